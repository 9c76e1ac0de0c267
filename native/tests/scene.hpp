// A connection to servers of the case's own: the look-alike's in a folder, or those that TEST_CHFS_SERVER names.
#pragma once

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "chfs/client.hpp"

namespace tieredckpt::chfs {

class Scene {
 public:
  explicit Scene(const std::string& switches = "servers = 3") {
    folder_ = std::filesystem::temp_directory_path() / "tieredckpt-native-XXXXXX";
    CHECK(mkdtemp(folder_.data()) != nullptr);
    if (const char* server = getenv("TEST_CHFS_SERVER"); server != nullptr) {
      options.server = server;
      options.rpc_timeout_ms = 3000;
    } else {
      options.library = LOOKALIKE;
      options.server = "directory:" + folder_;
      options.rpc_timeout_ms = 50;
      Switch(switches);
    }
    root = "/" + std::filesystem::path(folder_).filename().string();
  }
  ~Scene() { std::filesystem::remove_all(folder_); }

  std::shared_ptr<Client> Connect() {
    std::shared_ptr<Client> client;
    CHECK_OK(Client::Connect(options, &client));
    return client;
  }

  // By rename, as the look-alike asks for.
  void Switch(const std::string& switches) {
    std::ofstream(folder_ + "/new") << switches << "\n";
    std::filesystem::rename(folder_ + "/new", folder_ + "/switches");
  }

  const std::string& directory() const { return folder_; }  // of the look-alike

  Options options;
  std::string root;

 private:
  std::string folder_;
};

inline std::string RandomBytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

inline void Put(Client& client, const std::string& path, const std::string& bytes, std::uint32_t chunk_size) {
  File file;
  CHECK_OK(client.Create(path, chunk_size, &file));
  CHECK_OK(file.Write(bytes.data(), bytes.size(), 0));
  CHECK_OK(file.Close());
}

inline std::string Get(Client& client, const std::string& path) {
  File file;
  Info info;
  CHECK_OK(client.Open(path, &file, &info));
  std::string bytes(info.size, '\0');
  CHECK_OK(file.Read(bytes.data(), bytes.size(), 0));
  return bytes;
}

inline std::vector<std::string> Names(Client& client, const std::string& path) {
  std::vector<std::string> names;
  CHECK_OK(client.List(path, [&](const Entry& entry) { names.push_back(entry.name); }));
  return names;
}

// A process that does this and exits with 0; it ends with this one. To be begun before a connection is there.
inline pid_t Fork(const std::function<void()>& run) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(30);
  run();
  _exit(0);
}

// How the child ended, as waitpid tells it; 0 for success.
inline int Wait(pid_t child) {
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

// Holds one process until another lets it on.
class Gate {
 public:
  Gate() { CHECK(pipe(ends_) == 0); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() {
    close(ends_[0]);
    close(ends_[1]);
  }
  void Open() { CHECK(write(ends_[1], "", 1) == 1); }
  void Pass() {
    char byte = 0;
    CHECK(read(ends_[0], &byte, 1) == 1);
  }

 private:
  int ends_[2];
};

}  // namespace tieredckpt::chfs
