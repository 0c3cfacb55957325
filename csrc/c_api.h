// The C interface that memo_hf/allocator/native.py loads through ctypes. No torch, no CUDA, no C++ types.
//
// Every function may be called from any thread and none throws. A change to any line below that a caller could notice
// raises MEMO_ABI_VERSION, here and in native.py.
#pragma once

#include <stdint.h>

#define MEMO_ABI_VERSION 1
#define MEMO_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  uint64_t live_bytes;   // requested and not freed yet
  uint64_t peak_bytes;   // highest live_bytes since the last memo_cpu_take_peak
  uint64_t num_allocs;   // requests of at least one byte, since the library was loaded
  uint64_t num_frees;    // of those, freed again
} memo_statistics;

MEMO_EXPORT uint64_t memo_abi_version(void);

// The torch release whose headers the library was built with, for example "2.13.0".
MEMO_EXPORT const char* memo_torch_version(void);

// Puts this library's allocator in charge of CPU tensors, or adds one more user to it where it is already.
MEMO_EXPORT void memo_cpu_install(void);

// Drops one user; the last one puts back the allocator that was there before. Blocks that are still alive stay valid:
// each frees itself and is still counted.
MEMO_EXPORT void memo_cpu_uninstall(void);

MEMO_EXPORT void memo_cpu_statistics(memo_statistics* out);

// The highest live_bytes since the last call; the count starts again from what is live now.
MEMO_EXPORT uint64_t memo_cpu_take_peak(void);

#ifdef __cplusplus
}
#endif
