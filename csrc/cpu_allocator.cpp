// A c10::Allocator for CPU tensors: at planned addresses where the core has one, on the heap otherwise.
//
// A heap block carries its size in a header in front of the tensor's bytes, so that a free needs no look-up, and a block
// that outlives memo_cpu_uninstall is counted as any other.

#include "core.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

namespace {

// As long as torch's alignment, so that the tensor's bytes behind it are aligned as torch's own are.
constexpr std::size_t kHeaderBytes = c10::gAlignment;
static_assert(kHeaderBytes >= sizeof(std::uint64_t));

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

class CpuDevice final : public memo::Device {
 public:
  char* allocate_arena(std::uint64_t bytes) override {
    if (bytes > SIZE_MAX - kHugePageBytes) return nullptr;
    const std::size_t rounded = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    void* const base = std::aligned_alloc(kHugePageBytes, rounded);
    // The arena stays for the whole training: fewer, larger pages are worth their first touch. Advice only.
    if (base != nullptr) madvise(base, rounded, MADV_HUGEPAGE);
    return static_cast<char*>(base);
  }
  void free_arena(char* base) override { std::free(base); }
  void trim() override { malloc_trim(0); }

  // Work on the CPU is done when the call that asked for it returns, or its caller holds the tensor until it is.
  memo::Fence record(memo::Stream) override { return nullptr; }
  void wait(memo::Stream, memo::Fence) override {}
  void drop(memo::Fence) override {}
  void synchronize() override {}
};

// Never destroyed: tensors may be freed after static destructors have begun.
memo::Core& core() {
  static memo::Core* const instance = [] {
    auto* const made = new memo::Core(*new CpuDevice);
    // A data loader may fork while another thread allocates; the child must not inherit a lock that nobody releases.
    pthread_atfork([] { core().lock(); }, [] { core().unlock(); }, [] { core().unlock(); });
    return made;
  }();
  return *instance;
}

void* heap_block(std::size_t bytes) {
  if (bytes > SIZE_MAX - kHeaderBytes) throw std::bad_alloc();
  void* block;
  try {
    block = c10::alloc_cpu(bytes + kHeaderBytes);
  } catch (...) {
    core().release_idle();
    block = c10::alloc_cpu(bytes + kHeaderBytes);
  }
  *static_cast<std::uint64_t*>(block) = bytes;
  return static_cast<char*>(block) + kHeaderBytes;
}

void free_block(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  if (core().free_planned(data)) return;
  void* const block = static_cast<char*>(data) - kHeaderBytes;
  core().note_dynamic_free(data, *static_cast<std::uint64_t*>(block));
  c10::free_cpu(block);
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = nullptr;
    if (bytes > 0) {
      data = core().allocate(bytes, nullptr);
      if (data == nullptr) {
        try {
          data = heap_block(bytes);
        } catch (...) {
          c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
          throw;
        }
        core().note_dynamic(data, bytes, nullptr);
      }
      c10::profiledCPUMemoryReporter().New(data, bytes);
    }
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

memo_core* memo_cpu_core(void) { return reinterpret_cast<memo_core*>(&core()); }

void memo_cpu_install(void) {
  std::lock_guard<std::mutex> lock(install_mutex);
  if (num_users++ > 0) return;
  previous = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&allocator(), kPriority);
}

void memo_cpu_uninstall(void) {
  std::lock_guard<std::mutex> lock(install_mutex);
  if (num_users == 0 || --num_users > 0) return;
  // Somebody else may have set another allocator since; theirs is not ours to take away.
  if (c10::GetCPUAllocator() == &allocator()) c10::SetCPUAllocator(previous, kPriority);
}
