// A test runner in one header: cases register themselves, a failed check ends its case.
#pragma once

#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

namespace tieredckpt::testing {

using Case = void (*)();

inline std::map<std::string, Case>& Cases() {
  static std::map<std::string, Case> cases;
  return cases;
}

struct Registration {
  Registration(const char* name, Case run) { Cases()[name] = run; }
};

[[noreturn]] inline void Fail(const char* file, int line, const std::string& what) {
  std::cerr << file << ":" << line << ": " << what << "\n";
  std::_Exit(1);
}

}  // namespace tieredckpt::testing

#define TEST(name)                                                               \
  static void name();                                                            \
  static const ::tieredckpt::testing::Registration registered_##name(#name, name); \
  static void name()

#define CHECK(condition) \
  ((condition) ? void() : ::tieredckpt::testing::Fail(__FILE__, __LINE__, "not so: " #condition))

// `expression` gives a Status.
#define CHECK_CODE(expression, expected)                                                                   \
  do {                                                                                                     \
    const ::tieredckpt::chfs::Status checked_ = (expression);                                              \
    if (checked_.code != (expected))                                                                       \
      ::tieredckpt::testing::Fail(__FILE__, __LINE__,                                                      \
                                  #expression " gave code " + std::to_string(static_cast<int>(checked_.code)) + \
                                      " and not " #expected ": " + checked_.message);                      \
  } while (false)

#define CHECK_OK(expression) CHECK_CODE(expression, ::tieredckpt::chfs::Code::kOk)
