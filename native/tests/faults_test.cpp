// How the client reports servers that die, hang, fill up or fail; the look-alike plays them.
#include <dlfcn.h>

#include <functional>
#include <future>
#include <set>
#include <thread>
#include <vector>

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

TEST(objects_of_a_ring_that_grew_are_unavailable_and_never_missing_or_short) {
  Scene scene("servers = 3\nlate = 1 2");
  const auto client = scene.Connect();
  CHECK(client->servers() == 1);
  for (int i = 0; i < 12; ++i) Put(*client, scene.root + "/" + std::to_string(i), RandomBytes(3000, 1), 512);
  CHECK_OK(client->CheckRing());
  scene.Switch(kServers);
  ExpectUnavailable(*client, scene.root);
  const Status status = client->CheckRing();
  CHECK(status.message.find("is now one of 3") != std::string::npos);
  CHECK(status.message.find("/servers/1, ") != std::string::npos && status.message.find("joined") != std::string::npos);
}

TEST(a_list_of_a_ring_that_grew_is_unavailable) {
  Scene scene("servers = 3\nlate = 1 2");
  const auto client = scene.Connect();
  for (int i = 0; i < 12; ++i) Put(*client, scene.root + "/" + std::to_string(i), "1", 1);
  scene.Switch(kServers);
  CHECK_CODE(client->List(scene.root, [](const Entry&) {}), Code::kUnavailable);
}

TEST(a_list_of_many_folders_of_a_ring_that_grew_is_unavailable_at_its_end) {
  Scene scene("servers = 3\nlate = 1 2");
  const auto client = scene.Connect();
  for (int i = 0; i < 12; ++i) Put(*client, scene.root + "/" + std::to_string(i), "1", 1);
  scene.Switch(kServers);
  CHECK_OK(client->ListOneOfMany(scene.root, [](const Entry&) {}));
  CHECK_CODE(client->CheckRing(), Code::kUnavailable);
  CHECK_CODE(client->ListOneOfMany(scene.root, [](const Entry&) {}), Code::kUnavailable);
}

TEST(a_process_that_finds_more_or_fewer_servers_than_wrote_is_told_so) {
  for (const char* others : {"late = 0", "late = 1", "late = 2", "late = 1 2"}) {
    Scene scene(std::string(kServers) + others);
    const pid_t writer = Fork([&] {
      const auto client = scene.Connect();
      CHECK_OK(client->Record());
      Put(*client, scene.root + "/o", RandomBytes(3000, 1), 512);
      CHECK_OK(client->Record());
    });
    CHECK(Wait(writer) == 0);
    const pid_t reader = Fork([&] { CHECK_OK(scene.Connect()->CheckRecord(scene.root)); });
    CHECK(Wait(reader) == 0);
    scene.Switch(kServers);
    const pid_t other = Fork([&] {
      const auto client = scene.Connect();
      const Status status = client->CheckRecord(scene.root);
      CHECK_CODE(status, Code::kUnavailable);
      CHECK(status.message.find("there are 3 servers") != std::string::npos);
      CHECK_CODE(client->Record(), Code::kUnavailable);
    });
    CHECK(Wait(other) == 0);
  }
}

TEST(a_store_that_went_on_with_more_servers_is_found_in_their_folder_alone) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  for (int i = 0; i < 32; ++i) CHECK_OK(client->MakeFolder(scene.root + "/~ring/3~" + std::to_string(i)));
  for (const std::string& path : {scene.root, scene.root + "/steps/1", scene.root + "/~33"}) {
    const Status status = client->CheckRecord(path);
    CHECK_CODE(status, Code::kUnavailable);
    CHECK(status.message.find("lies in " + scene.root + "/~3,") != std::string::npos);
  }
  CHECK_OK(client->CheckRecord(scene.root + "/~3"));
  CHECK_OK(client->CheckRecord(scene.root + "/~3/steps/1"));
}

