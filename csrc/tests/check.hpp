// The least that a test program needs.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);   \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

#define RUN(test)                     \
  do {                                \
    test();                           \
    std::printf("passed %s\n", #test); \
  } while (false)
