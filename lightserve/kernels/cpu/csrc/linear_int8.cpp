// Products of weights of 8 bits, rounded when they are packed.
//
// In float32, and where a processor has no AVX512-VNNI, weights are widened in registers: see
// vectors_rounded.h. Otherwise a row of bfloat16 becomes integers of 16 bits, as many as its largest number
// is worth, each in two bytes, value = 256 * high + low: two multiplications of bytes with each
// weight cost no more than one of bfloat16, and what they round is far below bfloat16's own. More rows,
// where there is no AMX, go by bfloat16, which holds every integer of 8 bits: see linear_bf16.cpp.
//
// Rows that may be rounded (`linear_rounded`) become integers of 8 bits, one byte each: half of the
// multiplications, by the same instructions. Their sums are exact; each is made a float32, and multiplied
// by (the output's factor * the row's), so that vectors and tiles give the same bits.
#include <immintrin.h>

#include "core.h"
#include "tiles.h"

namespace avx2 {
template <typename T>
void linear_int8(const Linear<T>&, int);
}  // namespace avx2
namespace avx512 {
template <typename T>
void linear_int8(const Linear<T>&, int);
}  // namespace avx512

namespace {

constexpr int64_t MOST_INPUTS = 65536;  // of which sums of products of bytes without a sign fit in 32 bits
constexpr int64_t VECTOR_ROWS = 4;  // up to so many rows vectors read weights at the memory's speed
constexpr int64_t MOST_ROWS = 8;    // of which the registers hold the sums
constexpr int64_t WIDENED_ROWS = 48;  // from so many on, without tiles, it pays to widen weights
constexpr int64_t GROUP = 16;       // rows of a tile
constexpr int64_t A_BYTES = 1 << 20;  // of activations that stay in the cache while weights pass

// Makes integers of one output's weights, and returns what they are to be multiplied by.
template <typename T>
float quantize_row(const T* weight, int64_t num_inputs, int8_t* bytes) {
  constexpr float SMALLEST = 1e-30f;  // below it 127 / largest may be no number: all are zero
  constexpr float ROUNDS = 12582912.0f;  // added to a small number, leaves its integer, ties to even
  float largest = 0.0f;
  for (int64_t k = 0; k < num_inputs; k++) {
    const float size = __builtin_fabsf(widened(weight[k]));
    largest = size > largest ? size : largest;
  }
  const float inverse = largest < SMALLEST ? 0.0f : 127.0f / largest;
  for (int64_t k = 0; k < num_inputs; k++) {
    const float whole = (widened(weight[k]) * inverse + ROUNDS) - ROUNDS;
    bytes[k] = static_cast<int8_t>(static_cast<int32_t>(whole));
  }
  return largest < SMALLEST ? 0.0f : largest / 127.0f;
}

template <typename T>
void pack_int8(const T* weight, int64_t num_outputs, int64_t num_inputs, bool is_gated,
               int8_t* packed, float* factors, int num_threads) {
  const int64_t padded = padded_bytes(num_inputs);
  parallel(num_threads, panels_of(num_outputs, is_gated), [&](Cursor& cursor) {
    int8_t* line = static_cast<int8_t*>(scratch(0, padded));
    std::memset(line, 0, padded);
    for (int64_t panel; (panel = cursor.take()) < cursor.total;)
      for (int64_t i = 0; i < PANEL; i++) {
        const int64_t output = output_at(panel, i, num_outputs, is_gated);
        int8_t* to = packed + panel * PANEL * padded + i / 16 * BYTE_TILE + i % 16 * 4;
        factors[panel * PANEL + i] =
            output < num_outputs ? quantize_row(weight + output * num_inputs, num_inputs, line) : 0;
        if (output >= num_outputs) std::memset(line, 0, num_inputs);
        for (int64_t k = 0; k < padded; k += 4)
          std::memcpy(to + k / BYTE_BLOCK * 2 * BYTE_TILE + k % BYTE_BLOCK * 16, line + k, 4);
      }
  });
}

// Rows as bytes: [groups of rows][blocks of 64 inputs][planes][rows of a group][64 inputs], where planes
// are high and low bytes, or one alone. For vectors 128 is added to the high or only ones.
struct ByteRows {
  int8_t* bytes;
  float* factors;  // of each row; no number if one of its inputs is none
  int64_t num_blocks;
  int64_t num_planes;
  int64_t group_rows;  // that are multiplied at once: of a tile, or those whose sums registers hold
  int64_t plane_bytes() const { return group_rows * BYTE_BLOCK; }
  int64_t group_bytes() const { return num_blocks * num_planes * plane_bytes(); }
  int8_t* group(int64_t number) const { return bytes + number * group_bytes(); }
};

// The lowest byte of each integer, those of `even` and `odd` in turn.
TARGET_VNNI INLINE __m256i lowest_bytes(__m512i even, __m512i odd) {
  constexpr int CHOOSE = 0xca;  // a ? b : c
  return _mm512_cvtepi32_epi16(_mm512_ternarylogic_epi32(_mm512_set1_epi32(0xff), even,
                                                         _mm512_slli_epi32(odd, 8), CHOOSE));
}

TARGET_VNNI void split_row(const LinearBf16& task, int64_t row, bool has_sign,
                           const ByteRows& rows) {
  const bf16* x = task.x + row * task.x_stride;
  const bool is_rounded = rows.num_planes == 1;
  const RowScale scale = scale_of_row(task, x, is_rounded ? 127.0f : 32767.0f);
  rows.factors[row] = scale.factor;
  const __m512 inverse = _mm512_set1_ps(scale.inverse);
  const __m256i added = _mm256_set1_epi8(static_cast<char>(has_sign ? 0 : 128));
  int8_t* to = rows.group(row / rows.group_rows) + row % rows.group_rows * BYTE_BLOCK;
  for (int64_t k = 0; k < rows.num_blocks * BYTE_BLOCK; k += 32) {
    const __m512i pairs = _mm512_maskz_loadu_epi16(inputs_from(task, k), x + k);
    const __m512i even = scaled(_mm512_slli_epi32(pairs, 16), inverse);
    const __m512i odd =
        scaled(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))), inverse);
    const __m256i low = lowest_bytes(even, odd);
    const __m256i high =
        is_rounded ? low : lowest_bytes(_mm512_srai_epi32(even, 8), _mm512_srai_epi32(odd, 8));
    int8_t* place = to + k / BYTE_BLOCK * rows.num_planes * rows.plane_bytes() + k % BYTE_BLOCK;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), _mm256_add_epi8(high, added));
    if (!is_rounded)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(place + rows.plane_bytes()), low);
  }
}

