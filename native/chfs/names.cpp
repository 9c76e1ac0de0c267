// Names: what is there, folders, links, removal.
#include <algorithm>
#include <utility>
#include <vector>

#include "chfs/keys.hpp"
#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

constexpr mode_t kFolderMode = 0700;
constexpr std::size_t kLongestTarget = 4095;

std::uint64_t SizeOf(const struct stat& info) { return static_cast<std::uint64_t>(std::max<off_t>(info.st_size, 0)); }

std::uint32_t ChunkSizeOf(const struct stat& info) { return static_cast<std::uint32_t>(info.st_blksize); }

}  // namespace

Status Client::State::StatOnce(const std::string& path, struct stat* info) {
  *info = {};  // libchfs leaves some members as they are
  return Run("stat", path, [&] { return library.stat(path.c_str(), info); });
}

bool Client::State::UnderObject(const std::string& path) {
  for (std::string folder = ParentOf(path); folder != "/"; folder = ParentOf(folder)) {
    struct stat info;
    if (StatOnce(folder, &info).ok()) return KindOf(info.st_mode) != Kind::kFolder;
  }
  return false;
}

Status Client::State::MakeFolders(const std::string& path) {
  if (path == "/") return {};
  {
    const std::lock_guard<std::mutex> lock(made_mutex_);
    if (made_.count(path) != 0) return {};
  }
  if (Status status = MakeFolders(ParentOf(path)); !status.ok()) return status;
  struct stat info;
  Status status = StatOnce(path, &info);
  if (status.code == Code::kMissing) {
    status = Run("make the folder", path, [&] { return library.mkdir(path.c_str(), kFolderMode); });
    // Another client was first, with a folder or an object.
    if (status.code == Code::kExists || status.code == Code::kInvalid) status = StatOnce(path, &info);
    else info.st_mode = S_IFDIR;
  }
  if (!status.ok()) return status;
  if (KindOf(info.st_mode) != Kind::kFolder) {
    return {Code::kInvalid, "CHFS: " + path + " is an object and can hold nothing"};
  }
  const std::lock_guard<std::mutex> lock(made_mutex_);
  made_.insert(path);
  return {};
}

void Client::State::Forget(const std::string& folder) {
  const std::string inside = folder + "/";
  const std::lock_guard<std::mutex> lock(made_mutex_);
  for (auto it = made_.begin(); it != made_.end();) {
    it = *it == folder || it->compare(0, inside.size(), inside) == 0 ? made_.erase(it) : std::next(it);
  }
}

Status Client::State::KeepFolder(const std::string& folder) {
  struct stat info;
  if (folder == "/") return {};
  Status status = StatOnce(folder, &info);
  if (status.code != Code::kMissing) return status;
  // Parents may have gone with it.
  {
    const std::lock_guard<std::mutex> lock(made_mutex_);
    made_.clear();
  }
  return MakeFolders(folder);
}

Status Client::State::Claim(const std::string& path, const char* action) {
  if (Status status = MakeFolders(ParentOf(path)); !status.ok()) return status;
  struct stat info;
  if (path != "/") {
    Status status = StatOnce(path, &info);
    if (!status.ok()) return status.code == Code::kMissing ? Status{} : status;
    if (KindOf(info.st_mode) != Kind::kFolder) return {};
  }
  return {Code::kInvalid, std::string("CHFS: cannot ") + action + " " + path + ": it is a folder"};
}

Status Client::State::Empty(const std::string& path, const struct stat& info) {
  // An unlink alone removes chunks 10 and up after it returns, which may then be those of a new object.
  Status status = Run("empty", path, [&] { return library.truncate(path.c_str(), 0); });
  if (!status.ok()) return status;
  const std::uint64_t chunk_size = std::max<std::uint64_t>(ChunkSizeOf(info), 1);
  const std::uint64_t chunks = (SizeOf(info) + chunk_size - 1) / chunk_size;
  if (chunks < 2) return {};
  // Chunks go in order, and a failure on the way is not reported: the last one tells, as only a chunk that is
  // there can be cut at its beginning.
  const auto last = static_cast<off_t>((chunks - 1) * chunk_size);
  status = Run("empty", path, [&] { return library.truncate(path.c_str(), last); });
  if (status.code == Code::kMissing) return {};
  if (!status.ok()) return status;
  return Confirm({Code::kFailed, "CHFS: cannot empty " + path + ": chunks of it are left; try again"});
}

