#include "chfs/keys.hpp"

#include <algorithm>
#include <cstddef>

namespace tieredckpt::chfs {
namespace {

constexpr std::size_t kLongestPiece = 200;  // leaves room for ":<index>", which CHFS adds
constexpr std::size_t kMostFolders = 12;    // of a key's slashes; CHFS bounds the depth of paths
constexpr char kJoin[] = "%+";              // ends a component that the next one continues without a slash
constexpr char kEmpty[] = "%-";

constexpr std::size_t kLongestComponent = 240;
constexpr std::size_t kMostLevels = 22;

constexpr char kDigits[] = "0123456789ABCDEF";

void AppendEscaped(char c, std::string* out) {
  const auto byte = static_cast<unsigned char>(c);
  *out += '%';
  *out += kDigits[byte >> 4];
  *out += kDigits[byte & 15];
}

int DigitOf(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// `raw` may hold slashes, which then belong to the component.
std::string EncodeComponent(std::string_view raw) {
  if (raw.empty()) return kEmpty;
  const bool dots = raw == "." || raw == "..";
  std::string out;
  std::size_t piece = 0;  // where the current one begins
  for (const char c : raw) {
    const auto byte = static_cast<unsigned char>(c);
    const bool unsafe = c == ':' || c == '%' || c == '/' || byte < 0x20 || byte == 0x7F || dots;
    if (out.size() - piece + (unsafe ? 3 : 1) > kLongestPiece) {
      out += kJoin;
      out += '/';
      piece = out.size();
    }
    if (unsafe) {
      AppendEscaped(c, &out);
    } else {
      out += c;
    }
  }
  // A piece after the first may be "." or "..", where a long component was cut.
  const std::string last = out.substr(piece);
  if (last == "." || last == "..") {
    out.resize(piece);
    for (const char c : last) AppendEscaped(c, &out);
  }
  return out;
}

// Undoes EncodeComponent for one piece; leaves it to the caller to refuse what EncodeKey would not have made.
bool DecodePiece(std::string_view piece, std::string* key) {
  for (std::size_t i = 0; i < piece.size(); ++i) {
    if (piece[i] != '%') {
      *key += piece[i];
      continue;
    }
    if (i + 2 >= piece.size()) return false;
    const int high = DigitOf(piece[i + 1]);
    const int low = DigitOf(piece[i + 2]);
    if (high < 0 || low < 0) return false;
    *key += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return true;
}

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// The parts between slashes; one more than there are slashes.
template <typename Function>
bool ForEachPart(std::string_view text, Function function) {
  for (std::size_t begin = 0;;) {
    const std::size_t end = std::min(text.find('/', begin), text.size());
    if (!function(text.substr(begin, end - begin), end == text.size())) return false;
    if (end == text.size()) return true;
    begin = end + 1;
  }
}

Status Refuse(std::string_view path, const std::string& reason) {
  constexpr std::size_t kShown = 120;
  std::string shown(path.substr(0, kShown));
  if (path.size() > kShown) shown += "...";
  return {Code::kInvalid, "CHFS cannot hold the path '" + shown + "': " + reason};
}

}  // namespace

std::string EncodeKey(std::string_view key) {
  std::string path;
  for (std::size_t folders = 0;; ++folders) {
    const std::size_t slash = folders < kMostFolders ? key.find('/') : std::string_view::npos;
    path += EncodeComponent(key.substr(0, slash));
    if (slash == std::string_view::npos) return path;
    path += '/';
    key.remove_prefix(slash + 1);
  }
}

bool DecodeKey(std::string_view path, std::string* key) {
  std::string decoded;
  const bool ok = ForEachPart(path, [&](std::string_view piece, bool last) {
    const bool joined = EndsWith(piece, kJoin);
    if (joined) piece.remove_suffix(sizeof kJoin - 1);
    if (piece != kEmpty && !DecodePiece(piece, &decoded)) return false;
    if (!joined && !last) decoded += '/';
    return true;
  });
  // A key has one path: another path that decodes to the key is refused.
  if (!ok || EncodeKey(decoded) != path) return false;
  *key = std::move(decoded);
  return true;
}

Status CheckPath(std::string_view path) {
  if (path.empty() || path[0] != '/') return Refuse(path, "it is not absolute");
  if (path.size() >= kPathLimit) return Refuse(path, "it has 4096 bytes or more");
  if (path.size() == 1) return {};
  std::size_t levels = 0;
  std::string reason;
  ForEachPart(path.substr(1), [&](std::string_view part, bool) {
    ++levels;
    if (part.empty()) {
      reason = "a component is empty";
    } else if (part == "." || part == "..") {
      reason = "'.' and '..' are not resolved";
    } else if (part.size() > kLongestComponent) {
      reason = "a component has more than 240 bytes";
    } else if (part.find(':') != std::string_view::npos || part.find('\0') != std::string_view::npos) {
      reason = "CHFS keeps ':' and NUL for itself";
    } else if (levels > kMostLevels) {
      reason = "it has more than 22 levels";
    }
    return reason.empty();
  });
  return reason.empty() ? Status{} : Refuse(path, reason);
}

}  // namespace tieredckpt::chfs
