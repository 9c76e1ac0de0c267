#include "chfs/library.hpp"

#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <stdlib.h>

#include <array>
#include <cstdio>

namespace tieredckpt::chfs {
namespace {

constexpr const char* kDefaultName = "libchfs.so";
constexpr int kOldestMajor = 2;
constexpr int kOldestMinor = 1;
// The tag 2.1.2 lacks chfs_size, the branch after it calls itself 2.1.2 as well.
constexpr const char* kNeeded = "; CHFS 3.0, or 2.1.2 from the branch `master`, is needed";

std::string LoaderError() {
  const char* error = dlerror();
  return error != nullptr ? error : "unknown error of the loader";
}

std::string PathOf(void* handle, const std::string& name) {
  struct link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr || map->l_name[0] == '\0') return name;
  return map->l_name;
}

// libchfs.so names no libraries that it needs, so margo must be in the global scope before it, together with
// the mercury and argobots that margo does name.
bool LoadMargo(const std::string& chfs, std::string* tried) {
  std::string beside;
  if (const auto slash = chfs.rfind('/'); slash != std::string::npos) beside = chfs.substr(0, slash + 1);
  for (const std::string& name : {beside + "libmargo.so", std::string("libmargo.so"), std::string("libmargo.so.0")}) {
    if (dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return true;
    *tried += "; " + LoaderError();
  }
  return false;
}

Status Load(const std::string& name, void** handle) {
  // RTLD_NOW: a library without its dependencies must fail here and not at the first call. RTLD_LOCAL: libchfs
  // exports names such as log_error.
  *handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (*handle != nullptr) return {};
  std::string tried = LoaderError();
  if (LoadMargo(name, &tried)) {
    *handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (*handle != nullptr) return {};
    tried += "; " + LoaderError();
  }
  return {Code::kUnavailable, "CHFS: cannot load " + name + " (" + tried +
                                  "); install CHFS, or name its library in the tier's `library` or in "
                                  "TIEREDCKPT_LIBCHFS"};
}

template <typename Function>
void Resolve(void* handle, const char* symbol, Function** function, std::string* missing) {
  *function = reinterpret_cast<Function*>(dlsym(handle, symbol));
  if (*function == nullptr) *missing += std::string(missing->empty() ? "" : ", ") + symbol;
}

std::string ResolveAll(void* handle, Library* library) {
  std::string missing;
  Resolve(handle, "chfs_init", &library->init, &missing);
  Resolve(handle, "chfs_size", &library->size, &missing);
  Resolve(handle, "chfs_version", &library->version_of, &missing);
  Resolve(handle, "chfs_create_chunk_size", &library->create, &missing);
  Resolve(handle, "chfs_open", &library->open, &missing);
  Resolve(handle, "chfs_close", &library->close, &missing);
  Resolve(handle, "chfs_pwrite", &library->pwrite, &missing);
  Resolve(handle, "chfs_pread", &library->pread, &missing);
  Resolve(handle, "chfs_truncate", &library->truncate, &missing);
  Resolve(handle, "chfs_unlink", &library->unlink, &missing);
  Resolve(handle, "chfs_mkdir", &library->mkdir, &missing);
  Resolve(handle, "chfs_rmdir", &library->rmdir, &missing);
  Resolve(handle, "chfs_stat", &library->stat, &missing);
  Resolve(handle, "chfs_readdir_index", &library->readdir_index, &missing);
  Resolve(handle, "chfs_symlink", &library->symlink, &missing);
  Resolve(handle, "chfs_readlink", &library->readlink, &missing);
  std::string optional;
  Resolve(handle, "ring_list_lookup_index", &library->address_of, &optional);
  Resolve(handle, "ring_list_rpc_node_list", &library->learn_ring, &optional);
  return missing;
}

bool NewEnough(const std::string& version) {
  int major = 0;
  int minor = 0;
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2) return false;
  return major > kOldestMajor || (major == kOldestMajor && minor >= kOldestMinor);
}

}  // namespace

struct SignalGuard::Saved {
  std::array<struct sigaction, NSIG> actions;
  std::array<bool, NSIG> known;
};

SignalGuard::SignalGuard() : saved_(new Saved()) {
  for (int number = 1; number < NSIG; ++number) {
    const auto i = static_cast<std::size_t>(number);
    saved_->known[i] = sigaction(number, nullptr, &saved_->actions[i]) == 0;
  }
}

SignalGuard::~SignalGuard() {
  for (int number = 1; number < NSIG; ++number) {
    const auto i = static_cast<std::size_t>(number);
    if (saved_->known[i]) sigaction(number, &saved_->actions[i], nullptr);
  }
}

Status LoadLibrary(const std::string& name, Library* library) {
  const std::string wanted = name.empty() ? kDefaultName : name;
  // Without these, libraries of old interconnects print backtraces and replace signal handlers.
  setenv("IPATH_NO_BACKTRACE", "1", 1);
  setenv("HFI_NO_BACKTRACE", "1", 1);
  const SignalGuard signals;
  void* handle = nullptr;
  if (Status status = Load(wanted, &handle); !status.ok()) return status;
  library->path = PathOf(handle, wanted);
  const std::string missing = ResolveAll(handle, library);
  const char* version = library->version_of != nullptr ? library->version_of() : nullptr;
  library->version = version != nullptr ? version : "unknown";
  const std::string found = library->path + " is version " + library->version;
  if (!missing.empty()) {
    return {Code::kUnavailable, "CHFS: " + found + " and lacks " + missing + kNeeded};
  }
  if (!NewEnough(library->version)) return {Code::kUnavailable, "CHFS: " + found + kNeeded};
  return {};
}

}  // namespace tieredckpt::chfs
