#include "xxh3/xxh3.hpp"

#include <algorithm>
#include <cstring>

#include "crc32c/crc32c.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define TIEREDCKPT_XXH3_X86 1
#include <immintrin.h>
#endif

namespace tieredckpt {
namespace {

constexpr std::size_t kStripe = Xxh3Stream::kStripe;
constexpr std::size_t kStripesPerBlock = 16;
constexpr std::size_t kSecretSize = 192;
constexpr std::size_t kSecretStep = 8;

constexpr std::uint64_t kPrime32_1 = 0x9E3779B1u;
constexpr std::uint64_t kPrime32_2 = 0x85EBCA77u;
constexpr std::uint64_t kPrime32_3 = 0xC2B2AE3Du;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87u;
constexpr std::uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9u;
constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;

// The secret of the specification, as little-endian words.
constexpr std::array<std::uint64_t, kSecretSize / 8> kSecretWords = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
    0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
    0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
    0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
    0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};

constexpr std::array<std::uint8_t, kSecretSize> make_secret() {
  std::array<std::uint8_t, kSecretSize> secret{};
  for (std::size_t i = 0; i < kSecretSize; ++i) {
    secret[i] = static_cast<std::uint8_t>(kSecretWords[i / 8] >> (8 * (i % 8)));
  }
  return secret;
}

alignas(64) constexpr std::array<std::uint8_t, kSecretSize> kSecret = make_secret();

// Bytes that are in the first level cache when they are taken in a second time: as many as `crc32c` likes best.
constexpr std::size_t kSealed = 24576;

using Lanes = Xxh3Stream::Lanes;
using TakeStripes = Xxh3Stream::TakeStripes;

constexpr Lanes kFirstLanes = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                               kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

std::uint64_t load(const std::uint8_t* p) {
  std::uint64_t word = 0;
  for (unsigned i = 0; i < 8; ++i) word |= std::uint64_t{p[i]} << (8 * i);
  return word;
}

void accumulate(Lanes& lanes, const std::uint8_t* stripe, const std::uint8_t* secret) {
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const std::uint64_t word = load(stripe + 8 * i);
    const std::uint64_t key = word ^ load(secret + 8 * i);
    lanes[i ^ 1u] += word;
    lanes[i] += (key & 0xFFFFFFFFu) * (key >> 32);
  }
}

void scramble(Lanes& lanes) {
  const std::uint8_t* secret = kSecret.data() + kSecretSize - kStripe;
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    lanes[i] = ((lanes[i] ^ (lanes[i] >> 47)) ^ load(secret + 8 * i)) * kPrime32_1;
  }
}

void take_stripes_portable(Lanes& lanes, const std::uint8_t* source, std::uint8_t* target, std::size_t first,
                           std::size_t count) {
  std::uint8_t stripe[kStripe];
  for (std::size_t i = first; i < first + count; ++i, source += kStripe) {
    std::memcpy(stripe, source, kStripe);
    if (target != nullptr) {
      std::memcpy(target, stripe, kStripe);
      target += kStripe;
    }
    accumulate(lanes, stripe, kSecret.data() + kSecretStep * (i % kStripesPerBlock));
    if (i % kStripesPerBlock == kStripesPerBlock - 1) scramble(lanes);
  }
}

#ifdef TIEREDCKPT_XXH3_X86

// Bytes of a copy from which stores bypass the caches, since nothing reads so large a copy soon: that saves the read of
// every line that is about to be overwritten. These stores want 16 bytes of alignment. A smaller copy had better stay
// in the cache.
constexpr std::size_t kStreamFrom = 256 << 10;

enum class Store { kNone, kPlain, kStreamed };

Store store_for(const std::uint8_t* target, std::size_t count) {
  if (target == nullptr) return Store::kNone;
  const bool aligned = reinterpret_cast<std::uintptr_t>(target) % 16 == 0;
  return aligned && count * kStripe >= kStreamFrom ? Store::kStreamed : Store::kPlain;
}

#define TIEREDCKPT_AVX2 __attribute__((target("avx2")))

// How far ahead of its use a line is asked for: into the second level cache first, which has room for more requests.
constexpr std::size_t kFarAhead = 8192;
constexpr std::size_t kAhead = 1024;

