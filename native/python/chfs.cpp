// Python bindings of the CHFS client: `tieredckpt._chfs`. Their types are in tieredckpt/_chfs.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "chfs/client.hpp"
#include "python/lent_bytes.hpp"

namespace nb = nanobind;
using tieredckpt::chfs::Client;
using tieredckpt::chfs::Code;
using tieredckpt::chfs::Entry;
using tieredckpt::chfs::File;
using tieredckpt::chfs::Info;
using tieredckpt::chfs::Kind;
using tieredckpt::chfs::Options;
using tieredckpt::chfs::Status;
using tieredckpt::python::LentBytes;

namespace {

// `ChfsError`, owned by the module.
PyObject* chfs_error = nullptr;

const char* NameOf(Code code) {
  switch (code) {
    case Code::kOk: return "";
    case Code::kMissing: return "missing";
    case Code::kExists: return "exists";
    case Code::kUnavailable: return "unavailable";
    case Code::kSilent: return "silent";
    case Code::kFull: return "full";
    case Code::kShort: return "short";
    case Code::kInvalid: return "invalid";
    case Code::kFailed: return "failed";
  }
  return "failed";
}

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kObject: return "object";
    case Kind::kFolder: return "folder";
    case Kind::kLink: return "link";
  }
  return "object";
}

// Names in CHFS need not be UTF-8; one that is not is no name of ours.
nb::object TextOf(const std::string& bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

// Calls `function` without the GIL: every call of libchfs may wait for a server.
template <typename Function>
void Call(Function function) {
  Status status;
  {
    const nb::gil_scoped_release released;
    status = function();
  }
  if (status.ok()) return;
  const nb::tuple args = nb::make_tuple(NameOf(status.code), TextOf(status.message));
  PyErr_SetObject(chfs_error, args.ptr());
  throw nb::python_error();
}

// An open object that Python may close while another of its threads reads or writes: closing waits for those.
// libchfs would give the descriptor to the next object, and they would go on in that one.
struct OpenFile {
  explicit OpenFile(File opened) : file(std::move(opened)) {}
  File file;
  std::shared_mutex guards_closing;
};

// The client outlives every object of Python that holds it.
struct Connection {
  std::shared_ptr<Client> client;
};

}  // namespace

NB_MODULE(_chfs, module) {
  module.doc() = "The client of CHFS; private, and only for a process that may be lost.";
  chfs_error = PyErr_NewException("tieredckpt._chfs.ChfsError", nullptr, nullptr);
  if (chfs_error == nullptr) throw nb::python_error();
  module.attr("ChfsError") = nb::handle(chfs_error);

  nb::class_<OpenFile>(module, "File")
      .def(
          "write",
          [](OpenFile& self, nb::handle data, std::uint64_t offset) {
            const LentBytes bytes(data, PyBUF_SIMPLE);
            Call([&] {
              const std::shared_lock<std::shared_mutex> lock(self.guards_closing);
              return self.file.Write(bytes.data(), bytes.size(), offset);
            });
          },
          nb::arg("data"), nb::arg("offset"))
      .def(
          "read_into",
          [](OpenFile& self, nb::handle into, std::uint64_t offset) {
            const LentBytes bytes(into, PyBUF_WRITABLE);
            Call([&] {
              const std::shared_lock<std::shared_mutex> lock(self.guards_closing);
              return self.file.Read(bytes.data(), bytes.size(), offset);
            });
          },
          nb::arg("into"), nb::arg("offset"))
      .def("close", [](OpenFile& self) {
        Call([&] {
          const std::unique_lock<std::shared_mutex> lock(self.guards_closing);
          return self.file.Close();
        });
      });

  nb::class_<Connection>(module, "Client")
      .def(
          "__init__",
          [](Connection* self, const std::string& library, const std::string& server, int rpc_timeout_ms) {
            Options options;
            options.library = library;
            options.server = server;
            options.rpc_timeout_ms = rpc_timeout_ms;
            std::shared_ptr<Client> client;
            Call([&] { return Client::Connect(options, &client); });
            new (self) Connection{std::move(client)};
          },
          nb::arg("library") = "", nb::arg("server") = "", nb::arg("rpc_timeout_ms") = 30'000)
      .def_prop_ro("version", [](const Connection& self) { return self.client->version(); })
      .def_prop_ro("library", [](const Connection& self) { return self.client->library(); })
      .def_prop_ro("servers", [](const Connection& self) { return self.client->servers(); })
      .def_prop_ro("addresses",
                   [](const Connection& self) {
                     nb::list found;
                     for (const std::string& address : self.client->addresses()) found.append(TextOf(address));
                     return found;
                   })
      .def("check_ring", [](Connection& self) { Call([&] { return self.client->CheckRing(); }); })
      .def(
          "create",
          [](Connection& self, const std::string& path, std::uint32_t chunk_size) {
            File file;
            Call([&] { return self.client->Create(path, chunk_size, &file); });
            return std::make_unique<OpenFile>(std::move(file));
          },
          nb::arg("path"), nb::arg("chunk_size"))
      .def(
          "open_object",
          [](Connection& self, const std::string& path) {
            File file;
            Call([&] { return self.client->OpenObject(path, &file); });
            return std::make_unique<OpenFile>(std::move(file));
          },
          nb::arg("path"))
      .def(
          "stat",
          [](Connection& self, const std::string& path) {
            Info info;
            Call([&] { return self.client->Stat(path, &info); });
            return nb::make_tuple(NameOf(info.kind), info.size, info.mtime_ns, info.chunk_size);
          },
          nb::arg("path"))
      .def(
          "remove",
          [](Connection& self, const std::string& path) { Call([&] { return self.client->Remove(path); }); },
          nb::arg("path"))
      .def(
          "remove_folder",
          [](Connection& self, const std::string& path) { Call([&] { return self.client->RemoveFolder(path); }); },
          nb::arg("path"))
      .def(
          "list",
          [](Connection& self, const std::string& path, bool replicas) {
            std::vector<Entry> entries;
            Call([&] {
              return self.client->ListOneOfMany(path, [&](const Entry& entry) { entries.push_back(entry); }, replicas);
            });
            nb::list found;
            for (const Entry& entry : entries) {
              found.append(nb::make_tuple(TextOf(entry.name), NameOf(entry.kind), entry.first_chunk, entry.mtime_ns));
            }
            return found;
          },
          nb::arg("path"), nb::arg("replicas") = false)
      .def(
          "make_folder",
          [](Connection& self, const std::string& path) { Call([&] { return self.client->MakeFolder(path); }); },
          nb::arg("path"));
}
