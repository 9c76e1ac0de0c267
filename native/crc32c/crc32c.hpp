// CRC-32C (Castagnoli polynomial, reflected, as in RFC 3720) of bytes in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tieredckpt {

// Extends `crc`, the checksum of the bytes before (0 for none), by `size` bytes at `data`.
// Uses the processor's CRC instructions where it has them, decided once at run time.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc) noexcept;

// The same from tables alone; what runs on processors without CRC instructions.
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t crc) noexcept;

// Whether `crc32c` uses CRC instructions on this processor.
bool crc32c_accelerated() noexcept;

}  // namespace tieredckpt
