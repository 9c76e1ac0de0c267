#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>  // NOLINT
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "chfs/client.hpp"
#include "tensorstore/batch.h"
#include "tensorstore/internal/global_initializer.h"
#include "tensorstore/internal/testing/json_gtest.h"
#include "tensorstore/kvstore/byte_range.h"
#include "tensorstore/kvstore/chfs/test_store.h"
#include "tensorstore/kvstore/generation.h"
#include "tensorstore/kvstore/key_range.h"
#include "tensorstore/kvstore/kvstore.h"
#include "tensorstore/kvstore/operations.h"
#include "tensorstore/kvstore/read_result.h"
#include "tensorstore/kvstore/spec.h"
#include "tensorstore/kvstore/test_matchers.h"
#include "tensorstore/kvstore/test_util.h"
#include "tensorstore/util/future.h"
#include "tensorstore/util/result.h"
#include "tensorstore/util/status_testutil.h"

namespace {

namespace chfs = ::tieredckpt::chfs;
namespace kvstore = ::tensorstore::kvstore;
using ::tensorstore::Future;
using ::tensorstore::KeyRange;
using ::tensorstore::KvStore;
using ::tensorstore::OptionalByteRangeRequest;
using ::tensorstore::StatusIs;
using ::tensorstore::TimestampedStorageGeneration;
using ::tensorstore::internal::KeyValueStoreOpsTestParameters;
using ::tensorstore::internal::MatchesKvsReadResult;
using ::tensorstore::internal::MatchesKvsReadResultNotFound;
using ::tensorstore::internal_chfs_kvstore::TestFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr size_t kSmallChunk = 4096;

std::shared_ptr<chfs::Client> Client() {
  std::shared_ptr<chfs::Client> client;
  const chfs::Status status = chfs::Client::Connect({}, &client);
  EXPECT_TRUE(status.ok()) << status.message;
  return client;
}

std::string Pattern(size_t size, size_t seed) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>((i * 31 + i / 251 + seed) & 0xFF);
  return bytes;
}

std::string ValueOf(const KvStore& store, std::string_view key) {
  auto result = kvstore::Read(store, key).result();
  TENSORSTORE_EXPECT_OK(result);
  return result.ok() && result->has_value() ? std::string(result->value) : absl::StrCat("no value of ", key);
}

std::vector<std::string> KeysOf(const KvStore& store, std::string_view prefix = {}) {
  auto entries = kvstore::ListFuture(store, {KeyRange::Prefix(std::string(prefix))}).result();
  TENSORSTORE_EXPECT_OK(entries);
  std::vector<std::string> keys;
  if (entries.ok()) {
    for (const kvstore::ListEntry& entry : *entries) keys.push_back(entry.key);
  }
  return keys;
}

TENSORSTORE_GLOBAL_INITIALIZER {
  const auto register_with = [](std::string name, ::nlohmann::json members) {
    KeyValueStoreOpsTestParameters params;
    params.test_name = std::move(name);
    params.list_match_size = false;
    params.get_store = [members](auto callback) {
      TestFolder folder;
      callback(folder.Open(members));
    };
    RegisterKeyValueStoreOpsTests(params);
  };
  register_with("Conformance", ::nlohmann::json::object_t());
  // Nothing may wait in the only thread for what is to run in it.
  register_with("ConformanceOneThread", {{"chfs_concurrency", {{"limit", 1}}}});
}

TEST(ChfsSpecTest, RoundTrips) {
  TestFolder folder;
  ::tensorstore::internal::KeyValueStoreSpecRoundtripOptions options;
  options.full_spec = folder.Spec();
  options.url = absl::StrCat("chfs://", folder.path());
  TestKeyValueStoreSpecRoundtrip(options);
  options.full_spec = folder.Spec({{"chunk_size", 65536}, {"chfs_concurrency", {{"limit", 2}}}});
  options.spec_request_options.Set(::tensorstore::retain_context).IgnoreError();
  TestKeyValueStoreSpecRoundtrip(options);
}

