// The client while every server is alive; the tests also pass with a real CHFS (TEST_CHFS_SERVER).
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "scene.hpp"

namespace {

using namespace tieredckpt::chfs;
using Strings = std::vector<std::string>;

TEST(what_was_written_is_read_back_whole_and_in_ranges) {
  Scene scene;
  scene.options.bytes_per_call = 1000;
  const auto client = scene.Connect();
  for (const std::size_t size : {0, 1, 511, 512, 513, 40 * 512, 40 * 512 + 7}) {
    const std::string bytes = RandomBytes(size, static_cast<unsigned>(size));
    Put(*client, scene.root + "/a/b", bytes, 512);
    CHECK(Get(*client, scene.root + "/a/b") == bytes);
    Info info;
    CHECK_OK(client->Stat(scene.root + "/a/b", &info));
    CHECK(info.kind == Kind::kObject && info.size == size && info.chunk_size == 512 && info.mtime_ns > 0);
    File file;
    CHECK_OK(client->Open(scene.root + "/a/b", &file));
    std::string part(size / 3, '\0');
    CHECK_OK(file.Read(part.data(), part.size(), size / 2));
    CHECK(part == bytes.substr(size / 2, size / 3));
    char beyond[2];
    CHECK_CODE(file.Read(beyond, 2, size == 0 ? 0 : size - 1), Code::kShort);
  }
}

TEST(a_replaced_object_shows_nothing_of_the_old_one) {
  Scene scene("servers = 3\ntail.ms = 30");
  const auto client = scene.Connect();
  const std::string path = scene.root + "/object";
  unsigned seed = 0;
  for (const auto& [size, chunk] : {std::pair<std::size_t, std::uint32_t>{40 * 512, 512}, {100, 4096}, {30 * 256, 256},
                                    {5 * 1024, 1024}, {0, 64}, {64 * 20, 64}}) {
    const std::string bytes = RandomBytes(size, ++seed);
    Put(*client, path, bytes, chunk);
    CHECK(Get(*client, path) == bytes);
  }
  // Chunks 10 and up of a removed object must be gone before a new one may have them.
  for (int i = 0; i < 5; ++i) {
    const std::string bytes = RandomBytes(40 * 512, ++seed);
    Put(*client, path, bytes, 512);
    CHECK_OK(client->Remove(path));
    Put(*client, path, bytes, 512);
    std::this_thread::sleep_for(std::chrono::milliseconds(60));  // longer than the late removal takes
    CHECK(Get(*client, path) == bytes);
  }
}

TEST(missing_is_told_from_folder_and_link) {
  Scene scene;
  const auto client = scene.Connect();
  Put(*client, scene.root + "/folder/object", "bytes", 5);
  CHECK_OK(client->Link("target", scene.root + "/link"));
  File file;
  Info info;
  std::string target;
  CHECK_CODE(client->Open(scene.root + "/none", &file), Code::kMissing);
  CHECK_CODE(client->Stat(scene.root + "/none", &info), Code::kMissing);
  CHECK_CODE(client->Stat(scene.root + "/folder/object/below", &info), Code::kMissing);
  CHECK_CODE(client->Remove(scene.root + "/none"), Code::kMissing);
  CHECK_CODE(client->RemoveFolder(scene.root + "/none"), Code::kMissing);
  CHECK_CODE(client->ReadLink(scene.root + "/none", &target), Code::kMissing);
  CHECK_CODE(client->Open(scene.root + "/folder", &file), Code::kInvalid);
  CHECK_CODE(client->Open(scene.root + "/link", &file), Code::kInvalid);
  CHECK_CODE(client->Create(scene.root + "/folder", 5, &file), Code::kInvalid);
  CHECK_CODE(client->Create(scene.root + "/folder/object/below", 5, &file), Code::kInvalid);
  CHECK_CODE(client->Remove(scene.root + "/folder"), Code::kInvalid);
  CHECK_CODE(client->ReadLink(scene.root + "/folder/object", &target), Code::kInvalid);
  CHECK_CODE(client->MakeFolder(scene.root + "/folder/object"), Code::kInvalid);
  CHECK_CODE(client->Create("/a:b", 5, &file), Code::kInvalid);
}

TEST(folders_list_every_entry_once_and_implied_parents_too) {
  Scene scene;
  const auto client = scene.Connect();
  CHECK(Names(*client, scene.root + "/none").empty());
  Strings expected;
  for (char c = 'a'; c < 'u'; ++c) {
    expected.push_back(std::string(1, c));
    if (c % 2 == 0) {
      Put(*client, scene.root + "/" + c, RandomBytes(2000, 1), 100);
    } else {
      Put(*client, scene.root + "/" + c + "/x/y", "1", 1);
    }
  }
  CHECK(Names(*client, scene.root) == expected);
  CHECK_OK(client->List(scene.root, [](const Entry& entry) {
    CHECK(entry.kind == (entry.name[0] % 2 == 0 ? Kind::kObject : Kind::kFolder));
  }));
}

TEST(a_listing_tells_the_first_chunk_and_the_time_of_an_object) {
  Scene scene;
  const auto client = scene.Connect();
  Put(*client, scene.root + "/f/one", RandomBytes(2000, 1), 4096);
  Put(*client, scene.root + "/f/two", RandomBytes(2000, 2), 1024);
  Put(*client, scene.root + "/f/empty", "", 1024);
  const auto check = [&](const Entry& entry) {
    Info info;
    CHECK_OK(client->Stat(scene.root + "/f/" + entry.name, &info));
    CHECK(entry.first_chunk == std::min<std::uint64_t>(info.size, info.chunk_size));
    CHECK(entry.mtime_ns == info.mtime_ns && entry.mtime_ns > 0);
  };
  CHECK_OK(client->List(scene.root + "/f", check));
  CHECK_OK(client->ListOneOfMany(scene.root + "/f", check));
}

TEST(a_folder_goes_only_when_it_is_empty_and_is_listed_when_used_again) {
  Scene scene;
  const auto client = scene.Connect();
  const std::string folder = scene.root + "/f";
  for (char c = 'a'; c < 'g'; ++c) Put(*client, folder + "/" + c, "1", 1);
  CHECK_CODE(client->RemoveFolder(folder), Code::kExists);
  for (char c = 'a'; c < 'g'; ++c) CHECK_OK(client->Remove(folder + "/" + c));
  CHECK_OK(client->RemoveFolder(folder));
  CHECK(Names(*client, scene.root).empty());
  for (char c = 'a'; c < 'g'; ++c) Put(*client, folder + "/" + c, "1", 1);
  CHECK(Names(*client, scene.root) == Strings{"f"});
  CHECK(Names(*client, folder).size() == 6);
}

TEST(folders_that_another_process_removed_are_made_again) {
  constexpr int kFolders = 24;
  Scene scene;
  const auto folder = [&](int i) { return scene.root + "/f" + std::to_string(i); };
  Gate ready;
  const pid_t remover = Fork([&] {
    ready.Pass();
    const auto client = scene.Connect();
    for (int i = 0; i < kFolders; ++i) {
      CHECK_OK(client->RemoveFolder(folder(i) + "/g"));
      CHECK_OK(client->RemoveFolder(folder(i)));
    }
  });
  const auto client = scene.Connect();
  for (int i = 0; i < kFolders; ++i) {
    Put(*client, folder(i) + "/g/o", "1", 1);
    CHECK_OK(client->Remove(folder(i) + "/g/o"));
  }
  ready.Open();
  CHECK(Wait(remover) == 0);
  CHECK(Names(*client, scene.root).empty());
  for (int i = 0; i < kFolders; ++i) {
    if (i % 3 == 0) Put(*client, folder(i) + "/g/o", "1", 1);
    if (i % 3 == 1) CHECK_OK(client->Link("1", folder(i) + "/g/o"));
    if (i % 3 == 2) CHECK_OK(client->MakeFolder(folder(i) + "/g/o"));
  }
  CHECK(Names(*client, scene.root).size() == kFolders);
  for (int i = 0; i < kFolders; ++i) {
    CHECK(Names(*client, folder(i)) == Strings{"g"});
    CHECK(Names(*client, folder(i) + "/g") == Strings{"o"});
  }
}

TEST(ranges_that_no_file_offset_can_name_are_invalid) {
  Scene scene;
  const auto client = scene.Connect();
  File file;
  CHECK_OK(client->Create(scene.root + "/o", 512, &file));
  char byte = 0;
  for (const std::uint64_t offset : {std::uint64_t{INT64_MAX}, std::uint64_t{1} << 63, UINT64_MAX}) {
    CHECK_CODE(file.Write(&byte, 1, offset), Code::kInvalid);
    CHECK_CODE(file.Read(&byte, 1, offset), Code::kInvalid);
  }
}

TEST(one_of_many_claims_of_a_link_wins) {
  Scene scene;
  const auto client = scene.Connect();
  for (int round = 0; round < 10; ++round) {
    const std::string path = scene.root + "/claim" + std::to_string(round);
    std::atomic<int> winner{-1};
    std::atomic<int> winners{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        const Status status = client->Link(std::string(4000, static_cast<char>('a' + i)), path);
        CHECK(status.ok() || status.code == Code::kExists);
        if (status.ok()) winner = i, ++winners;
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(winners == 1);
    std::string target;
    CHECK_OK(client->ReadLink(path, &target));
    CHECK(target == std::string(4000, static_cast<char>('a' + winner)));
  }
  CHECK_CODE(client->Link("", scene.root + "/empty"), Code::kInvalid);
  CHECK_CODE(client->Link(std::string(4096, 'a'), scene.root + "/long"), Code::kInvalid);
}

TEST(many_threads_write_and_read_one_object) {
  Scene scene;
  const auto client = scene.Connect();
  const std::size_t part = 8 * 512;
  const std::string bytes = RandomBytes(8 * part, 1);
  File file;
  CHECK_OK(client->Create(scene.root + "/shared", 512, &file));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] { CHECK_OK(file.Write(bytes.data() + i * part, part, i * part)); });
  }
  for (auto& thread : threads) thread.join();
  CHECK_OK(file.Close());
  CHECK(Get(*client, scene.root + "/shared") == bytes);
}

