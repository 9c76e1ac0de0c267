// Python bindings of the native code: `tieredckpt._native`. Their types are in tieredckpt/_native.pyi.
#include <nanobind/nanobind.h>

#include <algorithm>

#include "crc32c/crc32c.hpp"
#include "narrow/narrow.hpp"
#include "python/lent_bytes.hpp"
#include "xxh3/xxh3.hpp"

namespace nb = nanobind;
using tieredckpt::Xxh3Digest;
using tieredckpt::Xxh3Stream;
using tieredckpt::python::LentBytes;

namespace {

// Below this many bytes (a few microseconds of work) the GIL is kept: a thread that gives it up while
// another computes in Python waits a whole switch interval (5 ms) to get it back.
constexpr std::size_t kWorthReleasing = 64 * 1024;

template <typename Function>
auto without_gil(std::size_t size, Function function) {
  if (size < kWorthReleasing) return function();
  const nb::gil_scoped_release released;
  return function();
}

template <typename Function>
std::uint32_t over_lent_bytes(Function function, nb::handle object, std::uint32_t crc) {
  const LentBytes bytes(object, PyBUF_SIMPLE);
  return without_gil(bytes.size(), [&] { return function(bytes.data(), bytes.size(), crc); });
}

nb::bytes as_bytes(const Xxh3Digest& digest) { return nb::bytes(digest.data(), digest.size()); }

void check_long(std::size_t size) {
  if (size < tieredckpt::kXxh3Shortest) throw nb::value_error("fewer bytes than the long form of XXH3 has");
}

template <typename Function>
nb::bytes copy_and_hash(Function function, nb::handle source, nb::handle target) {
  const LentBytes from(source, PyBUF_SIMPLE);
  const LentBytes to(target, PyBUF_WRITABLE);
  const std::size_t size = std::max(from.size(), to.size());
  check_long(size);
  return as_bytes(without_gil(size, [&] { return function(from.data(), from.size(), to.data(), to.size()); }));
}

bool narrow(tieredckpt::Narrow function, nb::handle source, nb::handle target) {
  const LentBytes from(source, PyBUF_SIMPLE);
  const LentBytes to(target, PyBUF_WRITABLE);
  const std::size_t count = from.size() / sizeof(float);
  if (from.size() % sizeof(float) != 0 || to.size() != count * sizeof(std::uint16_t)) {
    throw nb::value_error("the source is no floats, or the target has not half of its size");
  }
  const auto* floats = static_cast<const float*>(from.data());
  return without_gil(from.size(), [&] { return function(floats, static_cast<std::uint16_t*>(to.data()), count); });
}

void define_narrow(nb::module_& module, const char* name, tieredckpt::Narrow function) {
  module.def(
      name, [function](nb::handle source, nb::handle target) { return narrow(function, source, target); },
      nb::arg("source"), nb::arg("target"));
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
  module.def(
      "xxh3",
      [](nb::handle data) {
        const LentBytes bytes(data, PyBUF_SIMPLE);
        check_long(bytes.size());
        return as_bytes(without_gil(bytes.size(), [&] { return tieredckpt::xxh3(bytes.data(), bytes.size()); }));
      },
      nb::arg("data"));
  module.def(
      "xxh3_crc32c",
      [](nb::handle data) {
        const LentBytes bytes(data, PyBUF_SIMPLE);
        check_long(bytes.size());
        const auto sealed =
            without_gil(bytes.size(), [&] { return tieredckpt::xxh3_crc32c(bytes.data(), bytes.size()); });
        return nb::make_tuple(as_bytes(sealed.digest), sealed.crc);
      },
      nb::arg("data"));
  module.def(
      "xxh3_copy",
      [](nb::handle source, nb::handle target) { return copy_and_hash(tieredckpt::xxh3_copy, source, target); },
      nb::arg("source"), nb::arg("target"));
  module.def(
      "xxh3_copy_portable",
      [](nb::handle source, nb::handle target) {
        return copy_and_hash(tieredckpt::xxh3_copy_portable, source, target);
      },
      nb::arg("source"), nb::arg("target"));
  nb::class_<Xxh3Stream>(module, "Xxh3Stream")
      .def(nb::init<>())
      .def(
          "copy",
          [](Xxh3Stream& stream, nb::handle source, nb::handle target) {
            const LentBytes from(source, PyBUF_SIMPLE);
            const LentBytes to(target, PyBUF_WRITABLE);
            if (to.size() > from.size()) throw nb::value_error("the target is longer than the source");
            without_gil(from.size(), [&] {
              stream.take(from.data(), to.data(), to.size());
              stream.take(static_cast<const std::uint8_t*>(from.data()) + to.size(), nullptr, from.size() - to.size());
            });
          },
          nb::arg("source"), nb::arg("target"))
      .def("digest", [](const Xxh3Stream& stream) {
        check_long(stream.size());
        return as_bytes(stream.digest());
      });
  module.attr("XXH3_ACCELERATED") = tieredckpt::xxh3_accelerated();
  module.attr("XXH3_SHORTEST") = tieredckpt::kXxh3Shortest;
  define_narrow(module, "narrow_bf16", tieredckpt::narrow_bf16);
  define_narrow(module, "narrow_fp16", tieredckpt::narrow_fp16);
  define_narrow(module, "narrow_bf16_portable", tieredckpt::narrow_bf16_portable);
  define_narrow(module, "narrow_fp16_portable", tieredckpt::narrow_fp16_portable);
  module.attr("NARROW_ACCELERATED") = tieredckpt::narrow_accelerated();
}
