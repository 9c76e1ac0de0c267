// The C interface of libchfs over a directory. README.md says what it plays and what it leaves out.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "testing/session.hpp"

using tieredckpt::lookalike::Canonical;
using tieredckpt::lookalike::ChunkInfo;
using tieredckpt::lookalike::Cluster;
using tieredckpt::lookalike::Crash;
using tieredckpt::lookalike::Fail;
using tieredckpt::lookalike::Object;
using tieredckpt::lookalike::Server;
using tieredckpt::lookalike::ServerEntry;
using tieredckpt::lookalike::Session;
using tieredckpt::lookalike::TheSession;

#define LOOKALIKE_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr mode_t kNotOwned = mode_t{1} << 30;  // CHFS_S_IFREP
constexpr int kUnlinkedAtOnce = 10;

Session& session = TheSession();

// The path on the servers; false, with errno set, for none and, unless it is allowed, for the root.
bool ToPath(const char* given, std::string* path, int error_for_root = EINVAL) {
  const auto canonical = Canonical(given);
  if (!canonical) errno = ENAMETOOLONG;
  if (!canonical) return false;
  *path = *canonical;
  if (path->empty() && error_for_root != 0) errno = error_for_root;
  return !path->empty() || error_for_root == 0;
}

int StatChunk(const std::string& path, int index, ChunkInfo* info) {
  return session.cluster().Metadata(path, index, [&](const Server& s) { return s.Stat(path, index, info); });
}

int RemoveChunk(const std::string& path, int index) {
  return session.cluster().Metadata(path, index, [&](const Server& s) { return s.Remove(path, index); });
}

ssize_t Write(const Object& object, const char* data, std::size_t size, off_t offset) {
  if (size != 0 && object.chunk_size == 0) Crash(SIGFPE);  // a link, whose chunk size libchfs divides by
  std::size_t done = 0;
  while (done < size) {
    const std::uint64_t at = static_cast<std::uint64_t>(offset) + done;
    const int index = static_cast<int>(at / object.chunk_size);
    const std::uint64_t within = at % object.chunk_size;
    const std::size_t piece = std::min<std::size_t>(size - done, object.chunk_size - within);
    std::size_t written = 0;
    const int error = session.cluster().Data(object.path, index, [&](const Server& server) {
      return server.Write(object.path, index, object.mode, object.chunk_size, data + done, piece, within,
                          session.cluster().switches()->capacity, &written);
    });
    if (error != 0) return session.Report(error);
    done += written;
  }
  return static_cast<ssize_t>(size);
}

ssize_t Read(const Object& object, char* data, std::size_t size, off_t offset) {
  if (object.chunk_size == 0) Crash(SIGFPE);
  std::size_t done = 0;
  while (done < size) {
    const std::uint64_t at = static_cast<std::uint64_t>(offset) + done;
    const int index = static_cast<int>(at / object.chunk_size);
    const std::uint64_t within = at % object.chunk_size;
    std::size_t read = 0;
    const int error = session.cluster().Data(object.path, index, [&](const Server& server) {
      return server.Read(object.path, index, data + done, size - done, within, &read);
    });
    // Only the first chunk's failure is told; a missing chunk is no failure at all.
    if (error != 0 && error != ENOENT && done == 0) return session.Report(error);
    if (error != 0) break;
    done += read;
    if (within + read < object.chunk_size) break;
  }
  return static_cast<ssize_t>(done);
}

using Filler = int (*)(void*, const char*, const struct stat*, off_t);

