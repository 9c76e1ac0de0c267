#include "testing/cluster.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

namespace tieredckpt::lookalike {
namespace {

constexpr int kDepth = 50;
constexpr const char* kFormat = "tieredckpt look-alike of CHFS, format 1, servers: ";

// FNV-1a with a last mix, so that short names spread over few servers.
std::uint64_t Hash(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  hash ^= hash >> 33;
  hash *= 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 33);
}

std::string Reason(const std::string& path) { return path + ": " + std::strerror(errno); }

// Whether a directory holds only files of this library: a wrong path in a configuration must not fill somebody's home.
bool IsOurs(const std::string& directory) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (name != "servers" && name != "hanging" && name.rfind("ring", 0) != 0 && name.rfind("switches", 0) != 0) {
      return false;
    }
  }
  return !error;
}

int ServersOf(const std::string& directory) {
  std::ifstream file(directory + "/ring");
  std::string line;
  if (!std::getline(file, line) || line.rfind(kFormat, 0) != 0) return 0;
  const int servers = std::atoi(line.c_str() + std::strlen(kFormat));
  return servers >= 1 && servers <= 64 ? servers : 0;
}

bool MakeFolder(const std::string& path) { return ::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST; }

// Makes a directory of `servers` servers. Of several processes that try at once, one decides their number.
bool Make(const std::string& directory, int servers, std::string* message) {
  if (!IsOurs(directory)) {
    *message = directory + " holds other files: name a new or empty directory";
    return false;
  }
  const std::string draft = directory + "/ring." + std::to_string(::getpid());
  std::ofstream(draft) << kFormat << servers << "\n";
  const bool made = ::link(draft.c_str(), (directory + "/ring").c_str()) == 0 || errno == EEXIST;
  if (!made) *message = Reason(directory + "/ring");
  ::unlink(draft.c_str());
  return made;
}

}  // namespace

std::optional<std::string> Canonical(const char* path) {
  std::vector<std::string_view> components;
  std::string_view rest(path);
  while (!rest.empty()) {
    const auto slash = std::min(rest.find('/'), rest.size());
    const std::string_view component = rest.substr(0, slash);
    rest.remove_prefix(std::min(slash + 1, rest.size()));
    if (component.empty() || component == ".") continue;
    if (components.size() >= kDepth) return std::nullopt;
    if (component != "..") {
      components.push_back(component);
    } else if (!components.empty()) {
      components.pop_back();
    }
  }
  std::string joined;
  for (const auto component : components) {
    if (!joined.empty()) joined += '/';
    joined += component;
  }
  return joined;
}

std::unique_ptr<Cluster> Cluster::Connect(const std::string& directory, int timeout_ms, std::string* message) {
  std::error_code error;
  const auto parent = std::filesystem::absolute(directory, error).parent_path();
  if (!parent.empty()) std::filesystem::create_directories(parent, error);
  if (!MakeFolder(directory)) {
    *message = Reason(directory);
    return nullptr;
  }
  std::unique_ptr<Cluster> cluster(new Cluster(directory, timeout_ms));
  const auto switches = cluster->switches();
  if (::access((directory + "/ring").c_str(), F_OK) != 0 && !Make(directory, switches->servers, message)) return nullptr;
  const int count = ServersOf(directory);
  if (count == 0) {
    *message = directory + "/ring is not of a look-alike";
    return nullptr;
  }
  const std::string servers = directory + "/servers";
  bool there = MakeFolder(servers);
  for (int number = 0; there && number < count; ++number) {
    const std::string folder = servers + "/" + std::to_string(number);
    const int descriptor = MakeFolder(folder) ? ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    there = descriptor >= 0;
    cluster->servers_.emplace_back(descriptor);
  }
  if (!there) {
    *message = Reason(servers);
    return nullptr;
  }
  // The servers have told each other which of them died; one that hangs is still on their list.
  cluster->Learn(*switches);
  const auto answers = [&](int number) { return switches->hung.count(number) == 0; };
  if (!std::any_of(cluster->ring_.begin(), cluster->ring_.end(), answers)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(timeout_ms));
    *message = "no server of " + directory + " answers";
    return nullptr;
  }
  return cluster;
}

