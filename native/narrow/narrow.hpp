// 32-bit floats rounded to 16 bits, to the nearest and of two equally near ones to the even one (IEEE 754), as the
// processor's own instructions and NumPy round.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tieredckpt {

// Whether this processor has the vector instructions that the code here is written for.
bool narrow_accelerated() noexcept;

// Round `count` floats to bfloat16 or to float16. Returns whether all of them, before and after, are finite: what
// becomes of others is not said here.
using Narrow = bool (*)(const float* source, std::uint16_t* target, std::size_t count);

bool narrow_bf16(const float* source, std::uint16_t* target, std::size_t count) noexcept;
bool narrow_fp16(const float* source, std::uint16_t* target, std::size_t count) noexcept;

// The same without vector instructions, for comparison.
bool narrow_bf16_portable(const float* source, std::uint16_t* target, std::size_t count) noexcept;
bool narrow_fp16_portable(const float* source, std::uint16_t* target, std::size_t count) noexcept;

}  // namespace tieredckpt
