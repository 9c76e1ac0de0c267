// The one client of this process: its connection, the faults that it is told to play, its open objects.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "testing/cluster.hpp"

namespace tieredckpt::lookalike {

struct Object {
  std::string path;
  mode_t mode = 0;
  std::uint32_t chunk_size = 0;  // 0 for a link
  std::atomic<off_t> position{0};
};

// The table of open objects; a descriptor is the lowest free number.
class Descriptors {
 public:
  int Add(const std::string& path, mode_t mode, std::uint32_t chunk_size);
  std::shared_ptr<Object> Find(int descriptor) const;  // null for one that is not open
  bool Drop(int descriptor);

 private:
  mutable std::shared_mutex guards_objects_;
  std::vector<std::shared_ptr<Object>> objects_;
};

class Session {
 public:
  // Play chfs_init and chfs_term: any failure ends the process.
  void Connect(const char* server);
  void End();

  bool ready() const { return state_ == State::kReady; }
  bool plays_version_2() const { return cluster_ != nullptr && cluster_->switches()->version == 2; }

  // At the beginning of every call: crashes without a connection, hangs in a forked child, and plays the faults
  // that are due for the verb. False, with errno set, when the call is to fail.
  bool Enter(const char* verb, bool* shorten = nullptr);

  // 0, or -1 with the errno that libchfs makes of a host's on its way back from the server.
  int Report(int error) const;

  Cluster& cluster() { return *cluster_; }  // once connected

  Descriptors descriptors;
  std::atomic<int> default_chunk_size{64 * 1024};
  std::atomic<int> rpc_timeout_ms{30'000};

 private:
  enum class State { kNew, kConnecting, kReady, kOver };

  bool Faultless(const char* verb, bool* shorten = nullptr);

  std::atomic<State> state_{State::kNew};
  std::unique_ptr<Cluster> cluster_;
  pid_t owner_ = 0;
};

// Never destroyed: threads may be inside when the process ends.
Session& TheSession();

[[noreturn]] void Crash(int signal);

// -1 with errno set.
int Fail(int error);

}  // namespace tieredckpt::lookalike