TEST(at_most_64_objects_are_open_and_the_next_one_waits) {
  Scene scene;
  const auto client = scene.Connect();
  std::vector<File> files(64);
  for (std::size_t i = 0; i < 64; ++i) CHECK_OK(client->Create(scene.root + "/" + std::to_string(i), 1, &files[i]));
  std::atomic<bool> created{false};
  std::thread waiting([&] {
    File file;
    CHECK_OK(client->Create(scene.root + "/last", 1, &file));
    created = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!created);
  CHECK_OK(files[10].Close());
  waiting.join();
  CHECK_OK(files[10].Close());  // a second time is nothing
}

TEST(a_process_has_one_connection_and_keeps_its_signal_handlers) {
  struct sigaction mine {};
  mine.sa_handler = [](int) {};
  for (const int number : {SIGINT, SIGTERM, SIGSEGV, SIGABRT}) CHECK(sigaction(number, &mine, nullptr) == 0);
  Scene scene;
  const auto client = scene.Connect();
  for (const int number : {SIGINT, SIGTERM, SIGSEGV, SIGABRT}) {
    struct sigaction now {};
    CHECK(sigaction(number, nullptr, &now) == 0 && now.sa_handler == mine.sa_handler);
  }
  CHECK(scene.Connect() == client);
  Options other = scene.options;
  other.server = "directory:/elsewhere";
  std::shared_ptr<Client> second;
  CHECK_CODE(Client::Connect(other, &second), Code::kInvalid);
  CHECK(client->servers() == 3);
  CHECK(client->version()[0] == '2' || client->version()[0] == '3');
  CHECK_OK(client->CheckRing());
}

}  // namespace
