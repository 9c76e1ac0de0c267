#include "tensorstore/kvstore/chfs/turns.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace tensorstore {
namespace internal_chfs_kvstore {

Turns::Turn& Turns::Turn::operator=(Turn&& other) noexcept {
  if (this != &other) {
    End();
    turns_ = std::exchange(other.turns_, nullptr);
    path_ = std::move(other.path_);
  }
  return *this;
}

void Turns::Turn::End() {
  if (turns_ != nullptr) std::exchange(turns_, nullptr)->EndOne(std::move(path_));
}

void Turns::Take(std::string path, Kind kind, Start start) {
  {
    absl::MutexLock lock(mutex_);
    Line& line = lines_[path];
    // A reader does not pass a writer that waits: else a busy object would never be written.
    if (!line.waiting.empty() || !line.Admits(kind)) {
      line.waiting.push_back({kind, std::move(start)});
      return;
    }
    line.Admit(kind);
  }
  std::move(start)(Turn(this, std::move(path)));
}

void Turns::EndOne(std::string path) {
  std::vector<Start> next;
  {
    absl::MutexLock lock(mutex_);
    const auto it = lines_.find(path);
    Line& line = it->second;
    --line.running;
    line.writing = false;
    while (!line.waiting.empty() && line.Admits(line.waiting.front().kind)) {
      line.Admit(line.waiting.front().kind);
      next.push_back(std::move(line.waiting.front().start));
      line.waiting.pop_front();
    }
    if (line.running == 0) lines_.erase(it);
  }
  for (Start& start : next) std::move(start)(Turn(this, path));
}

}  // namespace internal_chfs_kvstore
}  // namespace tensorstore
