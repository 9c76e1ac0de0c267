// What the look-alike plays and how it fails on command (testing/README.md), asked through its C interface.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <set>
#include <thread>

#include "scene.hpp"

namespace {

using namespace tieredckpt::chfs;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

using Filler = int (*)(void*, const char*, const struct stat*, off_t);

// Loaded here and not connected: a case may fork before it connects, and never after.
template <typename Function>
Function* Of(const char* symbol) {
  static void* const library = dlopen(LOOKALIKE, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  void* const found = dlsym(library, symbol);
  CHECK(found != nullptr);
  return reinterpret_cast<Function*>(found);
}

const auto init = Of<int(const char*)>("chfs_init");
const auto term = Of<int()>("chfs_term");
const auto ring_size = Of<int()>("chfs_size");
const auto version = Of<const char*()>("chfs_version");
const auto set_timeout = Of<void(int)>("chfs_set_rpc_timeout_msec");
const auto create = Of<int(const char*, std::int32_t, mode_t, int)>("chfs_create_chunk_size");
const auto open_object = Of<int(const char*, std::int32_t)>("chfs_open");
const auto close_object = Of<int(int)>("chfs_close");
const auto pwrite_object = Of<ssize_t(int, const void*, std::size_t, off_t)>("chfs_pwrite");
const auto pread_object = Of<ssize_t(int, void*, std::size_t, off_t)>("chfs_pread");
const auto truncate_object = Of<int(const char*, off_t)>("chfs_truncate");
const auto unlink_object = Of<int(const char*)>("chfs_unlink");
const auto make_folder = Of<int(const char*, mode_t)>("chfs_mkdir");
const auto remove_folder = Of<int(const char*)>("chfs_rmdir");
const auto stat_object = Of<int(const char*, struct stat*)>("chfs_stat");
const auto list = Of<int(const char*, void*, Filler)>("chfs_readdir");
const auto list_server = Of<int(const char*, int, void*, Filler)>("chfs_readdir_index");
const auto make_link = Of<int(const char*, const char*)>("chfs_symlink");
const auto read_link = Of<int(const char*, char*, std::size_t)>("chfs_readlink");
const auto address_of = Of<char*(int)>("ring_list_lookup_index");
const auto learn_ring = Of<int(const char*)>("ring_list_rpc_node_list");

constexpr int kTimeoutMs = 40;
constexpr mode_t kNotOwned = mode_t{1} << 30;

void Connect(const Scene& scene) {
  set_timeout(kTimeoutMs);
  CHECK(init(scene.options.server.c_str()) == 0);
}

void Write(const char* path, const std::string& bytes, int chunk_size) {
  const int file = create(path, O_RDWR, 0600, chunk_size);
  CHECK(file >= 0);
  CHECK(pwrite_object(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  CHECK(close_object(file) == 0);
}

// Reads at most `size` bytes from `offset` on; returns "(missing)" or "(failed)" if that fails.
std::string Read(const char* path, off_t offset = 0, std::size_t size = 4096) {
  std::string bytes(size, '\0');
  const int file = open_object(path, O_RDONLY);
  const ssize_t got = file < 0 ? -1 : pread_object(file, bytes.data(), size, offset);
  if (got < 0) return errno == ENOENT ? "(missing)" : "(failed)";
  CHECK(close_object(file) == 0);
  return bytes.substr(0, static_cast<std::size_t>(got));
}

off_t SizeOf(const char* path) {
  struct stat info {};
  return stat_object(path, &info) == 0 ? info.st_size : -1;
}

// The files below the servers' folders with this name; one per chunk.
std::vector<std::filesystem::path> FilesNamed(const Scene& scene, const std::string& name) {
  std::vector<std::filesystem::path> found;
  const std::string folder = scene.options.server.substr(std::strlen("directory:"));
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder + "/servers")) {
    if (entry.path().filename() == name) found.push_back(entry.path());
  }
  return found;
}

using Listing = std::map<std::string, mode_t>;

int Collect(void* listing, const char* name, const struct stat* info, off_t) {
  if (name[0] != '.') (*static_cast<Listing*>(listing))[name] = info->st_mode;
  return 0;
}

// The wait status of a process that does this and exits with 0.
int StatusOf(const std::function<void()>& run) {
  return Wait(Fork([&] {
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    for (const int number : {SIGSEGV, SIGFPE}) signal(number, SIG_DFL);
    CHECK(freopen("/dev/null", "w", stderr) != nullptr);
    run();
  }));
}

bool Exits(int code, const std::function<void()>& run) {
  const int status = StatusOf(run);
  return WIFEXITED(status) && WEXITSTATUS(status) == code;
}

bool DiesOf(int number, const std::function<void()>& run) {
  const int status = StatusOf(run);
  return WIFSIGNALED(status) && WTERMSIG(status) == number;
}

TEST(lookalike_create_over_an_object_lets_its_old_chunks_show_through) {
  const Scene scene;
  Connect(scene);
  Write("/o", "aaaabbbbcc", 4);
  Write("/o", "x", 4);
  CHECK(Read("/o") == "x" && SizeOf("/o") == 1);
  Write("/o", "xxxx", 4);
  CHECK(Read("/o") == "xxxxbbbbcc" && SizeOf("/o") == 10);
}

TEST(lookalike_an_object_ends_where_a_chunk_is_missing_and_reads_end_short) {
  const Scene scene;
  Connect(scene);
  Write("/o", "aaaabbbbccccd", 4);
  CHECK(Read("/o", 2, 7) == "aabbbbc");
  CHECK(Read("/o", 13) == "" && Read("/o", 1000) == "");
  for (const auto& chunk : FilesNamed(scene, "o:2")) std::filesystem::remove(chunk);
  CHECK(SizeOf("/o") == 8);
  CHECK(Read("/o") == "aaaabbbb");
  CHECK(Read("/o", 12) == "d");
  CHECK(unlink_object("/o") == 0);  // which stops at the hole
  CHECK(FilesNamed(scene, "o:1").empty() && FilesNamed(scene, "o:3").size() == 1);
  CHECK(Read("/o") == "(missing)" && unlink_object("/o") == -1 && errno == ENOENT);
}

TEST(lookalike_truncate_shrinks_and_neither_grows_nor_cuts_at_the_end) {
  const Scene scene;
  Connect(scene);
  Write("/o", "aaaabbbbcccc", 4);
  CHECK(truncate_object("/o", 20) == -1 && errno == ENOENT);
  CHECK(truncate_object("/o", 12) == -1 && errno == ENOENT);
  CHECK(truncate_object("/o", 6) == 0 && Read("/o") == "aaaabb");
  CHECK(truncate_object("/o", 4) == 0 && Read("/o") == "aaaa");
  CHECK(truncate_object("/o", 0) == 0 && Read("/o") == "" && SizeOf("/o") == 0);
  CHECK(truncate_object("/none", 0) == -1 && errno == ENOENT);
}

TEST(lookalike_a_descriptor_makes_an_unlinked_object_anew) {
  const Scene scene;
  Connect(scene);
  const int file = create("/o", O_RDWR, 0600, 4);
  CHECK(unlink_object("/o") == 0);
  CHECK(pwrite_object(file, "bytes", 5, 0) == 5);
  CHECK(Read("/o") == "bytes");
}

TEST(lookalike_paths_fold_and_colons_are_accepted_but_not_listed) {
  const Scene scene;
  Connect(scene);
  Write("//a/./b/../c", "bytes", 8);
  CHECK(Read("/a/c") == "bytes" && Read("a//c/.") == "bytes");
  Write("/a/x:1", "chunk", 8);
  CHECK(Read("/a/x:1") == "chunk");
  Listing listing;
  CHECK(list("/a", &listing, Collect) == 0);
  CHECK(listing.size() == 1 && listing.count("c") == 1);
  std::string deep;
  for (int i = 0; i < 51; ++i) deep += "/d";
  CHECK(SizeOf(deep.c_str()) == -1 && errno == ENAMETOOLONG);
}

TEST(lookalike_one_of_many_processes_and_threads_gets_a_link) {
  const Scene scene;
  constexpr int kRounds = 20;
  int results[2];
  CHECK(pipe(results) == 0);
  std::vector<pid_t> processes;
  for (int process = 0; process < 3; ++process) {
    processes.push_back(Fork([&] {
      Connect(scene);
      const auto race = [&] {
        for (int round = 0; round < kRounds; ++round) {
          const char won = static_cast<char>(round);
          const std::string path = "/claim" + std::to_string(round);
          const bool mine = make_link("target", path.c_str()) == 0;
          CHECK(mine || errno == EEXIST);
          if (mine) CHECK(write(results[1], &won, 1) == 1);
        }
      };
      std::thread other(race);
      race();
      other.join();
    }));
  }
  for (const pid_t process : processes) CHECK(Wait(process) == 0);
  close(results[1]);
  std::multiset<int> won;
  for (char round; read(results[0], &round, 1) == 1;) won.insert(round);
  CHECK(won.size() == kRounds && std::set<int>(won.begin(), won.end()).size() == kRounds);
  Connect(scene);
  char target[16];
  CHECK(read_link("/claim0", target, sizeof target) == 6 && std::memcmp(target, "target", 6) == 0);
  CHECK(read_link("/claim0", target, 3) == 3);
}

TEST(lookalike_listings_never_fail_and_mark_what_a_server_does_not_own) {
  const Scene scene;
  Connect(scene);
  std::set<std::string> expected;
  for (int i = 0; i < 9; ++i) {
    const std::string name = "o" + std::to_string(i);
    Write(("/f/" + name).c_str(), "aaaabb", 4);
    expected.insert(name);
  }
  Listing all;
  CHECK(list("/f", &all, Collect) == 0 && all.size() == expected.size());
  CHECK(make_folder("/g", 0700) == 0);
  std::set<std::string> owned;
  int owners_of_g = 0;
  for (int server = 0; server < ring_size(); ++server) {
    Listing folder;
    CHECK(list_server("/f", server, &folder, Collect) == 0);
    for (const auto& [name, mode] : folder) {
      if ((mode & kNotOwned) == 0) CHECK(owned.insert(name).second);
    }
    Listing root;
    CHECK(list_server("/", server, &root, Collect) == 0);
    owners_of_g += root.count("g") == 1 && (root["g"] & kNotOwned) == 0;
  }
  CHECK(owned == expected && owners_of_g == 1);
  Listing none;
  CHECK(list("/none", &none, Collect) == 0 && list("/f/o1", &none, Collect) == 0 && none.empty());
  CHECK(list_server("/", 17, &none, Collect) == 0 && none.empty());
  CHECK(remove_folder("/none") == -1 && errno == ENOENT);
}

TEST(lookalike_implied_folders_are_marked_on_servers_that_do_not_own_them) {
  const Scene scene;
  Connect(scene);
  int hidden = 0;
  for (int i = 0; i < 12; ++i) Write(("/f" + std::to_string(i) + "/o").c_str(), "1", 4);
  Listing listed;
  CHECK(list("/", &listed, Collect) == 0);
  for (int server = 0; server < 3; ++server) {
    Listing root;
    CHECK(list_server("/", server, &root, Collect) == 0);
    for (const auto& [name, mode] : root) {
      CHECK(listed.count(name) == 1 || (mode & kNotOwned) != 0);
      hidden += listed.count(name) == 0;
    }
  }
  CHECK(hidden > 0 && listed.size() < 12);
}

TEST(lookalike_a_dead_server_leaves_the_ring_of_metadata_calls_and_fails_payload) {
  Scene scene;
  Connect(scene);
  std::vector<int> files;
  for (int i = 0; i < 9; ++i) files.push_back(create(("/o" + std::to_string(i)).c_str(), O_RDWR, 0600, 64));
  scene.Switch("dead = 1");
  int lost = 0;
  for (const int file : files) {
    const auto start = Clock::now();
    const bool failed = pwrite_object(file, "1", 1, 0) < 0;
    if (failed) CHECK(errno == ENOTCONN && Clock::now() - start >= milliseconds(kTimeoutMs));
    lost += failed;
  }
  CHECK(lost > 0 && lost < 9);
  CHECK(ring_size() == 3);  // payload drops no server
  int missing = 0;
  for (int i = 0; i < 9; ++i) missing += SizeOf(("/o" + std::to_string(i)).c_str()) < 0 && errno == ENOENT;
  CHECK(missing > 0 && ring_size() == 2);
  scene.Switch("");
  CHECK(ring_size() == 2);  // for this client, for good
  CHECK(Exits(0, [&] {  // whose own connection cannot be had again; a new process has the whole ring
    const char* other = "lookalike_paths_fold_and_colons_are_accepted_but_not_listed";
    execl("/proc/self/exe", "native_tests", "--one", other, nullptr);
  }));
}

TEST(lookalike_a_server_that_joins_takes_objects_over_that_stay_where_they_are) {
  Scene scene("servers = 3\nlate = 1 2");
  Connect(scene);
  CHECK(ring_size() == 1);
  for (int i = 0; i < 12; ++i) Write(("/o" + std::to_string(i)).c_str(), "aaaabbbb", 4);
  scene.Switch("");
  CHECK(ring_size() == 1);  // until it looks anew
  int whole = 0;
  for (int i = 0; i < 12; ++i) whole += Read(("/o" + std::to_string(i)).c_str()) == "aaaabbbb";
  CHECK(whole == 0);  // the second chunk of each is looked for on another server
  Listing all;
  CHECK(list_server("/", 0, &all, Collect) == 0);
  CHECK(all.size() == 12);
  Write("/new", "aaaabbbb", 4);
  CHECK(Read("/new") == "aaaabbbb");
  char* first = address_of(0);
  CHECK(first != nullptr && learn_ring(first) == 0);
  char* second = address_of(1);
  CHECK(second != nullptr && address_of(3) == nullptr);
  free(first);
  free(second);
  CHECK(ring_size() == 3);
  CHECK(Read("/new") == "aaaabbbb");  // it went where the servers have it
}

TEST(lookalike_a_server_comes_back_without_its_data) {
  Scene scene;
  Connect(scene);
  for (int i = 0; i < 12; ++i) Write(("/o" + std::to_string(i)).c_str(), "a", 4);
  scene.Switch("empty = 1");
  int missing = 0;
  for (int i = 0; i < 12; ++i) missing += Read(("/o" + std::to_string(i)).c_str()) == "(missing)";
  CHECK(missing > 0 && missing < 12);
  CHECK(ring_size() == 3);
  scene.Switch("");
  for (int i = 0; i < 12; ++i) CHECK(Read(("/o" + std::to_string(i)).c_str()) == "a");
}

TEST(lookalike_a_hung_server_answers_when_it_goes_on_in_time) {
  Scene scene;
  set_timeout(20'000);
  CHECK(init(scene.options.server.c_str()) == 0);
  Write("/o", "aaaabbbbcccc", 4);
  scene.Switch("hang = 0 1 2");
  std::atomic<bool> done{false};
  std::thread reader([&] {
    CHECK(Read("/o") == "aaaabbbbcccc");
    done = true;
  });
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(!done);
  scene.Switch("");
  reader.join();
  CHECK(ring_size() == 3);
}

TEST(lookalike_capacity_is_reported_as_each_version_does) {
  for (const auto& [played, error] : {std::pair{"3", ENOSPC}, {"2", EPERM}}) {
    CHECK(Exits(0, [&, played = played, error = error] {
      Scene scene(std::string("capacity = 1KiB\nversion = ") + played);
      Connect(scene);
      CHECK(version()[0] == played[0]);
      const int file = create("/o", O_RDWR, 0600, 4096);
      const std::string bytes(1024, 'x');
      CHECK(pwrite_object(file, bytes.data(), 1024, 0) == 1024);
      CHECK(pwrite_object(file, bytes.data(), 1024, 0) == 1024);  // nothing grows
      CHECK(pwrite_object(file, bytes.data(), 1, 1024) == -1 && errno == error);
      CHECK(SizeOf("/o") == 1024);
    }));
  }
}

TEST(lookalike_calls_fail_wait_and_fall_short_when_told) {
  Scene scene;
  Connect(scene);
  Write("/o", "12345678", 4096);
  scene.Switch("fail.stat = 2:EIO");
  CHECK(SizeOf("/o") == 8);
  CHECK(SizeOf("/o") == -1 && errno == EIO);
  CHECK(SizeOf("/o") == 8);
  scene.Switch("fail.any = 2+:EROFS");
  CHECK(SizeOf("/o") == 8);
  for (int i = 0; i < 2; ++i) CHECK(unlink_object("/o") == -1 && errno == EROFS);
  scene.Switch("short.pread = 1");
  CHECK(Read("/o", 0, 8) == "1234");
  CHECK(Read("/o", 0, 8) == "12345678");
  scene.Switch("delay.stat = 30");
  const auto start = Clock::now();
  CHECK(SizeOf("/o") == 8 && Clock::now() - start >= milliseconds(30));
  scene.Switch("hang.stat = 1");
  std::atomic<bool> done{false};
  std::thread waiting([&] {
    CHECK(SizeOf("/o") == 8);
    done = true;
  });
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(!done);
  scene.Switch("");
  waiting.join();
}

TEST(lookalike_processes_end_when_told_and_where_libchfs_would_end_them) {
  Scene scene;
  const auto after = [&](const std::string& switches, const std::function<void()>& run) {
    return [&scene, switches, run] {
      scene.Switch("");  // not those of the process before
      Connect(scene);
      scene.Switch(switches);
      run();
    };
  };
  const auto look = [] { (void)SizeOf("/o"); };
  CHECK(Exits(1, after("exit.stat = 1", look)));
  CHECK(Exits(7, after("exit.stat = *:7", look)));
  CHECK(Exits(0, after("exit.stat = 2", look)));
  CHECK(Exits(2, after("crashh.stat = 1", look)));
  CHECK(Exits(2, after("fail.stat = 1:ENONSENSE", look)));
  CHECK(DiesOf(SIGSEGV, after("crash.stat = 1", look)));
  CHECK(DiesOf(SIGSEGV, after("", [] { close_object(5); })));
  CHECK(DiesOf(SIGSEGV, look));  // before init
  CHECK(DiesOf(SIGFPE, after("", [] {
    CHECK(make_link("target", "/link") == 0);
    (void)Read("/link");
  })));
}

TEST(lookalike_init_ends_the_process_when_it_finds_no_server) {
  Scene scene;
  CHECK(setenv("CHFS_SERVER", "", 1) == 0);
  CHECK(Exits(2, [] { init(nullptr); }));
  CHECK(Exits(2, [] { init("ofi+tcp://127.0.0.1:1"); }));
  CHECK(Exits(2, [&] { Connect(scene), term(), init(scene.options.server.c_str()); }));
  CHECK(Exits(0, [&] { Connect(scene), Connect(scene); }));
  CHECK(Exits(0, [&] {
    CHECK(setenv("CHFS_SERVER", (scene.options.server + ",directory:/other").c_str(), 1) == 0);
    CHECK(init(nullptr) == 0);
    CHECK(getenv("CHFS_SERVER") == scene.options.server);
  }));
  scene.Switch("dead = 0 1 2");
  CHECK(Exits(2, [&] { Connect(scene); }));
  scene.Switch("dead = 1\nhang = 0 2");
  CHECK(Exits(2, [&] { Connect(scene); }));
  scene.Switch("dead = 1\nhang = 0");
  CHECK(Exits(0, [&] {
    Connect(scene);
    CHECK(ring_size() == 2);
  }));
  const Scene foreign;
  std::ofstream(foreign.options.server.substr(std::strlen("directory:")) + "/letter") << "of somebody";
  CHECK(Exits(2, [&] { Connect(foreign); }));
}

TEST(lookalike_calls_hang_after_fork) {
  const Scene scene;
  Connect(scene);
  const pid_t child = Fork([] { (void)SizeOf("/o"); });
  std::this_thread::sleep_for(milliseconds(100));
  int status = -1;
  CHECK(waitpid(child, &status, WNOHANG) == 0);
  CHECK(kill(child, SIGKILL) == 0 && Wait(child) == SIGKILL);
}

}  // namespace
