#include "narrow/narrow.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define TIEREDCKPT_NARROW_X86 1
#include <immintrin.h>
#define TIEREDCKPT_NARROW_TARGET __attribute__((target("avx2,f16c")))
#endif

namespace tieredckpt {
namespace {

constexpr std::uint32_t kMagnitude = 0x7FFFFFFFu;

struct Bf16 {
  static constexpr std::uint32_t kInfinite = 0x7F7F8000u;  // the least magnitude, as bits, that rounds to infinity

  static std::uint16_t round(std::uint32_t bits) {
    return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }

#ifdef TIEREDCKPT_NARROW_X86
  TIEREDCKPT_NARROW_TARGET static __m256i rounded(__m256i bits) {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  }

  TIEREDCKPT_NARROW_TARGET static void store(std::uint16_t* target, __m256i low, __m256i high) {
    const __m256i mixed = _mm256_packus_epi32(rounded(low), rounded(high));  // by halves of 128 bits
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm256_permute4x64_epi64(mixed, 0xD8));
  }
#endif
};

struct Fp16 {
  static constexpr std::uint32_t kInfinite = 0x477FF000u;  // 65520

  static std::uint16_t round(std::uint32_t bits) {
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & kMagnitude;
    std::uint32_t found = 0x7C00u;
    if (magnitude < 0x33000000u) {  // less than half of the smallest one
      found = 0;
    } else if (magnitude < 0x38800000u) {  // subnormal: a multiple of 2^-24
      const std::uint32_t shift = 126u - (magnitude >> 23);
      const std::uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
      const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
      const std::uint32_t half = 1u << (shift - 1u);
      found = mantissa >> shift;
      if (rest > half || (rest == half && (found & 1u) != 0)) ++found;
    } else if (magnitude < kInfinite) {
      const std::uint32_t moved = magnitude - 0x38000000u;  // the exponent of one bias to that of the other
      found = (moved + 0xFFFu + ((moved >> 13) & 1u)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | found);
  }

#ifdef TIEREDCKPT_NARROW_X86
  TIEREDCKPT_NARROW_TARGET static __m128i rounded(__m256i bits) {
    return _mm256_cvtps_ph(_mm256_castsi256_ps(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  TIEREDCKPT_NARROW_TARGET static void store(std::uint16_t* target, __m256i low, __m256i high) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), rounded(low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 8), rounded(high));
  }
#endif
};

// Returns whether all are finite, before and after; as do those below.
template <typename Format>
bool narrow_portable(const float* source, std::uint16_t* target, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, source + i, sizeof bits);
    largest = std::max(largest, bits & kMagnitude);
    target[i] = Format::round(bits);
  }
  return largest < Format::kInfinite;
}

#ifdef TIEREDCKPT_NARROW_X86

constexpr std::size_t kVector = 16;

// Rounds whole vectors: `count` is a multiple of kVector.
template <typename Format>
TIEREDCKPT_NARROW_TARGET bool narrow_vectors(const float* source, std::uint16_t* target, std::size_t count) {
  const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(kMagnitude));
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < count; i += kVector) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i + 8));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(low, magnitude));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(high, magnitude));
    Format::store(target + i, low, high);
  }
  alignas(32) std::uint32_t found[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(found), largest);
  return *std::max_element(found, found + 8) < Format::kInfinite;
}

#endif

template <typename Format>
bool narrow(const float* source, std::uint16_t* target, std::size_t count) {
  bool finite = true;
#ifdef TIEREDCKPT_NARROW_X86
  if (narrow_accelerated()) {
    const std::size_t whole = count - count % kVector;
    finite = narrow_vectors<Format>(source, target, whole);
    source += whole, target += whole, count -= whole;
  }
#endif
  return narrow_portable<Format>(source, target, count) && finite;
}

}  // namespace

bool narrow_accelerated() noexcept {
#ifdef TIEREDCKPT_NARROW_X86
  static const bool found = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return found;
#else
  return false;
#endif
}

bool narrow_bf16_portable(const float* source, std::uint16_t* target, std::size_t count) noexcept {
  return narrow_portable<Bf16>(source, target, count);
}

bool narrow_fp16_portable(const float* source, std::uint16_t* target, std::size_t count) noexcept {
  return narrow_portable<Fp16>(source, target, count);
}

bool narrow_bf16(const float* source, std::uint16_t* target, std::size_t count) noexcept {
  return narrow<Bf16>(source, target, count);
}

bool narrow_fp16(const float* source, std::uint16_t* target, std::size_t count) noexcept {
  return narrow<Fp16>(source, target, count);
}

}  // namespace tieredckpt
