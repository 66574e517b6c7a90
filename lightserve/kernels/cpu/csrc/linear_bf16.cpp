// Products by AVX512-bf16: of bfloat16 weights, and of rounded ones where there are so many rows that
// it pays to widen each panel to bfloat16 first, in memory that stays in a thread's second cache.
#include <immintrin.h>

#include "core.h"
#include "tiles.h"

namespace {

constexpr int64_t MOST_ROWS = 8;  // of which the registers hold the sums

// Rows of x, from a place where `padded` inputs can be read.
struct Rows {
  const bf16* x;
  int64_t stride;
};

Rows padded_rows(const LinearBf16& task, int slot) {
  const int64_t padded = padded_inputs(task.num_inputs);
  if (padded == task.num_inputs) return {task.x, task.x_stride};
  bf16* copy = static_cast<bf16*>(scratch(slot, task.num_rows * padded * sizeof(bf16)));
  for (int64_t row = 0; row < task.num_rows; row++) {
    std::memcpy(copy + row * padded, task.x + row * task.x_stride, task.num_inputs * sizeof(bf16));
    std::memset(copy + row * padded + task.num_inputs, 0,
                (padded - task.num_inputs) * sizeof(bf16));
  }
  return {copy, padded};
}

// R rows by one panel, which with `IS_READ` comes from memory only now.
template <int R, bool IS_READ>
TARGET_BF16 static inline void vector_panel(const LinearBf16& task, const Rows& all, int64_t row,
                                            int64_t number, const bf16* panel, Ahead& ahead) {
  const Rows rows{all.x + row * all.stride, all.stride};
  const int64_t num_blocks = padded_inputs(task.num_inputs) / K_BLOCK;
  constexpr int CHAINS = R <= 2 ? 2 : 1;  // an instruction waits for the one before it in its chain
  __m512 sums[CHAINS][R][2];
  for (int c = 0; c < CHAINS; c++)
    for (int r = 0; r < R; r++) sums[c][r][0] = sums[c][r][1] = _mm512_setzero_ps();
  for (int64_t block = 0; block < num_blocks; block++, panel += 2 * TILE) {
    if (!IS_READ) ahead.fetch();
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) {
      if (IS_READ) {
        fetch_beyond(ahead, panel + 64 * j);
        fetch_beyond(ahead, panel + 64 * j + 32);
      }
      const __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + 32 * j);
      const __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + TILE + 32 * j);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t pair;
        std::memcpy(&pair, rows.x + r * rows.stride + block * K_BLOCK + 2 * j, sizeof pair);
        const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
        __m512* sum = sums[j % CHAINS][r];
        sum[0] = _mm512_dpbf16_ps(sum[0], w0, x);
        sum[1] = _mm512_dpbf16_ps(sum[1], w1, x);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int half = 0; half < 2; half++) {
      for (int c = 1; c < CHAINS; c++)
        sums[0][r][half] = _mm512_add_ps(sums[0][r][half], sums[c][r][half]);
      if (task.factors != nullptr)
        sums[0][r][half] = _mm512_mul_ps(
            sums[0][r][half], _mm512_loadu_ps(task.factors + number * PANEL + 16 * half));
    }
    store_32(task, row + r, number, sums[0][r][0], sums[0][r][1]);
  }
}

TARGET_BF16 void vector_rows(const LinearBf16& task, const Rows& rows, int64_t row, int64_t number,
                             const bf16* panel, Ahead& ahead) {
#define CASE(R)                                                       \
  case R:                                                             \
    vector_panel<R, false>(task, rows, row, number, panel, ahead);    \
    break;
  switch (smaller(MOST_ROWS, task.num_rows - row)) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
  }
#undef CASE
}

// Returns integers of 8 bits, `shift` bits above the lowest of each 32, as numbers of bfloat16 in the
// upper halves of 32 bits: none of them loses a bit.
TARGET_BF16 INLINE __m512i widened_bytes(__m512i fours, int shift) {
  const __m512i top = shift == 24 ? fours : _mm512_slli_epi32(fours, 24 - shift);
  const __m512i own = _mm512_srai_epi32(top, 24);
  return _mm512_castps_si512(_mm512_cvtepi32_ps(own));
}

