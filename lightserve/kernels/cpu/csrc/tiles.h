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
  // Headers of gcc say that the instruction reads the first eight bytes alone: without this the
  // compiler may leave the others unwritten, and the processor refuses them.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// What is fetched into a thread's second cache while it multiplies a panel.
struct Ahead {
  // Lines of the next panel, where this one is read more than once: so many in each turn.
  const char* next;
  int64_t lines;
  // Where a panel is read once, the lines AHEAD of those that it reads: behind the end of its chunk come
  // those of the thread's next one.
  const char* end;
  int64_t jump;

  void fetch() {
    for (int64_t line = 0; line < lines; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
  }
};

// Fetches the line AHEAD of one that is read. Where lines of two halves are read in turn, fetching them in
// the order of memory is what keeps it busy. Zen 4's first cache has too few lines on their way. (GB/s of
// one row of bfloat16 and one core, Zen 4 beside other work: 6 KB ahead into the first 16, into the second
// 20, 12 to 20 KB ahead 21 to 26. Zen 5, 6 KB ahead: 40 into the first, 38 into the second.)
constexpr int64_t AHEAD = 16384;
TARGET_BF16 INLINE void fetch_beyond(const Ahead& ahead, const void* line) {
  const char* from = static_cast<const char*>(line) + AHEAD;
  _mm_prefetch(from < ahead.end ? from : from + ahead.jump, _MM_HINT_T1);
}

// Calls multiply(panel, ahead) for all panels: what a thread multiplies next, in `num_turns` turns, is on
// its way while it multiplies.
template <typename Multiply>
void over_panels_ahead(const LinearBf16& task, const void* weight, int64_t panel_bytes,
                       int64_t num_turns, int num_threads, Multiply&& multiply) {
  const int64_t num_panels = task.num_panels();
  // Of many rows a panel alone is worth a turn.
  const int64_t size =
      task.num_rows > 32 ? 1 : panels_of_chunk(num_panels, panel_bytes, num_threads);
  const int64_t lines = divide_up(panel_bytes / 64, num_turns);
  const char* first = static_cast<const char*>(weight);
  parallel(num_threads, divide_up(num_panels, size), [&](Cursor& cursor) {
    for (int64_t chunk = cursor.take(); chunk < cursor.total;) {
      const int64_t next = cursor.take();  // known early, so that its weights are on their way
      const int64_t end = smaller(num_panels, (chunk + 1) * size);
      // Without a next one, lines that have just been read: they cost nothing.
      const int64_t jump = next < cursor.total ? (next * size - end) * panel_bytes : -AHEAD;
      for (int64_t panel = chunk * size; panel < end; panel++) {
        const int64_t after = panel + 1 < end ? panel + 1 : next * size;
        Ahead ahead{first + after * panel_bytes, after < num_panels ? lines : 0,
                    first + end * panel_bytes, jump};
        multiply(panel, ahead);
      }
      chunk = next;
    }
  });
}

TARGET_BF16 INLINE __m512 wide(__m256i narrow) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// e to the power of x, with a relative error of about 1e-7; beyond the range, its ends.
TARGET_BF16 INLINE __m512 power_of_e(__m512 x) {
  // The second operand is the result where it is no number.
  x = _mm512_min_ps(_mm512_set1_ps(88.7f), _mm512_max_ps(_mm512_set1_ps(-87.3f), x));
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3981999507e-3f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(8.3334519073e-3f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(4.1665795894e-2f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.6666665459e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.0000001201e-1f));
  sum = _mm512_fmadd_ps(_mm512_mul_ps(sum, rest), rest, _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(sum, whole);
}

TARGET_BF16 INLINE __m512 gated(__m512 gate, __m512 up) {
  const __m512 power = power_of_e(_mm512_sub_ps(_mm512_setzero_ps(), gate));
  return _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(power, _mm512_set1_ps(1.0f))), up);
}

TARGET_BF16 INLINE __m512 biases(const bf16* from, __mmask16 mask) {
  return wide(_mm256_maskz_loadu_epi16(mask, from));
}

// Stores the 32 sums that a row has of a panel, as the product's form says.
TARGET_BF16 INLINE void store_32(const LinearBf16& task, int64_t row, int64_t panel, __m512 low,
                                 __m512 high) {
  const int64_t column = panel * task.panel_columns(), left = task.num_columns() - column;
  const int64_t place = row * task.num_columns() + column;
  bf16* out = static_cast<bf16*>(task.out) + place;
  if (task.form == GATED) {
    const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
    if (task.bias != nullptr) {
      low = _mm512_add_ps(low, biases(task.bias + column, mask));
      high = _mm512_add_ps(high, biases(task.bias + task.num_columns() + column, mask));
    }
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(gated(low, high)));
    return;
  }
  const __mmask32 mask = left >= PANEL ? ~0u : (1u << left) - 1;
  const __mmask16 masks[2] = {static_cast<__mmask16>(mask), static_cast<__mmask16>(mask >> 16)};
  if (task.bias != nullptr) {
    low = _mm512_add_ps(low, biases(task.bias + column, masks[0]));
    high = _mm512_add_ps(high, biases(task.bias + column + 16, masks[1]));
  }
  if (task.form == WIDE) {
    float* numbers = static_cast<float*>(task.out) + place;
    _mm512_mask_storeu_ps(numbers, masks[0], low);
    _mm512_mask_storeu_ps(numbers + 16, masks[1], high);
    return;
  }
  _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Rows of bfloat16 as integers of 16 bits, by each row's largest number.

TARGET_VNNI INLINE __mmask32 inputs_from(const LinearBf16& task, int64_t k) {
  const int64_t left = task.num_inputs - k;
  return left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1;
}

struct RowScale {
  float factor;   // gives the numbers back; no number if one of the inputs is none
  float inverse;  // makes the largest one `largest_value`
};

TARGET_VNNI static inline RowScale scale_of_row(const LinearBf16& task, const bf16* x,
                                                float largest_value) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t k = 0; k < task.num_inputs; k += 32) {
    const __m512i bits = _mm512_maskz_loadu_epi16(inputs_from(task, k), x + k);
    largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
  }
  uint16_t lanes[32], most = 0;
  _mm512_storeu_si512(lanes, largest);
  for (const uint16_t lane : lanes) most = lane > most ? lane : most;
  if (most >= 0x7f80) return {__builtin_nanf(""), 0.0f};
  const float size = widened(most);
  if (size < 1e-30f) return {0.0f, 0.0f};
  return {size / largest_value, largest_value / size};
}

// Integers of the float32 numbers that have these bits.
TARGET_VNNI INLINE __m512i scaled(__m512i bits, __m512 inverse) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), inverse));
}

TARGET_VNNI INLINE __m512i scaled_inputs(const LinearBf16& task, const bf16* x, int64_t k,
                                         __m512 inverse) {
  const __mmask16 mask = static_cast<__mmask16>(inputs_from(task, k));
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + k));
  return scaled(_mm512_slli_epi32(bits, 16), inverse);
}
