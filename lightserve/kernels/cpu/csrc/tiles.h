// What kernels of AVX512 and AMX share: tiles, and how sums become outputs.
#pragma once

#include <immintrin.h>

#include "core.h"

// Eight tiles of 16 rows of 64 bytes.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_row[16] = {};
  uint8_t num_rows[16] = {};
};

TARGET_AMX static inline void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.bytes_of_row[tile] = 64;
    config.num_rows[tile] = 16;
  }
  _tile_loadconfig(&config);
}

TARGET_BF16 INLINE __m512 wide(__m256i narrow) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// Adds the bias to 32 sums and stores as many of them as the output has.
TARGET_BF16 INLINE void store_32(__m512 low, __m512 high, const bf16* bias, bf16* out,
                                 int64_t num_columns) {
  if (num_columns == PANEL && bias == nullptr) {
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    return;
  }
  const __mmask32 mask = num_columns >= PANEL ? ~0u : (1u << num_columns) - 1;
  if (bias != nullptr) {
    const __m512i both = _mm512_maskz_loadu_epi16(mask, bias);
    low = _mm512_add_ps(low, wide(_mm512_castsi512_si256(both)));
    high = _mm512_add_ps(high, wide(_mm512_extracti64x4_epi64(both, 1)));
  }
  _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Rows of bfloat16 as integers of 16 bits, by each row's largest number.

TARGET_VNNI INLINE __mmask16 inputs_from(const LinearBf16& task, int64_t k) {
  const int64_t left = task.num_inputs - k;
  return left >= 16 ? 0xffff : left <= 0 ? 0 : (1u << left) - 1;
}

struct RowScale {
  float factor;   // gives the numbers back; no number if one of the inputs is none
  float inverse;  // makes the largest one `largest_value`
};

TARGET_VNNI static inline RowScale scale_of_row(const LinearBf16& task, const bf16* x,
                                                float largest_value) {
  __m256i largest = _mm256_setzero_si256();
  for (int64_t k = 0; k < task.num_inputs; k += 16) {
    const __m256i bits = _mm256_maskz_loadu_epi16(inputs_from(task, k), x + k);
    largest = _mm256_max_epu16(largest, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
  }
  uint16_t lanes[16], most = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), largest);
  for (const uint16_t lane : lanes) most = lane > most ? lane : most;
  if (most >= 0x7f80) return {__builtin_nanf(""), 0.0f};
  const float size = widened(most);
  if (size < 1e-30f) return {0.0f, 0.0f};
  return {size / largest_value, largest_value / size};
}

TARGET_VNNI INLINE __m512i scaled_inputs(const LinearBf16& task, const bf16* x, int64_t k,
                                         __m512 inverse) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inputs_from(task, k), x + k));
  return _mm512_cvtps_epi32(
      _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), inverse));
}