// Gives the filler each entry of a folder on one server. Returns false if the filler asked to stop.
bool Deliver(int server, const std::string& path, bool all, void* buffer, Filler filler) {
  std::vector<ServerEntry> entries;
  Cluster& cluster = session.cluster();
  if (cluster.Reach(server) != 0 || cluster.server(server).List(path, &entries) != 0) return true;
  for (const ServerEntry& entry : entries) {
    const bool owned = cluster.Owns(server, path.empty() ? entry.name : path + "/" + entry.name);
    if (!owned && !all) continue;
    struct stat st {};
    st.st_mode = entry.host.st_mode | (owned ? 0 : kNotOwned);
    st.st_uid = entry.host.st_uid;
    st.st_gid = entry.host.st_gid;
    st.st_size = entry.host.st_size;
    st.st_mtim = entry.host.st_mtim;
    st.st_ctim = entry.host.st_ctim;
    if (filler(buffer, entry.name.c_str(), &st, 0) != 0) return false;
  }
  return true;
}

}  // namespace

LOOKALIKE_API int chfs_initialized() { return session.ready() ? 1 : 0; }

LOOKALIKE_API const char* chfs_version() {
  return session.plays_version_2() ? "2.1.2 (tieredckpt look-alike over a directory, not CHFS)"
                                   : "3.0.2 (tieredckpt look-alike over a directory, not CHFS)";
}

LOOKALIKE_API void chfs_set_chunk_size(int size) {
  if (size > 0) session.default_chunk_size = size;
}
LOOKALIKE_API void chfs_set_rpc_timeout_msec(int timeout) { session.rpc_timeout_ms = timeout; }
LOOKALIKE_API void chfs_set_buf_size(int) {}
LOOKALIKE_API void chfs_set_async_access(int) {}
LOOKALIKE_API void chfs_set_rdma_thresh(size_t) {}
LOOKALIKE_API void chfs_set_node_list_cache_timeout(int) {}
LOOKALIKE_API void chfs_sync() {}

LOOKALIKE_API int chfs_init(const char* server) {
  session.Connect(server);
  return 0;
}

LOOKALIKE_API int chfs_term() {
  session.End();
  return 0;
}
LOOKALIKE_API int chfs_term_without_sync() { return chfs_term(); }

LOOKALIKE_API int chfs_size() {
  if (!session.ready()) Crash(SIGSEGV);
  return session.cluster().size();
}

// What chlist, a program of CHFS's own, uses of libchfs beside its interface.
LOOKALIKE_API char* ring_list_lookup_index(int index) {
  const std::string address = session.cluster().AddressAt(index);
  return address.empty() ? nullptr : ::strdup(address.c_str());
}
LOOKALIKE_API int ring_list_rpc_node_list(const char* server) { return session.cluster().LookAnew(server); }

LOOKALIKE_API int chfs_create_chunk_size(const char* given, int32_t, mode_t mode, int chunk_size) {
  std::string path;
  if (!session.Enter("create") || !ToPath(given, &path)) return -1;
  if (chunk_size <= 0) return Fail(EINVAL);
  const auto size = static_cast<std::uint32_t>(chunk_size);
  // The owner keeps access: the servers of CHFS do not run as the user of a file.
  const mode_t permissions = (mode & 0777) | 0600;
  const auto create = [&](const Server& s) { return s.Create(path, permissions, size); };
  const int error = session.cluster().Metadata(path, 0, create);
  return error == 0 ? session.descriptors.Add(path, permissions, size) : session.Report(error);
}

LOOKALIKE_API int chfs_create(const char* given, int32_t flags, mode_t mode) {
  return chfs_create_chunk_size(given, flags, mode, session.default_chunk_size);
}

LOOKALIKE_API int chfs_open(const char* given, int32_t) {
  std::string path;
  if (!session.Enter("open") || !ToPath(given, &path, EISDIR)) return -1;
  ChunkInfo info;
  if (const int error = StatChunk(path, 0, &info)) return session.Report(error);
  if (S_ISDIR(info.host.st_mode)) return Fail(EISDIR);
  return session.descriptors.Add(path, info.host.st_mode & 0777, info.chunk_size);
}

LOOKALIKE_API int chfs_close(int descriptor) {
  if (!session.Enter("close")) return -1;
  if (!session.descriptors.Drop(descriptor)) Crash(SIGSEGV);
  return 0;
}

