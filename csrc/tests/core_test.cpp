// The core against hand-made plans, and random steps against a reference that knows which bytes are in use.

#include "../core.hpp"
#include "check.hpp"

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

using memo::Core;
using memo::Fence;
using memo::Stream;

// Host memory, and a log of what the core asks of streams.
struct TestDevice final : memo::Device {
  char* allocate_arena(std::uint64_t bytes) override {
    if (fail) return nullptr;
    ++arenas;
    ++made;
    return static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  }
  void free_arena(char* base) override {
    --arenas;
    std::free(base);
  }
  Fence record(Stream stream) override {
    ++fences;
    return new Stream(stream);
  }
  void wait(Stream stream, Fence fence) override { waits.emplace_back(stream, *static_cast<Stream*>(fence)); }
  void drop(Fence fence) override {
    --fences;
    delete static_cast<Stream*>(fence);
  }
  void trim() override { ++trimmed; }
  void synchronize() override { ++synchronized; }

  bool fail = false;
  int arenas = 0, made = 0, trimmed = 0, fences = 0, synchronized = 0;
  std::vector<std::pair<Stream, Stream>> waits;
};

Stream stream(std::uintptr_t number) { return reinterpret_cast<Stream>(number); }

constexpr std::uint64_t K = 1024;

std::uint32_t add(Core& core, const std::vector<memo_planned_request>& requests, std::uint64_t arena) {
  return core.add_plan(requests.data(), requests.size(), arena);
}

void requests_get_their_addresses_in_every_step() {
  TestDevice device;
  Core core(device);
  const auto plan = add(core, {{0, 0, 100, 0}, {0, 0, 200, K}, {1, 0, 300, 2 * K}}, 4 * K);
  char* base = nullptr;
  for (int step = 0; step < 3; ++step) {
    CHECK(core.begin_step(plan));
    CHECK(core.allocate(100, nullptr) == nullptr);  // before the first mark
    core.mark(0);
    auto* const a = static_cast<char*>(core.allocate(100, nullptr));
    auto* const b = static_cast<char*>(core.allocate(200, nullptr));
    core.mark(1);
    auto* const c = static_cast<char*>(core.allocate(300, nullptr));
    CHECK(a != nullptr && b == a + K && c == a + 2 * K);
    if (step > 0) CHECK(a == base);
    base = a;
    CHECK(core.free_planned(a) && core.free_planned(b) && core.free_planned(c));
    core.end_step();
    CHECK(core.allocate(100, nullptr) == nullptr);  // evaluation between steps
  }
  const auto counts = core.statistics();
  CHECK(counts.num_planned == 9 && counts.num_outside == 6 && counts.num_missed == 0 && counts.num_conflicts == 0);
  CHECK(counts.live_bytes == 0 && counts.peak_bytes == 600 && counts.planned_bytes == 1800);
  CHECK(counts.arena_bytes == 4 * K && device.made == 1 && device.trimmed == 1);
}

void one_request_too_many_moves_nothing() {
  TestDevice device;
  Core core(device);
  const auto plan = add(core, {{0, 0, 100, 0}, {0, 0, 200, K}, {0, 0, 300, 2 * K}}, 4 * K);
  core.begin_step(plan);
  core.mark(0);
  CHECK(core.allocate(100, nullptr) != nullptr);
  CHECK(core.allocate(777, nullptr) == nullptr);
  CHECK(core.allocate(200, nullptr) != nullptr && core.allocate(300, nullptr) != nullptr);
  CHECK(core.allocate(300, nullptr) == nullptr);  // behind the end of the lane
  CHECK(core.misses().at(0) == 2 && core.statistics().num_missed == 2);
}

void requests_left_out_are_skipped() {
  TestDevice device;
  Core core(device);
  const auto plan = add(core, {{0, 0, 100, 0}, {0, 0, 200, K}, {0, 0, 300, 2 * K}, {1, 0, 400, 0}}, 4 * K);
  core.begin_step(plan);
  core.mark(0);
  auto* const late = static_cast<char*>(core.allocate(300, nullptr));
  CHECK(late != nullptr);
  CHECK(core.allocate(100, nullptr) == nullptr);  // its turn has passed
  core.mark(1);
  CHECK(core.allocate(400, nullptr) == late - 2 * K);
  core.mark(0);
  CHECK(core.misses().at(0) == 1);
}

