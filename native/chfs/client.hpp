// A client of CHFS over a libchfs that is opened at run time; no CHFS is needed to build it.
//
// libchfs is one global client per process, may end the process while it connects, and hangs after fork: use
// it in a process that may be lost, and spawn that process. See docs/decisions/0008-chfs.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tieredckpt::chfs {

// Failures have different codes where callers react differently.
enum class Code {
  kOk,
  kMissing,      // the object is not there; believed only with every server answering
  kExists,       // an exclusive name is taken
  kUnavailable,  // a call was lost, or the ring is another; open a new client in a new process
  kSilent,       // a server that the message names does not answer; only time helps
  kFull,         // no space, no quota
  kShort,        // the object ends before the range that was asked for
  kInvalid,      // a path that CHFS cannot hold, a folder where an object belongs, or the reverse
  kFailed,       // anything else
};

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;  // names the path, what was done, and errno's text

  bool ok() const { return code == Code::kOk; }
};

struct Options {
  std::string library;                    // path of libchfs; empty: $TIEREDCKPT_LIBCHFS, else the loader's
  std::string server;                     // one server's address; empty: $CHFS_SERVER
  int rpc_timeout_ms = 30'000;            // at least three times the servers' own (chfsd -t)
  std::size_t bytes_per_call = 64 << 20;  // the most that one call of libchfs is given (it recurses per chunk)
};

enum class Kind { kObject, kFolder, kLink };

struct Info {
  Kind kind = Kind::kObject;
  std::uint64_t size = 0;       // bytes
  std::int64_t mtime_ns = 0;    // since the epoch
  std::uint32_t chunk_size = 0; // bytes of a CHFS chunk
};

struct Entry {
  std::string name;  // one component
  Kind kind = Kind::kObject;
  std::uint64_t first_chunk = 0;  // bytes of an object's first CHFS chunk; a server does not know the others
  std::int64_t mtime_ns = 0;      // since the epoch
};

class Client;

// An open object; closes itself. Several threads may read and write at a time. No other thread may use it while it is
// closed or moved.
class File {
 public:
  File() = default;
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  // All `size` bytes at `offset`, or an error. Bytes must be written without holes; order does not matter
  // as long as every chunk but the last ends up full.
  Status Write(const void* data, std::size_t size, std::uint64_t offset);

  // All `size` bytes from `offset` on, or kShort.
  Status Read(void* data, std::size_t size, std::uint64_t offset);

  Status Close();
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  friend class Client;
  std::shared_ptr<Client> client_;
  std::string path_;
  int descriptor_ = -1;
  std::size_t bytes_per_call_ = 0;
};

// The process's connection. Paths are absolute, normal ("/a/b") and obey CheckPath of keys.hpp.
// Every method may be called from any thread.
class Client : public std::enable_shared_from_this<Client> {
 public:
  // Connects, or returns the existing connection; kInvalid if that one has another server or library.
  // It asks first whether the server answers. libchfs may end the process by exit(2) nevertheless.
  static Status Connect(const Options& options, std::shared_ptr<Client>* client);

  ~Client();

  const std::string& version() const;  // of libchfs
  const std::string& library() const;  // the path that it was loaded from
  int servers() const;                 // size of the ring when connected
  const std::vector<std::string>& addresses() const;  // of its servers; empty where libchfs does not tell

  // Asks every server whether it answers; kSilent if one does not, kUnavailable if the ring has changed since this
  // process connected: it is smaller or larger, or has other servers.
  Status CheckRing();

  // kUnavailable if a record in the folder `path` or one above it says that objects there were written to another
  // number of servers, which placed them otherwise: they would be missing or short. Also kUnavailable for a path above
  // the folder that a store uses since servers joined.
  Status CheckRecord(const std::string& path);

  // Records the number of servers at the root, if no record is there; once in a process. kUnavailable if a record
  // gives another number.
  Status Record();

  // Creates an empty object, ancestors included. Empties an object that is there and removes a link; a folder is
  // kInvalid. At most 64 objects may be open in all; further calls wait.
  Status Create(const std::string& path, std::uint32_t chunk_size, File* file);

  // Opens an existing object for reading and writing; a folder or link is kInvalid. `info`, where not null, is
  // filled as by Stat.
  Status Open(const std::string& path, File* file, Info* info = nullptr);

  // Opens a path that is known to be an object, and does not check that it is no link: the check costs several
  // requests for a large object, and libchfs crashes when a link is read.
  Status OpenObject(const std::string& path, File* file);
  Status Stat(const std::string& path, Info* info);

  // Removes an object or link, all of its chunks; kMissing if there is none.
  Status Remove(const std::string& path);
  Status RemoveFolder(const std::string& path);  // an empty one, else kExists

  // The entries of a folder, sorted, each once, from every server; a missing folder has none. `all` adds entries on
  // servers that do not own them, such as those written to a ring of another size.
  Status List(const std::string& path, std::function<void(const Entry&)> each, bool all = false);

  // The same for one folder of many, without asking for servers that joined meanwhile, which hold entries too. The
  // caller calls CheckRing after the last folder.
  Status ListOneOfMany(const std::string& path, std::function<void(const Entry&)> each, bool all = false);

  Status MakeFolder(const std::string& path);  // ancestors included; one that is there is fine

  // Claims `path` with a payload of at most 4095 bytes (no NUL); kExists for all callers but one.
  Status Link(const std::string& target, const std::string& path);
  Status ReadLink(const std::string& path, std::string* target);

 private:
  struct State;
  explicit Client(std::unique_ptr<State> state);
  friend class File;
  std::unique_ptr<State> state_;
};

}  // namespace tieredckpt::chfs
