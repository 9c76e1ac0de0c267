#include "tensorstore/kvstore/chfs/recent_writes.h"

#include <gtest/gtest.h>
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace {

using ::tensorstore::internal_chfs_kvstore::RecentWrites;

TEST(RecentWritesTest, ATimeRepeatsForTheSameObjectOnly) {
  RecentWrites writes;
  const absl::Time now = absl::Now();
  EXPECT_FALSE(writes.Repeats("/a", 10, now));
  EXPECT_FALSE(writes.Repeats("/b", 10, now));
  EXPECT_TRUE(writes.Repeats("/a", 10, now));
  EXPECT_TRUE(writes.Repeats("/a", 10, now + absl::Milliseconds(1)));
  EXPECT_FALSE(writes.Repeats("/a", 11, now + absl::Milliseconds(2)));
  EXPECT_TRUE(writes.Repeats("/a", 11, now + absl::Milliseconds(3)));
}

TEST(RecentWritesTest, AWriteIsForgottenAfterTheLongestTickAndNotBefore) {
  RecentWrites writes;
  const absl::Time start = absl::Now();
  EXPECT_FALSE(writes.Repeats("/a", 10, start));
  EXPECT_TRUE(writes.Repeats("/a", 10, start + absl::Seconds(2)));
  // The first of the two is old by now, the second is not.
  EXPECT_TRUE(writes.Repeats("/a", 10, start + absl::Seconds(4)));
  EXPECT_FALSE(writes.Repeats("/b", 10, start + absl::Seconds(8)));
  EXPECT_FALSE(writes.Repeats("/a", 10, start + absl::Seconds(8)));
}

}  // namespace
