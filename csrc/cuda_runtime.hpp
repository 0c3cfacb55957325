// The functions of the CUDA runtime that the allocator needs, looked up in the runtime that torch has loaded.
//
// Nothing of CUDA is needed to build, any runtime release serves, and a stand-in can be opened instead of the real one.
// tests/cuda_signatures.cpp holds the table below against CUDA's own header.
#pragma once

#include <cstddef>
#include <string>

namespace memo {

// MEMO_CUDA(name, parameters): cuda<name> returns an int, 0 for success.
#define MEMO_CUDA_FUNCTIONS(MEMO_CUDA)                             \
  MEMO_CUDA(Malloc, (void**, std::size_t))                         \
  MEMO_CUDA(Free, (void*))                                         \
  MEMO_CUDA(MallocAsync, (void**, std::size_t, void* stream))      \
  MEMO_CUDA(FreeAsync, (void*, void* stream))                      \
  MEMO_CUDA(DeviceGetDefaultMemPool, (void** pool, int device))    \
  MEMO_CUDA(MemPoolSetAttribute, (void* pool, int, void*))         \
  MEMO_CUDA(MemPoolGetAttribute, (void* pool, int, void*))         \
  MEMO_CUDA(MemPoolTrimTo, (void* pool, std::size_t))              \
  MEMO_CUDA(MemGetInfo, (std::size_t * free, std::size_t * total)) \
  MEMO_CUDA(EventCreateWithFlags, (void** event, unsigned int))    \
  MEMO_CUDA(EventRecord, (void* event, void* stream))              \
  MEMO_CUDA(EventQuery, (void* event))                             \
  MEMO_CUDA(EventSynchronize, (void* event))                       \
  MEMO_CUDA(EventDestroy, (void* event))                           \
  MEMO_CUDA(StreamWaitEvent, (void* stream, void* event, unsigned int)) \
  MEMO_CUDA(DeviceSynchronize, ())                                 \
  MEMO_CUDA(GetDevice, (int*))                                     \
  MEMO_CUDA(SetDevice, (int))                                      \
  MEMO_CUDA(GetLastError, ())

constexpr int kCudaMemoryAllocation = 2;          // cudaErrorMemoryAllocation
constexpr int kCudaNotReady = 600;                // cudaErrorNotReady
constexpr int kCudaReleaseThreshold = 4;          // cudaMemPoolAttrReleaseThreshold
constexpr int kCudaReservedNow = 5;               // cudaMemPoolAttrReservedMemCurrent
constexpr int kCudaReservedHigh = 6;              // cudaMemPoolAttrReservedMemHigh
constexpr unsigned int kCudaDisableTiming = 2;    // cudaEventDisableTiming

struct CudaRuntime {
#define MEMO_CUDA_POINTER(name, parameters) int(*name) parameters = nullptr;
  MEMO_CUDA_FUNCTIONS(MEMO_CUDA_POINTER)
#undef MEMO_CUDA_POINTER
  const char* (*GetErrorString)(int) = nullptr;

  // Fills the table from the library at this path. Returns what is wrong, or nothing.
  std::string open(const char* path);
};

}  // namespace memo
