// What the client makes of servers that die, hang, fill up or fail; the look-alike plays them.
#include <sys/wait.h>

#include <thread>

#include "scene.hpp"

namespace {

using namespace tieredckpt::chfs;

constexpr const char* kServers = "servers = 3\n";

TEST(a_missing_library_is_unavailable_and_says_what_to_do) {
  Options options;
  options.library = "/nowhere/libchfs.so";
  options.server = "directory:/nowhere";
  std::shared_ptr<Client> client;
  const Status status = Client::Connect(options, &client);
  CHECK_CODE(status, Code::kUnavailable);
  CHECK(status.message.find("TIEREDCKPT_LIBCHFS") != std::string::npos);
  options.library = "libm.so.6";
  const Status wrong = Client::Connect(options, &client);
  CHECK_CODE(wrong, Code::kUnavailable);
  CHECK(wrong.message.find("chfs_init") != std::string::npos);
}

// Every object of many is told as unavailable, and none as missing or short, whatever server it was on.
void ExpectUnavailable(Client& client, const std::string& root) {
  for (int i = 0; i < 12; ++i) {
    const std::string path = root + "/" + std::to_string(i);
    Info info;
    File file;
    CHECK_CODE(client.Stat(path + "-none", &info), Code::kUnavailable);
    const Status opened = client.Open(path, &file);
    CHECK(opened.ok() || opened.code == Code::kUnavailable);
    if (!opened.ok()) continue;
    std::string bytes(3000, '\0');
    CHECK_CODE(file.Read(bytes.data(), bytes.size(), 0), Code::kUnavailable);
  }
  CHECK_CODE(client.List(root, [](const Entry&) {}), Code::kUnavailable);
  CHECK_CODE(client.CheckRing(), Code::kUnavailable);
}

TEST(objects_on_a_dead_server_are_unavailable_and_never_missing_or_short) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  for (int i = 0; i < 12; ++i) Put(*client, scene.root + "/" + std::to_string(i), RandomBytes(3000, 1), 512);
  scene.Switch(std::string(kServers) + "dead = 1");
  ExpectUnavailable(*client, scene.root);
  // A server that comes back is not in this process's ring again.
  scene.Switch(kServers);
  CHECK_CODE(client->CheckRing(), Code::kUnavailable);
}

TEST(an_open_object_on_a_hung_server_is_unavailable) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  Put(*client, scene.root + "/o", RandomBytes(3000, 1), 512);
  File file;
  CHECK_OK(client->Open(scene.root + "/o", &file));
  scene.Switch(std::string(kServers) + "hang = 2");
  std::string bytes(3000, '\0');
  CHECK_CODE(file.Read(bytes.data(), bytes.size(), 0), Code::kUnavailable);
}

TEST(a_folder_is_not_empty_because_a_server_is_silent) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  for (int i = 0; i < 12; ++i) Put(*client, scene.root + "/f/" + std::to_string(i), "1", 1);
  for (int server = 0; server < 3; ++server) {
    scene.Switch(std::string(kServers) + "dead = " + std::to_string(server));
    CHECK_CODE(client->List(scene.root + "/f", [](const Entry&) {}), Code::kUnavailable);
  }
  scene.Switch(kServers);
  CHECK(Names(*client, scene.root + "/f").size() == 12);
}

TEST(a_full_device_is_told_from_other_failures) {
  Scene scene("servers = 3\ncapacity = 4KiB");
  const auto client = scene.Connect();
  File file;
  CHECK_OK(client->Create(scene.root + "/o", 512, &file));
  const std::string bytes(64 << 10, 'x');
  CHECK_CODE(file.Write(bytes.data(), bytes.size(), 0), Code::kFull);
}

TEST(version_2_hides_a_full_device_and_the_message_says_so) {
  Scene scene("servers = 3\nversion = 2\ncapacity = 4KiB");
  const auto client = scene.Connect();
  File file;
  CHECK_OK(client->Create(scene.root + "/o", 512, &file));
  const std::string bytes(64 << 10, 'x');
  const Status status = file.Write(bytes.data(), bytes.size(), 0);
  CHECK_CODE(status, Code::kFailed);
  CHECK(status.message.find("full device") != std::string::npos);
}

TEST(a_short_read_of_libchfs_is_asked_on_and_a_failing_chunk_is_an_error) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  const std::string bytes = RandomBytes(3000, 1);
  Put(*client, scene.root + "/o", bytes, 512);
  scene.Switch(std::string(kServers) + "short.pread = 1");
  CHECK(Get(*client, scene.root + "/o") == bytes);
  scene.Switch(std::string(kServers) + "fail.pread = *:EIO");
  File file;
  CHECK_OK(client->Open(scene.root + "/o", &file));
  std::string read(3000, '\0');
  CHECK_CODE(file.Read(read.data(), read.size(), 0), Code::kFailed);
}

TEST(a_forked_child_is_refused_and_does_not_hang) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  File file;
  CHECK_OK(client->Create(scene.root + "/o", 1, &file));
  const pid_t child = fork();
  if (child == 0) {
    Info info;
    const bool refused = client->Stat(scene.root + "/o", &info).code == Code::kUnavailable &&
                         file.Write("x", 1, 0).code == Code::kUnavailable;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
