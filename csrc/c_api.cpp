// c_api.h's functions on one device's core. No torch, CUDA or Python.

#include "c_api.h"

#include "core.hpp"

#include <string>

namespace {
memo::Core& of(memo_core* core) { return *reinterpret_cast<memo::Core*>(core); }
}  // namespace

uint64_t memo_abi_version(void) { return MEMO_ABI_VERSION; }

const char* memo_torch_version(void) { return MEMO_TORCH_VERSION; }

void memo_core_statistics(memo_core* core, memo_statistics* out) { *out = of(core).statistics(); }

uint64_t memo_core_take_peak(memo_core* core) { return of(core).take_peak(); }

const char* memo_core_add_plan(memo_core* core, const memo_planned_request* requests, size_t count,
                               uint64_t arena_bytes, uint32_t* plan) {
  static thread_local std::string error;
  try {
    *plan = of(core).add_plan(requests, count, arena_bytes);
    return nullptr;
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
}

void memo_core_clear_plans(memo_core* core) { of(core).clear_plans(); }

void memo_core_retire_arena(memo_core* core) { of(core).retire_arena(); }

int memo_core_begin_step(memo_core* core, uint32_t plan) { return of(core).begin_step(plan) ? 1 : 0; }

void memo_core_mark(memo_core* core, uint32_t phase) { of(core).mark(phase); }

void memo_core_end_step(memo_core* core) { of(core).end_step(); }

size_t memo_core_misses(memo_core* core, uint32_t* phases, uint64_t* counts, size_t capacity) {
  const auto misses = of(core).misses();
  size_t i = 0;
  for (const auto& [phase, count] : misses) {
    if (i == capacity) break;
    phases[i] = phase;
    counts[i++] = count;
  }
  return misses.size();
}

void memo_core_release_idle(memo_core* core) { of(core).release_idle(); }

void memo_core_start_recording(memo_core* core, size_t max_events) { of(core).start_recording(max_events); }

size_t memo_core_stop_recording(memo_core* core) { return of(core).stop_recording(); }

void memo_core_read_events(memo_core* core, memo_event* out, size_t count) { of(core).read_events(out, count); }
