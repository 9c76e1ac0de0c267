// What one connection knows: libchfs, the ring as it was, the descriptors in use.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "chfs/client.hpp"
#include "chfs/library.hpp"

namespace tieredckpt::chfs {

// The status of a failed call. `action` reads as in "cannot <action> <path>".
Status FromErrno(int error, const char* action, const std::string& path);

// Of a mode as CHFS gives it, with flags of its own above the usual bits.
Kind KindOf(mode_t mode);

// The folder of a path that CheckPath accepts; "/" for the root and what lies in it.
std::string ParentOf(const std::string& path);

struct Client::State {
  Library library;
  Options options;
  int servers = 0;
  pid_t process = 0;

  // ring.cpp
  // Before a call: kUnavailable in a forked child, where it would hang, and once the ring has changed.
  Status Usable();
  // After a call: what it said is only true if the ring is the one whose order placed the objects.
  Status Whole();
  Status CheckRing();
  // `missing`, if the ring is whole: a server that is gone shows as objects that are missing.
  Status Confirm(Status missing);
  Status Probe(int server);

  // One call of libchfs that returns a negative number and errno when it fails.
  template <typename Call>
  Status Run(const char* action, const std::string& path, Call call);

  // names.cpp
  // Without confirmation of kMissing.
  Status StatOnce(const std::string& path, struct stat* info);
  // Whether an ancestor of the path is an object, so that nothing can be there.
  bool UnderObject(const std::string& path);
  // A folder that is listed, ancestors included. A client calls it before it makes something in the folder, and
  // again after: another one may have found the folder empty and removed it in between.
  Status MakeFolders(const std::string& path);
  // Cuts an object down to nothing, all its chunks gone when it returns.
  Status Empty(const std::string& path, const struct stat& info);

  // files.cpp
  void AcquireSlot();
  void ReleaseSlot();

 private:
  Status ProbeAll();

  std::atomic<bool> ring_changed_{false};

  std::mutex check_mutex_;
  std::condition_variable check_done_;
  bool checking_ = false;
  std::uint64_t checks_begun_ = 0;
  std::uint64_t last_check_ = 0;  // that ended, with this result:
  Status last_result_;

  std::mutex slots_mutex_;
  std::condition_variable slot_free_;
  int slots_used_ = 0;
};

template <typename Call>
Status Client::State::Run(const char* action, const std::string& path, Call call) {
  if (Status status = Usable(); !status.ok()) return status;
  errno = 0;
  const auto result = call();
  const int error = errno;
  if (Status status = Whole(); !status.ok()) return status;
  return result < 0 ? FromErrno(error, action, path) : Status{};
}

}  // namespace tieredckpt::chfs
