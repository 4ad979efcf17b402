// What the Python side asks of the machine: huge pages, read bandwidth, and which interface this library speaks.
#include <sys/mman.h>

#include "api.h"
#include "parallel.h"
#include "simd.h"

// Raised with every change of the C interface; the Python side refuses another number.
VLLM_API int vllm_interface_version() { return 13; }

// Lanes of the vectors this library was compiled for.
VLLM_API int vllm_lanes() { return W; }

// Asks for transparent huge pages in [memory, memory + bytes). Advice only: failure changes nothing but speed. Returns 1 if accepted.
VLLM_API int vllm_advise_huge_pages(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, begin = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) / page * page;
    return end > begin && madvise((void*)begin, end - begin, MADV_HUGEPAGE) == 0;
#else
    (void)memory, (void)bytes;
    return 0;
#endif
}

// Reads `bytes` once with all threads, as fast as the machine can: the ceiling of every product with few rows.
VLLM_API float vllm_read(const float* memory, int64_t bytes) {
    const int64_t pieces = bytes / (1 << 16);
    float total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t piece = 0; piece < pieces; piece++) {
        const float* p = memory + piece * (1 << 14);
        vf sum[8] = {};
        for (int64_t i = 0; i < 1 << 14; i += 8 * W) {
            for (int j = 0; j < 8; j++) sum[j] += load(p + i + j * W);
        }
        for (int j = 1; j < 8; j++) sum[0] += sum[j];
        total += sum_lanes(sum[0]);
    }
    return total;
}
