// The state of the connection: libchfs, the ring as it was, the descriptors in use.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "chfs/client.hpp"
#include "chfs/library.hpp"

namespace tieredckpt::chfs {

// Longest wait for a server that is only asked whether it answers.
inline constexpr int kLongestLookMs = 5000;

// The status of a failed call. `action` reads as in "cannot <action> <path>".
Status FromErrno(int error, const char* action, const std::string& path);

// The kind that a mode of CHFS tells; CHFS sets flags of its own above the usual bits.
Kind KindOf(mode_t mode);

std::uint64_t SizeOf(const struct stat& info);

// 0 for a time that a server made up.
std::int64_t NanosecondsOf(const struct timespec& time);

// The folder of a path that CheckPath accepts; "/" for the root and what lies in it.
std::string ParentOf(const std::string& path);

struct Client::State {
  Library library;
  Options options;
  int servers = 0;
  std::vector<std::string> addresses;  // of the ring when connected; empty where libchfs does not tell
  pid_t process = 0;

  // ring.cpp
  // Before a call: kUnavailable in a forked child, where it would hang, and once the ring has changed.
  Status Usable();
  // After a call: its result is only true on the ring that placed the objects.
  Status Whole();
  Status CheckRing();
  // Returns `missing` if the ring is whole: the objects of a lost server look missing.
  Status Confirm(Status missing);
  Status Probe(int server);
  // kSilent, with the number and the address of a server.
  Status Silent(int server) const;
  // The servers of the ring as it is now.
  std::vector<std::string> AddressesNow() const;
  // Checks that every TCP server accepts a connection: a call to a dead one would take a whole RPC timeout.
  Status Reachable() const;
  // Asks a server for the ring, since libchfs does not tell of servers that join. Waits for the calls under way and
  // holds back others: the answer puts a lost server, which a call has just removed, into the ring again.
  Status LookAnew();

  // One call of libchfs that returns a negative number and errno when it fails.
  template <typename Call>
  Status Run(const char* action, const std::string& path, Call call);
  // The same for a call that stores something. EPERM is kFull then: CHFS says so of a full device (2.1, and 3 after the
  // tag 3.0.2), and of whatever else fails at one, which is rare.
  template <typename Call>
  Status RunToTakeRoom(const char* action, const std::string& path, Call call);

  // listing.cpp
  // Both call `each` with every entry. With `all`, these include entries that a server has and does not own.
  Status List(const std::string& path, bool all, const std::function<void(const Entry&)>& each);
  Status ListOneOfMany(const std::string& path, bool all, const std::function<void(const Entry&)>& each);

  // record.cpp
  // Whether a folder has a record, and where its objects lie; kUnavailable if they were written to other servers.
  Status ReadRecord(const std::string& folder, bool* found, std::string* place);
  Status WriteRecord();

  // names.cpp
  // Without confirmation of kMissing.
  Status StatOnce(const std::string& path, struct stat* info);
  // Whether an ancestor of the path is an object, so that nothing can be there.
  bool UnderObject(const std::string& path);
  // kUnavailable where servers pass on what is put into a folder: such a server forgets what was removed.
  Status Apart(const std::string& path);
  // Makes a folder and its ancestors, so that lists show them. To be called before and after an entry is made in the
  // folder: another client may find the folder empty and remove it in between.
  Status MakeFolders(const std::string& path);
  // Empties an object. All its chunks are gone when it returns.
  Status Empty(const std::string& path, const struct stat& info);

  // files.cpp
  void AcquireSlot();
  void ReleaseSlot();

 private:
  Status ProbeAll();
  Status Changed() const;
  std::shared_lock<std::shared_mutex> HoldRing();

  std::atomic<bool> ring_changed_{false};
  std::mutex ring_entrance_;      // a look holds it while it waits, so that later calls wait behind the look
  std::shared_mutex ring_mutex_;  // shared by calls until they have looked at what they did to the ring

  std::mutex check_mutex_;
  std::condition_variable check_done_;
  bool checking_ = false;
  std::uint64_t checks_begun_ = 0;
  std::uint64_t last_check_ = 0;  // that ended, with this result:
  Status last_result_;

  std::mutex slots_mutex_;
  std::condition_variable slot_free_;
  int slots_used_ = 0;

  friend class Client;
  std::mutex record_mutex_;  // never held while servers are asked
  bool recorded_ = false;
  std::shared_future<Status> recording_;       // valid while a caller writes the record
  std::map<std::string, std::string> places_;  // where the objects of a folder lie on this ring, which stays the same
};

template <typename Call>
Status Client::State::Run(const char* action, const std::string& path, Call call) {
  if (Status status = Usable(); !status.ok()) return status;
  const auto ring = HoldRing();
  errno = 0;
  const auto result = call();
  const int error = errno;
  if (Status status = Whole(); !status.ok()) return status;
  return result < 0 ? FromErrno(error, action, path) : Status{};
}

template <typename Call>
Status Client::State::RunToTakeRoom(const char* action, const std::string& path, Call call) {
  bool refused = false;
  Status status = Run(action, path, [&] {
    const auto result = call();
    refused = result < 0 && errno == EPERM;
    return result;
  });
  if (refused && status.code == Code::kFailed) status.code = Code::kFull;
  return status;
}

}  // namespace tieredckpt::chfs