TEST(ChfsSpecTest, UrlNamesServerAndPath) {
  ::tensorstore::internal::TestKeyValueStoreUrlRoundtrip(
      {{"driver", "chfs"}, {"server", "ofi+tcp;ofi_rxm://127.0.0.1:4242"}, {"path", "/a b/@c/"}},
      "chfs://ofi%2Btcp%3Bofi_rxm%3A%2F%2F127.0.0.1%3A4242/a%20b/%40c/");
  ::tensorstore::internal::TestKeyValueStoreUrlRoundtrip({{"driver", "chfs"}, {"path", "/"}}, "chfs:///");
  EXPECT_THAT(kvstore::Spec::FromUrl("chfs:///a?b"), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(kvstore::Spec::FromUrl("chfs:a"), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(ChfsSpecTest, PathsAreAbsoluteAndNormal) {
  TestFolder folder;
  ::tensorstore::internal::TestKeyValueStoreSpecRoundtripNormalize(
      {{"driver", "chfs"}, {"path", folder.path().substr(1)}}, folder.Spec());
  ::tensorstore::internal::TestKeyValueStoreSpecRoundtripNormalize({{"driver", "chfs"}},
                                                                   {{"driver", "chfs"}, {"path", "/"}});
  for (const char* path : {"/a//b", "//a", "/a/./b", "/a/..", "../a"}) {
    EXPECT_THAT(kvstore::Spec::FromJson({{"driver", "chfs"}, {"path", path}}),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("component")))
        << path;
  }
}

TEST(ChfsSpecTest, RefusesBadMembers) {
  for (const int64_t size : {int64_t{0}, int64_t{4095}, int64_t{1} << 31}) {
    EXPECT_THAT(kvstore::Spec::FromJson({{"driver", "chfs"}, {"path", "/a"}, {"chunk_size", size}}),
                StatusIs(absl::StatusCode::kInvalidArgument));
  }
  EXPECT_THAT(kvstore::Spec::FromJson({{"driver", "chfs"}, {"path", "/a"}, {"sever", "x"}}),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(ChfsTest, AProcessHasOneServer) {
  TestFolder folder;
  folder.Open();
  if (const char* server = ::getenv("CHFS_SERVER")) {
    TENSORSTORE_EXPECT_OK(kvstore::Open(folder.Spec({{"server", server}})).result());
  }
  EXPECT_THAT(kvstore::Open(folder.Spec({{"server", "ofi+tcp://192.0.2.1:9"}})).result(),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(ChfsTest, KeysMayBeAnyBytes) {
  TestFolder folder;
  const KvStore store = folder.Open();
  std::vector<std::string> keys = {"a:b", "a%b", "a%3Ab", "x/..", "x/.",       "x//y",       "z/",
                                   "",    "a\\b", "~a",    "a~",   "sp ace", "\x01\x7F\xFF", std::string("a\0b", 3)};
  keys.push_back(std::string(700, 'l'));
  keys.push_back(absl::StrCat("long/", std::string(450, ':'), "/end"));
  std::string deep = "deep";
  for (int i = 0; i < 40; ++i) absl::StrAppend(&deep, "/", i);
  keys.push_back(deep);
  std::vector<Future<TimestampedStorageGeneration>> writes;
  for (const std::string& key : keys) writes.push_back(kvstore::Write(store, key, absl::Cord(key)));
  for (auto& write : writes) TENSORSTORE_EXPECT_OK(write);
  for (const std::string& key : keys) EXPECT_EQ(ValueOf(store, key), key);
  EXPECT_THAT(KeysOf(store), ::testing::UnorderedElementsAreArray(keys));
  // Prefixes that end within what has become several folders, or one folder of what were several.
  for (const std::string& prefix :
       {std::string(650, 'l'), absl::StrCat("long/", std::string(100, ':')), deep.substr(0, 60), std::string("x/")}) {
    std::vector<std::string> expected;
    for (const std::string& key : keys) {
      if (key.compare(0, prefix.size(), prefix) == 0) expected.push_back(key);
    }
    EXPECT_FALSE(expected.empty());
    EXPECT_THAT(KeysOf(store, prefix), ::testing::UnorderedElementsAreArray(expected)) << prefix;
  }
  TENSORSTORE_EXPECT_OK(kvstore::DeleteRange(store, {}));
  EXPECT_THAT(KeysOf(store), ElementsAre());
}

TEST(ChfsTest, EveryWriteHasAGenerationOfItsOwn) {
  TestFolder folder;
  const KvStore store = folder.Open();
  for (const std::string_view value : {"same", ""}) {
    std::set<std::string> seen;
    constexpr size_t kWrites = 20;
    for (size_t i = 0; i < kWrites; ++i) {
      TENSORSTORE_ASSERT_OK_AND_ASSIGN(auto stamp, kvstore::Write(store, "key", absl::Cord(value)).result());
      seen.insert(stamp.generation.value);
      EXPECT_THAT(kvstore::Read(store, "key").result(), MatchesKvsReadResult(absl::Cord(value), stamp.generation));
      if (i % 2 == 1) {
        TENSORSTORE_EXPECT_OK(kvstore::Delete(store, "key"));
      }
    }
    EXPECT_EQ(seen.size(), kWrites);
  }
}

TEST(ChfsTest, ConditionalWritesOfOneProcessAreAtomic) {
  TestFolder folder;
  const KvStore store = folder.Open();
  ::tensorstore::internal::TestConcurrentWritesOptions options;
  options.get_store = [&] { return store; };
  options.key = "counter";
  options.num_iterations = 10;
  ::tensorstore::internal::TestConcurrentWrites(options);
}

TEST(ChfsTest, AReadOfTheSameProcessSeesAWholeValue) {
  TestFolder folder;
  const KvStore store = folder.Open({{"chunk_size", kSmallChunk}});
  constexpr size_t kSize = 5 * kSmallChunk + 7;
  const auto write = [&](char fill) { return kvstore::Write(store, "key", absl::Cord(std::string(kSize, fill))); };
  TENSORSTORE_ASSERT_OK(write('a'));
  std::vector<Future<TimestampedStorageGeneration>> writes;
  std::vector<Future<kvstore::ReadResult>> reads;
  for (int i = 0; i < 30; ++i) {
    writes.push_back(write(i % 2 == 0 ? 'a' : 'b'));
    for (int j = 0; j < 3; ++j) reads.push_back(kvstore::Read(store, "key"));
  }
  for (auto& future : writes) TENSORSTORE_EXPECT_OK(future);
  for (auto& future : reads) {
    TENSORSTORE_ASSERT_OK_AND_ASSIGN(kvstore::ReadResult result, future.result());
    const std::string value(result.value);
    ASSERT_EQ(value.size(), kSize);
    EXPECT_EQ(value, std::string(kSize, value[0]));
  }
}

TEST(ChfsTest, AReplacedObjectShowsNothingOfTheOldOne) {
  TestFolder folder;
  for (const size_t chunk_size : {kSmallChunk, 4 * kSmallChunk, kSmallChunk}) {
    const KvStore store = folder.Open({{"chunk_size", chunk_size}});
    for (const size_t size : {30 * kSmallChunk, size_t{0}, 20 * kSmallChunk + 1, size_t{1}, 2 * kSmallChunk}) {
      const std::string value = Pattern(size, chunk_size);
      TENSORSTORE_ASSERT_OK(kvstore::Write(store, "key", absl::Cord(value)));
      EXPECT_EQ(ValueOf(store, "key"), value);
    }
  }
}

TEST(ChfsTest, ReadsAnyRange) {
  TestFolder folder;
  const KvStore store = folder.Open({{"chunk_size", kSmallChunk}});
  const std::string value = Pattern(6 * kSmallChunk + 100, 1);
  const auto size = static_cast<int64_t>(value.size());
  TENSORSTORE_ASSERT_OK(kvstore::Write(store, "key", absl::Cord(value)));
  const std::vector<OptionalByteRangeRequest> ranges = {
      OptionalByteRangeRequest::Range(0, 1),           OptionalByteRangeRequest::Range(4095, 4097),
      OptionalByteRangeRequest::Range(4096, 8192),     OptionalByteRangeRequest::Range(5, size - 1),
      OptionalByteRangeRequest::Suffix(size - 1),      OptionalByteRangeRequest::SuffixLength(101),
      OptionalByteRangeRequest::Range(size, size),     OptionalByteRangeRequest()};
  const auto expected = [&](const OptionalByteRangeRequest& range) {
    const auto bytes = range.Validate(size).value();
    return absl::Cord(value.substr(static_cast<size_t>(bytes.inclusive_min), static_cast<size_t>(bytes.size())));
  };
  for (const bool batched : {false, true}) {
    for (const size_t count : {ranges.size(), ranges.size() - 1}) {  // with the whole object and without it
      auto batch = batched ? ::tensorstore::Batch::New() : ::tensorstore::no_batch;
      std::vector<Future<kvstore::ReadResult>> reads;
      for (size_t i = 0; i < count; ++i) {
        kvstore::ReadOptions options;
        options.byte_range = ranges[i];
        options.batch = batch;
        reads.push_back(kvstore::Read(store, "key", std::move(options)));
      }
      batch.Release();
      for (size_t i = 0; i < count; ++i) {
        EXPECT_THAT(reads[i].result(), MatchesKvsReadResult(expected(ranges[i]))) << ranges[i];
      }
    }
  }
  kvstore::ReadOptions beyond;
  beyond.byte_range = OptionalByteRangeRequest::Range(0, size + 1);
  EXPECT_THAT(kvstore::Read(store, "key", beyond).result(), StatusIs(absl::StatusCode::kOutOfRange));
}

TEST(ChfsTest, ManyBatchesOfManyRangesComplete) {
  // More objects than CHFS bears open at a time, each with ranges that wait for a thread.
  TestFolder folder;
  const KvStore store = folder.Open({{"chfs_concurrency", {{"limit", 4}}}});
  constexpr size_t kObjects = 100;
  const std::string value = Pattern(300'000, 2);
  std::vector<Future<TimestampedStorageGeneration>> writes;
  for (size_t i = 0; i < kObjects; ++i) {
    writes.push_back(kvstore::Write(store, absl::StrCat(i), absl::Cord(value)));
  }
  for (auto& write : writes) TENSORSTORE_ASSERT_OK(write);
  auto batch = ::tensorstore::Batch::New();
  std::vector<Future<kvstore::ReadResult>> reads;
  for (size_t i = 0; i < kObjects; ++i) {
    for (const int64_t begin : {0, 150'000, 299'990}) {
      kvstore::ReadOptions options;
      options.byte_range = OptionalByteRangeRequest::Range(begin, begin + 10);
      options.batch = batch;
      reads.push_back(kvstore::Read(store, absl::StrCat(i), std::move(options)));
    }
  }
  batch.Release();
  for (size_t i = 0; i < reads.size(); ++i) {
    const size_t begin = i % 3 == 0 ? 0 : i % 3 == 1 ? 150'000 : 299'990;
    EXPECT_THAT(reads[i].result(), MatchesKvsReadResult(absl::Cord(value.substr(begin, 10))));
  }
}

TEST(ChfsTest, AValueInManyPiecesIsReadAsOne) {
  TestFolder folder;
  const KvStore store = folder.Open();
  const std::string value = Pattern(1'000'000, 3);
  absl::Cord pieces;
  for (size_t i = 0; i < value.size(); i += 1000) pieces.Append(value.substr(i, 1000));
  ASSERT_FALSE(pieces.TryFlat().has_value());
  TENSORSTORE_ASSERT_OK(kvstore::Write(store, "key", pieces));
  TENSORSTORE_ASSERT_OK_AND_ASSIGN(kvstore::ReadResult result, kvstore::Read(store, "key").result());
  ASSERT_TRUE(result.value.TryFlat().has_value());
  EXPECT_TRUE(*result.value.TryFlat() == value);
}

TEST(ChfsTest, NothingIsListedOrDeletedBelowAMissingFolder) {
  TestFolder folder;
  const KvStore store = folder.Open();
  EXPECT_THAT(KeysOf(store), ElementsAre());
  EXPECT_THAT(KeysOf(store, "a/b/"), ElementsAre());
  TENSORSTORE_EXPECT_OK(kvstore::DeleteRange(store, KeyRange::Prefix("a/b/")));
  EXPECT_THAT(kvstore::Read(store, "a/b/c").result(), MatchesKvsReadResultNotFound());
}

TEST(ChfsTest, AFolderIsNoValue) {
  TestFolder folder;
  const KvStore store = folder.Open();
  TENSORSTORE_ASSERT_OK(kvstore::Write(store, "a/b", absl::Cord("x")));
  EXPECT_THAT(kvstore::Read(store, "a").result(), MatchesKvsReadResultNotFound());
  TENSORSTORE_EXPECT_OK(kvstore::Delete(store, "a"));
  EXPECT_THAT(kvstore::Write(store, "a", absl::Cord("y")).result(), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(kvstore::Write(store, "a/b/c", absl::Cord("y")).result(),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(ValueOf(store, "a/b"), "x");
}

TEST(ChfsTest, FoldersGoWithTheLastOfTheirKeys) {
  TestFolder folder;
  const KvStore store = folder.Open();
  TENSORSTORE_ASSERT_OK(kvstore::Write(store, "a/b/c/d", absl::Cord("x")));
  TENSORSTORE_ASSERT_OK(kvstore::Write(store, "a/e", absl::Cord("y")));
  TENSORSTORE_EXPECT_OK(kvstore::DeleteRange(store, KeyRange::Prefix("a/b/")));
  TENSORSTORE_EXPECT_OK(kvstore::Write(store, "a/b", absl::Cord("z")));
  EXPECT_THAT(KeysOf(store), UnorderedElementsAre("a/b", "a/e"));
}

TEST(ChfsTest, AClaimedKeyIsReadThroughItsLink) {
  TestFolder folder;
  const KvStore store = folder.Open();
  TENSORSTORE_ASSERT_OK(kvstore::Write(store, "dir/key~1", absl::Cord("claimed")));
  const std::string path = absl::StrCat(folder.path(), "dir/");
  ASSERT_TRUE(Client()->Link("key~1", absl::StrCat(path, "beside")).ok());
  ASSERT_TRUE(Client()->Link(absl::StrCat(path, "key~1"), absl::StrCat(path, "absolute")).ok());
  ASSERT_TRUE(Client()->Link("nowhere", absl::StrCat(path, "dangling")).ok());
  EXPECT_EQ(ValueOf(store, "dir/beside"), "claimed");
  EXPECT_EQ(ValueOf(store, "dir/absolute"), "claimed");
  EXPECT_THAT(kvstore::Read(store, "dir/dangling").result(), MatchesKvsReadResultNotFound());
  TENSORSTORE_EXPECT_OK(kvstore::Write(store, "dir/beside", absl::Cord("own")));
  EXPECT_EQ(ValueOf(store, "dir/beside"), "own");
  EXPECT_EQ(ValueOf(store, "dir/key~1"), "claimed");
  TENSORSTORE_EXPECT_OK(kvstore::Delete(store, "dir/absolute"));
  EXPECT_THAT(kvstore::Read(store, "dir/absolute").result(), MatchesKvsReadResultNotFound());
  EXPECT_EQ(ValueOf(store, "dir/key~1"), "claimed");
}

TEST(ChfsTest, PathsThatAreNoKeysAreNotListed) {
  TestFolder folder;
  const KvStore store = folder.Open();
  TENSORSTORE_ASSERT_OK(kvstore::Write(store, "key", absl::Cord("x")));
  chfs::File file;
  ASSERT_TRUE(Client()->Create(absl::StrCat(folder.path(), "%zz"), kSmallChunk, &file).ok());
  ASSERT_TRUE(file.Close().ok());
  EXPECT_THAT(KeysOf(store), ElementsAre("key"));
  ASSERT_TRUE(Client()->Remove(absl::StrCat(folder.path(), "%zz")).ok());
}

TEST(ChfsTest, ObjectsLieAtTheirKeys) {
  TestFolder folder;
  const KvStore store = folder.Open({{"chunk_size", 65536}});
  TENSORSTORE_ASSERT_OK(kvstore::Write(store, "p/c/0/1", absl::Cord(Pattern(100'000, 4))));
  chfs::Info info;
  ASSERT_TRUE(Client()->Stat(absl::StrCat(folder.path(), "p/c/0/1"), &info).ok());
  EXPECT_EQ(info.size, 100'000u);
  EXPECT_EQ(info.chunk_size, 65536u);
}

}  // namespace
