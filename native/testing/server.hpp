// One server of the look-alike: a folder in which every chunk of every object is a file of its own.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tieredckpt::lookalike {

struct ChunkInfo {
  struct stat host {};           // of the file; st_size counts the payload alone
  std::uint32_t chunk_size = 0;  // 0 for folders and links
};

struct ServerEntry {
  std::string name;
  struct stat host {};
};

// Paths are relative and normal. Every method gives 0 or the host's errno, and may be called from any thread.
class Server {
 public:
  explicit Server(int folder) : folder_(folder) {}

  int Create(const std::string& path, mode_t mode, std::uint32_t chunk_size) const;
  // Clips at `chunk_size`; makes the chunk, and its folders, when it is not there. `capacity` 0 is none.
  int Write(const std::string& path, int index, mode_t mode, std::uint32_t chunk_size, const void* data,
            std::size_t size, std::uint64_t offset, std::uint64_t capacity, std::size_t* written) const;
  // Clips at the chunk's own size.
  int Read(const std::string& path, int index, void* data, std::size_t size, std::uint64_t offset,
           std::size_t* read) const;
  int Stat(const std::string& path, int index, ChunkInfo* info) const;
  int Truncate(const std::string& path, int index, std::uint64_t size) const;
  // A file or link, or a folder that holds nothing but folders.
  int Remove(const std::string& path, int index) const;
  int MakeFolder(const std::string& path, mode_t mode) const;
  int MakeLink(const std::string& target, const std::string& path) const;
  int ReadLink(const std::string& path, char* buffer, std::size_t size, std::size_t* length) const;
  int List(const std::string& path, std::vector<ServerEntry>* entries) const;

 private:
  int MakeParents(const std::string& path) const;

  int folder_;  // open for the life of the process
};

}  // namespace tieredckpt::lookalike
