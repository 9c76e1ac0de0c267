#include "chfs/address.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace tieredckpt::chfs {
namespace {

// 0, or the errno of the attempt.
int TryConnect(const addrinfo& target, int timeout_ms) {
  const int fd = socket(target.ai_family, target.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, target.ai_protocol);
  if (fd < 0) return errno;
  int error = 0;
  if (connect(fd, target.ai_addr, target.ai_addrlen) != 0) error = errno;
  if (error == EINPROGRESS) {
    pollfd waiting{fd, POLLOUT, 0};
    int ready;
    do {
      ready = poll(&waiting, 1, timeout_ms);
    } while (ready < 0 && errno == EINTR);
    socklen_t length = sizeof error;
    if (ready == 0) {
      error = ETIMEDOUT;
    } else if (ready < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) {
      error = errno;
    }
  }
  close(fd);
  return error;
}

// Empty if the endpoint accepts a connection, else why not.
std::string WhyNot(const Endpoint& endpoint, int timeout_ms) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &hints, &found); error != 0) {
    return gai_strerror(error);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* target = found; target != nullptr; target = target->ai_next) {
    error = TryConnect(*target, timeout_ms);
    if (error == 0) return "";
  }
  return std::strerror(error);
}

}  // namespace

bool ParseEndpoint(const std::string& address, Endpoint* endpoint) {
  const auto scheme = address.find("://");
  if (scheme == std::string::npos) return false;
  // The ports of other transports (verbs, psm2) are not TCP's.
  const std::string transport = address.substr(0, scheme);
  if (transport.find("tcp") == std::string::npos && transport.find("sockets") == std::string::npos) return false;
  std::string host = address.substr(scheme + 3);
  const auto colon = host.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == host.size()) return false;
  const std::string port = host.substr(colon + 1);
  if (port.find_first_not_of("0123456789") != std::string::npos) return false;
  host.resize(colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  *endpoint = {host, port};
  return true;
}

std::vector<std::string> SplitAddresses(const std::string& addresses) {
  // An address without a transport is the look-alike's folder, and may hold commas.
  if (addresses.find("://") == std::string::npos) return {addresses};
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= addresses.size();) {
    const std::size_t end = std::min(addresses.find(',', begin), addresses.size());
    if (end > begin) parts.push_back(addresses.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

Status FirstAnswering(const std::vector<std::string>& addresses, int timeout_ms, std::string* address) {
  std::string reasons;
  for (const std::string& candidate : addresses) {
    Endpoint endpoint;
    std::string reason;
    if (ParseEndpoint(candidate, &endpoint)) reason = WhyNot(endpoint, timeout_ms);
    if (reason.empty()) {
      *address = candidate;
      return {};
    }
    reasons += (reasons.empty() ? "" : ", ") + candidate + " (" + reason + ")";
  }
  return {Code::kSilent, "CHFS: no server answers at " + reasons + "; start the servers, or correct the address"};
}

}  // namespace tieredckpt::chfs
