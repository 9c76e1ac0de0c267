// The servers of one look-alike directory, and this client's ring of them.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "testing/server.hpp"
#include "testing/switches.hpp"

namespace tieredckpt::lookalike {

// "/a//b/./c" as "a/b/c", the root as ""; nothing for a path of more than 50 components.
std::optional<std::string> Canonical(const char* path);

class Cluster {
 public:
  // Opens the directory, making it when it is not there. Null with a message when that fails, when no server
  // lives, or when none answers within the timeout.
  static std::unique_ptr<Cluster> Connect(const std::string& directory, int timeout_ms, std::string* message);

  std::shared_ptr<const Switches> switches() { return file_.Read(); }

  // Adds the verb of a call that hangs from now on to the file "hanging", for whoever waits for that.
  void TellHanging(const char* verb) const;

  int size() const;

  // The server at an index of the ring; -1 past its end.
  int At(int index) const;

  // The address of the server at an index of the ring; empty past its end.
  std::string AddressAt(int index) const;

  // Takes over the ring as a server knows it: 0, or ENOTCONN after the whole timeout.
  int LookAnew(const std::string& address);

  // Whether chunk 0 of a path belongs to a server, as the ring is now.
  bool Owns(int server, const std::string& path);

  // With its data, or without where the switches say that it lost it.
  const Server& server(int number);

  // 0, or ENOTCONN after the whole timeout.
  int Reach(int server);

  // Runs a call on the server of a chunk. A server that does not answer is dropped from the ring, and the next
  // one that the chunk then falls to is asked: what it has not got reads as missing.
  int Metadata(const std::string& path, int index, const std::function<int(const Server&)>& call);

  // The same for payload, which gives up on a server that does not answer, and drops none.
  int Data(const std::string& path, int index, const std::function<int(const Server&)>& call);

 private:
  Cluster(const std::string& directory, int timeout_ms)
      : file_(directory + "/switches"),
        directory_(directory),
        hanging_(directory + "/hanging"),
        timeout_ms_(timeout_ms) {}
  std::string Address(int server) const;
  int Lookup(const std::string& path, int index) const;
  int PassedOn(int server, const std::string& path, int index);
  void Evict(int server);
  void Learn(const Switches& switches);

  SwitchFile file_;
  const std::string directory_;
  const std::string hanging_;
  const int timeout_ms_;
  std::vector<Server> servers_;
  std::set<int> late_;  // when the ring was last learnt
  std::mutex guards_emptied_;
  std::map<int, Server> emptied_;  // the folders of servers that lost their data
  mutable std::shared_mutex guards_ring_;
  std::vector<int> ring_;
};

}  // namespace tieredckpt::lookalike
