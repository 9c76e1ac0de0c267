// How many servers there were when objects were written, recorded beside them.
//
// CHFS places objects by the number of its servers. A client that sees one server more or less finds objects missing
// or short, and no server reports that. The record is 32 empty folders `~ring/<servers>-<n>`, spread over the servers. The
// stores of tieredckpt keep one of their own, which `tieredckpt/blobs/chfs/record.py` writes and specifies:
// `<servers>~<n>` there means that the objects lie in the folder `~<servers>`, and `<servers>+<n>` that the entries of
// that number are still being written.
#include <cstdlib>
#include <set>
#include <utility>

#include "chfs/keys.hpp"
#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

constexpr const char* kFolder = "~ring";
constexpr int kNames = 32;
constexpr std::size_t kMostPlaces = 4096;

std::string Below(const std::string& folder, const std::string& name) {
  return (folder == "/" ? "/" : folder + "/") + name;
}

std::string RecordIn(const std::string& folder) { return Below(folder, kFolder); }

bool IsIn(const std::string& path, const std::string& folder) {
  return path == folder || folder == "/" || path.compare(0, folder.size() + 1, folder + "/") == 0;
}

// The number of servers and the mark that an entry tells; 0 for any other name.
std::pair<int, char> Parse(const std::string& name) {
  const auto digits = name.find_first_not_of("0123456789");
  if (digits == std::string::npos || digits == 0 || digits > 6) return {0, '\0'};
  const char mark = name[digits];
  return {mark == '-' || mark == '~' || mark == '+' ? std::atoi(name.c_str()) : 0, mark};
}

}  // namespace

Status Client::State::ReadRecord(const std::string& folder, bool* found, std::string* place) {
  *found = false;
  *place = folder;
  // The entries that the servers own are the last record. If they own none, the servers were others then, and still
  // hold the entries of that time.
  for (const bool all : {false, true}) {
    std::set<int> told;
    std::set<int> begun;
    bool apart = false;
    const auto see = [&](const Entry& entry) {
      const auto [number, mark] = Parse(entry.name);
      if (number > 0) (mark == '+' ? begun : told).insert(number);
      apart = apart || (number == servers && mark == '~');
    };
    if (Status status = List(RecordIn(folder), all, see); !status.ok()) return status;
    if (told.empty()) continue;
    std::set<int> written;
    for (const int number : told) {
      if (begun.count(number) == 0) written.insert(number);
    }
    if (written.empty()) written = told;
    if (written == std::set<int>{servers}) {
      *found = true;
      if (apart) *place = Below(folder, "~" + std::to_string(servers));
      return {};
    }
    std::string numbers;
    for (const int number : written) numbers += (numbers.empty() ? "" : " and ") + std::to_string(number);
    return {Code::kUnavailable,
            "CHFS: there are " + std::to_string(servers) + " servers, and what is in " + folder + " was written to " +
                numbers + ", where it lies in other places; start CHFS with as many, or remove " + RecordIn(folder) +
                " if what was written then may be lost"};
  }
  return {};
}

Status Client::CheckRecord(const std::string& path) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  for (std::string folder = path;; folder = ParentOf(folder)) {
    std::string place;
    {
      const std::lock_guard<std::mutex> lock(state_->record_mutex_);
      if (const auto known = state_->places_.find(folder); known != state_->places_.end()) place = known->second;
    }
    if (place.empty()) {
      bool found = false;
      if (Status status = state_->ReadRecord(folder, &found, &place); !status.ok()) return status;
      const std::lock_guard<std::mutex> lock(state_->record_mutex_);
      if (state_->places_.size() >= kMostPlaces) state_->places_.clear();
      state_->places_[folder] = place;
    }
    if (!IsIn(path, place)) {
      return {Code::kUnavailable, "CHFS: what is in " + folder + " was written to another number of servers than the " +
                                      std::to_string(state_->servers) + " of now; what was written to these lies in " +
                                      place + ", so use that path"};
    }
    if (folder == "/") return {};
  }
}

Status Client::State::WriteRecord() {
  // Before and after: servers may have joined since this process connected, and may join while it writes.
  if (Status status = CheckRing(); !status.ok()) return status;
  bool found = false;
  std::string place;
  if (Status status = ReadRecord("/", &found, &place); !status.ok()) return status;
  for (int number = 0; number < kNames && !found; ++number) {
    const std::string name = std::to_string(servers) + "-" + std::to_string(number);
    if (Status status = MakeFolders(Below(RecordIn("/"), name)); !status.ok()) return status;
  }
  return CheckRing();
}

Status Client::Record() {
  // Callers that come while one writes the record take over its result, so that all wait once for a silent server.
  std::promise<Status> mine;
  std::shared_future<Status> of_another;
  {
    const std::lock_guard<std::mutex> lock(state_->record_mutex_);
    if (state_->recorded_) return {};
    if (state_->recording_.valid()) {
      of_another = state_->recording_;
    } else {
      state_->recording_ = mine.get_future().share();
    }
  }
  if (of_another.valid()) return of_another.get();
  Status status = state_->WriteRecord();
  {
    const std::lock_guard<std::mutex> lock(state_->record_mutex_);
    state_->recorded_ = status.ok();
    state_->recording_ = {};
  }
  mine.set_value(status);
  return status;
}

}  // namespace tieredckpt::chfs
