#include "chfs/keys.hpp"

#include <map>
#include <random>

#include "check.hpp"

namespace {

using namespace tieredckpt::chfs;

// Biased to what CHFS forbids or folds together, and to what the escapes are made of.
std::string RandomKey(std::mt19937& random) {
  static const std::string special = std::string("/./:%%+-.0E2A", 13) + '\0' + '\x7f' + '\xff' + "\n";
  const std::size_t lengths[] = {0, 1, 2, 3, 5, 9, 40, 198, 199, 200, 201, 202, 405, 700};
  const std::size_t length = lengths[random() % std::size(lengths)];
  const unsigned style = random() % 4;
  std::string key;
  while (key.size() < length) {
    if (style == 0) key += static_cast<char>(random() % 256);
    if (style == 1) key += special[random() % special.size()];
    if (style == 2) key += random() % 300 == 0 ? '/' : random() % 30 == 0 ? '.' : 'a';
    if (style == 3) key += random() % 3 == 0 ? '/' : '.';
  }
  return key;
}

TEST(keys_of_any_bytes_have_one_path_each_that_chfs_holds_and_come_back) {
  std::mt19937 random(1);
  std::map<std::string, std::string> keys;  // by path
  for (int i = 0; i < 60'000; ++i) {
    const std::string key = RandomKey(random);
    const std::string path = EncodeKey(key);
    CHECK_OK(CheckPath("/store/" + path));
    std::string back;
    CHECK(DecodeKey(path, &back));
    CHECK(back == key);
    CHECK(keys.emplace(path, key).first->second == key);
  }
}

TEST(a_path_that_no_key_has_is_not_decoded) {
  std::mt19937 random(2);
  for (int i = 0; i < 60'000; ++i) {
    const std::string path = RandomKey(random);
    std::string key = "untouched";
    if (DecodeKey(path, &key)) {
      CHECK(EncodeKey(key) == path);
    } else {
      CHECK(key == "untouched");
    }
  }
}

TEST(the_names_of_the_format_stay_as_they_are) {
  for (const char* key : {"tieredckpt.json", "packs/ab/0123-x_y.pack", "steps/0000001000-000007/manifest.ocdbt", "a..b"}) {
    CHECK(EncodeKey(key) == key);
  }
  CHECK(EncodeKey("a:b/../c") == "a%3Ab/%2E%2E/c");
}

TEST(paths_that_chfs_would_refuse_alias_or_cut_are_invalid) {
  const std::string long_component(241, 'a');
  std::string deep;
  for (int i = 0; i < 23; ++i) deep += "/a";
  std::string long_path;
  while (long_path.size() < 4096) long_path += "/" + std::string(230, 'a');
  for (const std::string& path :
       {std::string(), std::string("a"), std::string("//"), std::string("/a/"), std::string("/a//b"), std::string("/."),
        std::string("/a/.."), std::string("/a:0"), std::string("/a\0b", 4), "/" + long_component, deep, long_path}) {
    CHECK_CODE(CheckPath(path), Code::kInvalid);
  }
  for (const std::string& path : {std::string("/"), std::string("/.a"), "/" + long_component.substr(1), deep.substr(2)}) {
    CHECK_OK(CheckPath(path));
  }
}

}  // namespace
