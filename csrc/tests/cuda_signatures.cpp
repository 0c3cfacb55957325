// Holds the table of cuda_runtime.hpp against CUDA's own header: as many parameters, each of the same size, and numbers
// of the same value. Compiled by nvcc, never run.

#include "../cuda_runtime.hpp"

#include <cuda_runtime_api.h>

#include <type_traits>

namespace {

template <typename Ours, typename Theirs>
struct Same : std::false_type {};

template <typename... Ours, typename... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
struct Same<int(Ours...), cudaError_t(Theirs...)>
    : std::bool_constant<((sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>) && ...)> {};

#define MEMO_SAME(name, parameters) static_assert(Same<int parameters, decltype(cuda##name)>::value, #name);
MEMO_CUDA_FUNCTIONS(MEMO_SAME)

static_assert(sizeof(cudaError_t) == sizeof(int));
static_assert(memo::kCudaMemoryAllocation == cudaErrorMemoryAllocation);
static_assert(memo::kCudaNotReady == cudaErrorNotReady);
static_assert(memo::kCudaReleaseThreshold == cudaMemPoolAttrReleaseThreshold);
static_assert(memo::kCudaReservedNow == cudaMemPoolAttrReservedMemCurrent);
static_assert(memo::kCudaReservedHigh == cudaMemPoolAttrReservedMemHigh);
static_assert(memo::kCudaDisableTiming == cudaEventDisableTiming);

}  // namespace
