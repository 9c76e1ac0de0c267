// Calls on names: look-up, folders, links, removal.
#include <algorithm>
#include <utility>
#include <vector>

#include "chfs/keys.hpp"
#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

constexpr mode_t kFolderMode = 0700;
constexpr std::size_t kLongestTarget = 4095;

// 0, which no object has, for what libchfs's own type cannot hold.
std::uint32_t ChunkSizeOf(const struct stat& info) {
  return info.st_blksize > 0 && info.st_blksize <= INT32_MAX ? static_cast<std::uint32_t>(info.st_blksize) : 0;
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

Status Client::State::Apart(const std::string& path) {
  // A server that lacks an object asks its back end for it and puts the back end's folder before the name. If the path
  // is already as long as a name may be, that name is too long and the call fails. A server without a back end reports
  // the object missing.
  std::string longest = path + "/.missing/";
  longest.resize(kPathLimit - 1, 'x');
  struct stat info;
  Status status = StatOnce(longest, &info);
  if (status.code != Code::kFailed) return status.code == Code::kUnavailable ? status : Status{};
  return {Code::kUnavailable,
          "CHFS: its servers copy " + path + " to a back end (`chfsd -b`): then they list nothing of it any more, and "
          "what is removed comes back; start them without `-b`, or with `-B` and a folder that `path` of the tier is "
          "not in"};
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
  // Below an object, servers fail in ways that depend on which servers hold the two: that object is the better reason.
  if (Status parent = MakeFolders(ParentOf(path)); !parent.ok()) return parent;
  if (status.code != Code::kMissing) return status;
  if (Status apart = Apart(path); !apart.ok()) return apart;
  status = Run("make the folder", path, [&] { return library.mkdir(path.c_str(), kFolderMode); });
  // Another client was first, with a folder or an object.
  if (status.code == Code::kExists || status.code == Code::kInvalid) return look();
  // Another client may have removed the parent while it was empty.
  return status.ok() ? MakeFolders(ParentOf(path)) : status;
}

Status Client::State::Empty(const std::string& path, const struct stat& info) {
  // unlink removes chunks 10 and up after it has returned, when they may be those of a new object.
  Status status = Run("empty", path, [&] { return library.truncate(path.c_str(), 0); });
  if (!status.ok()) return status;
  const std::uint64_t chunk_size = std::max<std::uint64_t>(ChunkSizeOf(info), 1);
  const std::uint64_t chunks = (SizeOf(info) + chunk_size - 1) / chunk_size;
  if (chunks < 2) return {};
  // Chunks are removed in order, and failures are not reported. The last chunk tells: only a chunk that exists can be
  // cut at its start.
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
    // Below an object, servers fail in ways that depend on which servers hold the two.
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
    // One request removes an object of one chunk, so that a removal that is cut off leaves no empty object.
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
  // A server removes a folder although others still hold entries of it, which would then be hidden.
  if (status = List(path, see); !status.ok()) return status;
  if (!empty) return not_empty;
  status = state_->Run("remove the folder", path, [&] { return state_->library.rmdir(path.c_str()); });
  if (status.code == Code::kMissing) return state_->Confirm(std::move(status));
  if (!status.ok()) return status;
  // A client that created something in between has made the folder again, or its entry is listed here.
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
