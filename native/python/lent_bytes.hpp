// The memory of a Python object, for calls that work on it where it lies.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace tieredckpt::python {

// Bytes that a Python object lends for as long as this lives; its memory can neither move nor go away.
class LentBytes {
 public:
  // `flags` are those of PyObject_GetBuffer: PyBUF_SIMPLE to read, PyBUF_WRITABLE to fill.
  LentBytes(nanobind::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
  }
  LentBytes(const LentBytes&) = delete;
  LentBytes& operator=(const LentBytes&) = delete;
  ~LentBytes() { PyBuffer_Release(&view_); }

  void* data() const { return view_.buf; }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

}  // namespace tieredckpt::python
