// What libchfs's errno means to a caller.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

Code CodeOf(int error) {
  switch (error) {
    case ENOENT:
      return Code::kMissing;
    case EEXIST:
    case ENOTEMPTY:
      return Code::kExists;
    case ENOTCONN:  // what libchfs makes of every failed or timed out RPC
    case ECONNREFUSED:
    case ECONNRESET:
    case EHOSTUNREACH:
    case ETIMEDOUT:
      return Code::kUnavailable;
    case ENOSPC:
    case EDQUOT:
      return Code::kFull;
    case EINVAL:
    case EISDIR:
    case ENOTDIR:
    case ENAMETOOLONG:
      return Code::kInvalid;
    default:
      return Code::kFailed;
  }
}

}  // namespace

Status FromErrno(int error, const char* action, const std::string& path) {
  std::string message = std::string("CHFS: cannot ") + action + " " + path + ": ";
  message += error != 0 ? std::strerror(error) : "libchfs gives no reason";
  if (error == EPERM) {
    message += " (which CHFS says of a full device, and of any other failure at its server; its log tells)";
  }
  return {CodeOf(error), std::move(message)};
}

Kind KindOf(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFDIR:
      return Kind::kFolder;
    case S_IFLNK:
      return Kind::kLink;
    default:
      return Kind::kObject;
  }
}

std::uint64_t SizeOf(const struct stat& info) { return static_cast<std::uint64_t>(std::max<off_t>(info.st_size, 0)); }

std::int64_t NanosecondsOf(const struct timespec& time) {
  std::int64_t nanoseconds = 0;
  const bool overflow = __builtin_mul_overflow(std::int64_t{time.tv_sec}, 1'000'000'000, &nanoseconds) ||
                        __builtin_add_overflow(nanoseconds, std::int64_t{time.tv_nsec}, &nanoseconds);
  return overflow ? 0 : nanoseconds;
}

std::string ParentOf(const std::string& path) {
  const auto slash = path.rfind('/');
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace tieredckpt::chfs
