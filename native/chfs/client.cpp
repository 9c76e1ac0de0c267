#include "chfs/client.hpp"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "chfs/address.hpp"
#include "chfs/state.hpp"

namespace tieredckpt::chfs {
namespace {

// libchfs reads these at init, where they override its setters.
void SetEnvironment(const Options& options) {
  setenv("CHFS_BUF_SIZE", "0", 1);      // a buffer drops the errors of its flush
  setenv("CHFS_ASYNC_ACCESS", "0", 1);  // asynchronous reads may leave garbage behind a missing chunk
  // Otherwise libchfs may end the process when, 120 s later, no server answers its question for the ring.
  setenv("CHFS_NODE_LIST_CACHE_TIMEOUT", "0", 1);
  setenv("CHFS_RPC_TIMEOUT_MSEC", std::to_string(options.rpc_timeout_ms).c_str(), 1);
}

Status CheckOptions(const Options& options) {
  if (options.rpc_timeout_ms <= 0) return {Code::kInvalid, "CHFS: the RPC timeout must be above 0 ms"};
  if (options.bytes_per_call == 0) return {Code::kInvalid, "CHFS: the bytes per call must be above 0"};
  return {};
}

// The options, with values of the environment for those that are not given.
Options Resolved(Options options) {
  const auto take = [](std::string* value, const char* variable) {
    const char* configured = value->empty() ? getenv(variable) : nullptr;
    if (configured != nullptr) *value = configured;
  };
  take(&options.server, "CHFS_SERVER");
  take(&options.library, "TIEREDCKPT_LIBCHFS");
  return options;
}

// The first address: chfs_init removes the others from CHFS_SERVER.
std::string FirstOf(const std::string& servers) {
  const std::vector<std::string> addresses = SplitAddresses(servers);
  return addresses.empty() ? std::string() : addresses.front();
}

}  // namespace

Status Client::Connect(const Options& options, std::shared_ptr<Client>* client) {
  // Never destroyed: libchfs cannot be ended while threads may use it, and cannot be initialized again.
  static std::mutex mutex;
  static auto& connection = *new std::shared_ptr<Client>;

  const std::lock_guard<std::mutex> lock(mutex);  // racing calls of chfs_init end the process
  if (Status status = CheckOptions(options); !status.ok()) return status;
  const Options asked = Resolved(options);
  if (connection != nullptr) {
    const Options& first = connection->state_->options;
    if (FirstOf(asked.server) == FirstOf(first.server) &&
        (asked.library == first.library || asked.library == connection->library())) {
      *client = connection;
      return connection->state_->Usable();
    }
    return {Code::kInvalid, "CHFS: this process is connected to '" + first.server + "' through '" +
                                connection->library() + "' and can have no other connection, as to '" + asked.server +
                                "' through '" + asked.library + "'; use another process"};
  }
  if (asked.server.empty()) {
    return {Code::kUnavailable, "CHFS: no server is named; give the tier's `server`, or set CHFS_SERVER"};
  }
  std::string server;
  const int look_ms = std::min(options.rpc_timeout_ms, kLongestLookMs);
  if (Status status = FirstAnswering(SplitAddresses(asked.server), look_ms, &server); !status.ok()) return status;
  Library library;
  if (Status status = LoadLibrary(asked.library, &library); !status.ok()) return status;
  SetEnvironment(options);
  int result = 0;
  {
    const SignalGuard signals;
    result = library.init(server.c_str());
  }
  auto state = std::make_unique<State>();
  state->library = library;
  state->options = asked;
  state->servers = library.size();
  state->process = getpid();
  state->addresses = state->AddressesNow();
  if (result != 0 || state->servers <= 0) {
    return {Code::kUnavailable, "CHFS: libchfs could not connect to " + server + "; see that the server runs"};
  }
  // The first call to a lost server would take a whole RPC timeout. The caller tries again in another process.
  if (Status status = state->Reachable(); !status.ok()) return status;
  connection.reset(new Client(std::move(state)));
  *client = connection;
  return {};
}

Client::Client(std::unique_ptr<State> state) : state_(std::move(state)) {}
Client::~Client() = default;

const std::string& Client::version() const { return state_->library.version; }
const std::string& Client::library() const { return state_->library.path; }
int Client::servers() const { return state_->servers; }
const std::vector<std::string>& Client::addresses() const { return state_->addresses; }
Status Client::CheckRing() { return state_->CheckRing(); }

}  // namespace tieredckpt::chfs