ByteRows split_rows(const LinearBf16& task, bool for_tiles, int64_t num_planes, int num_threads) {
  const int64_t num_groups = divide_up(task.num_rows, for_tiles ? GROUP : MOST_ROWS);
  ByteRows rows;
  rows.group_rows = for_tiles ? GROUP : divide_up(task.num_rows, num_groups);  // evenly
  rows.num_blocks = padded_bytes(task.num_inputs) / BYTE_BLOCK;
  rows.num_planes = num_planes;
  const int64_t num_bytes = num_groups * rows.group_bytes();
  rows.bytes = static_cast<int8_t*>(scratch(2, num_bytes + task.num_rows * sizeof(float)));
  rows.factors = reinterpret_cast<float*>(rows.bytes + num_bytes);
  if (task.num_rows % GROUP != 0 && for_tiles)
    std::memset(rows.group(num_groups - 1), 0, rows.group_bytes());
  // Small activations are split sooner than another thread would notice.
  parallel(num_bytes < (128 << 10) ? 1 : num_threads, num_groups, [&](Cursor& cursor) {
    for (int64_t group; (group = cursor.take()) < cursor.total;)
      for (int64_t row = group * rows.group_rows;
           row < smaller(task.num_rows, (group + 1) * rows.group_rows); row++)
        split_row(task, row, for_tiles, rows);
  });
  return rows;
}

