#include "tensorstore/kvstore/chfs/recent_writes.h"

#include <stdint.h>

#include <string>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace tensorstore {
namespace internal_chfs_kvstore {

bool RecentWrites::Repeats(const std::string& path, int64_t mtime_ns, absl::Time now) {
  absl::MutexLock lock(mutex_);
  for (; !by_age_.empty() && by_age_.front().first < now - kLongestTick; by_age_.pop_front()) {
    const auto it = writes_.find(by_age_.front().second);
    // A later write of the object has its own place in the queue.
    if (it != writes_.end() && it->second.noted == by_age_.front().first) writes_.erase(it);
  }
  const auto [it, added] = writes_.try_emplace(path, Write{mtime_ns, now});
  const bool repeats = !added && it->second.mtime_ns == mtime_ns;
  it->second = {mtime_ns, now};
  by_age_.emplace_back(now, path);
  return repeats;
}

}  // namespace internal_chfs_kvstore
}  // namespace tensorstore
