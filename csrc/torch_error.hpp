// The error that torch turns into Python's torch.OutOfMemoryError, behind a function so that others need no torch.
#pragma once

#include <string>

namespace memo {

[[noreturn]] void throw_out_of_memory(const std::string& message);

}  // namespace memo
