#include "testing/server.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace tieredckpt::lookalike {
namespace {

constexpr std::size_t kLevels = 20;  // of missing ancestors that a server makes

// In front of the payload of every chunk; a cache line, so that copies stay aligned.
struct Header {
  char magic[8] = {'C', 'H', 'F', 'S', 'L', 'I', 'K', 'E'};
  std::uint32_t chunk_size = 0;
  char padding[52] = {};
};
static_assert(sizeof(Header) == 64);

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    const int error = errno;
    if (number_ >= 0) ::close(number_);
    errno = error;
  }
  int get() const { return number_; }
  bool ok() const { return number_ >= 0; }

 private:
  int number_;
};

// Opens without following any link: a link's target is a user's payload and may look like a path of this host.
int Open(int folder, const std::string& path, int flags, mode_t mode = 0) {
  static std::atomic<bool> has_openat2{true};
  if (has_openat2) {
    open_how how{};
    how.flags = static_cast<std::uint64_t>(flags | O_CLOEXEC);
    how.mode = mode;
    how.resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH;
    const long number = ::syscall(SYS_openat2, folder, path.c_str(), &how, sizeof how);
    if (number >= 0 || (errno != ENOSYS && errno != EPERM)) return static_cast<int>(number);
    has_openat2 = false;  // an old kernel, or a sandbox that does not know the call
  }
  return ::openat(folder, path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode);
}

// The folder of `path`, and its last component, for the calls that take such a pair.
class Place {
 public:
  Place(int folder, const std::string& path)
      : slash_(path.rfind('/')),
        parent_(Open(folder, slash_ == std::string::npos ? "." : path.substr(0, slash_), O_PATH | O_DIRECTORY)),
        name_(slash_ == std::string::npos ? path : path.substr(slash_ + 1)) {}

  bool ok() const { return parent_.ok(); }
  int parent() const { return parent_.get(); }
  const char* name() const { return name_.c_str(); }

 private:
  std::string::size_type slash_;
  Descriptor parent_;
  std::string name_;
};

std::string ChunkName(const std::string& path, int index) {
  return index == 0 ? path : path + ":" + std::to_string(index);
}

int PutHeader(int file, std::uint32_t chunk_size) {
  Header header;
  header.chunk_size = chunk_size;
  const ssize_t done = ::pwrite(file, &header, sizeof header, 0);
  if (done < 0) return errno;
  return done == static_cast<ssize_t>(sizeof header) ? 0 : ENOSPC;
}

int GetHeader(int file, std::uint32_t* chunk_size) {
  Header header;
  const ssize_t done = ::pread(file, &header, sizeof header, 0);
  if (done < 0) return errno;
  if (done == 0) return ENOENT;  // another process is about to make it
  if (done != static_cast<ssize_t>(sizeof header) || std::memcmp(header.magic, Header{}.magic, 8) != 0) return EIO;
  *chunk_size = header.chunk_size;
  return 0;
}

off_t Payload(off_t size) { return size > off_t{sizeof(Header)} ? size - off_t{sizeof(Header)} : 0; }

// The payload of a link: on disk ":" stands before it, so that the link leads nowhere.
int GetLink(int parent, const char* name, std::string* payload) {
  char stored[4096];
  const ssize_t done = ::readlinkat(parent, name, stored, sizeof stored);
  if (done < 0) return errno;
  const bool marked = done > 0 && stored[0] == ':';
  payload->assign(stored + (marked ? 1 : 0), stored + done);
  return 0;
}

// The size that CHFS shows for a file or link of the host.
off_t ShownSize(int parent, const char* name, const struct stat& host) {
  if (S_ISREG(host.st_mode)) return Payload(host.st_size);
  std::string payload;
  if (S_ISLNK(host.st_mode) && GetLink(parent, name, &payload) == 0) return static_cast<off_t>(payload.size());
  return host.st_size;
}

