// What torch's CUDAPluggableAllocator calls: planned addresses in one arena that cudaMalloc makes, everything else by
// stream-ordered cudaMallocAsync. No torch, no Python, no CUDA header.
//
// A block that was used on further streams is freed in two steps: at its free an event is recorded on each of them, and
// its memory is given out again only behind those events.

#include "core.hpp"
#include "cuda_held.hpp"
#include "cuda_runtime.hpp"
#include "torch_error.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace memo {
namespace {

constexpr int kMaxDevices = 128;

CudaRuntime cuda;

// Dynamic blocks that are used on further streams. One table for all devices: an address says which it is on.
class OtherStreams {
 public:
  void add(const void* data, Stream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& streams = streams_[data];
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  }

  // The block ends: what was added for it, without its own stream.
  std::vector<Stream> take(const void* data, Stream own) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = streams_.find(data);
    if (found == streams_.end()) return {};
    std::vector<Stream> streams = std::move(found->second);
    streams_.erase(found);
    std::erase(streams, own);
    return streams;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::vector<Stream>> streams_;
};

OtherStreams other_streams;

std::uint64_t aligned(std::uint64_t value) { return (value + MEMO_ALIGNMENT - 1) / MEMO_ALIGNMENT * MEMO_ALIGNMENT; }

// Makes a device current; torch may free a block while another one is.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    if (cuda.GetDevice(&before_) == 0 && before_ != device) changed_ = cuda.SetDevice(device) == 0;
  }
  ~DeviceScope() {
    if (changed_) cuda.SetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index) : core(*this), held(cuda, index), index_(index) {}

  Core core;
  CudaHeld held;

  // Null and a message where there is no memory even after everything that can be freed was.
  void* allocate(std::uint64_t bytes, Stream stream, std::string* error) {
    if (void* const data = core.allocate(bytes, stream)) return data;
    const DeviceScope scope(index_);
    free_finished(false);
    void* data = nullptr;
    int status = dynamic_block(bytes, stream, &data);
    if (status == kCudaMemoryAllocation) {
      release_unused();
      status = dynamic_block(bytes, stream, &data);
    }
    if (status != 0) {
      *error = failure(bytes, status);
      return nullptr;
    }
    core.note_dynamic(data, bytes, stream);
    return data;
  }

  void free(void* data, std::uint64_t bytes, Stream stream) {
    const DeviceScope scope(index_);
    if (core.free_planned(data)) return;
    core.note_dynamic_free(data, bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    Unfinished block{original(data), stream, {}};
    for (Stream other : other_streams.take(data, stream)) block.fences.push_back(record(other));
    if (block.fences.empty()) {
      cuda.FreeAsync(block.data, stream);
    } else {
      unfinished_.push_back(std::move(block));
    }
  }

  void release_unused() {
    core.release_idle();
    trim();
  }

  // --- Device; called under the core's lock ---

  char* allocate_arena(std::uint64_t bytes) override {
    const DeviceScope scope(index_);
    void* base = nullptr;
    if (bytes > UINT64_MAX - MEMO_ALIGNMENT) return nullptr;
    if (cuda.Malloc(&base, bytes + MEMO_ALIGNMENT) != 0) {
      cuda.GetLastError();  // or the next kernel launch would report it
      return nullptr;
    }
    held.add_arena(bytes + MEMO_ALIGNMENT);
    auto* const start = reinterpret_cast<char*>(aligned(reinterpret_cast<std::uintptr_t>(base)));
    made_[start] = {base, bytes + MEMO_ALIGNMENT};
    return start;
  }

  void free_arena(char* start) override {
    const DeviceScope scope(index_);
    const auto [base, bytes] = made_.at(start);
    cuda.Free(base);  // waits for the device by itself
    held.remove_arena(bytes);
    made_.erase(start);
  }

  void trim() override {
    const DeviceScope scope(index_);
    free_finished(true);
    held.trim();
  }

  Fence record(Stream stream) override {
    const DeviceScope scope(index_);
    void* event = nullptr;
    if (cuda.EventCreateWithFlags(&event, kCudaDisableTiming) == 0) {
      if (cuda.EventRecord(event, stream) == 0) return event;
      cuda.EventDestroy(event);
    }
    cuda.GetLastError();
    cuda.DeviceSynchronize();  // no event to be had: the work is waited for here
    return nullptr;
  }

  void wait(Stream stream, Fence fence) override {
    const DeviceScope scope(index_);
    if (fence != nullptr && cuda.StreamWaitEvent(stream, fence, 0) != 0) cuda.EventSynchronize(fence);
  }

  void drop(Fence fence) override {
    if (fence != nullptr) cuda.EventDestroy(fence);
  }

  void synchronize() override {
    const DeviceScope scope(index_);
    cuda.DeviceSynchronize();
  }

 private:
  struct Unfinished {
    void* data;
    Stream stream;
    std::vector<Fence> fences;
  };

  int dynamic_block(std::uint64_t bytes, Stream stream, void** data) {
    if (bytes > UINT64_MAX - 2 * MEMO_ALIGNMENT) return kCudaMemoryAllocation;
    int status = cuda.MallocAsync(data, aligned(bytes), stream);
    if (status == 0 && reinterpret_cast<std::uintptr_t>(*data) % MEMO_ALIGNMENT != 0) {
      cuda.FreeAsync(*data, stream);
      void* base = nullptr;
      status = cuda.MallocAsync(&base, aligned(bytes) + MEMO_ALIGNMENT, stream);
      *data = reinterpret_cast<void*>(aligned(reinterpret_cast<std::uintptr_t>(base)));
      std::lock_guard<std::mutex> lock(mutex_);
      if (status == 0 && *data != base) shifted_[*data] = base;
    }
    if (status != 0) cuda.GetLastError();  // or the next kernel launch would report it
    return status;
  }

  // What cudaMallocAsync returned for this block.
  void* original(void* data) {
    const auto found = shifted_.find(data);
    if (found == shifted_.end()) return data;
    void* const base = found->second;
    shifted_.erase(found);
    return base;
  }

  // Frees, in their order, the blocks whose other streams are done with them, or all of them after waiting.
  void free_finished(bool wait_for_all) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!unfinished_.empty()) {
      Unfinished& block = unfinished_.front();
      for (Fence fence : block.fences) {
        if (fence == nullptr) continue;
        if (wait_for_all) {
          cuda.EventSynchronize(fence);
        } else if (cuda.EventQuery(fence) == kCudaNotReady) {
          cuda.GetLastError();
          return;
        }
      }
      for (Fence fence : block.fences) drop(fence);
      cuda.FreeAsync(block.data, block.stream);
      unfinished_.pop_front();
    }
  }

  std::string failure(std::uint64_t bytes, int status) {
    if (status != kCudaMemoryAllocation) return std::string("cudaMallocAsync failed: ") + cuda.GetErrorString(status);
    const memo_statistics now = core.statistics();
    std::size_t free_bytes = 0, total_bytes = 0;
    cuda.MemGetInfo(&free_bytes, &total_bytes);
    const auto mib = [](std::uint64_t value) { return static_cast<double>(value) / (1 << 20); };
    char text[512];
    std::snprintf(text, sizeof text,
                  "CUDA out of memory. Tried to allocate %.2f MiB on device %d, which has %.2f MiB free of %.2f MiB. "
                  "Planned addresses hold %.2f MiB of an arena of %.2f MiB, dynamic blocks %.2f MiB. Use shorter "
                  "sequences or a smaller batch, or leave the weights' and optimizer's memory to other devices.",
                  mib(bytes), index_, mib(free_bytes), mib(total_bytes), mib(now.planned_live_bytes),
                  mib(now.arena_bytes), mib(now.live_bytes - now.planned_live_bytes));
    return text;
  }

  const int index_;
  // Aligned start of an arena: what cudaMalloc returned, and its bytes.
  std::unordered_map<char*, std::pair<void*, std::uint64_t>> made_;

  std::mutex mutex_;  // of everything below
  std::unordered_map<void*, void*> shifted_;  // a block moved up to its alignment: what cudaMallocAsync returned
  std::deque<Unfinished> unfinished_;
};

