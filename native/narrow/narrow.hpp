// Rounds 32-bit floats to 16 bits: to the nearest value, ties to even (IEEE 754), as the processor's own instructions
// and NumPy do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tieredckpt {

// Whether this processor has the vector instructions that the code here is written for.
bool narrow_accelerated() noexcept;

// Rounds `count` floats to bfloat16 or to float16. Returns whether all of them are finite before and after; the result
// for any other value is unspecified.
using Narrow = bool (*)(const float* source, std::uint16_t* target, std::size_t count);

bool narrow_bf16(const float* source, std::uint16_t* target, std::size_t count) noexcept;
bool narrow_fp16(const float* source, std::uint16_t* target, std::size_t count) noexcept;

// The same without vector instructions, for comparison.
bool narrow_bf16_portable(const float* source, std::uint16_t* target, std::size_t count) noexcept;
bool narrow_fp16_portable(const float* source, std::uint16_t* target, std::size_t count) noexcept;

}  // namespace tieredckpt