void Cluster::TellHanging(const char* verb) const {
  // One write a line, so that lines of several threads and processes do not mix.
  std::ofstream(hanging_, std::ios::app) << std::string(verb) + "\n";
}

int Cluster::size() const {
  const std::shared_lock lock(guards_ring_);
  return static_cast<int>(ring_.size());
}

int Cluster::At(int index) const {
  const std::shared_lock lock(guards_ring_);
  return index >= 0 && index < static_cast<int>(ring_.size()) ? ring_[static_cast<std::size_t>(index)] : -1;
}

int Cluster::Lookup(const std::string& path, int index) const {
  const std::shared_lock lock(guards_ring_);
  if (ring_.empty()) return -1;
  return ring_[(Hash(path) + static_cast<std::uint64_t>(index)) % ring_.size()];
}

std::string Cluster::Address(int server) const { return directory_ + "/servers/" + std::to_string(server); }

std::string Cluster::AddressAt(int index) const {
  const int number = At(index);
  return number < 0 ? std::string() : Address(number);
}

void Cluster::Learn(const Switches& switches) {
  const std::unique_lock lock(guards_ring_);
  ring_.clear();
  for (int number = 0; number < static_cast<int>(servers_.size()); ++number) {
    if (switches.dead.count(number) == 0 && switches.late.count(number) == 0) ring_.push_back(number);
  }
  late_ = switches.late;
}

int Cluster::LookAnew(const std::string& address) {
  for (int number = 0; number < static_cast<int>(servers_.size()); ++number) {
    if (Address(number) != address) continue;
    const int error = Reach(number);
    if (error == 0) Learn(*file_.Read());
    return error;
  }
  return ENOTCONN;
}

const Server& Cluster::server(int number) {
  if (file_.Read()->empty.count(number) == 0) return servers_[static_cast<std::size_t>(number)];
  const std::lock_guard lock(guards_emptied_);
  const auto found = emptied_.find(number);
  if (found != emptied_.end()) return found->second;
  const std::string folder = Address(number) + "-emptied";
  MakeFolder(folder);
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return emptied_.emplace(number, Server(descriptor)).first->second;
}

bool Cluster::Owns(int server, const std::string& path) {
  return PassedOn(Lookup(path, 0), path, 0) == server;
}

// A server that others have joined passes on what is theirs by the ring as it is now, whatever a client knows.
int Cluster::PassedOn(int server, const std::string& path, int index) {
  const auto switches = file_.Read();
  {
    const std::shared_lock lock(guards_ring_);
    if (server < 0 || switches->late == late_) return server;
  }
  std::vector<int> ring;
  for (int number = 0; number < static_cast<int>(servers_.size()); ++number) {
    if (switches->late.count(number) == 0 && switches->dead.count(number) == 0) ring.push_back(number);
  }
  return ring[(Hash(path) + static_cast<std::uint64_t>(index)) % ring.size()];
}

void Cluster::Evict(int server) {
  const std::unique_lock lock(guards_ring_);
  ring_.erase(std::remove(ring_.begin(), ring_.end(), server), ring_.end());
}

int Cluster::Reach(int server) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms_);
  bool lost = false;
  for (;;) {
    const auto switches = file_.Read();
    // A request to a server that hangs is answered when it goes on; one to a server that died is lost.
    lost = lost || switches->dead.count(server) != 0;
    if (!lost && switches->hung.count(server) == 0) return 0;
    if (std::chrono::steady_clock::now() >= deadline) return ENOTCONN;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

int Cluster::Metadata(const std::string& path, int index, const std::function<int(const Server&)>& call) {
  for (;;) {
    const int number = Lookup(path, index);
    if (number < 0) return ENOTCONN;
    if (Reach(number) == 0) {
      const int owner = PassedOn(number, path, index);
      if (owner == number) return call(server(number));
      return Reach(owner) == 0 ? call(server(owner)) : EPERM;
    }
    Evict(number);
  }
}

int Cluster::Data(const std::string& path, int index, const std::function<int(const Server&)>& call) {
  const int number = Lookup(path, index);
  if (number < 0) return ENOTCONN;
  if (const int error = Reach(number)) return error;
  const int owner = PassedOn(number, path, index);
  if (owner != number && Reach(owner) != 0) return EPERM;
  return call(server(owner));
}

}  // namespace tieredckpt::lookalike
