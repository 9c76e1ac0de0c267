// Arrays over the driver: zarr and zarr3, one object per chunk, sharded, and in OCDBT.
#include <stdint.h>

#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include "tensorstore/array.h"
#include "tensorstore/array_testutil.h"
#include "tensorstore/context.h"
#include "tensorstore/index.h"
#include "tensorstore/index_space/dim_expression.h"
#include "tensorstore/kvstore/chfs/test_store.h"
#include "tensorstore/open.h"
#include "tensorstore/open_mode.h"
#include "tensorstore/tensorstore.h"
#include "tensorstore/util/status_testutil.h"

namespace {

using ::tensorstore::Context;
using ::tensorstore::Dims;
using ::tensorstore::Index;
using ::tensorstore::internal_chfs_kvstore::TestFolder;

constexpr Index kRows = 100;
constexpr Index kColumns = 70;

tensorstore::SharedArray<float, 2> Values(float seed) {
  auto array = tensorstore::AllocateArray<float>({kRows, kColumns});
  for (Index i = 0; i < kRows; ++i) {
    for (Index j = 0; j < kColumns; ++j) array(i, j) = static_cast<float>(i * kColumns + j) * 0.5f + seed;
  }
  return array;
}

// Writes an array, changes a part of it, and reads it through a connection of its own to the cache.
void RoundTrip(::nlohmann::json spec) {
  const auto first = Values(1);
  const auto second = Values(1000);
  {
    TENSORSTORE_ASSERT_OK_AND_ASSIGN(
        auto store, tensorstore::Open(spec, Context::Default(), tensorstore::OpenMode::create,
                                      tensorstore::ReadWriteMode::read_write)
                        .result());
    TENSORSTORE_ASSERT_OK(tensorstore::Write(first, store).result());
    EXPECT_THAT(tensorstore::Read(store).result(), ::testing::Optional(tensorstore::MatchesArrayIdentically(first)));
    TENSORSTORE_ASSERT_OK(tensorstore::Write(second | Dims(0).SizedInterval(33, 20),
                                             store | Dims(0).SizedInterval(33, 20)).result());
  }
  auto expected = tensorstore::MakeCopy(first);
  for (Index i = 33; i < 53; ++i) {
    for (Index j = 0; j < kColumns; ++j) expected(i, j) = second(i, j);
  }
  TENSORSTORE_ASSERT_OK_AND_ASSIGN(
      auto store, tensorstore::Open({{"driver", spec["driver"]}, {"kvstore", spec["kvstore"]}}, Context::Default(),
                                    tensorstore::OpenMode::open, tensorstore::ReadWriteMode::read)
                      .result());
  EXPECT_THAT(tensorstore::Read(store).result(),
              ::testing::Optional(tensorstore::MatchesArrayIdentically(expected)));
}

::nlohmann::json Zarr3Metadata() {
  return {{"data_type", "float32"},
          {"shape", {kRows, kColumns}},
          {"chunk_grid", {{"name", "regular"}, {"configuration", {{"chunk_shape", {32, 32}}}}}}};
}

TEST(ChfsArraysTest, Zarr) {
  TestFolder folder;
  RoundTrip({{"driver", "zarr"},
             {"kvstore", folder.Spec()},
             {"metadata", {{"dtype", "<f4"}, {"shape", {kRows, kColumns}}, {"chunks", {32, 32}}}}});
}

TEST(ChfsArraysTest, Zarr3) {
  TestFolder folder;
  RoundTrip({{"driver", "zarr3"}, {"kvstore", folder.Spec()}, {"metadata", Zarr3Metadata()}});
}

TEST(ChfsArraysTest, Zarr3Sharded) {
  TestFolder folder;
  ::nlohmann::json metadata = Zarr3Metadata();
  metadata["codecs"] = {{{"name", "sharding_indexed"}, {"configuration", {{"chunk_shape", {8, 8}}}}}};
  RoundTrip({{"driver", "zarr3"}, {"kvstore", folder.Spec()}, {"metadata", metadata}});
}

TEST(ChfsArraysTest, Zarr3InOcdbt) {
  TestFolder folder;
  RoundTrip({{"driver", "zarr3"},
             {"kvstore", {{"driver", "ocdbt"}, {"base", folder.Spec()}, {"path", "array/"}}},
             {"metadata", Zarr3Metadata()}});
}

TEST(ChfsArraysTest, OpensByUrl) {
  TestFolder folder;
  RoundTrip({{"driver", "zarr3"}, {"kvstore", "chfs://" + folder.path()}, {"metadata", Zarr3Metadata()}});
}

}  // namespace
