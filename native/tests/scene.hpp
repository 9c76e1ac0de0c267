// A connection to servers of the case's own: the look-alike's in a folder, or those that TEST_CHFS_SERVER names.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
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

  static bool Real() { return getenv("TEST_CHFS_SERVER") != nullptr; }

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

}  // namespace tieredckpt::chfs
