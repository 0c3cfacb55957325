// The CUDA allocator, whole, on the stand-in runtime whose path is the first argument. Each test takes a fresh device.

#include "../c_api.h"
#include "../torch_error.hpp"
#include "check.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace memo {
void throw_out_of_memory(const std::string& message) { throw std::runtime_error(message); }
}  // namespace memo

namespace {

// As in fake_cudart.cpp.
enum { kMalloc, kFree, kMallocAsync, kFreeAsync, kTrim, kRecord, kWait, kSynchronize, kEventsAlive, kUsed };

struct Fake {
  void (*fill)(void*, void*, std::size_t, int);
  void (*expect)(void*, const void*, std::size_t, int);
  void (*order)(void*, void*);
  void (*run)(void*);
  void (*configure)(std::size_t, int, int, int);
  void (*fail)(int, int);
  long (*count)(int);
  long (*corrupted)();
  long (*misuse)();
  int (*last_error)();
  int (*get_device)(int*);
  int (*set_device)(int);
  int (*synchronize)();
} fake;

template <typename Function>
void look_up(void* library, const char* name, Function*& to) {
  to = reinterpret_cast<Function*>(dlsym(library, name));
  CHECK(to != nullptr);
}

constexpr std::size_t K = 1024, kPlenty = std::size_t{1} << 40;

void* stream(std::uintptr_t number) { return reinterpret_cast<void*>(number); }
void* const kMain = stream(16);
void* const kSide = stream(32);

int fresh_device() {
  static int next = 0;
  return next++;
}

memo_statistics statistics(int device) {
  memo_statistics out;
  memo_core_statistics(memo_cuda_core(device), &out);
  return out;
}

std::uint32_t add_plan(int device, const std::vector<memo_planned_request>& requests, std::uint64_t arena) {
  std::uint32_t plan = 0;
  const char* const error = memo_core_add_plan(memo_cuda_core(device), requests.data(), requests.size(), arena, &plan);
  CHECK(error == nullptr);
  return plan;
}

void begin(int device, std::uint32_t plan) {
  CHECK(memo_core_begin_step(memo_cuda_core(device), plan) == 1);
  memo_core_mark(memo_cuda_core(device), 0);
}

// Frees everything that a test has left, and checks that nothing is held or was misused.
void finish(int device) {
  fake.configure(kPlenty, 0, 0, 0);
  memo_core_end_step(memo_cuda_core(device));
  memo_core_clear_plans(memo_cuda_core(device));
  memo_cuda_empty_cache();
  CHECK(statistics(device).live_bytes == 0 && statistics(device).arena_bytes == 0);
  CHECK(fake.count(kUsed) == 0 && fake.count(kEventsAlive) == 0 && fake.misuse() == 0);
}

void nothing_without_the_runtime() {
  const char* error = nullptr;
  CHECK(memo_cuda_try_malloc(8, 0, nullptr, &error) == nullptr && error != nullptr);
  CHECK(memo_cuda_core(0) == nullptr);
  CHECK(std::strstr(memo_cuda_open("/no/such/file"), "/no/such/file") != nullptr);
  CHECK(std::strstr(memo_cuda_open("libc.so.6"), "has no cudaMalloc") != nullptr);
}

void no_bytes_no_address() {
  const int device = fresh_device();
  const long before = fake.count(kMallocAsync);
  CHECK(memo_cuda_malloc(0, device, kMain) == nullptr);
  memo_cuda_free(nullptr, 0, device, kMain);
  memo_cuda_record_stream(nullptr, kMain);
  CHECK(fake.count(kMallocAsync) == before && statistics(device).num_allocs == 0);
  CHECK(memo_cuda_core(-1) == nullptr && memo_cuda_core(1000) == nullptr);
  finish(device);
}

void addresses_are_aligned() {
  for (int misalign = 0; misalign < 2; ++misalign) {
    const int device = fresh_device();
    fake.configure(kPlenty, misalign, 0, 0);
    const auto plan = add_plan(device, {{0, 0, 1, 0}, {0, 0, 700, 512}}, 4 * K);
    begin(device, plan);
    std::vector<std::pair<void*, std::size_t>> blocks;
    for (std::size_t bytes : {1, 700, 1, 4097, 512, 4097}) {
      void* const data = memo_cuda_malloc(bytes, device, kMain);
      CHECK(data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 512 == 0);
      fake.fill(kMain, data, bytes, 7);
      blocks.emplace_back(data, bytes);
    }
    CHECK(statistics(device).num_planned == 2 && statistics(device).live_bytes == 1 + 700 + 1 + 4097 + 512 + 4097);
    for (auto [data, bytes] : blocks) memo_cuda_free(data, bytes, device, kMain);
    finish(device);
  }
}

void the_arena_is_made_once_and_freed_once() {
  const int device = fresh_device();
  const auto plan = add_plan(device, {{0, 0, K, 0}}, 4 * K);
  const long made = fake.count(kMalloc), freed = fake.count(kFree);
  for (int step = 0; step < 3; ++step) {
    begin(device, plan);
    void* const data = memo_cuda_malloc(K, device, kMain);
    memo_cuda_free(data, K, device, kMain);
    memo_core_end_step(memo_cuda_core(device));
  }
  CHECK(fake.count(kMalloc) == made + 1 && fake.count(kFree) == freed);
  memo_cuda_empty_cache();
  memo_cuda_empty_cache();
  CHECK(fake.count(kFree) == freed + 1 && statistics(device).arena_bytes == 0);
  begin(device, plan);  // made again
  void* const data = memo_cuda_malloc(K, device, kMain);
  CHECK(statistics(device).num_planned == 4);
  memo_core_end_step(memo_cuda_core(device));
  memo_cuda_empty_cache();  // something lives there
  CHECK(fake.count(kFree) == freed + 1);
  memo_cuda_free(data, K, device, kMain);
  finish(device);
  CHECK(fake.count(kMalloc) == made + 2 && fake.count(kFree) == freed + 2);
}

memo_held held(int device) {
  memo_held out;
  memo_cuda_held(device, &out);
  return out;
}

// A step without a plan or evaluation: blocks of these sizes at once, all freed at the end.
void dynamic_step(int device, const std::vector<std::size_t>& sizes) {
  CHECK(memo_core_begin_step(memo_cuda_core(device), MEMO_NO_PLAN) == 1);
  std::vector<void*> blocks;
  for (std::size_t bytes : sizes) blocks.push_back(memo_cuda_malloc(bytes, device, kMain));
  // The pool may have this one back only when the copy stream is done with it.
  fake.fill(kSide, blocks[0], sizes[0], 1);
  memo_cuda_record_stream(blocks[0], kSide);
  for (std::size_t i = 0; i < sizes.size(); ++i) memo_cuda_free(blocks[i], sizes[i], device, kMain);
  memo_core_end_step(memo_cuda_core(device));
}

// What is held of the device, to the byte: first steps, plans of two shapes, evaluation, a plan made again.
void the_pool_makes_room_for_arenas() {
  const int device = fresh_device();
  memo_core* const core = memo_cuda_core(device);
  CHECK(held(device).bytes == 0 && held(device).peak_bytes == 0);
  void* const weights = memo_cuda_malloc(8 * K, device, kMain);
  dynamic_step(device, {60 * K, 40 * K});
  CHECK(held(device).bytes == 108 * K && held(device).peak_bytes == 108 * K);  // the pool keeps all

  // The first plan: its arena takes the place of what its steps had of the pool.
  const auto plan = add_plan(device, {{0, 0, 60 * K, 0}}, 100 * K);
  const std::uint64_t arena = 100 * K + 512;
  const auto planned_step = [&](std::uint32_t number) {
    begin(device, number);
    memo_cuda_free(memo_cuda_malloc(60 * K, device, kMain), 60 * K, device, kMain);
    memo_core_end_step(core);
  };
  fake.configure(static_cast<std::size_t>(arena + 8 * K), 0, 0, 0);  // room for no byte more
  planned_step(plan);
  fake.configure(kPlenty, 0, 0, 0);
  CHECK(held(device).bytes == arena + 8 * K && held(device).peak_bytes == arena + 8 * K);
  memo_cuda_reset_peak_held(device);

  // A second, shorter shape is dynamic beside the arena. Its plan fits there, and its memory goes back all the same.
  dynamic_step(device, {30 * K, 20 * K});
  planned_step(plan);
  CHECK(held(device).bytes == arena + 58 * K);
  const auto shorter = add_plan(device, {{0, 0, 60 * K, 0}}, 60 * K);
  planned_step(shorter);
  CHECK(held(device).bytes == arena + 8 * K && held(device).peak_bytes == arena + 58 * K);
  memo_cuda_reset_peak_held(device);
  CHECK(held(device).peak_bytes == arena + 8 * K);

  // Evaluation over and over: its memory stays for the next, does not add up, and costs no planned step a wait.
  const long synchronized = fake.count(kSynchronize), asked = fake.count(kTrim);
  for (int round = 0; round < 3; ++round) {
    dynamic_step(device, {16 * K});
    fake.synchronize();
    planned_step(plan);
    planned_step(shorter);
    fake.synchronize();
    begin(device, plan);  // one request that the plan does not know
    memo_cuda_free(memo_cuda_malloc(16 * K, device, kMain), 16 * K, device, kMain);
    memo_core_end_step(core);
  }
  CHECK(fake.count(kSynchronize) == synchronized + 6 && fake.count(kTrim) == asked);
  CHECK(held(device).bytes == arena + 24 * K && held(device).peak_bytes == arena + 24 * K);

  // A plan made again while a block stays at an address of the old one, then freed: two arenas, then one.
  begin(device, plan);
  void* const stays = memo_cuda_malloc(60 * K, device, kMain);
  memo_core_end_step(core);
  memo_core_retire_arena(core);
  planned_step(add_plan(device, {{0, 0, 60 * K, 0}}, 100 * K));
  CHECK(held(device).bytes == 2 * arena + 8 * K);
  memo_cuda_free(stays, 60 * K, device, kMain);
  CHECK(held(device).bytes == arena + 8 * K && held(device).peak_bytes == 2 * arena + 8 * K);
  CHECK(fake.count(kUsed) == static_cast<long>(arena + 8 * K));

  memo_cuda_free(weights, 8 * K, device, kMain);
  memo_cuda_empty_cache();
  memo_cuda_reset_peak_held(device);
  CHECK(held(device).bytes == 0 && held(device).peak_bytes == 0);
  finish(device);
}

// A copy stream reads a block that the main stream frees and takes again. Returns how often it read wrong bytes.
long read_on_the_side(bool planned, bool record, bool ignore_waits) {
  const int device = fresh_device();
  const long before = fake.corrupted();
  fake.configure(kPlenty, 0, ignore_waits, 0);
  memo_cuda_free(memo_cuda_malloc(1, device, kMain), 1, device, kMain);  // numbers the main stream 0
  if (planned) begin(device, add_plan(device, {{0, 0, K, 0}, {0, 0, K, 0}}, K));
  void* const first = memo_cuda_malloc(K, device, kMain);
  fake.fill(kMain, first, K, 1);
  fake.order(kSide, kMain);
  fake.expect(kSide, first, K, 1);
  if (record) memo_cuda_record_stream(first, kSide);
  memo_cuda_free(first, K, device, kMain);
  void* const second = memo_cuda_malloc(K, device, kMain);
  CHECK(!planned || second == first);
  fake.fill(kMain, second, K, 2);
  fake.run(kMain);  // the side stream is as late as it may be
  fake.run(kSide);
  memo_cuda_free(second, K, device, kMain);
  finish(device);
  return fake.corrupted() - before;
}

void record_stream_is_honoured() {
  for (bool planned : {false, true}) {
    CHECK(read_on_the_side(planned, true, false) == 0);
    CHECK(read_on_the_side(planned, false, false) == 1);  // the stand-in does notice
  }
  CHECK(read_on_the_side(true, true, true) == 1);
}

// A block is freed twice on one stream. When the first free has run and the second has not, the pool keeps it there.
void another_stream_waits_for_the_last_free() {
  const int device = fresh_device();
  const long before = fake.corrupted();
  void* const first = memo_cuda_malloc(K, device, kMain);
  memo_cuda_free(first, K, device, kMain);
  CHECK(memo_cuda_malloc(K, device, kMain) == first);
  fake.fill(kMain, first, K, 1);
  fake.order(kSide, kMain);
  fake.expect(kMain, first, K, 1);
  memo_cuda_free(first, K, device, kMain);
  fake.run(kSide);  // and the main stream up to its fill
  void* const other = memo_cuda_malloc(K, device, kSide);
  CHECK(other != first);
  fake.fill(kSide, other, K, 2);
  fake.run(kSide);
  memo_cuda_free(other, K, device, kSide);
  fake.synchronize();
  CHECK(fake.corrupted() == before);
  void* const late = memo_cuda_malloc(K, device, stream(48));  // now both frees have run
  CHECK(late == first || late == other);
  memo_cuda_free(late, K, device, stream(48));
  finish(device);
}

// One plan gives a range to the main stream, the next gives it to the side stream. The main stream still reads a block
// there, which is freed before the plans change or after.
void a_change_of_plan_moves_no_range_too_early() {
  for (bool outlives : {false, true}) {
    const int device = fresh_device();
    const long before = fake.corrupted();
    for (void* each : {kMain, kSide}) memo_cuda_free(memo_cuda_malloc(1, device, each), 1, device, each);  // 0 and 1
    const auto one = add_plan(device, {{0, 0, K, 0}}, K), other = add_plan(device, {{0, 1, K, 0}}, K);
    begin(device, one);
    void* const first = memo_cuda_malloc(K, device, kMain);
    fake.fill(kMain, first, K, 1);
    fake.run(kMain);
    if (outlives) begin(device, other);
    fake.expect(kMain, first, K, 1);
    memo_cuda_free(first, K, device, kMain);
    if (!outlives) begin(device, other);
    void* const second = memo_cuda_malloc(K, device, kSide);
    CHECK(second == first && statistics(device).num_planned == 2);
    fake.fill(kSide, second, K, 2);
    fake.run(kSide);
    memo_cuda_free(second, K, device, kSide);
    finish(device);
    CHECK(fake.corrupted() == before);
  }
}

void without_events_the_device_is_waited_for() {
  for (bool planned : {false, true}) {
    fake.fail(0, 1);
    const long synchronized = fake.count(kSynchronize);
    CHECK(read_on_the_side(planned, true, true) == 0);
    CHECK(fake.count(kSynchronize) > synchronized && fake.last_error() == 0);
    fake.fail(0, 0);
  }
}

void out_of_memory_frees_what_it_can() {
  const int device = fresh_device();
  fake.configure(64 * K, 0, 0, 0);
  const auto plan = add_plan(device, {{0, 0, K, 0}}, 15 * K);
  begin(device, plan);
  memo_core_end_step(memo_cuda_core(device));  // an idle arena of 15 KiB and alignment
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(memo_cuda_malloc(4 * K, device, kMain));
  fake.fill(kSide, blocks[0], 4 * K, 1);
  memo_cuda_record_stream(blocks[0], kSide);
  for (void* block : blocks) memo_cuda_free(block, 4 * K, device, kMain);  // cached by the pool, one unfinished
  void* const large = memo_cuda_malloc(60 * K, device, kMain);
  CHECK(large != nullptr && statistics(device).arena_bytes == 0 && fake.last_error() == 0);
  CHECK(memo_core_begin_step(memo_cuda_core(device), plan) == 0);  // no room for the arena: dynamic
  memo_cuda_free(large, 60 * K, device, kMain);
  CHECK(memo_core_begin_step(memo_cuda_core(device), plan) == 1);  // the pool gave it back
  finish(device);
}

void out_of_memory_says_so() {
  const int device = fresh_device();
  fake.configure(1024 * K, 0, 0, 0);
  const auto plan = add_plan(device, {{0, 0, 256 * K, 0}}, 512 * K);
  begin(device, plan);
  void* const planned = memo_cuda_malloc(256 * K, device, kMain);
  void* const dynamic = memo_cuda_malloc(128 * K, device, kMain);
  std::string message;
  try {
    memo_cuda_malloc(2048 * K, device, kMain);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  for (const std::string& part : {std::string("CUDA out of memory. Tried to allocate 2.00 MiB on device ") +
                                     std::to_string(device) + ",",
                                 std::string("hold 0.25 MiB of an arena of 0.50 MiB, dynamic blocks 0.12 MiB")}) {
    CHECK(message.find(part) != std::string::npos);
  }
  CHECK(fake.last_error() == 0 && statistics(device).live_bytes == 384 * K);
  const char* error = nullptr;
  CHECK(memo_cuda_try_malloc(SIZE_MAX, device, kMain, &error) == nullptr && error != nullptr);
  memo_cuda_free(planned, 256 * K, device, kMain);
  memo_cuda_free(dynamic, 128 * K, device, kMain);
  finish(device);
}

void one_failure_is_tried_again() {
  const int device = fresh_device();
  memo_cuda_core(device);
  fake.fail(1, 0);
  void* const data = memo_cuda_malloc(K, device, kMain);
  CHECK(data != nullptr && fake.last_error() == 0);
  memo_cuda_free(data, K, device, kMain);
  finish(device);
}

void the_current_device_stays() {
  const int device = fresh_device();
  fake.set_device(100);
  void* const data = memo_cuda_malloc(K, device, kMain);
  memo_cuda_free(data, K, device, kMain);
  int now = 0;
  fake.get_device(&now);
  CHECK(now == 100);
  fake.set_device(0);
  finish(device);
}

// Random training on two streams, several threads asking at once of a slow runtime; torch's own table checks addresses.
void random_use_from_several_threads() {
  const int device = fresh_device();
  fake.configure(kPlenty, 0, 0, 20);
  std::vector<memo_planned_request> planned;
  for (std::uint64_t i = 0; i < 50; ++i) planned.push_back({0, 0, (1 + i % 7) * 600, 512 * ((i * 13) % 40)});
  for (std::uint64_t i = 0; i < 20; ++i) planned.push_back({0, 1, 900, 64 * K + 512 * ((i * 5) % 11)});
  const auto plan = add_plan(device, planned, 128 * K);
  memo_cuda_free(memo_cuda_malloc(1, device, kMain), 1, device, kMain);
  // The step is under way before any thread asks: a thread that is done before another begins is served from it too.
  memo_core_begin_step(memo_cuda_core(device), plan);
  const long corrupted = fake.corrupted();
  std::mutex table_mutex;
  std::map<void*, std::size_t> table;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      void* const own = t == 2 ? kSide : kMain;
      std::vector<std::pair<void*, std::size_t>> held;
      for (int i = 0; i < 300; ++i) {
        if (t == 0 && i % 50 == 49) memo_core_begin_step(memo_cuda_core(device), plan);
        if (i % 50 == 0) memo_core_mark(memo_cuda_core(device), 0);
        const std::size_t bytes = t == 2 ? 900 : (1 + random() % 7) * 600;
        void* const data = memo_cuda_malloc(bytes, device, own);
        {
          std::lock_guard<std::mutex> lock(table_mutex);
          CHECK(table.emplace(data, bytes).second);  // "Trying to free a pointer not allocated here", later
          const auto at = table.find(data);
          CHECK(std::next(at) == table.end() || static_cast<char*>(data) + bytes <= std::next(at)->first);
        }
        const int value = static_cast<int>(random() % 200);
        fake.fill(own, data, bytes, value);
        if (i % 3 == 0) {
          void* const other = own == kMain ? stream(48) : kMain;
          fake.order(other, own);
          fake.expect(other, data, bytes, value);
          memo_cuda_record_stream(data, other);
        }
        fake.expect(own, data, bytes, value);
        held.emplace_back(data, bytes);
        while (held.size() > random() % 6) {
          const auto [old, size] = held.front();
          held.erase(held.begin());
          {
            std::lock_guard<std::mutex> lock(table_mutex);
            CHECK(table.erase(old) == 1);
          }
          memo_cuda_free(old, size, device, own);
        }
        if (i % 10 == static_cast<int>(t)) fake.run(random() % 2 ? own : stream(48));
        if (i % 97 == 0) memo_cuda_empty_cache();
      }
      for (auto [data, size] : held) {
        {
          std::lock_guard<std::mutex> lock(table_mutex);
          table.erase(data);
        }
        memo_cuda_free(data, size, device, own);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  fake.synchronize();
  // How many are planned depends on how the threads interleave; that some are shows that both ways were in use.
  CHECK(fake.corrupted() == corrupted && statistics(device).num_planned > 0);
  finish(device);
}

}  // namespace

int main(int, char** arguments) {
  RUN(nothing_without_the_runtime);
  CHECK(memo_cuda_open(arguments[1]) == nullptr);
  void* const library = dlopen(arguments[1], RTLD_NOW);
  look_up(library, "fake_fill", fake.fill);
  look_up(library, "fake_expect", fake.expect);
  look_up(library, "fake_order", fake.order);
  look_up(library, "fake_run", fake.run);
  look_up(library, "fake_configure", fake.configure);
  look_up(library, "fake_fail", fake.fail);
  look_up(library, "fake_count", fake.count);
  look_up(library, "fake_corrupted", fake.corrupted);
  look_up(library, "fake_misuse", fake.misuse);
  look_up(library, "fake_last_error", fake.last_error);
  look_up(library, "cudaGetDevice", fake.get_device);
  look_up(library, "cudaSetDevice", fake.set_device);
  look_up(library, "cudaDeviceSynchronize", fake.synchronize);
  RUN(no_bytes_no_address);
  RUN(addresses_are_aligned);
  RUN(the_arena_is_made_once_and_freed_once);
  RUN(the_pool_makes_room_for_arenas);
  RUN(record_stream_is_honoured);
  RUN(another_stream_waits_for_the_last_free);
  RUN(a_change_of_plan_moves_no_range_too_early);
  RUN(without_events_the_device_is_waited_for);
  RUN(out_of_memory_frees_what_it_can);
  RUN(out_of_memory_says_so);
  RUN(one_failure_is_tried_again);
  RUN(the_current_device_stays);
  RUN(random_use_from_several_threads);
}
