// The range of memory that planned addresses lie in, and which parts of it are in use. No torch, CUDA or Python.
//
// Whatever a plan says, two live blocks never overlap here: take() looks before it gives.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace memo {

using Stream = void*;  // opaque; null is the default stream
using Fence = void*;   // a point in a stream's queue of work

// What a device can do. The calls may come from any thread, and under a lock: they must not call back.
class Device {
 public:
  virtual ~Device() = default;
  virtual char* allocate_arena(std::uint64_t bytes) = 0;  // null where there is no memory
  virtual void free_arena(char* base) = 0;
  virtual void trim() = 0;                               // what it keeps of freed dynamic blocks goes back
  virtual Fence record(Stream stream) = 0;               // behind all work that is queued on the stream now
  virtual void wait(Stream stream, Fence fence) = 0;     // what is queued on the stream from now on runs behind the fence
  virtual void drop(Fence fence) = 0;
  virtual void synchronize() = 0;                        // all streams' work is done
};

class Arena {
 public:
  Arena(Device& device, char* base, std::uint64_t bytes) : device_(device), base_(base), bytes_(bytes) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::uint64_t bytes() const { return bytes_; }
  bool contains(const void* data) const;
  bool idle() const { return num_live_ == 0; }

  // The address of [offset, offset + bytes) for a block of this stream, or null where a live block is in the way.
  void* take(std::uint64_t offset, std::uint64_t bytes, Stream stream);

  // Ends a block and returns its bytes. Where other streams used it, its range is fenced: the next block there waits.
  // Where the streams have changed since it began, its end waits for the device.
  std::uint64_t give_back(const void* data);

  // The block is used on this stream too.
  void use(const void* data, Stream stream);

  // From now on a range may go to another stream than it was on. The work that is queued until now is done.
  void change_streams();

 private:
  struct Block {
    std::uint64_t bytes;
    Stream stream;
    bool live = true;
    bool outlived_change = false;  // of streams
    std::vector<Stream> other_streams = {};
    std::vector<Fence> fences = {};
  };
  using Blocks = std::map<std::uint64_t, Block>;  // by offset; never overlapping

  Blocks::iterator find(const void* data);
  void forget(Blocks::iterator first, Blocks::iterator last);

  Device& device_;
  char* const base_;
  const std::uint64_t bytes_;
  Blocks blocks_;
  std::uint64_t num_live_ = 0;
};

}  // namespace memo