void live_blocks_never_overlap() {
  TestDevice device;
  Core core(device);
  // Wrong on purpose: all four lie on each other.
  const auto plan = add(core, {{0, 0, 4 * K, 0}, {0, 0, K, K}, {0, 0, 2 * K, 3 * K}, {0, 0, K, 0}}, 8 * K);
  core.begin_step(plan);
  core.mark(0);
  void* const first = core.allocate(4 * K, nullptr);
  CHECK(first != nullptr);
  CHECK(core.allocate(K, nullptr) == nullptr && core.allocate(2 * K, nullptr) == nullptr);
  CHECK(core.statistics().num_conflicts == 2 && core.misses().at(0) == 2);
  CHECK(core.free_planned(first));
  CHECK(core.allocate(K, nullptr) == first);
}

void blocks_may_outlive_steps_plans_and_the_arena() {
  TestDevice device;
  Core core(device);
  const auto small = add(core, {{0, 0, 100, 0}, {0, 0, 100, 512}}, K);
  const auto large = add(core, {{0, 0, 5000, 0}}, 8 * K);
  core.begin_step(small);
  core.mark(0);
  void* const kept = core.allocate(100, nullptr);
  core.end_step();
  core.release_idle();
  CHECK(device.arenas == 1);  // not idle
  core.begin_step(small);
  core.mark(0);
  CHECK(core.allocate(100, nullptr) == nullptr && core.statistics().num_conflicts == 1);
  CHECK(core.allocate(100, nullptr) != nullptr);
  core.begin_step(large);
  core.mark(0);
  void* const big = core.allocate(5000, nullptr);
  CHECK(big != nullptr && device.arenas == 2);
  CHECK(core.free_planned(kept));
  CHECK(device.arenas == 2);  // the other block of the small arena lives
  core.begin_step(small);     // served from the large arena
  core.mark(0);
  CHECK(core.allocate(100, nullptr) == nullptr);
  core.end_step();
  core.clear_plans();
  CHECK(device.arenas == 2 && !core.begin_step(small) && core.begin_step(MEMO_NO_PLAN));
  CHECK(core.free_planned(big));
  CHECK(device.arenas == 1);
}

void a_retired_arena_is_out_of_the_way() {
  TestDevice device;
  Core core(device);
  const auto plan = add(core, {{0, 0, 100, 0}}, K);
  core.begin_step(plan);
  core.mark(0);
  void* const stays = core.allocate(100, nullptr);
  core.retire_arena();
  CHECK(core.allocate(100, nullptr) == nullptr);  // until the next step
  core.begin_step(plan);
  core.mark(0);
  void* const data = core.allocate(100, nullptr);
  CHECK(data != nullptr && data != stays && device.arenas == 2 && core.statistics().arena_bytes == 2 * K);
  CHECK(core.free_planned(stays));
  CHECK(device.arenas == 1);
  CHECK(core.free_planned(data));
  CHECK(device.arenas == 1);
  core.end_step();
  core.retire_arena();
  CHECK(device.arenas == 0);
}

void no_memory_for_the_arena_means_dynamic() {
  TestDevice device;
  Core core(device);
  const auto plan = add(core, {{0, 0, 100, 0}}, K);
  device.fail = true;
  CHECK(!core.begin_step(plan));
  core.mark(0);
  CHECK(core.allocate(100, nullptr) == nullptr);
  device.fail = false;
  CHECK(core.begin_step(plan));
  core.mark(0);
  void* const data = core.allocate(100, nullptr);
  CHECK(data != nullptr && core.free_planned(data));
  core.release_idle();
  CHECK(device.arenas == 1);  // a planned step is on
  core.end_step();
  core.release_idle();
  CHECK(device.arenas == 0 && core.statistics().arena_bytes == 0);
  CHECK(core.begin_step(plan) && device.arenas == 1);
}

