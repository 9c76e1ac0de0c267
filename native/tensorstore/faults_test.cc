// How the driver reports failures of CHFS; needs the look-alike of libchfs, which fails on command.
#include <stdlib.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "tensorstore/kvstore/chfs/test_store.h"
#include "tensorstore/kvstore/generation.h"
#include "tensorstore/kvstore/key_range.h"
#include "tensorstore/kvstore/kvstore.h"
#include "tensorstore/kvstore/operations.h"
#include "tensorstore/kvstore/test_matchers.h"
#include "tensorstore/util/result.h"
#include "tensorstore/util/status_testutil.h"

namespace {

namespace kvstore = ::tensorstore::kvstore;
using ::tensorstore::StatusIs;
using ::tensorstore::StorageGeneration;
using ::tensorstore::internal::MatchesKvsReadResult;
using ::tensorstore::internal::MatchesKvsReadResultNotFound;
using ::tensorstore::internal_chfs_kvstore::TestFolder;

class ChfsFaultsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* server = ::getenv("CHFS_SERVER");
    std::string_view directory = server == nullptr ? "" : server;
    if (!absl::ConsumePrefix(&directory, "directory:")) {
      GTEST_SKIP() << "CHFS_SERVER names no look-alike (directory:PATH)";
    }
    file_ = absl::StrCat(directory, "/switches");
    std::ostringstream before;
    before << std::ifstream(file_).rdbuf();
    before_ = before.str();
    TENSORSTORE_ASSERT_OK(kvstore::Write(store_ = folder_.Open(), "key", absl::Cord("value")));
  }

  void TearDown() override {
    if (!file_.empty()) Switch(before_);
  }

  // Replaces the switches; by rename, since a call may read the file at any moment.
  void Switch(const std::string& text) {
    const std::string next = absl::StrCat(file_, ".next");
    ASSERT_TRUE(std::ofstream(next) << text << "\n" << std::flush);
    ASSERT_EQ(std::rename(next.c_str(), file_.c_str()), 0);
  }

  TestFolder folder_;
  tensorstore::KvStore store_;

 private:
  std::string file_;
  std::string before_;
};

TEST_F(ChfsFaultsTest, ASilentServerIsUnavailableAndNothingIsMissing) {
  Switch("fail.stat = *:ENOTCONN");
  const auto unavailable = StatusIs(absl::StatusCode::kUnavailable);
  EXPECT_THAT(kvstore::Read(store_, "key").result(), unavailable);
  EXPECT_THAT(kvstore::Write(store_, "key", absl::Cord("new")).result(), unavailable);
  EXPECT_THAT(kvstore::Write(store_, "key", absl::Cord("new"), {StorageGeneration::NoValue()}).result(), unavailable);
  Switch("fail.readdir_index = *:ENOTCONN");
  EXPECT_THAT(kvstore::Read(store_, "missing").result(), unavailable);
  EXPECT_THAT(kvstore::ListFuture(store_).result(), unavailable);
  EXPECT_THAT(kvstore::DeleteRange(store_, {}).result(), unavailable);
  Switch("");
  EXPECT_THAT(kvstore::Read(store_, "key").result(), MatchesKvsReadResult(absl::Cord("value")));
  EXPECT_THAT(kvstore::Read(store_, "missing").result(), MatchesKvsReadResultNotFound());
}

TEST_F(ChfsFaultsTest, AnObjectThatIsThereIsReadAndWrittenWithoutAskingEveryServer) {
  const auto store = folder_.Open({{"chunk_size", 8192}});
  for (const size_t size : {0, 1, 4096, 8191, 8192, 12288, 16384, 24576, 65536, 100'000}) {
    const absl::Cord value(std::string(size, 'x'));
    Switch("fail.readdir_index = *:ENOTCONN");
    TENSORSTORE_EXPECT_OK(kvstore::Write(store, absl::StrCat(size), value));
    EXPECT_THAT(kvstore::Read(store, absl::StrCat(size)).result(), MatchesKvsReadResult(value)) << size;
    Switch("");
    TENSORSTORE_EXPECT_OK(kvstore::Delete(store, absl::StrCat(size)));
  }
}

TEST_F(ChfsFaultsTest, AFailureThatIsNotUnderstoodIsNotMissing) {
  Switch("fail.stat = *:EPERM");
  EXPECT_THAT(kvstore::Read(store_, "key").result(), StatusIs(absl::StatusCode::kUnknown));
}

TEST_F(ChfsFaultsTest, AFullServerLeavesNoHalfValue) {
  Switch("fail.pwrite = *:ENOSPC");
  EXPECT_THAT(kvstore::Write(store_, "other", absl::Cord("x")).result(),
              StatusIs(absl::StatusCode::kResourceExhausted));
  Switch("");
  EXPECT_THAT(kvstore::Read(store_, "other").result(), MatchesKvsReadResultNotFound());
}

TEST_F(ChfsFaultsTest, AWriteThatNeverBeganLeavesTheOldValue) {
  Switch("fail.stat = 1:EPERM");
  EXPECT_THAT(kvstore::Write(store_, "key", absl::Cord("new")).result(), StatusIs(absl::StatusCode::kUnknown));
  EXPECT_THAT(kvstore::Read(store_, "key").result(), MatchesKvsReadResult(absl::Cord("value")));
}

TEST_F(ChfsFaultsTest, AnObjectThatWasOnlyEmptiedIsNoValue) {
  Switch("fail.create = *:EIO");
  EXPECT_THAT(kvstore::Write(store_, "key", absl::Cord("new")).result(), StatusIs(absl::StatusCode::kUnknown));
  EXPECT_THAT(kvstore::Read(store_, "key").result(), MatchesKvsReadResultNotFound());
}

TEST_F(ChfsFaultsTest, AnObjectThatEndsTooEarlyIsDataLoss) {
  Switch("fail.pread = *:ENOENT");
  EXPECT_THAT(kvstore::Read(store_, "key").result(), StatusIs(absl::StatusCode::kDataLoss));
}

TEST_F(ChfsFaultsTest, ADeletionThatFailsIsTold) {
  Switch("fail.unlink = *:EIO");
  EXPECT_THAT(kvstore::Delete(store_, "key").result(), StatusIs(absl::StatusCode::kUnknown));
  EXPECT_THAT(kvstore::DeleteRange(store_, {}).result(), StatusIs(absl::StatusCode::kUnknown));
}

}  // namespace
