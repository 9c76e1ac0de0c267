#include "tensorstore/kvstore/chfs/objects.h"

#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "chfs/client.hpp"
#include "chfs/keys.hpp"
#include "tensorstore/internal/flat_cord_builder.h"
#include "tensorstore/internal/os/hugepages.h"
#include "tensorstore/kvstore/byte_range.h"
#include "tensorstore/kvstore/generation.h"
#include "tensorstore/kvstore/key_range.h"
#include "tensorstore/util/quote_string.h"
#include "tensorstore/util/result.h"
#include "tensorstore/util/status.h"

namespace tensorstore {
namespace internal_chfs_kvstore {
namespace {

namespace chfs = ::tieredckpt::chfs;

constexpr absl::Duration kShortestTick = absl::Milliseconds(2);  // of the clocks that stamp files

absl::StatusCode CodeOf(chfs::Code code) {
  switch (code) {
    case chfs::Code::kOk:
      return absl::StatusCode::kOk;
    case chfs::Code::kMissing:
      // Callers to whom a missing object is an answer check for it first. Here the object was there a moment ago.
      return absl::StatusCode::kAborted;
    case chfs::Code::kExists:
      return absl::StatusCode::kAlreadyExists;
    case chfs::Code::kUnavailable:
    case chfs::Code::kSilent:
      return absl::StatusCode::kUnavailable;
    case chfs::Code::kFull:
      return absl::StatusCode::kResourceExhausted;
    case chfs::Code::kShort:
      return absl::StatusCode::kDataLoss;
    case chfs::Code::kInvalid:
      return absl::StatusCode::kInvalidArgument;
    case chfs::Code::kFailed:
      break;
  }
  return absl::StatusCode::kUnknown;
}

absl::Status ToStatus(const chfs::Status& status) {
  return absl::Status(CodeOf(status.code), status.message);
}

// libchfs gives an object no identity but these two. The time is that of the first CHFS chunk alone, which a
// write replaces first.
StorageGeneration GenerationOf(const chfs::Info& info) {
  return StorageGeneration::FromValues(info.mtime_ns, info.size);
}

// About the wanted size, but such that the last chunk is not full: if an object ends with a full chunk, every look at
// it must ask all servers whether it goes on.
uint32_t ChunkSizeFor(size_t size, uint32_t wanted) {
  if (size < wanted) {
    const size_t next = (size / kMinChunkSize + 1) * kMinChunkSize;
    return static_cast<uint32_t>(std::min<size_t>(next, wanted));
  }
  while (size % wanted == 0) wanted += kMinChunkSize;
  return wanted;
}

// A link names its object by a path, or by a name beside it.
std::string TargetOf(std::string_view link, std::string_view target) {
  if (!target.empty() && target.front() == '/') return std::string(target);
  return absl::StrCat(link.substr(0, link.rfind('/') + 1), target);
}

std::string PathBelow(std::string_view folder, std::string_view name) {
  return folder == "/" ? absl::StrCat("/", name) : absl::StrCat(folder, "/", name);
}

std::optional<std::string> KeyOfPath(std::string_view path) {
  std::string key;
  if (!chfs::DecodeKey(path.substr(1), &key)) return std::nullopt;
  return absl::StrCat("/", key);
}

// The prefix of all keys below a folder; none if the folder's name alone does not tell it.
std::optional<std::string> PrefixOfFolder(std::string_view folder) {
  std::optional<std::string> key = KeyOfPath(PathBelow(folder, "x"));
  if (key) key->pop_back();
  return key;
}

// A folder that all keys of the range lie below.
std::string FolderOfRange(const KeyRange& range) {
  const std::string_view prefix = LongestPrefix(range);
  const size_t slash = prefix.rfind('/');
  if (slash == std::string_view::npos || prefix.front() != '/') return "/";
  // Only a whole key has a path: complete one, and drop its last component.
  std::string path = absl::StrCat("/", chfs::EncodeKey(absl::StrCat(prefix.substr(1, slash), "x")));
  path.resize(std::max<size_t>(path.rfind('/'), 1));
  return path;
}

}  // namespace

Result<std::string> PathOfKey(std::string_view key) {
  if (key.empty() || key.front() != '/') {
    return absl::InvalidArgumentError(
        absl::StrFormat("Keys of CHFS begin with '/': %v", QuoteString(key)));
  }
  return absl::StrCat("/", chfs::EncodeKey(key.substr(1)));
}

Result<Objects*> Objects::Connect(const std::string& server, const std::string& library) {
  chfs::Options options;
  options.server = server;
  options.library = library;
  std::shared_ptr<chfs::Client> client;
  TENSORSTORE_RETURN_IF_ERROR(ToStatus(chfs::Client::Connect(options, &client)));
  TENSORSTORE_RETURN_IF_ERROR(ToStatus(client->CheckRecord("/")));
  static Objects* const objects = new Objects(std::move(client));
  return objects;
}

absl::Status Objects::CheckRecordAbove(const std::string& path) {
  return ToStatus(client_->CheckRecord(path.substr(0, std::max<size_t>(path.rfind('/'), 1))));
}

Result<std::optional<Objects::Found>> Objects::Find(std::string path, chfs::File* file) {
  for (bool followed = false;; followed = true) {
    chfs::Info info;
    chfs::Status status{chfs::Code::kInvalid, {}};
    if (file != nullptr) status = client_->Open(path, file, &info);
    if (status.code == chfs::Code::kInvalid) status = client_->Stat(path, &info);  // a link and a folder do not open
    if (status.code == chfs::Code::kMissing) {
      TENSORSTORE_RETURN_IF_ERROR(CheckRecordAbove(path));
      return std::nullopt;
    }
    TENSORSTORE_RETURN_IF_ERROR(ToStatus(status));
    if (info.kind == chfs::Kind::kObject) {
      // One that ends with a full chunk may go on, on a server that joined since: only the ring tells.
      if (info.chunk_size > 0 && info.size > 0 && info.size % info.chunk_size == 0) {
        TENSORSTORE_RETURN_IF_ERROR(ToStatus(client_->CheckRing()));
        TENSORSTORE_RETURN_IF_ERROR(CheckRecordAbove(path));  // it may have been written to fewer servers
      }
      return Found{std::move(path), static_cast<int64_t>(info.size), GenerationOf(info)};
    }
    if (info.kind == chfs::Kind::kFolder || followed) return std::nullopt;
    std::string target;
    status = client_->ReadLink(path, &target);
    if (status.code == chfs::Code::kMissing) return std::nullopt;
    TENSORSTORE_RETURN_IF_ERROR(ToStatus(status));
    path = TargetOf(path, target);
  }
}

Result<chfs::File> Objects::Open(const Found& found) {
  chfs::File file;
  TENSORSTORE_RETURN_IF_ERROR(ToStatus(client_->OpenObject(found.path, &file)));
  return file;
}

Result<absl::Cord> Objects::Read(chfs::File& file, const Found& found, ByteRange range) {
  if (range.size() == 0) return absl::Cord();
  const auto size = static_cast<size_t>(range.size());
  internal::FlatCordBuilder bytes(internal_os::AllocateHugePageRegionWithFallback(0, size));
  const chfs::Status status = file.Read(bytes.data(), size, static_cast<uint64_t>(range.inclusive_min));
  if (status.code == chfs::Code::kShort) {
    TENSORSTORE_ASSIGN_OR_RETURN(const std::optional<Found> now, Find(found.path));
    if (!now || now->generation != found.generation) {
      return absl::UnavailableError(
          absl::StrCat(status.message, "; another process replaced it meanwhile, read it again"));
    }
  }
  TENSORSTORE_RETURN_IF_ERROR(ToStatus(status));
  return std::move(bytes).Build();
}

Result<chfs::Info> Objects::Fill(const std::string& path, chfs::File file, std::string_view bytes) {
  if (!bytes.empty()) {
    TENSORSTORE_RETURN_IF_ERROR(ToStatus(file.Write(bytes.data(), bytes.size(), 0)));
  }
  TENSORSTORE_RETURN_IF_ERROR(ToStatus(file.Close()));
  chfs::Info info;
  TENSORSTORE_RETURN_IF_ERROR(ToStatus(client_->Stat(path, &info)));
  if (info.size != bytes.size()) {
    return absl::DataLossError(absl::StrFormat(
        "CHFS: %s has %d bytes after %d were written; does another process write it?", path, info.size,
        bytes.size()));
  }
  return info;
}

Result<chfs::Info> Objects::Put(const std::string& path, std::string_view bytes, uint32_t chunk_size) {
  TENSORSTORE_RETURN_IF_ERROR(ToStatus(client_->Record()));
  chfs::File file;
  absl::Status created = ToStatus(client_->Create(path, ChunkSizeFor(bytes.size(), chunk_size), &file));
  const bool begun = created.ok();
  Result<chfs::Info> info = begun ? Fill(path, std::move(file), bytes) : Result<chfs::Info>(std::move(created));
  // Where servers are silent, what follows would only wait for them again.
  if (info.ok() || absl::IsUnavailable(info.status())) return info;
  // Half an object must not pass for a value, nor one that was only emptied; one that was not touched stays.
  bool spoilt = begun;
  if (!begun) {
    const Result<std::optional<Found>> left = Find(path);
    spoilt = left.ok() && *left && (*left)->size == 0;
  }
  if (spoilt) Delete(path).IgnoreError();
  return info;
}

Result<StorageGeneration> Objects::Write(const std::string& path, absl::Cord value, uint32_t chunk_size) {
  // A Cord that was copied together is a tree of 4 KiB pieces, and each would be a call to the servers.
  const std::string_view bytes = value.Flatten();
  for (absl::Duration pause = kShortestTick;; pause *= 2) {
    TENSORSTORE_ASSIGN_OR_RETURN(const chfs::Info info, Put(path, bytes, chunk_size));
    if (!recent_writes_.Repeats(path, info.mtime_ns, absl::Now())) return GenerationOf(info);
    // Within one tick of the server's clock two values would have one generation: write again after the tick.
    if (pause > RecentWrites::kLongestTick) {
      return absl::InternalError(
          absl::StrCat("CHFS: the clock of the server of ", path, " stands still: writes seconds apart get one time"));
    }
    absl::SleepFor(pause);
    TENSORSTORE_RETURN_IF_ERROR(Delete(path));  // only a new object is sure to get a new time when it is empty
  }
}

absl::Status Objects::Delete(const std::string& path) {
  const chfs::Status status = client_->Remove(path);
  if (status.code == chfs::Code::kMissing) return absl::OkStatus();
  if (status.code == chfs::Code::kInvalid) {
    chfs::Info info;
    if (client_->Stat(path, &info).ok() && info.kind == chfs::Kind::kFolder) return absl::OkStatus();
  }
  return ToStatus(status);
}

absl::Status Objects::DeleteFolder(const std::string& path) {
  const chfs::Status status = client_->RemoveFolder(path);
  if (status.code == chfs::Code::kMissing || status.code == chfs::Code::kExists) return absl::OkStatus();
  return ToStatus(status);
}

absl::Status Objects::Walk(const KeyRange& range, const Visitor& visitor) {
  if (range.empty()) return absl::OkStatus();
  const std::string folder = FolderOfRange(range);
  TENSORSTORE_RETURN_IF_ERROR(ToStatus(client_->CheckRecord(folder)));
  TENSORSTORE_ASSIGN_OR_RETURN(const bool whole, WalkFolder(folder, range, visitor));
  if (whole && visitor.folder && folder != "/") {
    const std::optional<std::string> prefix = PrefixOfFolder(folder);
    if (prefix && ContainsPrefix(range, *prefix)) visitor.folder(folder);
  }
  return absl::OkStatus();
}

// Visits a folder. Returns false if the visitor stopped before the end.
Result<bool> Objects::WalkFolder(const std::string& folder, const KeyRange& range, const Visitor& visitor) {
  std::vector<chfs::Entry> entries;
  TENSORSTORE_RETURN_IF_ERROR(
      ToStatus(client_->List(folder, [&](const chfs::Entry& entry) { entries.push_back(entry); })));
  for (const chfs::Entry& entry : entries) {
    std::string path = PathBelow(folder, entry.name);
    if (entry.kind != chfs::Kind::kFolder) {
      std::optional<std::string> key = KeyOfPath(path);
      if (key && Contains(range, *key) && !visitor.object(*std::move(key))) return false;
      continue;
    }
    if (entry.name == "~ring") continue;  // the client's record, which no key lies in
    const std::optional<std::string> prefix = PrefixOfFolder(path);
    if (prefix && !IntersectsPrefix(range, *prefix)) continue;
    TENSORSTORE_ASSIGN_OR_RETURN(const bool whole, WalkFolder(path, range, visitor));
    if (!whole) return false;
    if (visitor.folder && prefix && ContainsPrefix(range, *prefix)) visitor.folder(std::move(path));
  }
  return true;
}

}  // namespace internal_chfs_kvstore
}  // namespace tensorstore