void other_streams_are_waited_for_when_the_address_is_used_again() {
  TestDevice device;
  Core core(device);
  const auto plan = add(core, {{0, 0, 100, 0}, {0, 0, 100, 512}, {1, 0, 600, 0}, {0, 1, 50, K}}, 2 * K);
  core.allocate(1, stream(0));  // numbers the streams: 0 is the main one
  core.begin_step(plan);
  core.mark(0);
  void* const a = core.allocate(100, stream(0));
  void* const b = core.allocate(100, stream(0));
  void* const c = core.allocate(50, stream(7));
  CHECK(a != nullptr && b != nullptr && c != nullptr);
  CHECK(core.use_on_stream(a, stream(7)) && core.use_on_stream(a, stream(7)) && core.use_on_stream(b, stream(9)));
  CHECK(core.use_on_stream(c, stream(7)));  // its own
  int elsewhere = 0;
  CHECK(!core.use_on_stream(&elsewhere, stream(7)));
  CHECK(core.free_planned(a) && core.free_planned(b) && core.free_planned(c));
  CHECK(device.fences == 2 && device.waits.empty());
  core.mark(1);
  CHECK(core.allocate(600, stream(0)) == a);
  const std::vector<std::pair<Stream, Stream>> expected = {{stream(0), stream(7)}, {stream(0), stream(9)}};
  CHECK(device.waits == expected && device.fences == 0);
}

void streams_are_numbered_when_they_are_first_seen() {
  TestDevice device;
  Core core(device);
  const auto plan = add(core, {{0, 0, 100, 0}, {0, 1, 100, 512}}, K);
  CHECK(core.allocate(1, stream(7)) == nullptr);  // before any step
  core.begin_step(plan);
  core.mark(0);
  auto* const second = static_cast<char*>(core.allocate(100, stream(0)));
  auto* const first = static_cast<char*>(core.allocate(100, stream(7)));
  CHECK(first != nullptr && second == first + 512);
}

void a_change_of_plan_synchronizes_many_streams() {
  TestDevice device;
  Core core(device);
  const auto one = add(core, {{0, 0, 100, 0}}, K);
  const auto other = add(core, {{0, 0, 100, 512}}, K);
  const auto two = add(core, {{0, 0, 100, 0}, {0, 1, 100, 512}}, K);
  for (const auto plan : {one, other, one}) core.begin_step(plan);
  CHECK(device.synchronized == 0);
  for (const auto plan : {two, two, one}) core.begin_step(plan);
  CHECK(device.synchronized == 2);
  const auto side = add(core, {{0, 1, 100, 0}}, K);  // one stream, and another than before
  for (const auto plan : {side, side, one}) core.begin_step(plan);
  CHECK(device.synchronized == 4);
  core.mark(0);
  void* const data = core.allocate(100, stream(0));
  core.begin_step(side);
  CHECK(core.free_planned(data) && device.synchronized == 6);  // one at the change, one for what outlived it
}

void wrong_plans_are_refused() {
  TestDevice device;
  Core core(device);
  const auto refuses = [&](const std::vector<memo_planned_request>& requests, const char* why) {
    try {
      add(core, requests, 4 * K);
    } catch (const std::invalid_argument& error) {
      return std::strstr(error.what(), why) != nullptr;
    }
    return false;
  };
  CHECK(refuses({{0, 0, 0, 0}}, "request 0 has no bytes"));
  CHECK(refuses({{0, 0, 1, 0}, {0, 0, 1, 8}}, "request 1 is not aligned"));
  CHECK(refuses({{0, 0, 4 * K + 1, 0}}, "behind the arena"));
  CHECK(refuses({{0, 0, UINT64_MAX, 512}}, "behind the arena"));
  CHECK(refuses({{0, 0, 1, 64 * K}}, "behind the arena"));
  CHECK(refuses({{MEMO_NO_PHASE, 0, 1, 0}}, "no phase"));
  CHECK(refuses({{0, 0, K, 0}, {0, 1, K, 512}}, "two streams share"));
}

void only_threads_that_mark_are_planned() {
  TestDevice device;
  Core core(device);
  const auto plan = add(core, {{0, 0, 100, 0}, {1, 0, 100, 0}}, K);
  core.begin_step(plan);
  core.mark(0);
  std::thread([&] { CHECK(core.allocate(100, nullptr) == nullptr); }).join();  // a data loader
  void* const data = core.allocate(100, nullptr);
  CHECK(data != nullptr);
  std::thread([&] {  // backward on the autograd thread
    core.mark(1);
    CHECK(core.free_planned(data));
    CHECK(core.allocate(100, nullptr) == data);
  }).join();
}

