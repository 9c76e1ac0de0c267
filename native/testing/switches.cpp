#include "testing/switches.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

namespace tieredckpt::lookalike {
namespace {

const std::map<std::string, int> kErrnos = {
    {"E2BIG", E2BIG},   {"EDQUOT", EDQUOT},     {"EEXIST", EEXIST},     {"EINVAL", EINVAL}, {"EIO", EIO},
    {"ENOENT", ENOENT}, {"ENOMEM", ENOMEM},     {"ENOSPC", ENOSPC},     {"EPERM", EPERM},   {"EROFS", EROFS},
    {"EUCLEAN", EUCLEAN}, {"ENOTCONN", ENOTCONN}, {"ENOTSUP", ENOTSUP}, {"EBADF", EBADF},
};

const std::set<std::string> kVerbs = {
    "any",    "init",     "create", "open",  "close", "pwrite", "pread",   "fsync",         "truncate",
    "unlink", "mkdir",    "rmdir",  "stat",  "readdir", "readdir_index", "symlink", "readlink",
};

[[noreturn]] void Refuse(const std::string& path, const std::string& line) {
  std::fprintf(stderr, "libchfs look-alike: %s: cannot understand \"%s\"; native/testing/README.md lists the switches\n",
               path.c_str(), line.c_str());
  std::_Exit(2);
}

std::string Trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

bool ToNumber(const std::string& text, long* number) {
  char* end = nullptr;
  errno = 0;
  *number = std::strtol(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0' && errno == 0 && *number >= 0;
}

bool ToBytes(std::string text, std::uint64_t* bytes) {
  unsigned shift = 0;
  for (const auto& [suffix, bits] : {std::pair{"KiB", 10u}, {"MiB", 20u}, {"GiB", 30u}}) {
    if (text.size() > 3 && text.compare(text.size() - 3, 3, suffix) == 0) {
      shift = bits;
      text = Trimmed(text.substr(0, text.size() - 3));
      break;
    }
  }
  long number = 0;
  if (!ToNumber(text, &number)) return false;
  *bytes = static_cast<std::uint64_t>(number) << shift;
  return true;
}

bool ToServers(const std::string& text, std::set<int>* servers) {
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    long number = 0;
    if (!ToNumber(word, &number)) return false;
    servers->insert(static_cast<int>(number));
  }
  return true;
}

// "3", "3+" or "*", then ":VALUE" where the action has one.
bool ToRule(const std::string& action, const std::string& text, Rule* rule) {
  long number = 0;
  if (action == "delay") {
    if (!ToNumber(text, &number)) return false;
    rule->onwards = true;
    rule->value = static_cast<int>(number);
    return true;
  }
  const auto colon = text.find(':');
  std::string when = Trimmed(text.substr(0, colon));
  const std::string value = colon == std::string::npos ? "" : Trimmed(text.substr(colon + 1));
  if (when == "*") when = "1+";
  if (!when.empty() && when.back() == '+') {
    rule->onwards = true;
    when.pop_back();
  }
  if (!ToNumber(when, &rule->first) || rule->first == 0) return false;
  if (action == "fail") {
    const auto found = kErrnos.find(value);
    if (found == kErrnos.end()) return false;
    rule->value = found->second;
    return true;
  }
  if (action == "exit") {
    if (!value.empty() && !ToNumber(value, &number)) return false;
    rule->value = value.empty() ? 1 : static_cast<int>(number);
    return true;
  }
  return value.empty() && (action == "crash" || action == "hang" || action == "short");
}

bool Apply(const std::string& key, const std::string& value, Switches* switches) {
  long number = 0;
  if (key == "dead") return ToServers(value, &switches->dead);
  if (key == "hang") return ToServers(value, &switches->hung);
  if (key == "late") return ToServers(value, &switches->late);
  if (key == "empty") return ToServers(value, &switches->empty);
  if (key == "capacity") return ToBytes(value, &switches->capacity);
  if (key == "backend") {
    switches->backend = true;
    return value == "1";
  }
  if (key == "servers" || key == "version" || key == "tail.ms") {
    if (!ToNumber(value, &number)) return false;
    if (key == "servers") switches->servers = static_cast<int>(number);
    if (key == "version") switches->version = static_cast<int>(number);
    if (key == "tail.ms") switches->tail_ms = static_cast<int>(number);
    return key == "tail.ms" || (key == "servers" ? number >= 1 && number <= 64 : number == 2 || number == 3);
  }
  const auto dot = key.find('.');
  if (dot == std::string::npos || kVerbs.count(key.substr(dot + 1)) == 0) return false;
  Rule& rule = switches->rules.emplace_back();
  rule.action = key.substr(0, dot);
  rule.verb = key.substr(dot + 1);
  return ToRule(rule.action, value, &rule);
}

std::shared_ptr<const Switches> Parse(const std::string& path) {
  auto switches = std::make_shared<Switches>();
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::string text = Trimmed(line.substr(0, line.find('#')));
    if (text.empty()) continue;
    const auto equals = text.find('=');
    if (equals == std::string::npos ||
        !Apply(Trimmed(text.substr(0, equals)), Trimmed(text.substr(equals + 1)), switches.get())) {
      Refuse(path, line);
    }
  }
  return switches;
}

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_ino == b.st_ino && a.st_size == b.st_size && a.st_mtim.tv_sec == b.st_mtim.tv_sec &&
         a.st_mtim.tv_nsec == b.st_mtim.tv_nsec && a.st_ctim.tv_sec == b.st_ctim.tv_sec &&
         a.st_ctim.tv_nsec == b.st_ctim.tv_nsec;
}

}  // namespace

std::shared_ptr<const Switches> SwitchFile::Read() {
  struct stat now {};
  if (::stat(path_.c_str(), &now) != 0) now = {};
  const std::lock_guard lock(guards_parsed_);
  if (!parsed_ || !SameFile(now, seen_)) {
    parsed_ = now.st_ino == 0 ? std::make_shared<const Switches>() : Parse(path_);
    seen_ = now;
  }
  return parsed_;
}

}  // namespace tieredckpt::lookalike
