// XXH3 with 128 bits (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md), seed 0, of long inputs, and fused
// with a copy: every byte is loaded once, and what is stored is what is hashed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tieredckpt {

// Inputs of at least so many bytes; the shorter ones are other functions in XXH3.
constexpr std::size_t kXxh3Shortest = 241;

// The canonical form: big-endian, the high half first.
using Xxh3Digest = std::array<std::uint8_t, 16>;

// Whether this processor has the vector instructions that the code here is written for.
bool xxh3_accelerated() noexcept;

// The digest of bytes that come in pieces of any size, which may be copied as they come.
class Xxh3Stream {
 public:
  static constexpr std::size_t kStripe = 64;
  using Lanes = std::array<std::uint64_t, 8>;
  // Takes in `count` stripes, of which the first is the `first`th of all; copies them to `target` unless it is null.
  using TakeStripes = void (*)(Lanes&, const std::uint8_t* source, std::uint8_t* target, std::size_t first,
                               std::size_t count);

  Xxh3Stream() noexcept;

  // Without vector instructions, for comparison.
  static Xxh3Stream portable() noexcept;

  // Takes in `size` bytes. Copies them to `target` unless it is null; `target` must not overlap them. The digest is
  // that of the copy, even if `source` changes meanwhile.
  void take(const void* source, void* target, std::size_t size) noexcept;

  // Bytes taken in so far.
  std::size_t size() const noexcept { return stripes_ * kStripe + waiting_; }

  // The digest of all bytes so far, at least `kXxh3Shortest`.
  Xxh3Digest digest() const noexcept;

 private:

  explicit Xxh3Stream(TakeStripes take_stripes) noexcept;
  void keep(const std::uint8_t* source, std::uint8_t* target, std::size_t size) noexcept;

  TakeStripes take_stripes_;
  Lanes lanes_;
  std::size_t stripes_ = 0;  // that are in `lanes_`
  std::size_t waiting_ = 0;  // bytes since then; up to a whole stripe, because the last one of all counts differently
  std::array<std::uint8_t, 2 * kStripe> last_{};  // the last stripe in `lanes_`, and what is waiting
};

// The digest of `size` bytes.
Xxh3Digest xxh3(const void* data, std::size_t size) noexcept;

struct Sealed {
  Xxh3Digest digest;
  std::uint32_t crc;
};

// The digest and the CRC-32C of `size` bytes, each of which is fetched from memory once.
Sealed xxh3_crc32c(const void* data, std::size_t size) noexcept;

// Copies the first min(source_size, target_size) bytes; a longer target is filled up with zeros. Returns the digest
// of the longer one of the two, of which the copied part is taken as it arrived in `target`. They do not overlap.
Xxh3Digest xxh3_copy(const void* source, std::size_t source_size, void* target, std::size_t target_size) noexcept;

// The same without vector instructions, for comparison.
Xxh3Digest xxh3_copy_portable(const void* source, std::size_t source_size, void* target,
                              std::size_t target_size) noexcept;

}  // namespace tieredckpt