LOOKALIKE_API int chfs_fsync(int descriptor) {
  if (!session.Enter("fsync")) return -1;
  if (session.descriptors.Find(descriptor) == nullptr) Crash(SIGSEGV);
  return 0;
}

LOOKALIKE_API ssize_t chfs_pwrite(int descriptor, const void* data, size_t size, off_t offset) {
  if (!session.Enter("pwrite")) return -1;
  const auto object = session.descriptors.Find(descriptor);
  if (object == nullptr) return Fail(EBADF);
  return Write(*object, static_cast<const char*>(data), size, offset);
}

LOOKALIKE_API ssize_t chfs_pread(int descriptor, void* data, size_t size, off_t offset) {
  bool shorten = false;
  if (!session.Enter("pread", &shorten)) return -1;
  const auto object = session.descriptors.Find(descriptor);
  if (object == nullptr) return Fail(EBADF);
  return Read(*object, static_cast<char*>(data), shorten ? size / 2 : size, offset);
}

LOOKALIKE_API ssize_t chfs_write(int descriptor, const void* data, size_t size) {
  const auto object = session.descriptors.Find(descriptor);
  if (object == nullptr) return Fail(EBADF);
  return chfs_pwrite(descriptor, data, size, object->position.fetch_add(static_cast<off_t>(size)));
}

LOOKALIKE_API ssize_t chfs_read(int descriptor, void* data, size_t size) {
  const auto object = session.descriptors.Find(descriptor);
  if (object == nullptr) return Fail(EBADF);
  const ssize_t done = chfs_pread(descriptor, data, size, object->position);
  if (done > 0) object->position += done;
  return done;
}

LOOKALIKE_API int chfs_truncate(const char* given, off_t length) {
  std::string path;
  if (!session.Enter("truncate")) return -1;
  if (length < 0) return Fail(EINVAL);
  if (!ToPath(given, &path)) return -1;
  ChunkInfo info;
  if (const int error = StatChunk(path, 0, &info)) return session.Report(error);
  if (!S_ISREG(info.host.st_mode)) return Fail(EINVAL);
  const auto wanted = static_cast<std::uint64_t>(length);
  int index = static_cast<int>(wanted / info.chunk_size);
  // The chunk that holds the new end has to exist, even when it is to be empty.
  const int error = session.cluster().Metadata(
      path, index, [&](const Server& s) { return s.Truncate(path, index, wanted % info.chunk_size); });
  if (error != 0) return session.Report(error);
  while (RemoveChunk(path, ++index) == 0) {
  }
  return 0;
}

LOOKALIKE_API int chfs_unlink(const char* given) {
  std::string path;
  if (!session.Enter("unlink") || !ToPath(given, &path)) return -1;
  if (const int error = RemoveChunk(path, 0)) return session.Report(error);
  int index = 1;
  while (index < kUnlinkedAtOnce && RemoveChunk(path, index) == 0) ++index;
  if (index < kUnlinkedAtOnce) return 0;
  const auto remove_tail = [path] {
    for (int tail = kUnlinkedAtOnce; RemoveChunk(path, tail) == 0; ++tail) {
    }
  };
  const int late_ms = session.cluster().switches()->tail_ms;
  if (late_ms == 0) {
    remove_tail();
    return 0;
  }
  std::thread([remove_tail, late_ms] {
    std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
    remove_tail();
  }).detach();
  return 0;
}

LOOKALIKE_API int chfs_mkdir(const char* given, mode_t mode) {
  std::string path;
  if (!session.Enter("mkdir") || !ToPath(given, &path)) return -1;
  const mode_t permissions = (mode & 0777) | 0700;
  const auto make = [&](const Server& s) { return s.MakeFolder(path, permissions); };
  return session.Report(session.cluster().Metadata(path, 0, make));
}

