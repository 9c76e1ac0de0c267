/// \file
/// Key-value store in which each key is an object of CHFS, the parallel file system over compute nodes' memory.
///
/// CHFS can neither rename nor compare and swap: a value is replaced in place, which other processes see, and
/// conditions are checked before the write and not with it. One process may write a key at a time; within the
/// process this driver keeps order. Generations are made of an object's modification time and size.

#include <stdint.h>

#include <atomic>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "chfs/client.hpp"
#include "tensorstore/batch.h"
#include "tensorstore/context.h"
#include "tensorstore/context_resource_provider.h"
#include "tensorstore/internal/concurrency_resource_provider.h"
#include "tensorstore/internal/global_initializer.h"
#include "tensorstore/internal/intrusive_ptr.h"
#include "tensorstore/internal/json_binding/json_binding.h"
#include "tensorstore/internal/metrics/metadata.h"
#include "tensorstore/internal/metrics/registry.h"
#include "tensorstore/internal/uri/parse.h"
#include "tensorstore/internal/uri/percent_coder.h"
#include "tensorstore/kvstore/batch_util.h"
#include "tensorstore/kvstore/byte_range.h"
#include "tensorstore/kvstore/chfs/objects.h"
#include "tensorstore/kvstore/chfs/turns.h"
#include "tensorstore/kvstore/common_metrics.h"
#include "tensorstore/kvstore/driver.h"
#include "tensorstore/kvstore/generation.h"
#include "tensorstore/kvstore/key_range.h"
#include "tensorstore/kvstore/operations.h"
#include "tensorstore/kvstore/read_result.h"
#include "tensorstore/kvstore/registry.h"
#include "tensorstore/kvstore/spec.h"
#include "tensorstore/kvstore/supported_features.h"
#include "tensorstore/kvstore/url_registry.h"
#include "tensorstore/util/execution/execution.h"
#include "tensorstore/util/executor.h"
#include "tensorstore/util/future.h"
#include "tensorstore/util/garbage_collection/fwd.h"
#include "tensorstore/util/quote_string.h"
#include "tensorstore/util/result.h"
#include "tensorstore/util/span.h"
#include "tensorstore/util/status.h"

using ::tensorstore::kvstore::ListEntry;
using ::tensorstore::kvstore::ListReceiver;
using ::tensorstore::kvstore::ReadResult;
using ::tensorstore::kvstore::SupportedFeatures;

namespace tensorstore {
namespace internal_chfs_kvstore {
namespace {

namespace jb = ::tensorstore::internal_json_binding;
namespace chfs = ::tieredckpt::chfs;

ABSL_CONST_INIT internal_kvstore::CommonMetrics chfs_metrics;

TENSORSTORE_GLOBAL_INITIALIZER { TENSORSTORE_KVSTORE_REGISTER_COMMON_METRICS(&chfs_metrics, chfs); }

// The threads that call CHFS; each waits for the servers most of its time.
struct ChfsConcurrencyResource : public internal::ConcurrencyResource {
  static constexpr char id[] = "chfs_concurrency";
};

struct ChfsConcurrencyResourceTraits : public internal::ConcurrencyResourceTraits,
                                       public internal::ContextResourceTraits<ChfsConcurrencyResource> {
  ChfsConcurrencyResourceTraits() : ConcurrencyResourceTraits(128) {}
};

const internal::ContextResourceRegistration<ChfsConcurrencyResourceTraits> concurrency_registration;

struct ChfsKeyValueStoreSpecData {
  std::string server;
  std::string library;
  uint32_t chunk_size = kDefaultChunkSize;
  Context::Resource<ChfsConcurrencyResource> chfs_concurrency;

  constexpr static auto ApplyMembers = [](auto&& x, auto f) {
    return f(x.server, x.library, x.chunk_size, x.chfs_concurrency);
  };

  constexpr static auto default_json_binder = jb::Object(
      jb::Member("server", jb::Projection<&ChfsKeyValueStoreSpecData::server>(jb::DefaultInitializedValue())),
      jb::Member("library", jb::Projection<&ChfsKeyValueStoreSpecData::library>(jb::DefaultInitializedValue())),
      jb::Member("chunk_size",
                 jb::Projection<&ChfsKeyValueStoreSpecData::chunk_size>(jb::DefaultValue(
                     [](auto* size) { *size = kDefaultChunkSize; }, jb::Integer(kMinChunkSize, kMaxChunkSize)))),
      jb::Member(ChfsConcurrencyResource::id,
                 jb::Projection<&ChfsKeyValueStoreSpecData::chfs_concurrency>()));
};

class ChfsKeyValueStoreSpec
    : public internal_kvstore::RegisteredDriverSpec<ChfsKeyValueStoreSpec, ChfsKeyValueStoreSpecData> {
 public:
  static constexpr char id[] = "chfs";

  // Paths are absolute; a user who leaves the first slash out means the same.
  absl::Status NormalizeSpec(std::string& path) override {
    if (path.empty() || path.front() != '/') path.insert(0, 1, '/');
    const auto components = absl::StrSplit(std::string_view(path).substr(1), '/');
    for (auto it = components.begin(); it != components.end();) {
      const std::string_view component = *it++;
      // The last one may be empty: a folder is often written with a slash at its end.
      if (component == "." || component == ".." || (component.empty() && it != components.end())) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "Path of \"chfs\" has an empty, \".\" or \"..\" component; write it without: %v", QuoteString(path)));
      }
    }
    return absl::OkStatus();
  }