TEST(entries_of_a_record_that_is_being_written_count_for_nothing) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  for (const char* entry : {"3-1", "5+1", "5+2", "5~1"}) CHECK_OK(client->MakeFolder(scene.root + "/~ring/" + entry));
  CHECK_OK(client->CheckRecord(scene.root + "/steps"));
}

TEST(a_silent_server_is_waited_for_once_by_all_who_record) {
  Scene scene(kServers);
  scene.options.rpc_timeout_ms = 1000;
  const auto client = scene.Connect();
  scene.Switch(std::string(kServers) + "hang = 1");
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) threads.emplace_back([&] { CHECK_CODE(client->Record(), Code::kSilent); });
  for (auto& thread : threads) thread.join();
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

TEST(a_record_that_is_known_is_not_asked_for_again_while_another_is_written) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  CHECK_OK(client->CheckRecord(scene.root));
  scene.Switch(std::string(kServers) + "hang.mkdir = *");
  auto record = std::async(std::launch::async, [&] { return client->Record(); });
  while (!std::filesystem::exists(scene.directory() + "/hanging")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  auto check = std::async(std::launch::async, [&] { return client->CheckRecord(scene.root); });
  const bool blocked = check.wait_for(std::chrono::seconds(10)) != std::future_status::ready;
  scene.Switch(kServers);
  CHECK_OK(check.get());
  CHECK_OK(record.get());
  CHECK(!blocked);
}

TEST(the_number_of_servers_is_not_recorded_while_others_join) {
  Scene scene("servers = 3\nlate = 1 2");
  const auto client = scene.Connect();
  scene.Switch(kServers);
  CHECK_CODE(client->Record(), Code::kUnavailable);
}

TEST(a_server_that_does_not_answer_is_told_by_its_address) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  CHECK(client->addresses().size() == 3);
  scene.Switch(std::string(kServers) + "hang = 1");
  const Status status = client->CheckRing();
  CHECK_CODE(status, Code::kSilent);
  CHECK(status.message.find("server 2 of 3 at " + client->addresses()[1]) != std::string::npos);
}

TEST(an_object_of_one_chunk_is_removed_in_one_request) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  Put(*client, scene.root + "/o", "1", 512);
  scene.Switch(std::string(kServers) + "fail.truncate = *:EIO");
  CHECK_OK(client->Remove(scene.root + "/o"));
  Info info;
  CHECK_CODE(client->Stat(scene.root + "/o", &info), Code::kMissing);
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
    CHECK_CODE(client->List(scene.root + "/f", [](const Entry&) {}), Code::kSilent);
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

TEST(a_full_device_is_found_though_the_server_does_not_tell_it_from_other_failures) {
  Scene scene("servers = 3\nversion = 2\ncapacity = 4KiB");
  const auto client = scene.Connect();
  File file;
  CHECK_OK(client->Create(scene.root + "/o", 512, &file));
  const std::string bytes(64 << 10, 'x');
  const Status status = file.Write(bytes.data(), bytes.size(), 0);
  CHECK_CODE(status, Code::kFull);
  CHECK(status.message.find("full device") != std::string::npos);
}

TEST(servers_with_a_back_end_are_refused_before_anything_is_put) {
  Scene scene(std::string(kServers) + "backend = 1\n");
  const auto client = scene.Connect();
  File file;
  for (const Status& status : {client->Create(scene.root + "/a", 512, &file), client->MakeFolder(scene.root + "/b")}) {
    CHECK_CODE(status, Code::kUnavailable);
    CHECK(status.message.find("chfsd -b") != std::string::npos);
  }
  Info info;
  CHECK_CODE(client->Stat(scene.root, &info), Code::kMissing);
  scene.Switch(kServers);
  Put(*client, scene.root + "/a", "abc", 512);
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

TEST(the_size_of_an_object_of_full_chunks_is_right_or_unavailable) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  for (int i = 0; i < 12; ++i) Put(*client, scene.root + "/" + std::to_string(i), RandomBytes(3 * 512, 1), 512);
  scene.Switch(std::string(kServers) + "hang = 1");
  for (int i = 0; i < 12; ++i) {
    Info info;
    const Status status = client->Stat(scene.root + "/" + std::to_string(i), &info);
    CHECK(status.ok() ? info.size == 3 * 512 : status.code == Code::kUnavailable);
  }
}

