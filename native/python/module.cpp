// The Python face of the native code: `tieredckpt._native`. Its types are in tieredckpt/_native.pyi.
#include <nanobind/nanobind.h>

#include "crc32c/crc32c.hpp"
#include "python/lent_bytes.hpp"

namespace nb = nanobind;

namespace {

// Below this many bytes (a few microseconds of work) the GIL is kept: a thread that gives it up while
// another computes in Python waits a whole switch interval (5 ms) to get it back.
constexpr std::size_t kWorthReleasing = 64 * 1024;

template <typename Function>
std::uint32_t over_lent_bytes(Function function, nb::handle object, std::uint32_t crc) {
  const tieredckpt::python::LentBytes bytes(object, PyBUF_SIMPLE);
  if (bytes.size() < kWorthReleasing) return function(bytes.data(), bytes.size(), crc);
  const nb::gil_scoped_release released;
  return function(bytes.data(), bytes.size(), crc);
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "Native code of tieredckpt; private.";
  module.def(
      "crc32c",
      [](nb::handle data, std::uint32_t crc) {
        return over_lent_bytes(tieredckpt::crc32c, data, crc);
      },
      nb::arg("data"), nb::arg("crc") = 0);
  module.def(
      "crc32c_portable",
      [](nb::handle data, std::uint32_t crc) {
        return over_lent_bytes(tieredckpt::crc32c_portable, data, crc);
      },
      nb::arg("data"), nb::arg("crc") = 0);
  module.attr("CRC32C_ACCELERATED") = tieredckpt::crc32c_accelerated();
}
