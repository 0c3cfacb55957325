// A c10::Allocator for CPU tensors that counts what it hands out. The only file that includes torch headers.
//
// A block carries its size in a header in front of the tensor's bytes, so that counting needs no table, a free needs no
// look-up, and a block that outlives memo_cpu_uninstall is counted as any other.

#include "c_api.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>

namespace {

// As long as torch's alignment, so that the tensor's bytes behind it are aligned as torch's own are.
constexpr std::size_t kHeaderBytes = c10::gAlignment;
static_assert(kHeaderBytes >= sizeof(std::uint64_t));

class Meter {
 public:
  void on_alloc(std::uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_.num_allocs += 1;
    counts_.live_bytes += bytes;
    if (counts_.live_bytes > counts_.peak_bytes) counts_.peak_bytes = counts_.live_bytes;
  }

  void on_free(std::uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_.num_frees += 1;
    counts_.live_bytes -= bytes;
  }

  memo_statistics read() {
    std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }

  std::uint64_t take_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::uint64_t peak = counts_.peak_bytes;
    counts_.peak_bytes = counts_.live_bytes;
    return peak;
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
  memo_statistics counts_{};
};

// Never destroyed: tensors may be freed after static destructors have begun.
Meter& meter() {
  static Meter* const instance = [] {
    auto* made = new Meter;
    // A data loader may fork while another thread allocates; the child must not inherit a lock that nobody releases.
    pthread_atfork([] { meter().lock(); }, [] { meter().unlock(); }, [] { meter().unlock(); });
    return made;
  }();
  return *instance;
}

void free_block(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  void* const block = static_cast<char*>(data) - kHeaderBytes;
  meter().on_free(*static_cast<std::uint64_t*>(block));
  c10::free_cpu(block);
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::DeviceType::CPU)};
    void* block = nullptr;
    try {
      if (bytes > SIZE_MAX - kHeaderBytes) throw std::bad_alloc();
      block = c10::alloc_cpu(bytes + kHeaderBytes);
    } catch (...) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      throw;
    }
    *static_cast<std::uint64_t*>(block) = bytes;
    void* const data = static_cast<char*>(block) + kHeaderBytes;
    meter().on_alloc(bytes);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    // Context and data are the same pointer: torch calls that simple, and copy-on-write needs it.
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

std::mutex install_mutex;
int num_users = 0;
c10::Allocator* previous = nullptr;

constexpr std::uint8_t kPriority = 255;  // torch ignores a request of lower priority than the allocator in place

CpuAllocator& allocator() {
  static auto* const instance = new CpuAllocator;
  return *instance;
}

}  // namespace

uint64_t memo_abi_version(void) { return MEMO_ABI_VERSION; }

const char* memo_torch_version(void) { return MEMO_TORCH_VERSION; }

void memo_cpu_install(void) {
  std::lock_guard<std::mutex> lock(install_mutex);
  if (num_users++ > 0) return;
  meter();
  previous = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&allocator(), kPriority);
}

void memo_cpu_uninstall(void) {
  std::lock_guard<std::mutex> lock(install_mutex);
  if (num_users == 0 || --num_users > 0) return;
  // Somebody else may have set another allocator since; theirs is not ours to take away.
  if (c10::GetCPUAllocator() == &allocator()) c10::SetCPUAllocator(previous, kPriority);
}

void memo_cpu_statistics(memo_statistics* out) { *out = meter().read(); }

uint64_t memo_cpu_take_peak(void) { return meter().take_peak(); }