// `make` is held up by `hang` after it made sure of its folder; the folder goes away meanwhile.
void ExpectListed(const char* hang, const std::function<void(Client&, const std::string&)>& make) {
  constexpr int kFolders = 8;
  Scene scene(std::string(kServers) + hang + " = *");
  const auto folder = [&](int i) { return scene.root + "/f" + std::to_string(i); };
  const pid_t remover = Fork([&] {
    const auto client = scene.Connect();
    for (int i = 0; i < kFolders; ++i) {
      for (Status status; (status = client->RemoveFolder(folder(i))).code != Code::kOk;) {
        CHECK_CODE(status, Code::kMissing);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  });
  const auto client = scene.Connect();
  std::vector<std::thread> threads;
  for (int i = 0; i < kFolders; ++i) threads.emplace_back([&, i] { make(*client, folder(i) + "/o"); });
  CHECK(Wait(remover) == 0);
  scene.Switch(kServers);
  for (auto& thread : threads) thread.join();
  CHECK(Names(*client, scene.root).size() == kFolders);
}

TEST(an_object_is_listed_though_its_folder_was_removed_while_it_was_made) {
  ExpectListed("hang.create", [](Client& client, const std::string& path) { Put(client, path, "1", 1); });
}

TEST(a_link_is_listed_though_its_folder_was_removed_while_it_was_made) {
  ExpectListed("hang.symlink", [](Client& client, const std::string& path) { CHECK_OK(client.Link("1", path)); });
}

// The sleeps below give a broken client the time to go wrong; a right one passes with any other order as well.
constexpr std::chrono::milliseconds kAhead{60};

TEST(an_object_is_listed_though_its_folder_was_seen_empty_and_removed_after) {
  constexpr int kFolders = 8;
  Scene scene(std::string(kServers) + "delay.rmdir = 150");  // in which the object comes
  const auto folder = [&](int i) { return scene.root + "/f" + std::to_string(i); };
  Gate made;
  Gate begun;
  const pid_t remover = Fork([&] {
    made.Pass();
    const auto client = scene.Connect();
    begun.Open();
    std::vector<std::thread> threads;
    for (int i = 0; i < kFolders; ++i) {
      threads.emplace_back([&, i] { CHECK(client->RemoveFolder(folder(i)).code != Code::kUnavailable); });
    }
    for (auto& thread : threads) thread.join();
  });
  const auto client = scene.Connect();
  for (int i = 0; i < kFolders; ++i) CHECK_OK(client->MakeFolder(folder(i)));
  made.Open();
  begun.Pass();
  std::this_thread::sleep_for(kAhead);
  for (int i = 0; i < kFolders; ++i) Put(*client, folder(i) + "/o", "1", 1);
  CHECK(Wait(remover) == 0);
  CHECK(Names(*client, scene.root).size() == kFolders);
}

TEST(a_folder_is_listed_though_its_parent_was_removed_while_it_was_made) {
  constexpr int kFolders = 8;
  Scene scene(kServers);
  const auto folder = [&](int i) { return scene.root + "/f" + std::to_string(i); };
  Gate begun;
  const pid_t remover = Fork([&] {
    begun.Pass();
    const auto client = scene.Connect();
    for (int i = 0; i < kFolders; ++i) CHECK_OK(client->RemoveFolder(folder(i)));
  });
  const auto client = scene.Connect();
  for (int i = 0; i < kFolders; ++i) CHECK_OK(client->MakeFolder(folder(i)));
  scene.Switch(std::string(kServers) + "hang.mkdir = *");
  std::vector<std::thread> threads;
  for (int i = 0; i < kFolders; ++i) {
    threads.emplace_back([&, i] { CHECK_OK(client->MakeFolder(folder(i) + "/g")); });
  }
  std::this_thread::sleep_for(kAhead);
  begun.Open();
  CHECK(Wait(remover) == 0);
  scene.Switch(kServers);
  for (auto& thread : threads) thread.join();
  CHECK(Names(*client, scene.root).size() == kFolders);
}

TEST(a_check_of_the_ring_does_not_take_over_the_result_of_an_earlier_one) {
  Scene scene(kServers);
  scene.options.rpc_timeout_ms = 500;
  const auto client = scene.Connect();
  scene.Switch(std::string(kServers) + "hang = 2");
  std::thread earlier([&] { (void)client->CheckRing(); });
  std::this_thread::sleep_for(kAhead);  // it has asked the first server
  scene.Switch(std::string(kServers) + "hang = 0 2");
  std::thread later([&] { CHECK_CODE(client->CheckRing(), Code::kSilent); });
  std::this_thread::sleep_for(kAhead);
  scene.Switch(std::string(kServers) + "hang = 0");
  earlier.join();
  later.join();
}

// The objects, of 0 to 47 of the scene, whose first chunk lies on a server with these switches.
std::set<std::string> ObjectsOn(Scene& scene, int server, const std::string& switches) {
  scene.Switch(switches);
  const pid_t writer = Fork([&] {
    const auto client = scene.Connect();
    for (int i = 0; i < 48; ++i) Put(*client, scene.root + "/" + std::to_string(i), "1", 1);
  });
  CHECK(Wait(writer) == 0);
  std::set<std::string> names;
  const std::string folders = scene.directory() + "/servers/";
  for (const auto& entry : std::filesystem::directory_iterator(folders + std::to_string(server) + scene.root)) {
    names.insert(entry.path().filename().string());
  }
  for (const char* each : {"0", "1", "2"}) std::filesystem::remove_all(folders + each + scene.root);
  return names;
}

TEST(an_eviction_is_not_hidden_by_a_look_at_the_ring_of_another_thread) {
  Scene scene(kServers);
  scene.options.rpc_timeout_ms = 1500;
  // An object that is on server 1, and looked for on server 2 once server 1 has left the ring.
  const std::set<std::string> next = ObjectsOn(scene, 2, std::string(kServers) + "dead = 1");
  std::string path;
  for (const std::string& name : ObjectsOn(scene, 1, kServers)) {
    if (next.count(name) != 0) path = scene.root + "/" + name;
  }
  CHECK(!path.empty());
  const auto client = scene.Connect();
  Put(*client, path, "1", 1);
  const auto size = reinterpret_cast<int (*)()>(dlsym(dlopen(LOOKALIKE, RTLD_NOW | RTLD_NOLOAD), "chfs_size"));
  const auto wait_for = [&](int servers, int most_ms) {
    for (int ms = 0; ms < most_ms && size() != servers; ++ms) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  scene.Switch(std::string(kServers) + "hang = 1 2");
  auto stat = std::async(std::launch::async, [&] {
    Info info;
    return client->Stat(path, &info);
  });
  std::this_thread::sleep_for(5 * kAhead);
  scene.Switch(std::string(kServers) + "hang = 0 1 2");
  auto look = std::async(std::launch::async, [&] { return client->CheckRing(); });  // asks server 0 for the ring
  wait_for(2, 10'000);  // the call has evicted server 1, and asks server 2, where it will find nothing
  scene.Switch(std::string(kServers) + "hang = 1 2");
  wait_for(3, 200);  // server 0 has given a broken client the whole ring again
  scene.Switch(kServers);
  CHECK_CODE(stat.get(), Code::kUnavailable);
  CHECK_CODE(look.get(), Code::kUnavailable);
}

TEST(a_forked_child_is_refused_and_does_not_hang) {
  Scene scene(kServers);
  const auto client = scene.Connect();
  File file;
  CHECK_OK(client->Create(scene.root + "/o", 1, &file));
  CHECK(Wait(Fork([&] {
    Info info;
    CHECK_CODE(client->Stat(scene.root + "/o", &info), Code::kUnavailable);
    CHECK_CODE(file.Write("x", 1, 0), Code::kUnavailable);
  })) == 0);
}

}  // namespace
