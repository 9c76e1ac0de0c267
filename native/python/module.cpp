// The Python face of the native code: `tieredckpt._native`. Its types are in tieredckpt/_native.pyi.
#include <nanobind/nanobind.h>

#include "crc32c/crc32c.hpp"

namespace nb = nanobind;

namespace {

// Bytes that a Python object lends for as long as this lives; its memory can neither move nor go away.
class LentBytes {
 public:
  explicit LentBytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  LentBytes(const LentBytes&) = delete;
  LentBytes& operator=(const LentBytes&) = delete;
  ~LentBytes() { PyBuffer_Release(&view_); }

  const void* data() const { return view_.buf; }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

// Below this many bytes (a few microseconds of work) the GIL is kept: a thread that gives it up while
// another computes in Python waits a whole switch interval (5 ms) to get it back.
constexpr std::size_t kWorthReleasing = 64 * 1024;

template <typename Function>
std::uint32_t over_lent_bytes(Function function, nb::handle object, std::uint32_t crc) {
  const LentBytes bytes(object);
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
