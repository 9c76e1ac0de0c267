// Folders as all servers together see them.
#include <exception>
#include <map>

#include "chfs/keys.hpp"
#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

constexpr mode_t kReplica = mode_t{1} << 30;  // set by a server on entries that belong to another

struct Listing {
  std::map<std::string, Kind> entries;
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
    listing.entries.emplace(entry, KindOf(info->st_mode));
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

Status Client::State::List(const std::string& path, bool all, const std::function<void(const Entry&)>& each) {
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
  // Servers that joined since hold entries too.
  if (Status status = LookAnew(); !status.ok()) return status;
  if (listing.out_of_memory) return {Code::kFailed, "CHFS: cannot list " + path + ": out of memory"};
  for (const auto& [name, kind] : listing.entries) each({name, kind});
  return {};
}

}  // namespace tieredckpt::chfs
