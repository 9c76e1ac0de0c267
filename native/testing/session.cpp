#include "testing/session.hpp"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

namespace tieredckpt::lookalike {
namespace {

constexpr const char* kScheme = "directory:";

[[noreturn]] void Fatal(const std::string& message) {
  std::fprintf(stderr, "libchfs look-alike: %s\n", message.c_str());
  std::exit(2);
}

[[noreturn]] void Hang() {
  for (;;) ::pause();
}

void FromEnvironment(const char* name, std::atomic<int>* setting) {
  const char* text = std::getenv(name);
  if (text != nullptr && *text != '\0') *setting = std::atoi(text);
}

std::string FirstOfEnvironment() {
  char* servers = std::getenv("CHFS_SERVER");
  if (servers == nullptr) return "";
  // libchfs cuts the list in the environment itself, and whoever looks there later sees one server.
  if (char* comma = std::strchr(servers, ',')) *comma = '\0';
  return servers;
}

}  // namespace

int Descriptors::Add(const std::string& path, mode_t mode, std::uint32_t chunk_size) {
  auto object = std::make_shared<Object>();
  object->path = path;
  object->mode = mode;
  object->chunk_size = chunk_size;
  const std::unique_lock lock(guards_objects_);
  std::size_t number = 0;
  while (number < objects_.size() && objects_[number] != nullptr) ++number;
  if (number == objects_.size()) objects_.emplace_back();
  objects_[number] = std::move(object);
  return static_cast<int>(number);
}

std::shared_ptr<Object> Descriptors::Find(int descriptor) const {
  const std::shared_lock lock(guards_objects_);
  if (descriptor < 0 || static_cast<std::size_t>(descriptor) >= objects_.size()) return nullptr;
  return objects_[static_cast<std::size_t>(descriptor)];
}

bool Descriptors::Drop(int descriptor) {
  const std::unique_lock lock(guards_objects_);
  if (descriptor < 0 || static_cast<std::size_t>(descriptor) >= objects_.size()) return false;
  return std::exchange(objects_[static_cast<std::size_t>(descriptor)], nullptr) != nullptr;
}

void Session::Connect(const char* server) {
  State before = State::kNew;
  if (!state_.compare_exchange_strong(before, State::kConnecting)) {
    if (before == State::kReady) return;
    Fatal(before == State::kOver ? "chfs_init after chfs_term" : "two threads in chfs_init");
  }
  const std::string address = server != nullptr && *server != '\0' ? server : FirstOfEnvironment();
  if (address.empty()) Fatal("no server: pass one or set CHFS_SERVER");
  if (address.rfind(kScheme, 0) != 0 || address.size() == std::strlen(kScheme)) {
    Fatal(address + ": this is not CHFS but a look-alike, which serves directory:PATH only");
  }
  FromEnvironment("CHFS_CHUNK_SIZE", &default_chunk_size);
  FromEnvironment("CHFS_RPC_TIMEOUT_MSEC", &rpc_timeout_ms);
  std::string message;
  cluster_ = Cluster::Connect(address.substr(std::strlen(kScheme)), rpc_timeout_ms, &message);
  if (cluster_ == nullptr) Fatal(message);
  owner_ = ::getpid();
  if (!Faultless("init")) Fatal("told to fail in chfs_init");
  state_ = State::kReady;
}

void Session::End() {
  if (!ready()) Crash(SIGSEGV);
  state_ = State::kOver;
}

bool Session::Enter(const char* verb, bool* shorten) {
  if (!ready()) Crash(SIGSEGV);
  if (::getpid() != owner_) Hang();
  return Faultless(verb, shorten);
}

bool Session::Faultless(const char* verb, bool* shorten) {
  const auto switches = cluster_->switches();
  int error = 0;
  for (const Rule& rule : switches->rules) {
    if ((rule.verb != verb && rule.verb != "any") || !rule.Strikes()) continue;
    if (rule.action == "delay") std::this_thread::sleep_for(std::chrono::milliseconds(rule.value));
    if (rule.action == "crash") Crash(SIGSEGV);
    if (rule.action == "exit") std::exit(rule.value);
    if (rule.action == "fail") error = rule.value;
    if (rule.action == "short" && shorten != nullptr) *shorten = true;
    if (rule.action == "hang") cluster_->TellHanging(verb);
    // Until the file is replaced.
    while (rule.action == "hang" && cluster_->switches() == switches) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  if (error != 0) errno = error;
  return error == 0;
}

int Session::Report(int error) const {
  switch (error) {
    case 0:
      return 0;
    case EEXIST:
    case ENOENT:
    case ENOMEM:
    case ENOTSUP:
    case ENOTCONN:
      return Fail(error);
    case ENOSPC:
    case EDQUOT:
      return Fail(plays_version_2() ? EPERM : ENOSPC);
    default:
      return Fail(EPERM);
  }
}

Session& TheSession() {
  static Session& session = *new Session;
  return session;
}

void Crash(int signal) {
  std::raise(signal);
  std::abort();  // a handler that came back does not save the process
}

int Fail(int error) {
  errno = error;
  return -1;
}

}  // namespace tieredckpt::lookalike