  Future<kvstore::DriverPtr> DoOpen() const override;

  // Says where the data is; library and chunk_size, like context resources, do not belong to that.
  Result<std::string> ToUrl(std::string_view path) const override {
    return absl::StrCat(id, "://", internal_uri::PercentEncodeUriComponent(data_.server),
                        internal_uri::PercentEncodeKvStoreUriPath(path));
  }
};

class ChfsKeyValueStore
    : public internal_kvstore::RegisteredDriver<ChfsKeyValueStore, ChfsKeyValueStoreSpec> {
 public:
  Future<ReadResult> Read(Key key, ReadOptions options) override;
  Future<TimestampedStorageGeneration> Write(Key key, std::optional<Value> value,
                                             WriteOptions options) override;
  Future<const void> DeleteRange(KeyRange range) override;
  void ListImpl(ListOptions options, ListReceiver receiver) override;

  std::string DescribeKey(std::string_view key) override {
    return absl::StrCat("CHFS object ", QuoteString(key));
  }

  SupportedFeatures GetSupportedFeatures(const KeyRange&) const final {
    return SupportedFeatures::kNone;
  }

  absl::Status GetBoundSpecData(ChfsKeyValueStoreSpecData& spec) const {
    spec = spec_;
    return absl::OkStatus();
  }

  const Executor& executor() const { return spec_.chfs_concurrency->executor; }
  Objects& objects() const { return *objects_; }

  ChfsKeyValueStoreSpecData spec_;
  Objects* objects_ = nullptr;
};

Future<kvstore::DriverPtr> ChfsKeyValueStoreSpec::DoOpen() const {
  // Not in the caller's thread: a silent server is waited for.
  return MapFuture(data_.chfs_concurrency->executor, [data = data_]() -> Result<kvstore::DriverPtr> {
    auto driver = internal::MakeIntrusivePtr<ChfsKeyValueStore>();
    TENSORSTORE_ASSIGN_OR_RETURN(driver->objects_, Objects::Connect(data.server, data.library));
    driver->spec_ = data;
    return kvstore::DriverPtr(std::move(driver));
  });
}

// An extra call costs what reading about as many bytes does.
constexpr internal_kvstore_batch::CoalescingOptions kCoalescing = {/*.max_extra_read_bytes=*/65535};

class BatchReadTask;
using BatchReadTaskBase =
    internal_kvstore_batch::BatchReadEntry<ChfsKeyValueStore,
                                           internal_kvstore_batch::ByteRangeGenerationReadRequest,
                                           std::string /*path*/>;

// The reads of one object that were asked for in one batch: one look at it, then as few ranges as make sense.
class BatchReadTask final : public BatchReadTaskBase, public internal::AtomicReferenceCount<BatchReadTask> {
 public:
  explicit BatchReadTask(BatchEntryKey&& key)
      : BatchReadTaskBase(std::move(key)),
        // Submit takes this reference over.
        internal::AtomicReferenceCount<BatchReadTask>(/*initial_ref_count=*/1) {}

  void Submit(Batch::View) final {
    internal::IntrusivePtr<BatchReadTask> self(this, internal::adopt_object_ref);
    if (request_batch.requests.empty()) return;
    driver().objects().turns().Take(std::get<std::string>(batch_entry_key), Turns::Kind::kRead,
                                    [self = std::move(self)](Turns::Turn turn) mutable {
                                      self->turn_ = std::move(turn);
                                      const Executor& executor = self->driver().executor();
                                      executor([self = std::move(self)] { self->Run(); });
                                    });
  }

