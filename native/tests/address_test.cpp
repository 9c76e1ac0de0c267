#include "chfs/address.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.hpp"

namespace {

using namespace tieredckpt::chfs;

TEST(hosts_and_ports_are_found_in_tcp_addresses_alone) {
  Endpoint endpoint;
  CHECK(ParseEndpoint("ofi+tcp;ofi_rxm://127.0.0.1:4000", &endpoint));
  CHECK(endpoint.host == "127.0.0.1" && endpoint.port == "4000");
  CHECK(ParseEndpoint("ofi+sockets://node7:80", &endpoint));
  CHECK(endpoint.host == "node7" && endpoint.port == "80");
  CHECK(ParseEndpoint("tcp://[::1]:80", &endpoint));
  CHECK(endpoint.host == "::1");
  for (const char* other : {"na+sm://12-0", "ofi+verbs;ofi_rxm://10.0.0.1:4000", "directory:/tmp/a", "ofi+tcp://node",
                            "ofi+tcp://:80", "ofi+tcp://node:", "ofi+tcp://node:x", ""}) {
    CHECK(!ParseEndpoint(other, &endpoint));
  }
}

TEST(the_first_server_that_listens_is_taken_and_none_is_an_error_that_names_them) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in local{};
  local.sin_family = AF_INET;
  local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof local;
  CHECK(bind(fd, reinterpret_cast<sockaddr*>(&local), sizeof local) == 0);
  CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0);
  const std::string bound = "ofi+tcp;ofi_rxm://127.0.0.1:" + std::to_string(ntohs(local.sin_port));
  std::string found;
  const Status refused = FirstAnswering({bound}, 2000, &found);
  CHECK_CODE(refused, Code::kSilent);
  CHECK(refused.message.find(bound) != std::string::npos);
  const int listening = socket(AF_INET, SOCK_STREAM, 0);
  local.sin_port = 0;
  CHECK(bind(listening, reinterpret_cast<sockaddr*>(&local), sizeof local) == 0);
  CHECK(listen(listening, 1) == 0);
  CHECK(getsockname(listening, reinterpret_cast<sockaddr*>(&local), &length) == 0);
  const std::string up = "ofi+tcp;ofi_rxm://127.0.0.1:" + std::to_string(ntohs(local.sin_port));
  CHECK_OK(FirstAnswering(SplitAddresses(bound + "," + up), 2000, &found));
  CHECK(found == up);
  close(fd);
  close(listening);
}

}  // namespace
