#include "cuda_runtime.hpp"

#include <dlfcn.h>

namespace memo {

std::string CudaRuntime::open(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
#define MEMO_CUDA_LOOK_UP(name, parameters)                      \
  name = reinterpret_cast<decltype(name)>(dlsym(library, "cuda" #name)); \
  if (name == nullptr) return std::string(path) + " has no cuda" #name;
  MEMO_CUDA_FUNCTIONS(MEMO_CUDA_LOOK_UP)
#undef MEMO_CUDA_LOOK_UP
  GetErrorString = reinterpret_cast<decltype(GetErrorString)>(dlsym(library, "cudaGetErrorString"));
  if (GetErrorString == nullptr) return std::string(path) + " has no cudaGetErrorString";
  return {};
}

}  // namespace memo
