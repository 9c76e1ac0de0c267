#include "narrow/narrow.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define TIEREDCKPT_NARROW_X86 1
#include <immintrin.h>
#endif

namespace tieredckpt {
namespace {

// The least magnitudes, as bits, that round to infinity.
constexpr std::uint32_t kInfiniteBf16 = 0x7F7F8000u;
constexpr std::uint32_t kInfiniteFp16 = 0x477FF000u;  // 65520

constexpr std::uint32_t kMagnitude = 0x7FFFFFFFu;

std::uint16_t bf16(std::uint32_t bits) {
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

std::uint16_t fp16(std::uint32_t bits) {
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
  } else if (magnitude < kInfiniteFp16) {
    const std::uint32_t moved = magnitude - 0x38000000u;  // the exponent of one bias to that of the other
    found = (moved + 0xFFFu + ((moved >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | found);
}

template <std::uint16_t (*Round)(std::uint32_t)>
std::uint32_t narrow_portable(const float* source, std::uint16_t* target, std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, source + i, sizeof bits);
    largest = std::max(largest, bits & kMagnitude);
    target[i] = Round(bits);
  }
  return largest;
}

#ifdef TIEREDCKPT_NARROW_X86

constexpr std::size_t kVector = 16;

__attribute__((target("avx2"))) std::uint32_t largest_of(__m256i magnitudes) {
  alignas(32) std::uint32_t found[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(found), magnitudes);
  return *std::max_element(found, found + 8);
}

__attribute__((target("avx2"))) __m256i rounded_bf16(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
}

// Of whole vectors; the largest magnitude, as bits.
__attribute__((target("avx2"))) std::uint32_t vectors_bf16(const float* source, std::uint16_t* target,
                                                           std::size_t count) {
  const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(kMagnitude));
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < count; i += kVector) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i + 8));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(low, magnitude));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(high, magnitude));
    const __m256i mixed = _mm256_packus_epi32(rounded_bf16(low), rounded_bf16(high));  // by halves of 128 bits
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i), _mm256_permute4x64_epi64(mixed, 0xD8));
  }
  return largest_of(largest);
}

__attribute__((target("avx2,f16c"))) std::uint32_t vectors_fp16(const float* source, std::uint16_t* target,
                                                                std::size_t count) {
  const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(kMagnitude));
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < count; i += kVector) {
    for (std::size_t at = i; at < i + kVector; at += 8) {
      const __m256 values = _mm256_loadu_ps(source + at);
      largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(values), magnitude));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + at),
                       _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
  return largest_of(largest);
}

#endif

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
  return narrow_portable<bf16>(source, target, count) < kInfiniteBf16;
}

bool narrow_fp16_portable(const float* source, std::uint16_t* target, std::size_t count) noexcept {
  return narrow_portable<fp16>(source, target, count) < kInfiniteFp16;
}

bool narrow_bf16(const float* source, std::uint16_t* target, std::size_t count) noexcept {
  bool finite = true;
#ifdef TIEREDCKPT_NARROW_X86
  if (narrow_accelerated()) {
    const std::size_t whole = count - count % kVector;
    finite = vectors_bf16(source, target, whole) < kInfiniteBf16;
    source += whole, target += whole, count -= whole;
  }
#endif
  return narrow_bf16_portable(source, target, count) && finite;
}

bool narrow_fp16(const float* source, std::uint16_t* target, std::size_t count) noexcept {
  bool finite = true;
#ifdef TIEREDCKPT_NARROW_X86
  if (narrow_accelerated()) {
    const std::size_t whole = count - count % kVector;
    finite = vectors_fp16(source, target, whole) < kInfiniteFp16;
    source += whole, target += whole, count -= whole;
  }
#endif
  return narrow_fp16_portable(source, target, count) && finite;
}

}  // namespace tieredckpt