LOOKALIKE_API int chfs_rmdir(const char* given) {
  std::string path;
  if (!session.Enter("rmdir") || !ToPath(given, &path)) return -1;
  return session.Report(RemoveChunk(path, 0));
}

LOOKALIKE_API int chfs_stat(const char* given, struct stat* st) {
  std::string path;
  if (!session.Enter("stat") || !ToPath(given, &path, 0)) return -1;
  if (path.empty()) {
    std::memset(st, 0, sizeof *st);
    st->st_mode = S_IFDIR | 0755;
    return 0;
  }
  ChunkInfo info;
  if (const int error = StatChunk(path, 0, &info)) {
    // Any folder's name before it makes this one too long.
    const bool too_long = session.cluster().switches()->backend && path.size() + 2 >= PATH_MAX;
    return session.Report(error == ENOENT && too_long ? ENAMETOOLONG : error);
  }
  // The inode, device and access time stay as the caller left them.
  st->st_mode = info.host.st_mode;
  st->st_uid = info.host.st_uid;
  st->st_gid = info.host.st_gid;
  st->st_size = info.host.st_size;
  st->st_mtim = info.host.st_mtim;
  st->st_ctim = info.host.st_ctim;
  st->st_nlink = 1;
  st->st_blksize = static_cast<blksize_t>(info.chunk_size);
  const auto full = static_cast<off_t>(info.chunk_size);
  off_t last = S_ISREG(info.host.st_mode) ? info.host.st_size : -1;
  for (int index = 1; last == full && StatChunk(path, index, &info) == 0; ++index) {
    last = info.host.st_size;
    st->st_size += last;
  }
  st->st_blocks = (st->st_size + 511) / 512;
  return 0;
}

LOOKALIKE_API off_t chfs_seek(int descriptor, off_t offset, int whence) {
  const auto object = session.descriptors.Find(descriptor);
  if (object == nullptr) return Fail(EBADF);
  off_t start = whence == SEEK_CUR ? object->position.load() : 0;
  struct stat st {};
  if (whence == SEEK_END && chfs_stat(object->path.c_str(), &st) == 0) start = st.st_size;
  if (start + offset < 0) return Fail(EINVAL);
  object->position = start + offset;
  return start + offset;
}

LOOKALIKE_API int chfs_readdir(const char* given, void* buffer, Filler filler) {
  std::string path;
  if (!session.Enter("readdir") || !ToPath(given, &path, 0)) return -1;
  const int servers = session.cluster().size();
  if (servers == 0) Crash(SIGFPE);
  std::vector<int> ring;
  for (int index = 0; index < servers; ++index) ring.push_back(session.cluster().At(index));
  for (const int server : ring) {
    if (server >= 0) Deliver(server, path, false, buffer, filler);
  }
  return 0;
}

LOOKALIKE_API int chfs_readdir_index(const char* given, int index, void* buffer, Filler filler) {
  std::string path;
  if (!session.Enter("readdir_index") || !ToPath(given, &path, 0)) return -1;
  const int server = session.cluster().At(index);
  if (server >= 0 && filler != nullptr) Deliver(server, path, true, buffer, filler);
  return 0;
}

LOOKALIKE_API int chfs_symlink(const char* target, const char* given) {
  std::string path;
  if (!session.Enter("symlink")) return -1;
  if (target == nullptr) return Fail(ENOENT);
  if (!ToPath(given, &path)) return -1;
  const auto link = [&](const Server& s) { return s.MakeLink(target, path); };
  return session.Report(session.cluster().Metadata(path, 0, link));
}

LOOKALIKE_API int chfs_readlink(const char* given, char* buffer, size_t size) {
  std::string path;
  if (!session.Enter("readlink") || !ToPath(given, &path)) return -1;
  std::size_t length = 0;
  const int error =
      session.cluster().Data(path, 0, [&](const Server& s) { return s.ReadLink(path, buffer, size, &length); });
  return error == 0 ? static_cast<int>(length) : session.Report(error);
}