void the_log_tells_the_step() {
  TestDevice device;
  Core core(device);
  int before = 0, dynamic = 0;
  const auto plan = add(core, {{4, 0, 100, 0}}, K);
  core.note_dynamic(&before, 8, nullptr);
  core.start_recording(100);
  core.begin_step(plan);
  core.note_dynamic_free(&before, 8);  // of before: not logged
  core.mark(4);
  void* const planned = core.allocate(100, nullptr);
  core.note_dynamic(&dynamic, 50, stream(3));
  core.free_planned(planned);
  core.note_dynamic_free(&dynamic, 50);
  core.end_step();
  CHECK(core.stop_recording() == 7);
  std::vector<memo_event> events(7);
  core.read_events(events.data(), events.size());
  const std::uint32_t kinds[] = {MEMO_EVENT_STEP, MEMO_EVENT_MARK, MEMO_EVENT_ALLOC, MEMO_EVENT_ALLOC,
                                 MEMO_EVENT_FREE, MEMO_EVENT_FREE, MEMO_EVENT_STEP};
  for (int i = 0; i < 7; ++i) CHECK(events[i].kind == kinds[i] && events[i].thread == events[0].thread);
  CHECK(events[0].phase == MEMO_NO_PHASE && events[1].phase == 4 && events[6].phase == MEMO_NO_PHASE);
  CHECK(events[2].request == 0 && events[2].bytes == 100 && events[3].request == 1 && events[3].bytes == 50);
  CHECK(events[2].stream != events[3].stream && events[4].request == 0 && events[5].request == 1);
  core.start_recording(1);
  core.mark(1);
  core.mark(2);
  CHECK(core.stop_recording() == 1);  // full
}

void peaks() {
  TestDevice device;
  Core core(device);
  const auto plan = add(core, {{0, 0, 100, 0}}, K);
  core.begin_step(plan);
  core.mark(0);
  void* const data = core.allocate(100, nullptr);
  int dynamic = 0;
  core.note_dynamic(&dynamic, 70, nullptr);
  core.note_dynamic_free(&dynamic, 70);
  CHECK(core.take_peak() == 170 && core.statistics().peak_bytes == 100);
  core.free_planned(data);
  CHECK(core.take_peak() == 100 && core.take_peak() == 0);
}

// What a random step asks for: sizes per phase, and after how many further requests each is freed.
struct Request {
  std::uint32_t phase;
  std::uint64_t bytes;
  int lives;
};

