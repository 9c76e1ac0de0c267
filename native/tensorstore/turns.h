// Orders what this process does to each object of CHFS: writes alone, reads together, first come, first served.
//
// CHFS replaces an object in place, so that a read beside a write could see half of either. Nobody blocks while
// waiting: an operation is a continuation that starts when its turn comes.
#ifndef TENSORSTORE_KVSTORE_CHFS_TURNS_H_
#define TENSORSTORE_KVSTORE_CHFS_TURNS_H_

#include <deque>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace tensorstore {
namespace internal_chfs_kvstore {

class Turns {
 public:
  enum class Kind { kRead, kWrite };

  // The right to one object, for as long as it lives or until End.
  class Turn {
   public:
    Turn() = default;
    Turn(Turn&& other) noexcept
        : turns_(std::exchange(other.turns_, nullptr)), path_(std::move(other.path_)) {}
    Turn& operator=(Turn&& other) noexcept;
    ~Turn() { End(); }

    // Lets those who wait for the object go on; they start in this thread.
    void End();

   private:
    friend class Turns;
    Turn(Turns* turns, std::string path) : turns_(turns), path_(std::move(path)) {}

    Turns* turns_ = nullptr;
    std::string path_;
  };

  using Start = absl::AnyInvocable<void(Turn) &&>;

  // Calls `start` at once, or later in the thread that ends the turn before. It must be short: hand the work
  // to an executor.
  void Take(std::string path, Kind kind, Start start);

 private:
  struct Waiting {
    Kind kind;
    Start start;
  };
  struct Line {
    int running = 0;
    bool writing = false;  // then `running` is 1
    std::deque<Waiting> waiting;

    bool Admits(Kind kind) const { return running == 0 || (kind == Kind::kRead && !writing); }
    void Admit(Kind kind) {
      ++running;
      writing = kind == Kind::kWrite;
    }
  };

  void EndOne(std::string path);

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Line> lines_ ABSL_GUARDED_BY(mutex_);  // of objects in use
};

}  // namespace internal_chfs_kvstore
}  // namespace tensorstore

#endif  // TENSORSTORE_KVSTORE_CHFS_TURNS_H_
