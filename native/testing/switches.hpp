// Faults on demand: what the file `switches` of a look-alike's directory asks for. README.md lists them.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace tieredckpt::lookalike {

// One fault of one verb. It counts the calls of its verb since this process first saw the file.
struct Rule {
  std::string action;  // fail, exit, crash, hang, short, delay
  std::string verb;    // "any" stands for every verb
  long first = 1;
  bool onwards = false;
  int value = 0;  // the errno, the exit status, or milliseconds
  mutable std::atomic<long> calls{0};

  bool Strikes() const {
    const long call = ++calls;
    return onwards ? call >= first : call == first;
  }
};

struct Switches {
  std::set<int> dead;
  std::set<int> hung;
  std::set<int> late;          // not in the ring yet
  std::set<int> empty;         // came back without their data
  std::uint64_t capacity = 0;  // bytes of payload per server; 0: what the disk holds
  int servers = 1;             // only looked at when the directory is made
  int version = 3;             // the major version of libchfs that is played
  bool backend = false;        // a folder that servers copy to, as `chfsd -b`
  int tail_ms = 0;             // how late unlink removes chunks 10 and up
  std::deque<Rule> rules;      // a deque, because the counters cannot move
};

// The file, parsed again whenever it was replaced. From any thread.
class SwitchFile {
 public:
  explicit SwitchFile(std::string path) : path_(std::move(path)) {}

  // Ends the process with a message when the file holds something unknown: a misspelt switch would make a
  // test pass that tests nothing.
  std::shared_ptr<const Switches> Read();

 private:
  const std::string path_;
  std::mutex guards_parsed_;
  struct stat seen_ {};
  std::shared_ptr<const Switches> parsed_;
};

}  // namespace tieredckpt::lookalike