// Stores what a row has of a panel from the sums of its high and its low bytes.
TARGET_VNNI INLINE void store_row(const LinearBf16& task, int64_t row, int64_t panel, float factor,
                                  const __m512i high[2], const __m512i low[2]) {
  __m512 sums[2];
  for (int half = 0; half < 2; half++) {
    const __m512 both = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[half]), _mm512_set1_ps(256.0f),
                                        _mm512_cvtepi32_ps(low[half]));
    sums[half] = _mm512_mul_ps(
        both, _mm512_mul_ps(_mm512_loadu_ps(task.factors + panel * PANEL + 16 * half),
                            _mm512_set1_ps(factor)));
  }
  store_32(task, row, panel, sums[0], sums[1]);
}

// Stores what a rounded row has of a panel.
TARGET_VNNI INLINE void store_rounded(const LinearBf16& task, int64_t row, int64_t panel,
                                      float factor, const __m512i sums[2]) {
  __m512 numbers[2];
  for (int half = 0; half < 2; half++)
    numbers[half] = _mm512_mul_ps(
        _mm512_cvtepi32_ps(sums[half]),
        _mm512_mul_ps(_mm512_loadu_ps(task.factors + panel * PANEL + 16 * half),
                      _mm512_set1_ps(factor)));
  store_32(task, row, panel, numbers[0], numbers[1]);
}

TARGET_VNNI INLINE __m512i four_bytes(const int8_t* from) {
  int32_t value;
  std::memcpy(&value, from, sizeof value);
  return _mm512_set1_epi32(value);
}

// R rows by one panel, half by half: the registers hold the sums of more rows so. The instruction
// takes bytes without a sign: 128 has been added to the high ones, and 128 times the sum of the
// weights is taken away in the end.
template <int R>
TARGET_VNNI static inline void vector_panel(const LinearBf16& task, const ByteRows& rows,
                                            int64_t group, int64_t panel, Ahead& ahead) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i high[R][2], low[R][2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const int8_t* line = task.bytes + (panel * rows.num_blocks * 2 + half) * BYTE_TILE;
    const int8_t* x = rows.group(group);
    __m512i weights = _mm512_setzero_si512(), highs[R], lows[R];
    for (int r = 0; r < R; r++) highs[r] = lows[r] = _mm512_setzero_si512();
    for (int64_t block = 0; block < rows.num_blocks; block++, line += 2 * BYTE_TILE) {
      ahead.fetch();
      const int8_t* lower = x + rows.plane_bytes();
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) {
        const __m512i w = _mm512_loadu_si512(line + 64 * j);
        weights = _mm512_dpbusd_epi32(weights, ones, w);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const int64_t place = r * BYTE_BLOCK + 4 * j;
          highs[r] = _mm512_dpbusd_epi32(highs[r], four_bytes(x + place), w);
          lows[r] = _mm512_dpbusd_epi32(lows[r], four_bytes(lower + place), w);
        }
      }
      x = lower + rows.plane_bytes();
    }
    for (int r = 0; r < R; r++) {
      high[r][half] = _mm512_sub_epi32(highs[r], _mm512_slli_epi32(weights, 7));
      low[r][half] = lows[r];
    }
  }
  const int64_t first_row = group * rows.group_rows;
  for (int r = 0; r < R; r++)
    store_row(task, first_row + r, panel, rows.factors[first_row + r], high[r], low[r]);
}

// 128 times the sums of a panel's weights.
struct Offsets {
  __m512i of_half[2];
};

