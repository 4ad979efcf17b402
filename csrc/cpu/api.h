// Marks the library's C interface. Functions return 0, or one of these; they never throw and never print.
#pragma once

#define VLLM_API extern "C" __attribute__((visibility("default")))

constexpr int kOk = 0, kUnknownType = 1, kOutOfMemory = 2;
