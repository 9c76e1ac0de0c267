// The modification times that this process has lately seen its writes get.
#ifndef TENSORSTORE_KVSTORE_CHFS_RECENT_WRITES_H_
#define TENSORSTORE_KVSTORE_CHFS_RECENT_WRITES_H_

#include <stdint.h>

#include <deque>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace tensorstore {
namespace internal_chfs_kvstore {

// A generation is a time and a size: two values of one size that are written within one tick of the server's clock
// would have the same.
class RecentWrites {
 public:
  // Longer than a tick of any clock that stamps files; what is older is forgotten.
  static constexpr absl::Duration kLongestTick = absl::Seconds(3);

  // Whether the write of `path` before this one had the same time; notes this one's.
  bool Repeats(const std::string& path, int64_t mtime_ns, absl::Time now);

 private:
  struct Write {
    int64_t mtime_ns;
    absl::Time noted;
  };
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Write> writes_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::pair<absl::Time, std::string>> by_age_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace internal_chfs_kvstore
}  // namespace tensorstore

#endif  // TENSORSTORE_KVSTORE_CHFS_RECENT_WRITES_H_
