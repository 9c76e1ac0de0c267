// Objects: creating, opening, reading and writing them.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "chfs/keys.hpp"
#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

constexpr int kMostOpen = 64;  // libchfs grows its table of descriptors beyond 100 while others read it
constexpr mode_t kObjectMode = 0600;
constexpr std::size_t kMostChunksPerCall = 4096;  // each takes a frame of 170 bytes on the stack
constexpr std::size_t kLeastChunk = 4096;          // assumed of an object whose chunk size is not known

std::size_t BytesPerCall(const Options& options, std::size_t chunk_size) {
  return std::min(options.bytes_per_call, std::max<std::size_t>(chunk_size, 1) * kMostChunksPerCall);
}

// libchfs counts in off_t.
bool Countable(std::size_t size, std::uint64_t offset) {
  return offset <= INT64_MAX && size <= INT64_MAX - offset;
}

}  // namespace

void Client::State::AcquireSlot() {
  std::unique_lock<std::mutex> lock(slots_mutex_);
  slot_free_.wait(lock, [&] { return slots_used_ < kMostOpen; });
  ++slots_used_;
}

void Client::State::ReleaseSlot() {
  {
    const std::lock_guard<std::mutex> lock(slots_mutex_);
    --slots_used_;
  }
  slot_free_.notify_one();
}

Status Client::Create(const std::string& path, std::uint32_t chunk_size, File* file) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  if (chunk_size == 0 || chunk_size > INT32_MAX) {
    return {Code::kInvalid, "CHFS: cannot create " + path + " with chunks of " + std::to_string(chunk_size) + " bytes"};
  }
  if (Status status = file->Close(); !status.ok()) return status;
  const std::string folder = ParentOf(path);
  if (Status status = state_->MakeFolders(folder); !status.ok()) return status;
  struct stat info;
  Status status = state_->StatOnce(path, &info);
  if (status.ok()) {
    switch (KindOf(info.st_mode)) {
      case Kind::kFolder:
        return {Code::kInvalid, "CHFS: cannot create " + path + ": it is a folder"};
      case Kind::kLink:
        status = state_->Run("remove", path, [&] { return state_->library.unlink(path.c_str()); });
        break;
      case Kind::kObject:
        // libchfs would cut the first chunk only: the others would show through, in chunks of their old size.
        status = state_->Empty(path, info);
    }
  }
  if (!status.ok() && status.code != Code::kMissing) return status;
  state_->AcquireSlot();
  int descriptor = -1;
  status = state_->RunToTakeRoom("create", path, [&] {
    descriptor = state_->library.create(path.c_str(), O_RDWR, kObjectMode, static_cast<int>(chunk_size));
    return descriptor;
  });
  if (descriptor < 0) {
    state_->ReleaseSlot();
    return status;
  }
  // From here on the descriptor closes itself, whatever else fails.
  file->client_ = shared_from_this();
  file->path_ = path;
  file->descriptor_ = descriptor;
  file->bytes_per_call_ = BytesPerCall(state_->options, chunk_size);
  if (status.ok()) status = state_->MakeFolders(folder);
  if (!status.ok()) (void)file->Close();
  return status;
}

Status Client::Open(const std::string& path, File* file, Info* info) {
  if (Status status = file->Close(); !status.ok()) return status;
  // libchfs would open a link as well, and read its target as if it were the bytes of an object.
  Info found;
  if (Status status = Stat(path, &found); !status.ok()) return status;
  if (found.kind != Kind::kObject) {
    return {Code::kInvalid,
            "CHFS: cannot open " + path + ": it is a " + (found.kind == Kind::kFolder ? "folder" : "link")};
  }
  if (info != nullptr) *info = found;
  Status status = OpenObject(path, file);
  if (status.ok()) file->bytes_per_call_ = BytesPerCall(state_->options, found.chunk_size);
  return status;
}

