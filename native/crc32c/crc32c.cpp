#include "crc32c/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define TIEREDCKPT_CRC_X86 1
#include <nmmintrin.h>
#define TIEREDCKPT_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__GNUC__) && defined(__linux__) && !defined(__AARCH64EB__)
#define TIEREDCKPT_CRC_ARM 1
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define TIEREDCKPT_CRC_TARGET
#endif

namespace tieredckpt {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;

using Table = std::array<std::uint32_t, 256>;

// kSlices[k][b]: the register after byte `b` and then `k` zero bytes.
constexpr std::array<Table, 8> make_slices() {
  std::array<Table, 8> slices{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? kPolynomial : 0u);
    slices[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = slices[k - 1][byte];
      slices[k][byte] = (before >> 8) ^ slices[0][before & 0xFFu];
    }
  }
  return slices;
}

constexpr std::array<Table, 8> kSlices = make_slices();

std::uint32_t extend_by_table(const unsigned char* p, std::size_t size, std::uint32_t reg) {
  for (; size >= 8; p += 8, size -= 8) {
    // Byte by byte, so that the order of bytes in a word does not matter.
    const std::uint32_t low =
        reg ^ (std::uint32_t{p[0]} | std::uint32_t{p[1]} << 8 | std::uint32_t{p[2]} << 16 |
               std::uint32_t{p[3]} << 24);
    reg = kSlices[7][low & 0xFFu] ^ kSlices[6][(low >> 8) & 0xFFu] ^
          kSlices[5][(low >> 16) & 0xFFu] ^ kSlices[4][low >> 24] ^ kSlices[3][p[4]] ^
          kSlices[2][p[5]] ^ kSlices[1][p[6]] ^ kSlices[0][p[7]];
  }
  for (; size != 0; ++p, --size) reg = (reg >> 8) ^ kSlices[0][(reg ^ *p) & 0xFFu];
  return reg;
}

#ifdef TIEREDCKPT_CRC_TARGET

#ifdef TIEREDCKPT_CRC_X86
bool has_instructions() { return __builtin_cpu_supports("sse4.2") != 0; }

TIEREDCKPT_CRC_TARGET inline std::uint64_t extend_word(std::uint64_t reg, std::uint64_t word) {
  return _mm_crc32_u64(reg, word);
}

TIEREDCKPT_CRC_TARGET inline std::uint64_t extend_byte(std::uint64_t reg, unsigned char byte) {
  return _mm_crc32_u8(static_cast<std::uint32_t>(reg), byte);
}
#else
bool has_instructions() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

// In assembly, because compilers disagree on how <arm_acle.h> shows these without a flag for the whole file.
TIEREDCKPT_CRC_TARGET inline std::uint64_t extend_word(std::uint64_t reg, std::uint64_t word) {
  std::uint32_t out;
  __asm__(".arch_extension crc\n\tcrc32cx %w0, %w1, %2"
          : "=r"(out)
          : "r"(static_cast<std::uint32_t>(reg)), "r"(word));
  return out;
}

TIEREDCKPT_CRC_TARGET inline std::uint64_t extend_byte(std::uint64_t reg, unsigned char byte) {
  std::uint32_t out;
  __asm__(".arch_extension crc\n\tcrc32cb %w0, %w1, %w2"
          : "=r"(out)
          : "r"(static_cast<std::uint32_t>(reg)), "r"(static_cast<std::uint32_t>(byte)));
  return out;
}
#endif

// The register is linear in its bits: running it over `n` zero bytes is a 32 x 32 bit matrix, kept here
// as one table per byte of the register. It lets three checksums run side by side and be joined after.
using Shift = std::array<Table, 4>;

constexpr Shift make_shift(std::size_t zero_bytes) {
  std::array<std::uint32_t, 32> columns{};  // the matrix for one zero byte, then raised by squaring
  for (std::uint32_t bit = 0; bit < 32; ++bit) {
    std::uint32_t reg = 1u << bit;
    for (int i = 0; i < 8; ++i) reg = (reg >> 1) ^ ((reg & 1u) ? kPolynomial : 0u);
    columns[bit] = reg;
  }
  // `zero_bytes` is a power of two.
  for (; zero_bytes > 1; zero_bytes >>= 1) {
    std::array<std::uint32_t, 32> squared{};
    for (std::uint32_t bit = 0; bit < 32; ++bit) {
      for (std::uint32_t i = 0; i < 32; ++i) {
        if ((columns[bit] >> i) & 1u) squared[bit] ^= columns[i];
      }
    }
    columns = squared;
  }
  Shift shift{};
  for (std::uint32_t part = 0; part < 4; ++part) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      for (std::uint32_t i = 0; i < 8; ++i) {
        if ((byte >> i) & 1u) shift[part][byte] ^= columns[8 * part + i];
      }
    }
  }
  return shift;
}

// Long lanes amortise the join; short ones keep the interleave for what the long ones leave over.
constexpr std::size_t kLongLane = 8192;
constexpr std::size_t kShortLane = 256;
constexpr Shift kLongShift = make_shift(kLongLane);
constexpr Shift kShortShift = make_shift(kShortLane);

std::uint64_t apply(const Shift& shift, std::uint64_t reg) {
  return shift[0][reg & 0xFFu] ^ shift[1][(reg >> 8) & 0xFFu] ^ shift[2][(reg >> 16) & 0xFFu] ^
         shift[3][(reg >> 24) & 0xFFu];
}

std::uint64_t load(const unsigned char* p) {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// The instruction takes three cycles and one can start in each: three independent lanes fill the unit.
TIEREDCKPT_CRC_TARGET std::uint64_t extend_lanes(const unsigned char*& p, std::size_t& size,
                                                 std::size_t lane, const Shift& shift,
                                                 std::uint64_t reg) {
  while (size >= 3 * lane) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < lane; i += 8) {
      reg = extend_word(reg, load(p + i));
      second = extend_word(second, load(p + lane + i));
      third = extend_word(third, load(p + 2 * lane + i));
    }
    reg = apply(shift, apply(shift, reg) ^ second) ^ third;
    p += 3 * lane;
    size -= 3 * lane;
  }
  return reg;
}

TIEREDCKPT_CRC_TARGET std::uint32_t extend_by_instructions(const unsigned char* p, std::size_t size,
                                                           std::uint32_t start) {
  std::uint64_t reg = start;
  reg = extend_lanes(p, size, kLongLane, kLongShift, reg);
  reg = extend_lanes(p, size, kShortLane, kShortShift, reg);
  for (; size >= 8; p += 8, size -= 8) reg = extend_word(reg, load(p));
  for (; size != 0; ++p, --size) reg = extend_byte(reg, *p);
  return static_cast<std::uint32_t>(reg);
}

#else
bool has_instructions() { return false; }

std::uint32_t extend_by_instructions(const unsigned char* p, std::size_t size, std::uint32_t reg) {
  return extend_by_table(p, size, reg);
}
#endif

}  // namespace

bool crc32c_accelerated() noexcept {
  static const bool accelerated = has_instructions();
  return accelerated;
}

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc) noexcept {
  if (!crc32c_accelerated()) return crc32c_portable(data, size, crc);
  return ~extend_by_instructions(static_cast<const unsigned char*>(data), size, ~crc);
}

std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t crc) noexcept {
  return ~extend_by_table(static_cast<const unsigned char*>(data), size, ~crc);
}

}  // namespace tieredckpt