// Bytes of payload below an open folder, which it closes.
std::uint64_t Used(int folder) {
  DIR* listing = ::fdopendir(folder);
  if (listing == nullptr) {
    ::close(folder);
    return 0;
  }
  std::uint64_t total = 0;
  while (const dirent* entry = ::readdir(listing)) {
    if (std::strcmp(entry->d_name, ".") == 0 || std::strcmp(entry->d_name, "..") == 0) continue;
    struct stat host {};
    if (::fstatat(::dirfd(listing), entry->d_name, &host, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (S_ISREG(host.st_mode)) total += static_cast<std::uint64_t>(Payload(host.st_size));
    if (!S_ISDIR(host.st_mode)) continue;
    const int below = ::openat(::dirfd(listing), entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (below >= 0) total += Used(below);
  }
  ::closedir(listing);
  return total;
}

// Removes a folder that holds nothing but folders.
int RemoveFolders(int parent, const char* name) {
  if (::unlinkat(parent, name, AT_REMOVEDIR) == 0) return 0;
  if (errno != ENOTEMPTY && errno != EEXIST) return errno;
  const int folder = ::openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (folder < 0) return errno;
  DIR* listing = ::fdopendir(folder);
  if (listing == nullptr) {
    ::close(folder);
    return ENOMEM;
  }
  int error = 0;
  while (const dirent* entry = error == 0 ? ::readdir(listing) : nullptr) {
    if (std::strcmp(entry->d_name, ".") == 0 || std::strcmp(entry->d_name, "..") == 0) continue;
    error = RemoveFolders(::dirfd(listing), entry->d_name);
  }
  ::closedir(listing);
  if (error == 0 && ::unlinkat(parent, name, AT_REMOVEDIR) != 0) error = errno;
  return error;
}

}  // namespace

int Server::Create(const std::string& path, mode_t mode, std::uint32_t chunk_size) const {
  const int flags = O_WRONLY | O_CREAT;  // cut after the header is there, so that none sees a chunk without one
  int number = Open(folder_, path, flags, mode);
  if (number < 0 && errno == ENOENT) {
    MakeParents(path);  // another may be making them: the second attempt decides
    number = Open(folder_, path, flags, mode);
  }
  const Descriptor file(number);
  if (!file.ok()) return errno;
  if (const int error = PutHeader(file.get(), chunk_size)) return error;
  return ::ftruncate(file.get(), off_t{sizeof(Header)}) == 0 ? 0 : errno;
}

int Server::Write(const std::string& path, int index, mode_t mode, std::uint32_t chunk_size, const void* data,
                  std::size_t size, std::uint64_t offset, std::uint64_t capacity, std::size_t* written) const {
  const std::string name = ChunkName(path, index);
  *written = 0;
  bool fresh = false;
  int number = Open(folder_, name, O_WRONLY);
  for (const bool parents : {false, true}) {
    if (number >= 0 || errno != ENOENT) break;
    if (parents) MakeParents(name);
    fresh = true;
    number = Open(folder_, name, O_WRONLY | O_CREAT, mode);
  }
  const Descriptor file(number);
  if (!file.ok()) return errno;
  if (fresh) {
    if (const int error = PutHeader(file.get(), chunk_size)) return error;
  }
  if (capacity != 0) {
    struct stat host {};
    if (::fstat(file.get(), &host) != 0) return errno;
    const std::uint64_t present = static_cast<std::uint64_t>(Payload(host.st_size));
    const std::uint64_t end = offset + size;
    if (end > present && Used(Open(folder_, ".", O_RDONLY | O_DIRECTORY)) + (end - present) > capacity) return ENOSPC;
  }
  const char* bytes = static_cast<const char*>(data);
  while (*written < size) {
    const ssize_t done = ::pwrite(file.get(), bytes + *written, size - *written,
                                  static_cast<off_t>(sizeof(Header) + offset + *written));
    if (done < 0 && errno != EINTR) return errno;
    if (done > 0) *written += static_cast<std::size_t>(done);
  }
  return 0;
}

int Server::Read(const std::string& path, int index, void* data, std::size_t size, std::uint64_t offset,
                 std::size_t* read) const {
  *read = 0;
  const Descriptor file(Open(folder_, ChunkName(path, index), O_RDONLY));
  if (!file.ok()) return errno;
  std::uint32_t chunk_size = 0;
  if (const int error = GetHeader(file.get(), &chunk_size)) return error;
  if (offset >= chunk_size) return 0;
  size = std::min<std::size_t>(size, chunk_size - offset);
  char* bytes = static_cast<char*>(data);
  while (*read < size) {
    const ssize_t done =
        ::pread(file.get(), bytes + *read, size - *read, static_cast<off_t>(sizeof(Header) + offset + *read));
    if (done == 0) break;
    if (done < 0 && errno != EINTR) return errno;
    if (done > 0) *read += static_cast<std::size_t>(done);
  }
  return 0;
}

int Server::Stat(const std::string& path, int index, ChunkInfo* info) const {
  const std::string name = ChunkName(path, index);
  const Place place(folder_, name);
  if (!place.ok() || ::fstatat(place.parent(), place.name(), &info->host, AT_SYMLINK_NOFOLLOW) != 0) return errno;
  info->chunk_size = 0;
  info->host.st_size = ShownSize(place.parent(), place.name(), info->host);
  if (!S_ISREG(info->host.st_mode)) return 0;
  const Descriptor file(Open(place.parent(), place.name(), O_RDONLY));
  if (!file.ok()) return errno;
  return GetHeader(file.get(), &info->chunk_size);
}

int Server::Truncate(const std::string& path, int index, std::uint64_t size) const {
  const Descriptor file(Open(folder_, ChunkName(path, index), O_WRONLY));
  if (!file.ok()) return errno;
  return ::ftruncate(file.get(), static_cast<off_t>(sizeof(Header) + size)) == 0 ? 0 : errno;
}

int Server::Remove(const std::string& path, int index) const {
  const Place place(folder_, ChunkName(path, index));
  if (!place.ok()) return errno;
  if (::unlinkat(place.parent(), place.name(), 0) == 0) return 0;
  return errno == EISDIR ? RemoveFolders(place.parent(), place.name()) : errno;
}

int Server::MakeParents(const std::string& path) const {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return 0;
  const int error = MakeFolder(path.substr(0, slash), 0755);
  return error == EEXIST ? 0 : error;
}

int Server::MakeFolder(const std::string& path, mode_t mode) const {
  std::vector<std::string> missing;
  for (std::string folder = path;;) {
    const Place place(folder_, folder);
    if (place.ok()) {
      if (::mkdirat(place.parent(), place.name(), mode) == 0) break;
      // The folder itself is reported; a parent that another made meanwhile is welcome.
      if (missing.empty() || errno != EEXIST) return errno;
      break;
    }
    if (errno != ENOENT) return errno;
    missing.push_back(folder);
    if (missing.size() > kLevels) return ENOENT;
    folder.erase(folder.rfind('/'));
  }
  for (auto folder = missing.rbegin(); folder != missing.rend(); ++folder) {
    const Place place(folder_, *folder);
    if (!place.ok() || (::mkdirat(place.parent(), place.name(), mode) != 0 && errno != EEXIST)) return errno;
  }
  return 0;
}

int Server::MakeLink(const std::string& target, const std::string& path) const {
  if (target.empty()) return ENOENT;
  // The longest payload has no room for the mark; Open follows no link in any case.
  const std::string stored = target.size() < 4095 ? ":" + target : target;
  for (const bool parents : {false, true}) {
    if (parents) MakeParents(path);
    const Place place(folder_, path);
    if (place.ok() && ::symlinkat(stored.c_str(), place.parent(), place.name()) == 0) return 0;
    if (errno != ENOENT) break;
  }
  return errno;
}

int Server::ReadLink(const std::string& path, char* buffer, std::size_t size, std::size_t* length) const {
  const Place place(folder_, path);
  std::string payload;
  const int error = place.ok() ? GetLink(place.parent(), place.name(), &payload) : errno;
  if (error == EINVAL) return Read(path, 0, buffer, size, 0, length);  // a file gives its bytes
  if (error != 0) return error;
  *length = std::min(size, payload.size());
  std::memcpy(buffer, payload.data(), *length);
  return 0;
}

int Server::List(const std::string& path, std::vector<ServerEntry>* entries) const {
  const int number = Open(folder_, path.empty() ? "." : path, O_RDONLY | O_DIRECTORY);
  if (number < 0) return errno;
  DIR* listing = ::fdopendir(number);
  if (listing == nullptr) {
    ::close(number);
    return errno;
  }
  while (const dirent* found = ::readdir(listing)) {
    if (std::strchr(found->d_name, ':') != nullptr) continue;
    ServerEntry entry;
    entry.name = found->d_name;
    if (::fstatat(::dirfd(listing), found->d_name, &entry.host, AT_SYMLINK_NOFOLLOW) != 0) continue;
    entry.host.st_size = ShownSize(::dirfd(listing), found->d_name, entry.host);
    entries->push_back(std::move(entry));
  }
  ::closedir(listing);
  return 0;
}

}  // namespace tieredckpt::lookalike
