// How many servers there were when objects were written, recorded beside them.
//
// CHFS places objects by the number of its servers. Whoever finds one server more or less sees objects as missing or
// short, and no server tells. The record is 32 empty folders `~ring/<servers>-<n>`, spread over the servers. The
// stores of tieredckpt keep one of their own, which `tieredckpt/blobs/chfs/ring.py` writes; `<servers>~<n>` there
// means that the objects lie in the folder `~<servers>`.
#include <cstdlib>
#include <set>

#include "chfs/keys.hpp"
#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

constexpr const char* kFolder = "~ring";
constexpr int kNames = 32;

std::string RecordIn(const std::string& folder) { return (folder == "/" ? "/" : folder + "/") + kFolder; }

// The number of servers that an entry tells; 0 for any other name.
int ServersOf(const std::string& name) {
  const auto digits = name.find_first_not_of("0123456789");
  if (digits == std::string::npos || digits == 0 || digits > 6) return 0;
  return name[digits] == '-' || name[digits] == '~' ? std::atoi(name.c_str()) : 0;
}

}  // namespace

Status Client::State::CheckRecord(const std::string& folder, bool* found) {
  // What the servers own is of the last record; where that is nothing, they were others, and still have what they had.
  for (const bool all : {false, true}) {
    std::set<int> told;
    const auto see = [&](const Entry& entry) {
      if (const int number = ServersOf(entry.name); number > 0) told.insert(number);
    };
    if (Status status = List(RecordIn(folder), all, see); !status.ok()) return status;
    *found = !told.empty();
    if (told.empty()) continue;
    if (told == std::set<int>{servers}) return {};
    std::string numbers;
    for (const int number : told) numbers += (numbers.empty() ? "" : " and ") + std::to_string(number);
    return {Code::kUnavailable,
            "CHFS: there are " + std::to_string(servers) + " servers, and what is in " + folder + " was written to " +
                numbers + ", where it lies in other places; start CHFS with as many, or remove " + RecordIn(folder) +
                " if what was written then may be lost"};
  }
  return {};
}

Status Client::CheckRecord(const std::string& folder) {
  if (Status status = CheckPath(folder); !status.ok()) return status;
  const std::lock_guard<std::mutex> lock(state_->record_mutex_);
  for (std::string above = folder;; above = ParentOf(above)) {
    bool found = false;
    if (state_->agreeing_.count(above) == 0) {
      if (Status status = state_->CheckRecord(above, &found); !status.ok()) return status;
      state_->agreeing_.insert(above);
    }
    if (above == "/") return {};
  }
}

Status Client::Record() {
  const std::lock_guard<std::mutex> lock(state_->record_mutex_);
  if (state_->recorded_) return {};
  // Before, for servers may have joined since this process connected; and after, for they may join meanwhile.
  if (Status status = CheckRing(); !status.ok()) return status;
  bool found = false;
  if (Status status = state_->CheckRecord("/", &found); !status.ok()) return status;
  for (int number = 0; number < kNames && !found; ++number) {
    const std::string name = RecordIn("/") + "/" + std::to_string(state_->servers) + "-" + std::to_string(number);
    if (Status status = state_->MakeFolders(name); !status.ok()) return status;
  }
  Status status = CheckRing();
  state_->recorded_ = status.ok();
  return status;
}

}  // namespace tieredckpt::chfs
