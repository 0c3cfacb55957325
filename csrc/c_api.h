// The C interface that memo_hf/allocator/native.py loads through ctypes. No torch, no CUDA, no C++ types.
//
// Every function may be called from any thread. None throws, but for memo_cuda_malloc. A change to any line below that
// a caller could notice raises MEMO_ABI_VERSION, here and in native.py.
//
// Words: a step is one training step; a phase is a numbered part of it, such as the forward pass of layer 3; a lane is
// one phase on one stream. Streams are numbered in the order in which the library first sees them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define MEMO_ABI_VERSION 3
#define MEMO_EXPORT __attribute__((visibility("default")))

#define MEMO_ALIGNMENT 512          // of every planned address, and of every address on CUDA
#define MEMO_NO_PHASE 0xffffffffu   // before the first mark of a step, and outside steps
#define MEMO_NO_PLAN 0xffffffffu

#ifdef __cplusplus
extern "C" {
#endif

// One device's allocator. Lives as long as the process.
typedef struct memo_core memo_core;

typedef struct {
  uint64_t live_bytes;          // requested and not freed yet
  uint64_t peak_bytes;          // highest live_bytes since the last memo_core_take_peak
  uint64_t num_allocs;          // requests of at least one byte, since the library was loaded
  uint64_t num_frees;           // of those, freed again
  uint64_t planned_live_bytes;  // the part of live_bytes at planned addresses
  uint64_t planned_bytes;       // requested bytes that got a planned address, summed over all time
  uint64_t dynamic_bytes;       // requested bytes that did not
  uint64_t arena_bytes;         // held for planned addresses now
  uint64_t num_planned;         // requests that got a planned address
  uint64_t num_missed;          // requests that the plan has no entry for, or one of another size
  uint64_t num_conflicts;       // requests whose planned address was still in use
  uint64_t num_outside;         // requests outside planned steps, or of threads that never mark a phase
} memo_statistics;

typedef struct {
  uint32_t phase;
  uint32_t stream;
  uint64_t bytes;   // exactly as requested
  uint64_t offset;  // in the arena; a multiple of MEMO_ALIGNMENT
} memo_planned_request;

enum { MEMO_EVENT_ALLOC = 0, MEMO_EVENT_FREE = 1, MEMO_EVENT_MARK = 2, MEMO_EVENT_STEP = 3 };

typedef struct {
  uint64_t request;  // number of the allocation, from 0; a free names the allocation it ends
  uint64_t bytes;    // of the allocation, 0 otherwise
  uint32_t kind;
  uint32_t phase;
  uint32_t stream;
  uint32_t thread;   // threads are numbered in the order in which the library first sees them
} memo_event;

MEMO_EXPORT uint64_t memo_abi_version(void);

// The torch release whose headers the library was built with, for example "2.13.0".
MEMO_EXPORT const char* memo_torch_version(void);

// --- One device's allocator ---

MEMO_EXPORT void memo_core_statistics(memo_core* core, memo_statistics* out);

// The highest live_bytes since the last call; the peak starts again from what is there now.
MEMO_EXPORT uint64_t memo_core_take_peak(memo_core* core);

// Adds a plan: the requests of every lane in the order in which they come. Returns null and sets *plan, or returns
// what is wrong with it (valid until this thread's next call).
MEMO_EXPORT const char* memo_core_add_plan(memo_core* core, const memo_planned_request* requests, size_t count,
                                           uint64_t arena_bytes, uint32_t* plan);

// Forgets all plans and their misses. Blocks at planned addresses stay valid; the arena goes when the last of them is freed.
MEMO_EXPORT void memo_core_clear_plans(memo_core* core);

// The next planned step gets a new arena. For a plan that is made again: blocks that stay, and took addresses of the
// old plan by chance, are out of its way then.
MEMO_EXPORT void memo_core_retire_arena(memo_core* core);

// A step begins, served from the plan, or dynamically for MEMO_NO_PLAN. Returns 0 where the plan cannot be served, since
// there is no such plan or no memory for its arena; the step is served dynamically then, correct all the same.
MEMO_EXPORT int memo_core_begin_step(memo_core* core, uint32_t plan);

// From now on requests belong to this phase, beginning with its first. Threads that mark are the ones that are planned.
MEMO_EXPORT void memo_core_mark(memo_core* core, uint32_t phase);

MEMO_EXPORT void memo_core_end_step(memo_core* core);

// Requests that missed their plan or found its address in use, by phase. Fills at most `capacity` entries, returns how
// many phases there are.
MEMO_EXPORT size_t memo_core_misses(memo_core* core, uint32_t* phases, uint64_t* counts, size_t capacity);

// Frees arenas in which nothing lives, unless a planned step is on. The next planned step makes a new one.
MEMO_EXPORT void memo_core_release_idle(memo_core* core);

// Logs every request, free, mark and beginning of a step; a log that reaches max_events takes no more.
MEMO_EXPORT void memo_core_start_recording(memo_core* core, size_t max_events);
MEMO_EXPORT size_t memo_core_stop_recording(memo_core* core);
MEMO_EXPORT void memo_core_read_events(memo_core* core, memo_event* out, size_t count);

// --- CPU ---

MEMO_EXPORT memo_core* memo_cpu_core(void);

// Puts this library's allocator in charge of CPU tensors, or adds one more user to it where it is already.
MEMO_EXPORT void memo_cpu_install(void);

// Drops one user; the last one puts back the allocator that was there before. Blocks that are still alive stay valid:
// each frees itself and is still counted.
MEMO_EXPORT void memo_cpu_uninstall(void);

// --- CUDA: the functions that torch's CUDAPluggableAllocator takes ---

// Loads the CUDA runtime from this file, the one that torch uses. Returns null, or what is wrong.
MEMO_EXPORT const char* memo_cuda_open(const char* runtime_path);

MEMO_EXPORT memo_core* memo_cuda_core(int device);

typedef struct {
  uint64_t bytes;       // arenas, and what CUDA's pool for dynamic blocks holds, in use or not
  uint64_t peak_bytes;  // the most since the last memo_cuda_reset_peak_held
} memo_held;

// What is held of the device's memory.
MEMO_EXPORT void memo_cuda_held(int device, memo_held* out);

// The peak starts again from what is held now.
MEMO_EXPORT void memo_cuda_reset_peak_held(int device);

// Null for 0 bytes. Out of memory it frees what it can, tries again, then throws what torch turns into OutOfMemoryError.
MEMO_EXPORT void* memo_cuda_malloc(size_t bytes, int device, void* stream);

// As memo_cuda_malloc, but fails by null and a message (valid until this thread's next call).
MEMO_EXPORT void* memo_cuda_try_malloc(size_t bytes, int device, void* stream, const char** error);

MEMO_EXPORT void memo_cuda_free(void* data, size_t bytes, int device, void* stream);

// The block is used on this stream too: its memory is not given out again before the work queued there by the time of
// its free is done.
MEMO_EXPORT void memo_cuda_record_stream(void* data, void* stream);

// Gives back to CUDA what holds no block.
MEMO_EXPORT void memo_cuda_empty_cache(void);

#ifdef __cplusplus
}
#endif
