// The ring of servers. The client believes what CHFS says of an object only while every server answers.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "chfs/address.hpp"
#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

int CountEntry(void* count, const char*, const struct stat*, off_t) {
  ++*static_cast<std::size_t*>(count);
  return 0;
}

}  // namespace

Status Client::State::Usable() {
  if (getpid() != process) {
    return {Code::kUnavailable, "CHFS: this process was forked from the connected one, where every call would hang; "
                                "connect in a spawned process"};
  }
  return Whole();
}

Status Client::State::Whole() {
  if (!ring_changed_.load(std::memory_order_relaxed)) {
    if (library.size() == servers) return {};
    // For ever: a server that comes back does not join the ring of this process again.
    ring_changed_.store(true, std::memory_order_relaxed);
  }
  return Changed();
}

Status Client::State::Changed() const {
  const std::vector<std::string> now = AddressesNow();
  const auto others = [](const std::vector<std::string>& of, const std::vector<std::string>& than) {
    std::string names;
    for (const std::string& name : of) {
      if (std::find(than.begin(), than.end(), name) == than.end()) names += (names.empty() ? "" : ", ") + name;
    }
    return names;
  };
  const std::string left = others(addresses, now);
  const std::string joined = others(now, addresses);
  return {Code::kUnavailable, "CHFS: the ring of " + std::to_string(servers) + " servers is now one of " +
                                  std::to_string(library.size()) + (left.empty() ? "" : "; " + left + " left it") +
                                  (joined.empty() ? "" : "; " + joined + " joined it") +
                                  ", and objects are looked for in other places; see that all servers run, and "
                                  "connect in a new process"};
}

std::vector<std::string> Client::State::AddressesNow() const {
  std::vector<std::string> found;
  if (library.address_of == nullptr) return found;
  for (int index = 0;; ++index) {
    const std::unique_ptr<char, decltype(&free)> address(library.address_of(index), &free);
    if (address == nullptr) return found;
    found.emplace_back(address.get());
  }
}

Status Client::State::Silent(int server) const {
  const auto index = static_cast<std::size_t>(server);
  return {Code::kSilent, "CHFS: server " + std::to_string(server + 1) + " of " + std::to_string(servers) +
                             (index < addresses.size() ? " at " + addresses[index] : "") +
                             " does not answer; see that all servers run"};
}

Status Client::State::Reachable() const {
  for (std::size_t server = 0; server < addresses.size(); ++server) {
    std::string reached;
    if (!FirstAnswering({addresses[server]}, std::min(options.rpc_timeout_ms, kLongestLookMs), &reached).ok()) {
      return Silent(static_cast<int>(server));
    }
  }
  return {};
}

std::shared_lock<std::shared_mutex> Client::State::HoldRing() {
  const std::lock_guard<std::mutex> entrance(ring_entrance_);
  return std::shared_lock<std::shared_mutex>(ring_mutex_);
}

Status Client::State::LookAnew() {
  if (library.learn_ring == nullptr || addresses.empty()) return {};
  const std::lock_guard<std::mutex> entrance(ring_entrance_);
  const std::lock_guard<std::shared_mutex> ring(ring_mutex_);
  if (library.learn_ring(addresses.front().c_str()) != 0) {
    return Silent(0);
  }
  // A server that came back at another address is another one: it may have lost its data.
  if (AddressesNow() != addresses) ring_changed_.store(true, std::memory_order_relaxed);
  return Whole();
}

Status Client::State::Probe(int server) {
  // libchfs reports no failure here, but a living server has at least "." in its root.
  std::size_t entries = 0;
  Status status = Run("list", "/", [&] { return library.readdir_index("/", server, &entries, CountEntry); });
  if (status.ok() && entries == 0) {
    return Silent(server);
  }
  return status;
}

Status Client::State::ProbeAll() {
  if (Status status = LookAnew(); !status.ok()) return status;
  for (int server = 0; server < servers; ++server) {
    if (Status status = Probe(server); !status.ok()) return status;
  }
  return {};
}

Status Client::State::CheckRing() {
  if (Status status = Usable(); !status.ok()) return status;
  std::unique_lock<std::mutex> lock(check_mutex_);
  // A check that is under way may have asked a server before it fell silent: only a later one counts.
  const std::uint64_t needed = checks_begun_ + 1;
  while (last_check_ < needed) {
    if (checking_) {
      check_done_.wait(lock);
      continue;
    }
    checking_ = true;
    const std::uint64_t number = ++checks_begun_;
    lock.unlock();
    Status result = ProbeAll();
    lock.lock();
    checking_ = false;
    last_check_ = number;
    last_result_ = std::move(result);
    check_done_.notify_all();
  }
  return last_result_;
}

Status Client::State::Confirm(Status missing) {
  Status status = CheckRing();
  return status.ok() ? std::move(missing) : status;
}

}  // namespace tieredckpt::chfs
