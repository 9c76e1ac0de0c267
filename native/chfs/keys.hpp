// From keys of any bytes to paths that CHFS can hold, and back.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "chfs/client.hpp"

namespace tieredckpt::chfs {

// Bytes of the longest path with the NUL that ends it, as the kernel has it.
inline constexpr std::size_t kPathLimit = 4096;

// The relative path of a key. One to one: components of [A-Za-z0-9._-] and other harmless bytes stay as they
// are; what CHFS forbids or folds together (':', NUL, '%', empty, ".", "..", components over 200 bytes) is
// escaped with '%'. Keys that are prefixes of each other as folders ("a" and "a/b") cannot both be stored.
std::string EncodeKey(std::string_view key);

// The key of a path that EncodeKey made; false for any other.
bool DecodeKey(std::string_view path, std::string* key);

// kInvalid, with the reason, for a path that CHFS would refuse, alias or cut: relative, "//", ".", "..", ':' or
// NUL in it, a component over 240 bytes, more than 22 levels, 4096 bytes or more in all.
Status CheckPath(std::string_view path);

}  // namespace tieredckpt::chfs