Status Client::Stat(const std::string& path, Info* info) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  struct stat found;
  Status status = state_->StatOnce(path, &found);
  if (status.code == Code::kInvalid || status.code == Code::kFailed) {
    // Where an ancestor is an object, servers fail in ways that depend on where the two lie.
    if (state_->UnderObject(path)) status.code = Code::kMissing;
  }
  if (status.code == Code::kMissing) return state_->Confirm(std::move(status));
  if (!status.ok()) return status;
  info->kind = KindOf(found.st_mode);
  info->size = SizeOf(found);
  info->mtime_ns = std::int64_t{found.st_mtim.tv_sec} * 1'000'000'000 + found.st_mtim.tv_nsec;
  info->chunk_size = ChunkSizeOf(found);
  // An object that ends where a chunk does may only seem to, because the next one's server is silent.
  const bool may_go_on = info->kind == Kind::kObject && info->size > 0 && info->chunk_size > 0 &&
                         info->size % info->chunk_size == 0;
  return may_go_on ? state_->CheckRing() : Status{};
}

Status Client::Remove(const std::string& path) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  struct stat info;
  Status status = state_->StatOnce(path, &info);
  if (status.ok()) {
    const Kind kind = KindOf(info.st_mode);
    if (kind == Kind::kFolder) return {Code::kInvalid, "CHFS: cannot remove " + path + ": it is a folder"};
    if (kind == Kind::kObject) status = state_->Empty(path, info);
    if (status.ok()) status = state_->Run("remove", path, [&] { return state_->library.unlink(path.c_str()); });
  } else if ((status.code == Code::kInvalid || status.code == Code::kFailed) && state_->UnderObject(path)) {
    status.code = Code::kMissing;
  }
  return status.code == Code::kMissing ? state_->Confirm(std::move(status)) : status;
}

Status Client::RemoveFolder(const std::string& path) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  if (path == "/") return {Code::kInvalid, "CHFS: cannot remove /"};
  struct stat info;
  Status status = state_->StatOnce(path, &info);
  if (status.code == Code::kMissing) return state_->Confirm(std::move(status));
  if (!status.ok()) return status;
  if (KindOf(info.st_mode) != Kind::kFolder) {
    return {Code::kInvalid, "CHFS: cannot remove the folder " + path + ": it is an object or link"};
  }
  const Status not_empty{Code::kExists, "CHFS: cannot remove the folder " + path + ": it is not empty"};
  bool empty = true;
  const auto see = [&](const Entry&) { empty = false; };
  // A server removes a folder that others still hold entries of, which would then be hidden.
  if (status = List(path, see); !status.ok()) return status;
  if (!empty) return not_empty;
  state_->Forget(path);
  status = state_->Run("remove the folder", path, [&] { return state_->library.rmdir(path.c_str()); });
  if (status.code == Code::kMissing) return state_->Confirm(std::move(status));
  if (!status.ok()) return status;
  // Whoever created something in between either saw the folder gone and made it again, or is seen here.
  if (status = List(path, see); !status.ok()) return status;
  if (empty) return {};
  status = state_->KeepFolder(path);
  return status.ok() ? not_empty : status;
}

Status Client::MakeFolder(const std::string& path) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  if (Status status = state_->MakeFolders(path); !status.ok()) return status;
  return state_->KeepFolder(path);
}

Status Client::Link(const std::string& target, const std::string& path) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  if (target.empty() || target.size() > kLongestTarget || target.find('\0') != std::string::npos) {
    return {Code::kInvalid, "CHFS: cannot link " + path + ": the target must have 1 to 4095 bytes and no NUL"};
  }
  if (Status status = state_->MakeFolders(ParentOf(path)); !status.ok()) return status;
  if (path == "/") return {Code::kExists, "CHFS: cannot link /: it is a folder"};
  Status status = state_->Run("link", path, [&] { return state_->library.symlink(target.c_str(), path.c_str()); });
  return status.ok() ? state_->KeepFolder(ParentOf(path)) : status;
}

Status Client::ReadLink(const std::string& path, std::string* target) {
  // libchfs would read the first bytes of an object as if they were a target.
  Info info;
  if (Status status = Stat(path, &info); !status.ok()) return status;
  if (info.kind != Kind::kLink) return {Code::kInvalid, "CHFS: " + path + " is no link"};
  std::vector<char> buffer(kLongestTarget + 1);
  int length = 0;
  Status status = state_->Run("read the link", path, [&] {
    length = state_->library.readlink(path.c_str(), buffer.data(), buffer.size());
    return length;
  });
  if (status.code == Code::kMissing) return state_->Confirm(std::move(status));
  if (!status.ok()) return status;
  const auto end = buffer.begin() + std::min(length, static_cast<int>(buffer.size()));
  target->assign(buffer.begin(), std::find(buffer.begin(), end, '\0'));  // some back ends keep the NUL
  return {};
}

}  // namespace tieredckpt::chfs
