// Square transposition of W vectors of W 32-bit lanes.
#pragma once

#include "simd.h"

#if defined(__AVX512F__)

inline void transpose(vf (&rows)[W]) {
    __m512 t[16], u[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps((__m512)rows[2 * i], (__m512)rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps((__m512)rows[2 * i], (__m512)rows[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(t[4 * i + j]), high = _mm512_castps_pd(t[4 * i + 2 + j]);
            u[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            u[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(u[i], u[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_f32x4(u[i], u[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = (vf)_mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
        rows[8 + i] = (vf)_mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
        rows[4 + i] = (vf)_mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
        rows[12 + i] = (vf)_mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

#elif defined(__AVX2__)

inline void transpose(vf (&rows)[W]) {
    __m256 t[8], u[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps((__m256)rows[2 * i], (__m256)rows[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 2; j++) {
            u[4 * i + 2 * j] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0x44);
            u[4 * i + 2 * j + 1] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0xee);
        }
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = (vf)_mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
        rows[4 + i] = (vf)_mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
    }
}

#else

inline void transpose(vf (&rows)[W]) {
    for (int i = 0; i < W; i++) {
        for (int j = i + 1; j < W; j++) {
            const float swapped = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = swapped;
        }
    }
}

#endif