TARGET_VNNI INLINE Offsets offsets_of(const int8_t* line, int64_t num_blocks, Ahead& ahead) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t block = 0; block < num_blocks; block++, line += 2 * BYTE_TILE) {
    ahead.fetch();
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) {
      sums[0] = _mm512_dpbusd_epi32(sums[0], ones, _mm512_loadu_si512(line + 64 * j));
      sums[1] = _mm512_dpbusd_epi32(sums[1], ones, _mm512_loadu_si512(line + BYTE_TILE + 64 * j));
    }
  }
  return {{_mm512_slli_epi32(sums[0], 7), _mm512_slli_epi32(sums[1], 7)}};
}

// R rounded rows by one panel.
template <int R>
TARGET_VNNI static inline void rounded_panel(const LinearBf16& task, const ByteRows& rows,
                                             int64_t group, int64_t panel,
                                             const Offsets& offsets, Ahead& ahead) {
  __m512i sums[R][2];
  for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_si512();
  const int8_t* x = rows.group(group);
  const int8_t* line = task.bytes + panel * rows.num_blocks * 2 * BYTE_TILE;
  for (int64_t block = 0; block < rows.num_blocks; block++, line += 2 * BYTE_TILE) {
    ahead.fetch();
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) {
      const __m512i w0 = _mm512_loadu_si512(line + 64 * j);
      const __m512i w1 = _mm512_loadu_si512(line + BYTE_TILE + 64 * j);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m512i own = four_bytes(x + r * BYTE_BLOCK + 4 * j);
        sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], own, w0);
        sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], own, w1);
      }
    }
    x += rows.plane_bytes();
  }
  const int64_t first_row = group * rows.group_rows;
  for (int r = 0; r < R; r++) {
    for (int half = 0; half < 2; half++)
      sums[r][half] = _mm512_sub_epi32(sums[r][half], offsets.of_half[half]);
    store_rounded(task, first_row + r, panel, rows.factors[first_row + r], sums[r]);
  }
}

TARGET_VNNI void vector_rows(const LinearBf16& task, const ByteRows& rows, int64_t group,
                             int64_t panel, const Offsets* offsets, Ahead& ahead) {
#define CASE(R)                                                     \
  case R:                                                           \
    if (offsets != nullptr)                                         \
      rounded_panel<R>(task, rows, group, panel, *offsets, ahead);  \
    else                                                            \
      vector_panel<R>(task, rows, group, panel, ahead);             \
    break;
  switch (smaller(rows.group_rows, task.num_rows - group * rows.group_rows)) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
  }
#undef CASE
}

TARGET_VNNI void multiply_vectors(const LinearBf16& task, const ByteRows& rows, int num_threads) {
  const int64_t num_groups = divide_up(task.num_rows, rows.group_rows);
  const int64_t panel_bytes = rows.num_blocks * 2 * BYTE_TILE;
  const bool is_rounded = rows.num_planes == 1;
  const int64_t num_turns = rows.num_blocks * (is_rounded ? num_groups + 1 : 2 * num_groups);
  over_panels_ahead(
      task, task.bytes, panel_bytes, num_turns, num_threads,
      [&](int64_t panel, Ahead& ahead) TARGET_VNNI {
        Offsets offsets;
        if (is_rounded)
          offsets = offsets_of(task.bytes + panel * panel_bytes, rows.num_blocks, ahead);
        for (int64_t group = 0; group < num_groups; group++)
          vector_rows(task, rows, group, panel, is_rounded ? &offsets : nullptr, ahead);
      });
}

struct Prefetch {
  const int8_t* next;
  int64_t lines;  // in each step
};

