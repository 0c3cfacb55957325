// Which request of a step gets which address: plans, the cursor of each lane, statistics and the log of requests.
// No torch, CUDA or Python; a Device says how memory is had and how streams wait for each other.
//
// A request is known by its number in its lane (one phase on one stream) and by its size. Where both match the plan and
// the address is free it gets the planned address. Where not, the caller serves it dynamically: that is always correct.
#pragma once

#include "arena.hpp"
#include "c_api.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace memo {

class Core {
 public:
  explicit Core(Device& device) : device_(device) {}
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // --- Requests. The allocator that faces torch calls these around its own dynamic path. ---

  // The planned address, or null: the caller then makes a block itself and says so with note_dynamic.
  void* allocate(std::uint64_t bytes, Stream stream);
  void note_dynamic(const void* data, std::uint64_t bytes, Stream stream);

  // True where the block was at a planned address and is done with. False: the caller's own block.
  bool free_planned(const void* data);
  void note_dynamic_free(const void* data, std::uint64_t bytes);

  // True where the block is at a planned address; the rest is as for free_planned.
  bool use_on_stream(const void* data, Stream stream);

  // --- Steps and plans: what c_api.h says of each. ---

  // Throws std::invalid_argument that says what is wrong.
  std::uint32_t add_plan(const memo_planned_request* requests, std::size_t count, std::uint64_t arena_bytes);
  void clear_plans();
  void retire_arena();
  bool begin_step(std::uint32_t plan);
  void mark(std::uint32_t phase);
  void end_step();
  void release_idle();

  memo_statistics statistics();
  std::uint64_t take_peak();
  std::map<std::uint32_t, std::uint64_t> misses();

  void start_recording(std::size_t max_events);
  std::size_t stop_recording();
  void read_events(memo_event* out, std::size_t count);

  // For pthread_atfork.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Lane {
    std::vector<memo_planned_request> requests;
    std::size_t next = 0;
  };
  struct Plan {
    std::uint64_t arena_bytes;
    bool is_new;                         // no step was served from it yet
    std::vector<std::uint32_t> streams;  // ascending
    std::unordered_map<std::uint64_t, Lane> lanes;
  };

  static std::uint64_t lane_key(std::uint32_t phase, std::uint32_t stream);
  void* planned_address(std::uint64_t bytes, Stream stream);
  void count_alloc(const void* data, std::uint64_t bytes, Stream stream);
  void count_free(const void* data, std::uint64_t bytes);
  bool make_room(Plan& plan);
  void drop_idle_arenas();
  Arena* arena_of(const void* data);
  std::uint32_t stream_number(Stream stream);
  void log(std::uint32_t kind, std::uint64_t request, std::uint64_t bytes, std::uint32_t stream);

  std::mutex mutex_;
  Device& device_;
  memo_statistics counts_{};
  std::vector<std::unique_ptr<Arena>> arenas_;
  Arena* arena_ = nullptr;  // the one that plans are served from; the others wait for their blocks to end
  std::vector<std::unique_ptr<Plan>> plans_;
  Plan* plan_ = nullptr;         // of the step that is on; null: dynamic
  const Plan* last_plan_ = nullptr;
  std::uint32_t phase_ = MEMO_NO_PHASE;
  std::unordered_map<Stream, std::uint32_t> streams_;
  std::map<std::uint32_t, std::uint64_t> misses_;

  bool recording_ = false;
  std::size_t max_events_ = 0;
  std::vector<memo_event> events_;
  std::unordered_map<const void*, std::uint64_t> recorded_;  // live blocks that the log knows: number of the request
  std::uint64_t num_recorded_ = 0;
};

}  // namespace memo