template <Store kStore>
TIEREDCKPT_AVX2 inline void put(std::uint8_t* target, __m256i low, __m256i high) {
  if constexpr (kStore == Store::kPlain) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 32), high);
  } else if constexpr (kStore == Store::kStreamed) {
    auto* to = reinterpret_cast<__m128i*>(target);
    _mm_stream_si128(to, _mm256_castsi256_si128(low));
    _mm_stream_si128(to + 1, _mm256_extracti128_si256(low, 1));
    _mm_stream_si128(to + 2, _mm256_castsi256_si128(high));
    _mm_stream_si128(to + 3, _mm256_extracti128_si256(high, 1));
  }
}

TIEREDCKPT_AVX2 inline __m256i accumulate_half(__m256i lanes, __m256i words, const std::uint8_t* secret) {
  const __m256i key = _mm256_xor_si256(words, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
  const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
  return _mm256_add_epi64(product, _mm256_add_epi64(lanes, _mm256_shuffle_epi32(words, 0x4E)));
}

TIEREDCKPT_AVX2 inline __m256i scramble_half(__m256i lanes, const std::uint8_t* secret) {
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32_1));
  const __m256i mixed =
      _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)),
                       _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

template <Store kStore>
TIEREDCKPT_AVX2 void take_avx2(Lanes& lanes, const std::uint8_t* source, std::uint8_t* target, std::size_t first,
                               std::size_t count) {
  auto* halves = reinterpret_cast<__m256i*>(lanes.data());
  __m256i low = _mm256_loadu_si256(halves);
  __m256i high = _mm256_loadu_si256(halves + 1);
  for (std::size_t i = first; i < first + count; ++i, source += kStripe) {
    const std::uint8_t* secret = kSecret.data() + kSecretStep * (i % kStripesPerBlock);
    _mm_prefetch(reinterpret_cast<const char*>(source + kFarAhead), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(source + kAhead), _MM_HINT_T0);
    const __m256i first_words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    const __m256i last_words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
    put<kStore>(target, first_words, last_words);
    if constexpr (kStore != Store::kNone) target += kStripe;
    low = accumulate_half(low, first_words, secret);
    high = accumulate_half(high, last_words, secret + 32);
    if (i % kStripesPerBlock == kStripesPerBlock - 1) {
      low = scramble_half(low, kSecret.data() + kSecretSize - kStripe);
      high = scramble_half(high, kSecret.data() + kSecretSize - kStripe + 32);
    }
  }
  _mm256_storeu_si256(halves, low);
  _mm256_storeu_si256(halves + 1, high);
  if constexpr (kStore == Store::kStreamed) _mm_sfence();  // whoever is told of the copy is to see it
}

void take_stripes_avx2(Lanes& lanes, const std::uint8_t* source, std::uint8_t* target, std::size_t first,
                       std::size_t count) {
  switch (store_for(target, count)) {
    case Store::kNone: return take_avx2<Store::kNone>(lanes, source, target, first, count);
    case Store::kPlain: return take_avx2<Store::kPlain>(lanes, source, target, first, count);
    case Store::kStreamed: return take_avx2<Store::kStreamed>(lanes, source, target, first, count);
  }
}

TakeStripes fastest() {
  if (__builtin_cpu_supports("avx2")) return take_stripes_avx2;
  return take_stripes_portable;
}

#else

TakeStripes fastest() { return take_stripes_portable; }

#endif

TakeStripes chosen() {
  static const TakeStripes found = fastest();
  return found;
}

std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
#ifdef __SIZEOF_INT128__
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
#else
  const std::uint64_t low = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
  const std::uint64_t cross = (a >> 32) * (b & 0xFFFFFFFFu) + (low >> 32);
  const std::uint64_t more = (a & 0xFFFFFFFFu) * (b >> 32) + (cross & 0xFFFFFFFFu);
  const std::uint64_t high = (a >> 32) * (b >> 32) + (cross >> 32) + (more >> 32);
  return ((more << 32) | (low & 0xFFFFFFFFu)) ^ high;
#endif
}

std::uint64_t merge(const Lanes& lanes, std::size_t secret, std::uint64_t start) {
  std::uint64_t hash = start;
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint8_t* key = kSecret.data() + secret + 16 * i;
    hash += fold(lanes[2 * i] ^ load(key), lanes[2 * i + 1] ^ load(key + 8));
  }
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9u;
  return hash ^ (hash >> 32);
}