// Writes a panel of 8-bit integers as one of bfloat16, without their factors.
TARGET_BF16 void widen_bytes(const LinearBf16& task, int64_t panel, bf16* out) {
  const int64_t num_blocks = padded_inputs(task.num_inputs) / K_BLOCK;
  const int8_t* bytes = task.bytes + panel * PANEL * padded_bytes(task.num_inputs);
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  constexpr int SELECT = 0xf8;  // a | (b & c)
  for (int64_t block = 0; block < num_blocks; block++)
    for (int half = 0; half < 2; half++) {
      const int8_t* line =
          bytes + (block / 2 * 2 + half) * BYTE_TILE + block % 2 * (BYTE_TILE / 2);
      for (int i = 0; i < 8; i++, line += 64, out += 64) {
        const __m512i fours = _mm512_loadu_si512(line);
        for (int pair = 0; pair < 2; pair++) {
          const __m512i even = widened_bytes(fours, 16 * pair);
          const __m512i odd = widened_bytes(fours, 16 * pair + 8);
          _mm512_store_si512(out + 32 * pair,
                             _mm512_ternarylogic_epi32(_mm512_srli_epi32(even, 16), odd, upper,
                                                       SELECT));
        }
      }
    }
}

// Multiplies all rows by all panels, MOST_ROWS at a time.
template <typename PanelOf>
void multiply_steps(const LinearBf16& task, const Rows& rows, const void* weight,
                    int64_t panel_bytes, int num_threads, PanelOf&& panel_of) {
  const int64_t num_blocks = padded_inputs(task.num_inputs) / K_BLOCK;
  const int64_t num_turns = num_blocks * divide_up(task.num_rows, MOST_ROWS);
  over_panels_ahead(task, weight, panel_bytes, num_turns, num_threads,
                    [&](int64_t number, Ahead& ahead) {
                      const bf16* panel = panel_of(number);
                      for (int64_t row = 0; row < task.num_rows; row += MOST_ROWS)
                        vector_rows(task, rows, row, number, panel, ahead);
                    });
}

}  // namespace

void linear_bf16_avx512_bf16(const LinearBf16& task, int num_threads) {
  const Rows rows = padded_rows(task, 0);
  const int64_t size = padded_inputs(task.num_inputs) * PANEL, panel_bytes = size * sizeof(bf16);
  const auto panel_of = [&](int64_t number) { return task.weight + number * size; };
  if (task.num_rows > 1)
    return multiply_steps(task, rows, task.weight, panel_bytes, num_threads, panel_of);
  over_panels_ahead(task, task.weight, panel_bytes, 1, num_threads,
                    [&](int64_t number, Ahead& ahead) {
                      vector_panel<1, true>(task, rows, 0, number, panel_of(number), ahead);
                    });
}

void linear_widened(const LinearBf16& task, int num_threads) {
  const Rows rows = padded_rows(task, 0);
  const int64_t padded = padded_inputs(task.num_inputs), num_blocks = padded / K_BLOCK;
  const bool is_grouped = task.groups.numbers != nullptr;
  const int64_t panel_bytes = is_grouped ? num_blocks * block_bytes_of(task.groups.bits)
                                         : padded_bytes(task.num_inputs) * PANEL;
  const void* weight = is_grouped ? static_cast<const void*>(task.groups.numbers) : task.bytes;
  multiply_steps(task, rows, weight, panel_bytes, num_threads, [&](int64_t number) {
    bf16* panel = static_cast<bf16*>(scratch(4, padded * PANEL * sizeof(bf16)));
    if (is_grouped)
      widen_groups(task, number, 0, num_blocks, panel);
    else
      widen_bytes(task, number, panel);
    return panel;
  });
}
