// The CHFS that the tests run against, and folders of their own in it.
#ifndef TENSORSTORE_KVSTORE_CHFS_TEST_STORE_H_
#define TENSORSTORE_KVSTORE_CHFS_TEST_STORE_H_

#include <unistd.h>

#include <atomic>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tensorstore/kvstore/kvstore.h"
#include "tensorstore/kvstore/operations.h"
#include "tensorstore/util/status_testutil.h"

namespace tensorstore {
namespace internal_chfs_kvstore {

// An empty folder of the servers at CHFS_SERVER; its keys are deleted with it.
class TestFolder {
 public:
  TestFolder() {
    static std::atomic<int> count = 0;
    path_ = absl::StrCat("/tensorstore-test-", ::getpid(), "-", absl::ToUnixNanos(absl::Now()), "-", ++count, "/");
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  ~TestFolder() {
    auto store = kvstore::Open(Spec()).result();
    if (store.ok()) TENSORSTORE_EXPECT_OK(kvstore::DeleteRange(*store, {}));
  }

  const std::string& path() const { return path_; }

  ::nlohmann::json Spec(::nlohmann::json members = ::nlohmann::json::object_t()) const {
    members["driver"] = "chfs";
    members["path"] = path_;
    return members;
  }

  KvStore Open(::nlohmann::json members = ::nlohmann::json::object_t()) const {
    return kvstore::Open(Spec(std::move(members))).value();
  }

 private:
  std::string path_;
};

}  // namespace internal_chfs_kvstore
}  // namespace tensorstore

#endif  // TENSORSTORE_KVSTORE_CHFS_TEST_STORE_H_
