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

// 0, which no object has, for what libchfs's own type cannot hold.
std::uint32_t ChunkSizeOf(const struct stat& info) {
  return info.st_blksize > 0 && info.st_blksize <= INT32_MAX ? static_cast<std::uint32_t>(info.st_blksize) : 0;
}

// 0 for a time that a server made up.
std::int64_t NanosecondsOf(const struct timespec& time) {
  std::int64_t nanoseconds = 0;
  const bool overflow = __builtin_mul_overflow(std::int64_t{time.tv_sec}, 1'000'000'000, &nanoseconds) ||
                        __builtin_add_overflow(nanoseconds, std::int64_t{time.tv_nsec}, &nanoseconds);
  return overflow ? 0 : nanoseconds;
}

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
  const auto look = [&] {
    struct stat info;
    Status status = StatOnce(path, &info);
    if (!status.ok() || KindOf(info.st_mode) == Kind::kFolder) return status;
    return Status{Code::kInvalid, "CHFS: " + path + " is an object or link and can hold nothing"};
  };
  Status status = look();
  if (status.ok() || status.code == Code::kUnavailable || status.code == Code::kSilent) return status;
  // Below an object, servers fail in ways that depend on where the two lie: that object is the better reason.
  if (Status parent = MakeFolders(ParentOf(path)); !parent.ok()) return parent;
  if (status.code != Code::kMissing) return status;
  status = Run("make the folder", path, [&] { return library.mkdir(path.c_str(), kFolderMode); });
  // Another client was first, with a folder or an object.
  if (status.code == Code::kExists || status.code == Code::kInvalid) return look();
  // The parent may have been removed, as an empty one, before this was in it.
  return status.ok() ? MakeFolders(ParentOf(path)) : status;
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
  info->mtime_ns = NanosecondsOf(found.st_mtim);
  info->chunk_size = ChunkSizeOf(found);
  return {};
}

Status Client::Remove(const std::string& path) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  struct stat info;
  Status status = state_->StatOnce(path, &info);
  if (status.ok()) {
    const Kind kind = KindOf(info.st_mode);
    if (kind == Kind::kFolder) return {Code::kInvalid, "CHFS: cannot remove " + path + ": it is a folder"};
    // An object of one chunk goes in one request: one that is cut off half way leaves no empty object behind.
    if (kind == Kind::kObject && SizeOf(info) >= ChunkSizeOf(info)) status = state_->Empty(path, info);
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
  status = state_->Run("remove the folder", path, [&] { return state_->library.rmdir(path.c_str()); });
  if (status.code == Code::kMissing) return state_->Confirm(std::move(status));
  if (!status.ok()) return status;
  // Whoever created something in between either saw the folder gone and made it again, or is seen here.
  if (status = List(path, see); !status.ok()) return status;
  if (empty) return {};
  status = state_->MakeFolders(path);
  return status.ok() ? not_empty : status;
}

Status Client::MakeFolder(const std::string& path) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  return state_->MakeFolders(path);
}

Status Client::Link(const std::string& target, const std::string& path) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  if (target.empty() || target.size() > kLongestTarget || target.find('\0') != std::string::npos) {
    return {Code::kInvalid, "CHFS: cannot link " + path + ": the target must have 1 to 4095 bytes and no NUL"};
  }
  if (path == "/") return {Code::kExists, "CHFS: cannot link /: it is a folder"};
  if (Status status = state_->MakeFolders(ParentOf(path)); !status.ok()) return status;
  Status status = state_->Run("link", path, [&] { return state_->library.symlink(target.c_str(), path.c_str()); });
  return status.ok() ? state_->MakeFolders(ParentOf(path)) : status;
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