std::mutex devices_mutex;
std::array<CudaDevice*, kMaxDevices> devices{};  // never destroyed: tensors may be freed after static destructors ran
bool opened = false;

CudaDevice* device_at(int index) {
  std::lock_guard<std::mutex> lock(devices_mutex);
  if (!opened || index < 0 || index >= kMaxDevices) return nullptr;
  auto& device = devices[static_cast<std::size_t>(index)];
  if (device == nullptr) {
    const DeviceScope scope(index);
    device = new CudaDevice(index);
  }
  return device;
}

std::vector<CudaDevice*> all_devices() {
  std::lock_guard<std::mutex> lock(devices_mutex);
  std::vector<CudaDevice*> found;
  for (CudaDevice* device : devices) {
    if (device != nullptr) found.push_back(device);
  }
  return found;
}

}  // namespace
}  // namespace memo

const char* memo_cuda_open(const char* runtime_path) {
  static thread_local std::string error;
  std::lock_guard<std::mutex> lock(memo::devices_mutex);
  if (memo::opened) return nullptr;
  error = memo::cuda.open(runtime_path);
  memo::opened = error.empty();
  return memo::opened ? nullptr : error.c_str();
}

memo_core* memo_cuda_core(int device) {
  memo::CudaDevice* const found = memo::device_at(device);
  return found == nullptr ? nullptr : reinterpret_cast<memo_core*>(&found->core);
}

void memo_cuda_held(int device, memo_held* out) {
  memo::CudaDevice* const found = memo::device_at(device);
  *out = found == nullptr ? memo_held{} : found->held.read();
}

void memo_cuda_reset_peak_held(int device) {
  memo::CudaDevice* const found = memo::device_at(device);
  if (found != nullptr) found->held.reset_peak();
}

void* memo_cuda_try_malloc(size_t bytes, int device, void* stream, const char** error) {
  static thread_local std::string message;
  *error = nullptr;
  if (bytes == 0) return nullptr;
  memo::CudaDevice* const found = memo::device_at(device);
  if (found == nullptr) {
    *error = "memo_hf's CUDA allocator is not opened, or there is no such device";
    return nullptr;
  }
  void* const data = found->allocate(bytes, stream, &message);
  if (data == nullptr) *error = message.c_str();
  return data;
}

void* memo_cuda_malloc(size_t bytes, int device, void* stream) {
  const char* error;
  void* const data = memo_cuda_try_malloc(bytes, device, stream, &error);
  if (error != nullptr) memo::throw_out_of_memory(error);
  return data;
}

void memo_cuda_free(void* data, size_t bytes, int device, void* stream) {
  memo::CudaDevice* const found = data == nullptr ? nullptr : memo::device_at(device);
  if (found != nullptr) found->free(data, bytes, stream);
}

void memo_cuda_record_stream(void* data, void* stream) {
  if (data == nullptr) return;
  for (memo::CudaDevice* device : memo::all_devices()) {
    if (device->core.use_on_stream(data, stream)) return;
  }
  memo::other_streams.add(data, stream);
}

void memo_cuda_empty_cache(void) {
  for (memo::CudaDevice* device : memo::all_devices()) device->release_unused();
}
