// Runs the cases that are named, or all; each in a process of its own. `--list` prints their names.
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "check.hpp"

namespace {

using tieredckpt::testing::Cases;

// exec, because a process that only forks is no place for libchfs.
bool RunAlone(const std::string& name) {
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "native_tests", "--one", name.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return false;
  const bool ok = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  std::cout << (ok ? "ok     " : "FAILED ") << name << std::endl;
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 2 && arguments[0] == "--one") {
    alarm(60);
    Cases().at(arguments[1])();
    return 0;
  }
  if (arguments == std::vector<std::string>{"--list"}) {
    for (const auto& [name, run] : Cases()) std::cout << name << "\n";
    return 0;
  }
  if (arguments.empty()) {
    for (const auto& [name, run] : Cases()) arguments.push_back(name);
  }
  bool ok = true;
  for (const std::string& name : arguments) {
    if (Cases().count(name) == 0) {
      std::cerr << "no case " << name << "\n";
      ok = false;
    } else {
      ok = RunAlone(name) && ok;
    }
  }
  return ok ? 0 : 1;
}