// Multiplies a group of rows by one panel, and stores them.
TARGET_AMX static inline void tile_group(const LinearBf16& task, const ByteRows& rows,
                                         int64_t group, int64_t panel, int32_t* sums,
                                         Prefetch& prefetch) {
  const int8_t* a = rows.group(group);
  const int8_t* b = task.bytes + panel * rows.num_blocks * 2 * BYTE_TILE;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < rows.num_blocks; block++) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a, 64);
    _tile_loadd(5, a + BYTE_TILE, 64);
    _tile_loadd(7, b + BYTE_TILE, 64);
    for (int64_t line = 0; line < prefetch.lines; line++, prefetch.next += 64)
      _mm_prefetch(reinterpret_cast<const char*>(prefetch.next), _MM_HINT_T1);
    _tile_dpbssd(0, 4, 6);  // high bytes have a sign
    _tile_dpbusd(2, 5, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbusd(3, 5, 7);
    a += 2 * BYTE_TILE;
    b += 2 * BYTE_TILE;
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
  for (int64_t i = 0; i < smaller(GROUP, task.num_rows - group * GROUP); i++) {
    const int32_t* line = sums + 16 * i;
    const __m512i high[2] = {_mm512_load_si512(line), _mm512_load_si512(line + 256)};
    const __m512i low[2] = {_mm512_load_si512(line + 512), _mm512_load_si512(line + 768)};
    const int64_t row = group * GROUP + i;
    store_row(task, row, panel, rows.factors[row], high, low);
  }
}

// Multiplies one group of rounded rows by one panel, or two, and stores them.
template <bool TWO>
TARGET_AMX static inline void rounded_tiles(const LinearBf16& task, const ByteRows& rows,
                                            int64_t group, int64_t panel, int32_t* sums,
                                            Prefetch& prefetch) {
  const int8_t* a = rows.group(group);
  const int8_t* b = task.bytes + panel * rows.num_blocks * 2 * BYTE_TILE;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t block = 0; block < rows.num_blocks; block++) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a, 64);
    _tile_loadd(7, b + BYTE_TILE, 64);
    if (TWO) _tile_loadd(5, a + rows.group_bytes(), 64);
    for (int64_t line = 0; line < prefetch.lines; line++, prefetch.next += 64)
      _mm_prefetch(reinterpret_cast<const char*>(prefetch.next), _MM_HINT_T1);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if (TWO) _tile_dpbssd(2, 5, 6);
    if (TWO) _tile_dpbssd(3, 5, 7);
    a += BYTE_TILE;
    b += 2 * BYTE_TILE;
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (TWO) _tile_stored(2, sums + 512, 64);
  if (TWO) _tile_stored(3, sums + 768, 64);
  for (int64_t i = 0; i < smaller((TWO ? 2 : 1) * GROUP, task.num_rows - group * GROUP); i++) {
    const int32_t* line = sums + i / GROUP * 512 + i % GROUP * 16;
    const __m512i own[2] = {_mm512_load_si512(line), _mm512_load_si512(line + 256)};
    const int64_t row = group * GROUP + i;
    store_rounded(task, row, panel, rows.factors[row], own);
  }
}

// Rows are cut into parts whose bytes stay in the cache, outputs into chunks of panels.
TARGET_AMX void multiply_tiles(const LinearBf16& task, const ByteRows& rows, int num_threads) {
  const int64_t num_groups = divide_up(task.num_rows, GROUP);
  int64_t groups = larger(2, A_BYTES / rows.group_bytes());
  const int64_t num_parts = divide_up(num_groups, smaller(groups, num_groups));
  groups = divide_up(num_groups, num_parts);  // evenly
  const int64_t num_panels = task.num_panels();
  const int64_t panel_size = rows.num_blocks * 2 * BYTE_TILE;
  const int64_t size = panels_of_chunk(num_panels, panel_size, num_threads);
  const int64_t num_chunks = divide_up(num_panels, size);
  parallel(num_threads, num_parts * num_chunks, [&](Cursor& cursor) TARGET_AMX {
    int32_t* sums = static_cast<int32_t*>(scratch(1, 4096));
    configure_tiles();
    for (int64_t turn = cursor.take(); turn < cursor.total;) {
      const int64_t next = cursor.take();  // known early, so that its weights are on their way
      const int64_t after = next < cursor.total ? next % num_chunks * size : 0;
      const int64_t first = turn / num_chunks * groups;
      const int64_t end = smaller(num_groups, first + groups);
      const int64_t panel_end = smaller(num_panels, (turn % num_chunks + 1) * size);
      for (int64_t panel = turn % num_chunks * size; panel < panel_end; panel++) {
        const int64_t ahead = panel + 1 < panel_end ? panel + 1 : after;
        const bool is_rounded = rows.num_planes == 1;
        const int64_t step = is_rounded ? 2 : 1, num_steps = divide_up(end - first, step);
        Prefetch prefetch{task.bytes + ahead * panel_size, divide_up(32, num_steps)};
        for (int64_t group = first; group < end; group += step)
          if (!is_rounded)
            tile_group(task, rows, group, panel, sums, prefetch);
          else if (group + 1 < end)
            rounded_tiles<true>(task, rows, group, panel, sums, prefetch);
          else
            rounded_tiles<false>(task, rows, group, panel, sums, prefetch);
      }
      turn = next;
    }
    _tile_release();
  });
}