Xxh3Digest copy(Xxh3Stream stream, const void* source, std::size_t source_size, void* target,
                std::size_t target_size) {
  const std::size_t copied = std::min(source_size, target_size);
  stream.take(source, target, copied);
  stream.take(static_cast<const std::uint8_t*>(source) + copied, nullptr, source_size - copied);
  if (target_size > copied) {
    auto* rest = static_cast<std::uint8_t*>(target) + copied;
    std::memset(rest, 0, target_size - copied);
    stream.take(rest, nullptr, target_size - copied);
  }
  return stream.digest();
}

}  // namespace

bool xxh3_accelerated() noexcept { return chosen() != take_stripes_portable; }

Xxh3Stream::Xxh3Stream(TakeStripes take_stripes) noexcept : take_stripes_(take_stripes), lanes_(kFirstLanes) {}

Xxh3Stream::Xxh3Stream() noexcept : Xxh3Stream(chosen()) {}

Xxh3Stream Xxh3Stream::portable() noexcept { return Xxh3Stream(take_stripes_portable); }

void Xxh3Stream::take(const void* source, void* target, std::size_t size) noexcept {
  const auto* from = static_cast<const std::uint8_t*>(source);
  auto* to = static_cast<std::uint8_t*>(target);
  if (size == 0) return;
  if (waiting_ != 0) {
    const std::size_t more = std::min(kStripe - waiting_, size);
    keep(from, to, more);
    if (more == size) return;
    take_stripes_(lanes_, last_.data() + kStripe, nullptr, stripes_++, 1);
    std::memcpy(last_.data(), last_.data() + kStripe, kStripe);
    waiting_ = 0;
    from += more;
    if (to != nullptr) to += more;
    size -= more;
  }
  const std::size_t whole = (size - 1) / kStripe;
  if (whole != 0) {
    const std::size_t bytes = whole * kStripe;
    take_stripes_(lanes_, from, to, stripes_, whole);
    stripes_ += whole;
    std::memcpy(last_.data(), (to != nullptr ? to : from) + bytes - kStripe, kStripe);
    from += bytes;
    if (to != nullptr) to += bytes;
    size -= bytes;
  }
  keep(from, to, size);
}

void Xxh3Stream::keep(const std::uint8_t* source, std::uint8_t* target, std::size_t size) noexcept {
  std::uint8_t* kept = last_.data() + kStripe + waiting_;
  std::memcpy(kept, source, size);
  if (target != nullptr) std::memcpy(target, kept, size);
  waiting_ += size;
}

Xxh3Digest Xxh3Stream::digest() const noexcept {
  Lanes lanes = lanes_;
  accumulate(lanes, last_.data() + waiting_, kSecret.data() + kSecretSize - kStripe - 7);
  const std::uint64_t halves[2] = {merge(lanes, kSecretSize - kStripe - 11, ~(size() * kPrime64_2)),
                                   merge(lanes, 11, size() * kPrime64_1)};
  Xxh3Digest digest{};
  for (std::size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<std::uint8_t>(halves[i / 8] >> (56 - 8 * (i % 8)));
  }
  return digest;
}

Xxh3Digest xxh3(const void* data, std::size_t size) noexcept {
  Xxh3Stream stream;
  stream.take(data, nullptr, size);
  return stream.digest();
}

Sealed xxh3_crc32c(const void* data, std::size_t size) noexcept {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  Xxh3Stream stream;
  std::uint32_t crc = 0;
  for (std::size_t done = 0; done < size; done += kSealed) {
    const std::size_t count = std::min(size - done, kSealed);
    stream.take(bytes + done, nullptr, count);
    crc = crc32c(bytes + done, count, crc);
  }
  return {stream.digest(), crc};
}

Xxh3Digest xxh3_copy(const void* source, std::size_t source_size, void* target, std::size_t target_size) noexcept {
  return copy(Xxh3Stream(), source, source_size, target, target_size);
}

Xxh3Digest xxh3_copy_portable(const void* source, std::size_t source_size, void* target,
                              std::size_t target_size) noexcept {
  return copy(Xxh3Stream::portable(), source, source_size, target, target_size);
}

}  // namespace tieredckpt
