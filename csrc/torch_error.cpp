#include "torch_error.hpp"

#include <c10/util/Exception.h>

namespace memo {

void throw_out_of_memory(const std::string& message) {
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, message);
}

}  // namespace memo