void random_steps_against_a_reference() {
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
    std::vector<Request> requests;
    for (std::uint32_t phase = 0; phase < 6; ++phase) {
      for (int i = below(30); i >= 0; --i) requests.push_back({phase, 1 + random() % 3000, 1 + below(60)});
    }
    // Offsets without search: even seeds never overlap, odd ones are random, mostly wrong.
    std::vector<memo_planned_request> planned;
    std::uint64_t top = 0;
    for (const Request& r : requests) {
      const std::uint64_t offset = seed % 2 == 0 ? top : 512 * static_cast<std::uint64_t>(below(60));
      planned.push_back({r.phase, 0, r.bytes, offset});
      top = std::max(top, (offset + r.bytes + 511) / 512 * 512);
    }
    TestDevice device;
    Core core(device);
    const auto plan = add(core, planned, top);
    std::map<char*, std::uint64_t> live;  // the reference
    std::map<char*, unsigned char> contents;
    std::map<char*, std::unique_ptr<char[]>> heap;
    std::uint64_t live_bytes = 0, peak = 0, made = 0, freed = 0;
    std::multimap<int, char*> ends;
    int now = 0;

    const auto end_block = [&](char* data) {
      for (std::uint64_t i = 0; i < live[data]; ++i) CHECK(static_cast<unsigned char>(data[i]) == contents[data]);
      live_bytes -= live[data];
      if (heap.erase(data) == 1) {
        CHECK(!core.free_planned(data));
        core.note_dynamic_free(data, live[data]);
      } else {
        CHECK(core.free_planned(data));
      }
      live.erase(data);
      ++freed;
    };
    const auto ask = [&](std::uint64_t bytes, int lives) {
      auto* data = static_cast<char*>(core.allocate(bytes, nullptr));
      if (data == nullptr) {
        std::unique_ptr<char[]> own(new char[bytes]);
        data = own.get();
        heap[data] = std::move(own);
        core.note_dynamic(data, bytes, nullptr);
      } else {
        CHECK(reinterpret_cast<std::uintptr_t>(data) % MEMO_ALIGNMENT == 0);
      }
      const auto next = live.lower_bound(data);
      CHECK(next == live.end() || data + bytes <= next->first);
      CHECK(next == live.begin() || std::prev(next)->first + std::prev(next)->second <= data);
      live[data] = bytes;
      contents[data] = static_cast<unsigned char>(++made);
      std::memset(data, static_cast<int>(made & 0xff), bytes);
      live_bytes += bytes;
      peak = std::max(peak, live_bytes);
      ends.emplace(now + lives, data);
    };

    for (int step = 0; step < 4; ++step) {
      CHECK(core.begin_step(plan));
      std::uint32_t phase = MEMO_NO_PHASE;
      const auto before = core.statistics();
      std::uint64_t asked = 0;
      for (const Request& r : requests) {
        if (r.phase != phase) core.mark(phase = r.phase);
        if (step > 1 && below(20) == 0) continue;               // left out
        if (step > 1 && below(20) == 0) ask(1 + below(3000), 5);  // one too many
        ask(r.bytes, r.lives);
        ++asked;
        ++now;
        while (!ends.empty() && ends.begin()->first <= now) {
          end_block(ends.begin()->second);
          ends.erase(ends.begin());
        }
      }
      core.end_step();
      const auto after = core.statistics();
      if (step == 0 && seed % 2 == 0) CHECK(after.num_planned - before.num_planned == asked);
      if (step == 1 && seed % 2 == 0) CHECK(after.num_missed == 0);
    }
    auto counts = core.statistics();
    CHECK(counts.live_bytes == live_bytes && counts.peak_bytes == peak);
    CHECK(counts.num_allocs == made && counts.num_frees == freed);
    while (!live.empty()) end_block(live.begin()->first);
    counts = core.statistics();
    CHECK(counts.live_bytes == 0 && counts.planned_live_bytes == 0);
    core.clear_plans();
    CHECK(device.arenas == 0);
  }
}

void threads_share_one_core() {
  TestDevice device;
  Core core(device);
  std::vector<memo_planned_request> planned;
  for (std::uint64_t i = 0; i < 64; ++i) planned.push_back({static_cast<std::uint32_t>(i % 4), 0, 256, 512 * i});
  const auto plan = add(core, planned, 64 * 512);
  core.start_recording(10000);
  std::mutex taken_mutex;
  std::set<void*> taken;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (unsigned i = 0; i < 300; ++i) {
        if (t == 0 && i % 20 == 0) core.begin_step(plan);
        if (i % 5 == 0) core.mark(i % 4);
        void* const data = core.allocate(256, nullptr);
        if (data != nullptr) {
          {
            std::lock_guard<std::mutex> lock(taken_mutex);
            CHECK(taken.insert(data).second);
          }
          std::memset(data, static_cast<int>(t), 256);
          {
            std::lock_guard<std::mutex> lock(taken_mutex);
            taken.erase(data);
          }
          CHECK(core.free_planned(data));
        }
        core.statistics();
        if (t == 1 && i % 50 == 0) core.release_idle();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(core.statistics().live_bytes == 0 && core.statistics().num_planned > 0);
}

}  // namespace

int main() {
  RUN(requests_get_their_addresses_in_every_step);
  RUN(one_request_too_many_moves_nothing);
  RUN(requests_left_out_are_skipped);
  RUN(live_blocks_never_overlap);
  RUN(blocks_may_outlive_steps_plans_and_the_arena);
  RUN(a_retired_arena_is_out_of_the_way);
  RUN(no_memory_for_the_arena_means_dynamic);
  RUN(other_streams_are_waited_for_when_the_address_is_used_again);
  RUN(streams_are_numbered_when_they_are_first_seen);
  RUN(a_change_of_plan_synchronizes_many_streams);
  RUN(wrong_plans_are_refused);
  RUN(only_threads_that_mark_are_planned);
  RUN(the_log_tells_the_step);
  RUN(peaks);
  RUN(random_steps_against_a_reference);
  RUN(threads_share_one_core);
}