 private:
  void Run() {
    auto& requests = request_batch.requests;
    const bool single = requests.size() == 1;
    chfs::File file;
    stamp_.time = absl::Now();
    TENSORSTORE_ASSIGN_OR_RETURN(
        std::optional<Objects::Found> found,
        driver().objects().Find(std::get<std::string>(batch_entry_key), single ? &file : nullptr),
        internal_kvstore_batch::SetCommonResult(requests, std::move(_)));
    if (!found) {
      internal_kvstore_batch::SetCommonResult(requests, ReadResult::Missing(stamp_.time));
      return;
    }
    found_ = *std::move(found);
    stamp_.generation = found_.generation;
    internal_kvstore_batch::ValidateGenerationsAndByteRanges(requests, stamp_, found_.size);
    if (requests.empty()) return;
    if (single) {
      requests[0].promise.SetResult(ReadRange(file, requests[0].byte_range.AsByteRange()));
      return;
    }
    internal_kvstore_batch::ForEachCoalescedRequest<Request>(
        requests, kCoalescing,
        [this](OptionalByteRangeRequest byte_range, tensorstore::span<Request> coalesced) {
          driver().executor()([self = internal::IntrusivePtr<BatchReadTask>(this),
                               byte_range = byte_range.AsByteRange(), coalesced] {
            TENSORSTORE_ASSIGN_OR_RETURN(
                ReadResult result, self->OpenAndReadRange(byte_range),
                internal_kvstore_batch::SetCommonResult(coalesced, std::move(_)));
            internal_kvstore_batch::ResolveCoalescedRequests(byte_range, coalesced, std::move(result));
          });
        });
  }

  // Every range opens the object for itself: one left open for ranges that wait for a thread could keep all threads
  // waiting to open theirs, since CHFS bears only so many open at a time.
  Result<ReadResult> OpenAndReadRange(ByteRange byte_range) {
    TENSORSTORE_ASSIGN_OR_RETURN(chfs::File file, driver().objects().Open(found_));
    return ReadRange(file, byte_range);
  }

  Result<ReadResult> ReadRange(chfs::File& file, ByteRange byte_range) {
    chfs_metrics.batch_read.Increment();
    const absl::Time start = absl::Now();
    TENSORSTORE_ASSIGN_OR_RETURN(absl::Cord value, driver().objects().Read(file, found_, byte_range));
    chfs_metrics.bytes_read.IncrementBy(value.size());
    chfs_metrics.read_latency_ms.Observe(absl::ToDoubleMilliseconds(absl::Now() - start));
    return ReadResult::Value(std::move(value), stamp_);
  }

  TimestampedStorageGeneration stamp_;
  Objects::Found found_;
  Turns::Turn turn_;  // ends with the last read
};

Future<ReadResult> ChfsKeyValueStore::Read(Key key, ReadOptions options) {
  chfs_metrics.read.Increment();
  TENSORSTORE_ASSIGN_OR_RETURN(std::string path, PathOfKey(key));
  auto [promise, future] = PromiseFuturePair<ReadResult>::Make();
  BatchReadTask::MakeRequest<BatchReadTask>(
      *this, {std::move(path)}, options.batch, options.staleness_bound,
      BatchReadTask::Request{std::move(promise), options.byte_range, std::move(options.generation_conditions)});
  return std::move(future);
}

// Writes, or without a value deletes, if the condition holds.
Result<TimestampedStorageGeneration> Replace(Objects& objects, const std::string& path,
                                             std::optional<absl::Cord> value, const StorageGeneration& if_equal,
                                             uint32_t chunk_size) {
  TimestampedStorageGeneration stamp;
  stamp.time = absl::Now();
  if (!StorageGeneration::IsUnknown(if_equal)) {
    TENSORSTORE_ASSIGN_OR_RETURN(const std::optional<Objects::Found> found, objects.Find(path));
    if ((found ? found->generation : StorageGeneration::NoValue()) != if_equal) {
      stamp.generation = StorageGeneration::Unknown();
      return stamp;
    }
  }
  if (!value) {
    TENSORSTORE_RETURN_IF_ERROR(objects.Delete(path));
    stamp.generation = StorageGeneration::NoValue();
    return stamp;
  }
  const auto size = static_cast<int64_t>(value->size());
  TENSORSTORE_ASSIGN_OR_RETURN(stamp.generation, objects.Write(path, *std::move(value), chunk_size));
  chfs_metrics.bytes_written.IncrementBy(size);
  chfs_metrics.write_latency_ms.Observe(absl::ToDoubleMilliseconds(absl::Now() - stamp.time));
  return stamp;
}

Future<TimestampedStorageGeneration> ChfsKeyValueStore::Write(Key key, std::optional<Value> value,
                                                              WriteOptions options) {
  chfs_metrics.write.Increment();
  TENSORSTORE_ASSIGN_OR_RETURN(std::string path, PathOfKey(key));
  auto [promise, future] = PromiseFuturePair<TimestampedStorageGeneration>::Make();
  auto work = [driver = internal::IntrusivePtr<ChfsKeyValueStore>(this), path, value = std::move(value),
               if_equal = std::move(options.generation_conditions.if_equal),
               promise = std::move(promise)](Turns::Turn turn) mutable {
    auto result = Replace(driver->objects(), path, std::move(value), if_equal, driver->spec_.chunk_size);
    turn.End();  // whom the promise wakes may want the object next
    promise.SetResult(std::move(result));
  };
  objects().turns().Take(std::move(path), Turns::Kind::kWrite,
                         [executor = executor(), work = std::move(work)](Turns::Turn turn) mutable {
                           executor([work = std::move(work), turn = std::move(turn)]() mutable {
                             work(std::move(turn));
                           });
                         });
  return std::move(future);
}