void linear_bytes(const LinearBf16& task, int64_t num_planes, int32_t level, int num_threads) {
  const bool goes_by_tiles = level >= AMX && task.num_rows > VECTOR_ROWS;
  const ByteRows rows = split_rows(task, goes_by_tiles, num_planes, num_threads);
  (goes_by_tiles ? multiply_tiles : multiply_vectors)(task, rows, num_threads);
}

}  // namespace

void linear_int8(const Linear<float>& task, int32_t level, int num_threads) {
  (level >= AVX512 ? avx512::linear_int8<float> : avx2::linear_int8<float>)(task, num_threads);
}

void linear_int8(const LinearBf16& task, int32_t level, int num_threads) {
  if (level == AVX512_BF16 && task.num_rows >= WIDENED_ROWS)
    linear_widened(task, num_threads);
  else if (level >= AVX512_BF16 && task.num_inputs <= MOST_INPUTS)
    linear_bytes(task, 2, level, num_threads);
  else
    (level >= AVX512 ? avx512::linear_int8<bf16> : avx2::linear_int8<bf16>)(task, num_threads);
}

void linear_rounded(const LinearBf16& task, const int64_t* rounded, int32_t level,
                    int num_threads) {
  int64_t row = 0;
  const auto take = [&](int64_t end, bool is_rounded) {
    LinearBf16 own = task;
    own.x += row * task.x_stride;
    own.num_rows = end - row;
    own.out = static_cast<char*>(task.out) + row * task.num_columns() * (task.form == WIDE ? 4 : 2);
    row = end;
    if (own.num_rows == 0) return;
    if (is_rounded)
      linear_bytes(own, 1, level, num_threads);
    else
      linear_int8(own, level, num_threads);
  };
  const bool can_round = level >= AVX512_BF16 && task.num_inputs <= MOST_INPUTS;
  if (can_round && rounded[0] == task.num_rows)
    for (int64_t run = 0; run < rounded[1]; run++) {
      take(rounded[2 + 2 * run], false);
      take(rounded[3 + 2 * run], true);
    }
  take(task.num_rows, false);
}

// Returns how many bytes a packed weight of 8 bits has.
EXPORT int64_t core_packed_size_int8(int64_t num_outputs, int64_t num_inputs, int32_t is_gated) {
  return panels_of(num_outputs, is_gated != 0) * PANEL * padded_bytes(num_inputs);
}

// Quantizes and packs weight [num_outputs, num_inputs], contiguous; factors are padded to panels.
#define OPERATIONS(T, name)                                                                      \
  EXPORT void core_pack_int8_##name(const T* weight, int64_t num_outputs, int64_t num_inputs,    \
                                    int32_t is_gated, int8_t* packed, float* factors,            \
                                    int32_t num_threads) {                                       \
    pack_int8(weight, num_outputs, num_inputs, is_gated != 0, packed, factors, num_threads);     \
  }
OPERATIONS(float, f32)
OPERATIONS(bf16, bf16)
