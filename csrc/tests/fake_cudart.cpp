// A stand-in for the CUDA runtime. Streams are queues whose work runs as late as the rules of CUDA allow, so that memory
// which is given out too early is written to by its new owner before its old owner has read it.
//
// fake_* functions are for the tests: work that fills and checks memory, faults to come, counts.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kMemoryAllocation = 2, kNotReady = 600;
constexpr int kReleaseThreshold = 4, kReservedNow = 5, kReservedHigh = 6;  // attributes of a pool

struct Event {
  void* stream = nullptr;
  bool recorded = false, done = false;
};

struct Work {
  std::function<void()> run;
  Event* after = nullptr;  // may not run before this event is done
};

struct Pool {  // of one device: what it has from the device, in blocks or kept
  std::uint64_t reserved = 0, high = 0;
};

struct Block {
  std::size_t bytes;
  Pool* pool;
};

struct Segment {  // a freed block that its pool keeps
  Block block;
  void* freed_on;
  Event* freed;  // done when its last free has run, whatever earlier frees of the same address did
};

struct Runtime {
  std::recursive_mutex mutex;
  std::map<void*, std::deque<Work>> streams;
  std::set<Event*> events;
  std::map<void*, std::size_t> arenas;     // of cudaMalloc
  std::map<int, Pool> pools;               // by device
  std::map<void*, Block> blocks;           // of cudaMallocAsync, live
  std::multimap<void*, Segment> cached;
  std::size_t capacity = std::size_t{1} << 40, used = 0;
  int last_error = kSuccess;
  std::map<int, int> current_device;
  std::map<long, long> counts;
  long corrupted = 0, misuse = 0;
  int fail_mallocs = 0, fail_events = 0;
  bool ignore_waits = false, misalign = false;
  int delay_microseconds = 0;
};

Runtime& rt() {
  static auto* const instance = new Runtime;
  return *instance;
}

thread_local int device = 0;

int fail(int error) { return rt().last_error = error; }

void run_until(Event* event);

void run_next(void* stream) {
  auto& queue = rt().streams[stream];
  Work work = std::move(queue.front());
  queue.pop_front();
  if (work.after != nullptr) run_until(work.after);
  work.run();
}

void run_until(Event* event) {
  while (event->recorded && !event->done) run_next(event->stream);
}

// The event is done when the stream has run all that is queued on it now.
Event* record(Event* event, void* stream) {
  *event = {stream, true, false};
  rt().streams[stream].push_back({[event] { event->done = true; }});
  return event;
}

void run_stream(void* stream) {
  while (!rt().streams[stream].empty()) run_next(stream);
}

void* from_device(std::size_t bytes) {
  auto& r = rt();
  if (r.used + bytes > r.capacity) return nullptr;
  const std::size_t shift = r.misalign ? 256 : 0;
  void* const base = std::aligned_alloc(4096, (bytes + shift + 4095) / 4096 * 4096);
  r.used += bytes;
  return static_cast<char*>(base) + shift;
}

void to_device(void* data, std::size_t bytes) {
  rt().used -= bytes;
  std::free(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(data) & ~std::uintptr_t{4095}));
}

void slow() {
  if (rt().delay_microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(rt().delay_microseconds));
}

}  // namespace

#define LOCK std::lock_guard<std::recursive_mutex> lock(rt().mutex)

extern "C" {

enum { kMalloc, kFree, kMallocAsync, kFreeAsync, kTrim, kRecord, kWait, kSynchronize, kEventsAlive, kUsed };

int cudaMalloc(void** out, std::size_t bytes) {
  LOCK;
  slow();
  rt().counts[kMalloc]++;
  if (rt().fail_mallocs > 0 && rt().fail_mallocs--) return fail(kMemoryAllocation);
  *out = from_device(bytes);
  if (*out == nullptr) return fail(kMemoryAllocation);
  rt().arenas[*out] = bytes;
  return kSuccess;
}

int cudaDeviceSynchronize() {
  LOCK;
  rt().counts[kSynchronize]++;
  for (auto& [stream, queue] : rt().streams) run_stream(stream);
  return kSuccess;
}

int cudaFree(void* data) {
  LOCK;
  rt().counts[kFree]++;
  const auto found = rt().arenas.find(data);
  if (found == rt().arenas.end()) return rt().misuse++, fail(kInvalidValue);
  for (auto& [stream, queue] : rt().streams) run_stream(stream);
  to_device(data, found->second);
  rt().arenas.erase(found);
  return kSuccess;
}

int cudaMallocAsync(void** out, std::size_t bytes, void* stream) {
  LOCK;
  slow();
  auto& r = rt();
  r.counts[kMallocAsync]++;
  if (r.fail_mallocs > 0 && r.fail_mallocs--) return fail(kMemoryAllocation);
  Pool& pool = r.pools[device];
  for (auto it = r.cached.begin(); it != r.cached.end(); ++it) {
    const Segment& segment = it->second;
    if (segment.block.bytes != bytes || segment.block.pool != &pool) continue;
    if (segment.freed_on != stream && !segment.freed->done) continue;
    *out = it->first;
    r.cached.erase(it);
    r.blocks[*out] = {bytes, &pool};
    return kSuccess;
  }
  *out = from_device(bytes);
  if (*out == nullptr) return fail(kMemoryAllocation);
  r.blocks[*out] = {bytes, &pool};
  pool.reserved += bytes;
  pool.high = std::max(pool.high, pool.reserved);
  return kSuccess;
}

int cudaFreeAsync(void* data, void* stream) {
  LOCK;
  auto& r = rt();
  r.counts[kFreeAsync]++;
  const auto found = r.blocks.find(data);
  if (found == r.blocks.end()) return r.misuse++, fail(kInvalidValue);
  r.cached.emplace(data, Segment{found->second, stream, record(new Event, stream)});
  r.blocks.erase(found);
  return kSuccess;
}

int cudaDeviceGetDefaultMemPool(void** pool, int of) {
  LOCK;
  return *pool = &rt().pools[of], kSuccess;
}

// The release threshold must be to keep everything. A high mark of 0 stays there until the pool grows: CUDA's header
// does not say more.
int cudaMemPoolSetAttribute(void* pool, int attribute, void* value) {
  LOCK;
  const auto number = *static_cast<std::uint64_t*>(value);
  if (attribute == kReleaseThreshold) return number == UINT64_MAX ? kSuccess : fail(kInvalidValue);
  if (attribute != kReservedHigh || number != 0) return fail(kInvalidValue);
  static_cast<Pool*>(pool)->high = 0;
  return kSuccess;
}

int cudaMemPoolGetAttribute(void* pool, int attribute, void* value) {
  LOCK;
  const Pool& p = *static_cast<Pool*>(pool);
  if (attribute != kReservedNow && attribute != kReservedHigh) return fail(kInvalidValue);
  *static_cast<std::uint64_t*>(value) = attribute == kReservedNow ? p.reserved : p.high;
  return kSuccess;
}

int cudaMemPoolTrimTo(void* pool, std::size_t) {
  LOCK;
  auto& r = rt();
  r.counts[kTrim]++;
  for (auto it = r.cached.begin(); it != r.cached.end();) {
    const Segment& segment = it->second;
    if (segment.block.pool != pool || !segment.freed->done) {
      ++it;
      continue;
    }
    segment.block.pool->reserved -= segment.block.bytes;
    to_device(it->first, segment.block.bytes);
    it = r.cached.erase(it);
  }
  return kSuccess;
}

int cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  LOCK;
  *free = rt().capacity - rt().used;
  *total = rt().capacity;
  return kSuccess;
}

