// The addresses of CHFS servers, and a look at one that cannot end the process.
#pragma once

#include <string>
#include <vector>

#include "chfs/client.hpp"

namespace tieredckpt::chfs {

// The host and port that a TCP transport's address names ("ofi+tcp;ofi_rxm://10.0.0.1:4000", "tcp://[::1]:80").
struct Endpoint {
  std::string host;
  std::string port;
};

// False for addresses of other transports, and for what has no host and port at its end.
bool ParseEndpoint(const std::string& address, Endpoint* endpoint);

// Splits a list of addresses at its commas, as CHFS_SERVER holds it.
std::vector<std::string> SplitAddresses(const std::string& addresses);

// The first of `addresses` that accepts a TCP connection, or that cannot be asked; kSilent if none does.
Status FirstAnswering(const std::vector<std::string>& addresses, int timeout_ms, std::string* address);

}  // namespace tieredckpt::chfs