Future<const void> ChfsKeyValueStore::DeleteRange(KeyRange range) {
  chfs_metrics.delete_range.Increment();
  if (range.empty()) return absl::OkStatus();
  auto [promise, future] = PromiseFuturePair<void>::Make();
  executor()([driver = internal::IntrusivePtr<ChfsKeyValueStore>(this), range = std::move(range),
              promise = std::move(promise)]() mutable {
    std::vector<AnyFuture> deletions;
    std::vector<std::string> folders;  // each after those in it
    Objects::Visitor visitor;
    visitor.object = [&](std::string key) {
      deletions.push_back(driver->Write(std::move(key), std::nullopt, {}));
      return promise.result_needed();
    };
    visitor.folder = [&](std::string path) { folders.push_back(std::move(path)); };
    absl::Status walked = driver->objects().Walk(range, visitor);
    Link(WithExecutor(driver->executor(),
                      [driver, folders = std::move(folders), walked = std::move(walked)](
                          Promise<void> done, ReadyFuture<void> deleted) mutable {
                        absl::Status status = std::move(walked);
                        status.Update(deleted.status());
                        for (const std::string& folder : folders) {
                          if (status.ok()) status = driver->objects().DeleteFolder(folder);
                        }
                        done.SetResult(MakeResult(std::move(status)));
                      }),
         std::move(promise), WaitAllFuture(deletions));
  });
  return std::move(future);
}

void ChfsKeyValueStore::ListImpl(ListOptions options, ListReceiver receiver) {
  chfs_metrics.list.Increment();
  executor()([driver = internal::IntrusivePtr<ChfsKeyValueStore>(this), options = std::move(options),
              receiver = std::move(receiver)]() mutable {
    std::atomic<bool> cancelled = false;
    execution::set_starting(receiver, [&cancelled] { cancelled = true; });
    Objects::Visitor visitor;
    visitor.object = [&](std::string key) {
      if (cancelled) return false;
      key.erase(0, options.strip_prefix_length);
      execution::set_value(receiver, ListEntry{std::move(key), /*size=*/-1});  // it would cost a call
      return true;
    };
    absl::Status status = cancelled ? absl::OkStatus() : driver->objects().Walk(options.range, visitor);
    if (status.ok() || cancelled) {
      execution::set_done(receiver);
    } else {
      execution::set_error(receiver, std::move(status));
    }
    execution::set_stopping(receiver);
  });
}

// chfs:///path, or chfs://SERVER/path with the address of a server percent-encoded.
Result<kvstore::Spec> ParseChfsUrl(std::string_view url) {
  const internal_uri::ParsedGenericUri parsed = internal_uri::ParseGenericUri(url);
  TENSORSTORE_RETURN_IF_ERROR(
      internal_uri::EnsureSchemaWithAuthorityDelimiter(parsed, ChfsKeyValueStoreSpec::id));
  TENSORSTORE_RETURN_IF_ERROR(internal_uri::EnsureNoQueryOrFragment(parsed));
  auto spec = internal::MakeIntrusivePtr<ChfsKeyValueStoreSpec>();
  TENSORSTORE_ASSIGN_OR_RETURN(spec->data_.server, internal_uri::PercentDecode(parsed.authority));
  spec->data_.chfs_concurrency = Context::Resource<ChfsConcurrencyResource>::DefaultSpec();
  TENSORSTORE_ASSIGN_OR_RETURN(std::string path, internal_uri::PercentDecode(parsed.path));
  TENSORSTORE_RETURN_IF_ERROR(spec->NormalizeSpec(path));
  return {std::in_place, std::move(spec), std::move(path)};
}

}  // namespace
}  // namespace internal_chfs_kvstore
}  // namespace tensorstore

TENSORSTORE_DECLARE_GARBAGE_COLLECTION_NOT_REQUIRED(tensorstore::internal_chfs_kvstore::ChfsKeyValueStore)

namespace {

const tensorstore::internal_kvstore::DriverRegistration<tensorstore::internal_chfs_kvstore::ChfsKeyValueStoreSpec>
    registration;

const tensorstore::internal_kvstore::UrlSchemeRegistration url_scheme_registration{
    tensorstore::internal_chfs_kvstore::ChfsKeyValueStoreSpec::id,
    tensorstore::internal_chfs_kvstore::ParseChfsUrl};

}  // namespace
