// Folders as all servers together see them.
#include <exception>
#include <map>

#include "chfs/keys.hpp"
#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

constexpr mode_t kReplica = mode_t{1} << 30;  // set by a server on entries that belong to another

struct Listing {
  std::map<std::string, Entry> entries;
  bool all = false;  // also entries that a server holds and does not own
  bool answered = false;
  bool out_of_memory = false;
};

int Collect(void* context, const char* name, const struct stat* info, off_t) {
  auto& listing = *static_cast<Listing*>(context);
  listing.answered = true;
  const std::string_view entry(name);
  if (entry == "." || entry == "..") return 0;
  // A folder belongs to one server; the others hold parts of it, which stay behind when it is removed.
  if (!listing.all && (info->st_mode & kReplica) != 0) return 0;
  try {
    listing.entries.emplace(entry, Entry{name, KindOf(info->st_mode), SizeOf(*info), NanosecondsOf(info->st_mtim)});
  } catch (const std::exception&) {  // which must not cross the C of libchfs
    listing.out_of_memory = true;
  }
  return 0;
}

}  // namespace

Status Client::List(const std::string& path, std::function<void(const Entry&)> each, bool all) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  return state_->List(path, all, each);
}

Status Client::ListOneOfMany(const std::string& path, std::function<void(const Entry&)> each, bool all) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  return state_->ListOneOfMany(path, all, each);
}

Status Client::State::List(const std::string& path, bool all, const std::function<void(const Entry&)>& each) {
  Status status = ListOneOfMany(path, all, each);
  return status.ok() ? LookAnew() : status;  // servers that joined since hold entries too
}

Status Client::State::ListOneOfMany(const std::string& path, bool all, const std::function<void(const Entry&)>& each) {
  Listing listing;
  listing.all = all;
  const auto ask = [&](int server) {
    listing.answered = false;
    return Run("list", path, [&] { return library.readdir_index(path.c_str(), server, &listing, Collect); });
  };
  for (int server = 0; server < servers; ++server) {
    if (Status status = ask(server); !status.ok()) return status;
    if (listing.answered) continue;
    // The server lacks the folder, or is gone: libchfs reports both alike.
    if (Status status = Probe(server); !status.ok()) return status;
    if (Status status = ask(server); !status.ok()) return status;
  }
  if (listing.out_of_memory) return {Code::kFailed, "CHFS: cannot list " + path + ": out of memory"};
  for (const auto& [_, entry] : listing.entries) each(entry);
  return {};
}

}  // namespace tieredckpt::chfs
