// How much of one device's memory is held: its arenas, and the driver's pool that cudaMallocAsync takes from.
//
// The pool keeps what is freed, so that most dynamic requests need nothing from the driver; trim() gives it back. It
// knows its own highest mark but not that of both together. So the mark is read and begun anew where an arena comes or
// goes: between two such points the arenas are constant, and the highest sum is theirs and the pool's mark.
#pragma once

#include "c_api.h"
#include "cuda_runtime.hpp"

#include <algorithm>
#include <cstdint>
#include <mutex>

namespace memo {

class CudaHeld {
 public:
  CudaHeld(const CudaRuntime& cuda, int device) : cuda_(cuda) {
    if (cuda_.DeviceGetDefaultMemPool(&pool_, device) != 0) {
      pool_ = nullptr;  // no request will be served either
      cuda_.GetLastError();
      return;
    }
    std::uint64_t keep_everything = UINT64_MAX;
    cuda_.MemPoolSetAttribute(pool_, kCudaReleaseThreshold, &keep_everything);
  }

  // What the pool holds unused goes back to the driver.
  void trim() {
    cuda_.DeviceSynchronize();  // stream-ordered frees give nothing back before they have run
    if (pool_ != nullptr) cuda_.MemPoolTrimTo(pool_, 0);
  }

  void add_arena(std::uint64_t bytes) { change_arenas(bytes, 0); }
  void remove_arena(std::uint64_t bytes) { change_arenas(0, bytes); }

  memo_held read() {
    std::lock_guard<std::mutex> lock(mutex_);
    return read_locked();
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    begin_mark(0);
  }

 private:
  void change_arenas(std::uint64_t more, std::uint64_t less) {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::uint64_t peak = read_locked().peak_bytes;
    arena_bytes_ += more - less;
    begin_mark(peak);
  }

  memo_held read_locked() const {
    const std::uint64_t now = arena_bytes_ + pool_bytes(kCudaReservedNow);
    return {now, std::max({peak_bytes_, now, arena_bytes_ + pool_bytes(kCudaReservedHigh)})};
  }

  // What is held now counts in the new mark: the driver's may begin at 0 and stay there until the pool grows.
  void begin_mark(std::uint64_t peak_bytes) {
    std::uint64_t zero = 0;
    if (pool_ != nullptr) cuda_.MemPoolSetAttribute(pool_, kCudaReservedHigh, &zero);
    peak_bytes_ = std::max(peak_bytes, arena_bytes_ + pool_bytes(kCudaReservedNow));
  }

  std::uint64_t pool_bytes(int attribute) const {
    std::uint64_t bytes = 0;
    if (pool_ != nullptr) cuda_.MemPoolGetAttribute(pool_, attribute, &bytes);
    return bytes;
  }

  const CudaRuntime& cuda_;
  void* pool_ = nullptr;
  std::mutex mutex_;  // of both below
  std::uint64_t arena_bytes_ = 0;
  std::uint64_t peak_bytes_ = 0;  // of what came before the pool's mark began
};

}  // namespace memo
