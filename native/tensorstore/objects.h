// The driver's calls to CHFS. They block, and speak TensorStore's terms: absl statuses, generations, flat Cords.
#ifndef TENSORSTORE_KVSTORE_CHFS_OBJECTS_H_
#define TENSORSTORE_KVSTORE_CHFS_OBJECTS_H_

#include <stdint.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "chfs/client.hpp"
#include "tensorstore/kvstore/byte_range.h"
#include "tensorstore/kvstore/chfs/recent_writes.h"
#include "tensorstore/kvstore/chfs/turns.h"
#include "tensorstore/kvstore/generation.h"
#include "tensorstore/kvstore/key_range.h"
#include "tensorstore/util/result.h"

namespace tensorstore {
namespace internal_chfs_kvstore {

inline constexpr uint32_t kDefaultChunkSize = 4 << 20;  // CHFS's own 64 KiB is an eighth as fast
inline constexpr uint32_t kMinChunkSize = 4 << 10;
inline constexpr uint32_t kMaxChunkSize = 1 << 30;

// The path of a key, which must begin with '/'; the rest of it may be any bytes.
Result<std::string> PathOfKey(std::string_view key);

// The objects of the servers that this process is connected to.
class Objects {
 public:
  // The one instance of the process, as libchfs is; another server or library than the first is an error.
  static Result<Objects*> Connect(const std::string& server, const std::string& library);

  // Held by whoever works on an object.
  Turns& turns() { return turns_; }

  struct Found {
    std::string path;  // of the bytes: where the key is a link, the link's target
    int64_t size;
    StorageGeneration generation;
  };

  // Finds the object at `path`; none if nothing or a folder is there. With `file`, opens the object too, which saves a
  // request.
  Result<std::optional<Found>> Find(std::string path, ::tieredckpt::chfs::File* file = nullptr);

  Result<::tieredckpt::chfs::File> Open(const Found& found);

  // Reads a range of the object, as one flat piece.
  Result<absl::Cord> Read(::tieredckpt::chfs::File& file, const Found& found, ByteRange range);

  // Replaces the object; while that lasts, other processes see it empty or in part.
  Result<StorageGeneration> Write(const std::string& path, absl::Cord value, uint32_t chunk_size);

  // Removes the object, if there is one.
  absl::Status Delete(const std::string& path);

  // Removes a folder, if it is empty.
  absl::Status DeleteFolder(const std::string& path);

  struct Visitor {
    std::function<bool(std::string key)> object;   // false: stop here
    std::function<void(std::string path)> folder;  // after what is in it; only one that is all in the range
  };

  // Visits what lies in a range of keys, in no particular order.
  absl::Status Walk(const KeyRange& range, const Visitor& visitor);

 private:
  // Fails if a record above the path says that objects there lie in other places.
  absl::Status CheckRecordAbove(const std::string& path);
  explicit Objects(std::shared_ptr<::tieredckpt::chfs::Client> client) : client_(std::move(client)) {}

  Result<::tieredckpt::chfs::Info> Put(const std::string& path, std::string_view bytes, uint32_t chunk_size);
  Result<::tieredckpt::chfs::Info> Fill(const std::string& path, ::tieredckpt::chfs::File file,
                                        std::string_view bytes);
  Result<bool> WalkFolder(const std::string& folder, const KeyRange& range, const Visitor& visitor);

  const std::shared_ptr<::tieredckpt::chfs::Client> client_;
  Turns turns_;
  RecentWrites recent_writes_;
};

}  // namespace internal_chfs_kvstore
}  // namespace tensorstore

#endif  // TENSORSTORE_KVSTORE_CHFS_OBJECTS_H_
