// libchfs, opened at run time: the functions that the client uses, and nothing that ends the process.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "chfs/client.hpp"

namespace tieredckpt::chfs {

using Filler = int (*)(void* context, const char* name, const struct stat* info, off_t offset);

struct Library {
  std::string path;     // of the file that was loaded
  std::string version;  // as it says itself

  int (*init)(const char* server) = nullptr;
  int (*size)() = nullptr;
  const char* (*version_of)() = nullptr;
  int (*create)(const char* path, std::int32_t flags, mode_t mode, int chunk_size) = nullptr;
  int (*open)(const char* path, std::int32_t flags) = nullptr;
  int (*close)(int descriptor) = nullptr;
  ssize_t (*pwrite)(int descriptor, const void* data, std::size_t size, off_t offset) = nullptr;
  ssize_t (*pread)(int descriptor, void* data, std::size_t size, off_t offset) = nullptr;
  int (*truncate)(const char* path, off_t size) = nullptr;
  int (*unlink)(const char* path) = nullptr;
  int (*mkdir)(const char* path, mode_t mode) = nullptr;
  int (*rmdir)(const char* path) = nullptr;
  int (*stat)(const char* path, struct stat* info) = nullptr;
  int (*readdir_index)(const char* path, int index, void* context, Filler filler) = nullptr;
  int (*symlink)(const char* target, const char* path) = nullptr;
  int (*readlink)(const char* path, char* target, std::size_t size) = nullptr;

  // For libchfs's own programs, which are linked with it; null where a version lacks them.
  char* (*address_of)(int index) = nullptr;       // of a server of the ring, to be freed; null past its end
  int (*learn_ring)(const char* server) = nullptr;  // asks a server for the ring; 0, or why it did not answer
};

// Loads `name`, a path or a name for the loader's search; empty: "libchfs.so".
// Loaded libraries stay until the process ends. The process's signal handlers stay its own.
Status LoadLibrary(const std::string& name, Library* library);

// Restores the dispositions of all signals when it is destroyed: libraries below libchfs install handlers of their
// own, some when they are loaded and some when they connect.
class SignalGuard {
 public:
  SignalGuard();
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;
  ~SignalGuard();

 private:
  struct Saved;
  const std::unique_ptr<Saved> saved_;
};

}  // namespace tieredckpt::chfs