int cudaEventCreateWithFlags(void** event, unsigned int flags) {
  LOCK;
  if (rt().fail_events > 0 && rt().fail_events--) return fail(kInvalidValue);
  if (flags != 2) return fail(kInvalidValue);
  auto* const made = new Event;
  rt().events.insert(made);
  *event = made;
  return kSuccess;
}

int cudaEventRecord(void* event, void* stream) {
  LOCK;
  rt().counts[kRecord]++;
  record(static_cast<Event*>(event), stream);
  return kSuccess;
}

int cudaEventQuery(void* event) {
  LOCK;
  auto* const e = static_cast<Event*>(event);
  return e->recorded && !e->done ? fail(kNotReady) : kSuccess;
}

int cudaEventSynchronize(void* event) {
  LOCK;
  run_until(static_cast<Event*>(event));
  return kSuccess;
}

// As in CUDA, what waits for the event keeps it: it is only marked here.
int cudaEventDestroy(void* event) {
  LOCK;
  return rt().events.erase(static_cast<Event*>(event)) == 1 ? kSuccess : (rt().misuse++, fail(kInvalidValue));
}

int cudaStreamWaitEvent(void* stream, void* event, unsigned int) {
  LOCK;
  rt().counts[kWait]++;
  if (!rt().ignore_waits) rt().streams[stream].push_back({[] {}, static_cast<Event*>(event)});
  return kSuccess;
}

int cudaGetDevice(int* out) { return *out = device, kSuccess; }

int cudaSetDevice(int to) { return device = to, kSuccess; }

int cudaGetLastError() {
  LOCK;
  const int error = rt().last_error;
  rt().last_error = kSuccess;
  return error;
}

const char* cudaGetErrorString(int error) { return error == kMemoryAllocation ? "out of memory" : "invalid argument"; }

// --- For the tests ---

// Queues work that fills the block with a byte.
void fake_fill(void* stream, void* data, std::size_t bytes, int value) {
  LOCK;
  rt().streams[stream].push_back({[=] { std::memset(data, value, bytes); }});
}

// Queues work that reads the block and counts it as corrupted unless every byte is this one.
void fake_expect(void* stream, const void* data, std::size_t bytes, int value) {
  LOCK;
  rt().streams[stream].push_back({[=] {
    const auto* const at = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) {
      if (at[i] != value) {
        rt().corrupted++;
        return;
      }
    }
  }});
}

// The stream's later work runs behind what is queued on the other one now.
void fake_order(void* stream, void* behind) {
  LOCK;
  rt().streams[stream].push_back({[] {}, record(new Event, behind)});
}

void fake_run(void* stream) {
  LOCK;
  run_stream(stream);
}

void fake_configure(std::size_t capacity, int misalign, int ignore_waits, int delay_microseconds) {
  LOCK;
  rt().capacity = capacity;
  rt().misalign = misalign != 0;
  rt().ignore_waits = ignore_waits != 0;
  rt().delay_microseconds = delay_microseconds;
}

void fake_fail(int mallocs, int events) {
  LOCK;
  rt().fail_mallocs = mallocs;
  rt().fail_events = events;
}

long fake_count(int what) {
  LOCK;
  if (what == kEventsAlive) return static_cast<long>(rt().events.size());
  if (what == kUsed) return static_cast<long>(rt().used);
  return rt().counts[what];
}

long fake_corrupted() {
  LOCK;
  return rt().corrupted;
}

long fake_misuse() {
  LOCK;
  return rt().misuse;
}

int fake_last_error() {
  LOCK;
  return rt().last_error;
}

}  // extern "C"