Status Client::OpenObject(const std::string& path, File* file) {
  if (Status status = CheckPath(path); !status.ok()) return status;
  if (Status status = file->Close(); !status.ok()) return status;
  if (Status status = state_->Usable(); !status.ok()) return status;
  state_->AcquireSlot();
  int descriptor = -1;
  Status status = state_->Run("open", path, [&] {
    descriptor = state_->library.open(path.c_str(), O_RDWR);
    return descriptor;
  });
  if (descriptor < 0) {
    state_->ReleaseSlot();
    return status.code == Code::kMissing ? state_->Confirm(std::move(status)) : status;
  }
  file->client_ = shared_from_this();
  file->path_ = path;
  file->descriptor_ = descriptor;
  file->bytes_per_call_ = BytesPerCall(state_->options, kLeastChunk);
  if (!status.ok()) (void)file->Close();
  return status;
}

File::File(File&& other) noexcept { *this = std::move(other); }

File& File::operator=(File&& other) noexcept {
  if (this == &other) return *this;
  (void)Close();
  client_ = std::move(other.client_);
  path_ = std::move(other.path_);
  descriptor_ = std::exchange(other.descriptor_, -1);
  bytes_per_call_ = other.bytes_per_call_;
  return *this;
}

File::~File() { (void)Close(); }

Status File::Write(const void* data, std::size_t size, std::uint64_t offset) {
  if (descriptor_ < 0) return {Code::kInvalid, "CHFS: cannot write to a closed object"};
  if (!Countable(size, offset)) return {Code::kInvalid, "CHFS: cannot write beyond 2^63 bytes of " + path_};
  Client::State& state = *client_->state_;
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const std::size_t part = std::min(size, bytes_per_call_);
    ssize_t written = 0;
    Status status = state.RunToTakeRoom("write", path_, [&] {
      written = state.library.pwrite(descriptor_, next, part, static_cast<off_t>(offset));
      return written;
    });
    if (!status.ok()) return status;
    if (written == 0 || static_cast<std::size_t>(written) > part) {
      return {Code::kFailed, "CHFS: cannot write " + path_ + ": " + std::to_string(written) + " of " +
                                 std::to_string(part) + " bytes were taken at offset " + std::to_string(offset)};
    }
    next += written;
    offset += static_cast<std::uint64_t>(written);
    size -= static_cast<std::size_t>(written);
  }
  return {};
}

Status File::Read(void* data, std::size_t size, std::uint64_t offset) {
  if (descriptor_ < 0) return {Code::kInvalid, "CHFS: cannot read from a closed object"};
  if (!Countable(size, offset)) return {Code::kInvalid, "CHFS: cannot read beyond 2^63 bytes of " + path_};
  Client::State& state = *client_->state_;
  char* next = static_cast<char*>(data);
  while (size > 0) {
    const std::size_t part = std::min(size, bytes_per_call_);
    ssize_t got = 0;
    Status status = state.Run("read", path_, [&] {
      got = state.library.pread(descriptor_, next, part, static_cast<off_t>(offset));
      return got;
    });
    if (!status.ok() && status.code != Code::kMissing) return status;
    // A short count may be the end of the object, or a failing chunk: read on from there.
    if (!status.ok() || got == 0) {
      return state.Confirm({Code::kShort, "CHFS: cannot read " + path_ + ": it ends at byte " + std::to_string(offset) +
                                              ", " + std::to_string(size) + " bytes too early"});
    }
    if (static_cast<std::size_t>(got) > part) {
      return {Code::kFailed, "CHFS: cannot read " + path_ + ": more bytes came than were asked for"};
    }
    next += got;
    offset += static_cast<std::uint64_t>(got);
    size -= static_cast<std::size_t>(got);
  }
  return {};
}

Status File::Close() {
  if (descriptor_ < 0) return {};
  Client::State& state = *client_->state_;
  const int descriptor = std::exchange(descriptor_, -1);
  // In a forked child the descriptor is the parent's. Otherwise closing asks no server.
  if (state.process != getpid()) return state.Usable();
  errno = 0;
  const int result = state.library.close(descriptor);
  const int error = errno;
  state.ReleaseSlot();
  const std::shared_ptr<Client> client = std::move(client_);
  if (result != 0) return FromErrno(error, "close", path_);
  return state.Whole();
}

}  // namespace tieredckpt::chfs
