// Products of weights in groups of inputs, each with a factor and a zero of its own: see core.h.
//
// In float32, and where a processor has no AVX512-VNNI, weights are widened in registers: see
// vectors_rounded.h. Otherwise rows of bfloat16 become integers of 16 bits as for weights of 8 bits,
// but of two bytes that both have a sign. More rows go by AMX:
//
//   4 bits, to 64 rows   128 + integer is a bfloat16 that two instructions make; groups' sums stay apart
//   beyond               each panel is widened once, see linear_amx.cpp
//
// Without AMX each panel is widened once from WIDENED_ROWS on, see linear_bf16.cpp.
#include <immintrin.h>

#include "core.h"
#include "tiles.h"

namespace avx2 {
template <typename T>
void linear_groups(const Linear<T>&, int);
}  // namespace avx2
namespace avx512 {
template <typename T>
void linear_groups(const Linear<T>&, int);
}  // namespace avx512

namespace {

constexpr int64_t VECTOR_ROWS = 4;  // up to so many rows vectors are faster than tiles
constexpr int64_t WIDENED_ROWS = 32;  // without tiles
constexpr int64_t TILE_ROWS = 64;  // up to so many, sums of groups cost less than widening
constexpr float SHIFTED_BY = 128.0f;
constexpr int64_t MOST_ROWS = 4;    // of which the registers hold the sums
constexpr int64_t MOST_OF_GROUP = 128;
constexpr float LARGEST_VALUE = 32512.0f;  // 127 * 256: both bytes of it have a sign

// Puts the integers of number `i` of a panel, a byte each, into their places.
void place_integers(const uint8_t* line, int64_t num_blocks, int64_t bits, int64_t panel, int64_t i,
                    uint8_t* packed) {
  const int64_t lines = bits == 4 ? 4 : 8, block_bytes = block_bytes_of(bits);
  uint8_t* to =
      packed + panel * num_blocks * block_bytes + i / 16 * (block_bytes / 2) + i % 16 * 4;
  for (int64_t block = 0; block < num_blocks; block++, to += block_bytes, line += K_BLOCK)
    for (int64_t j = 0; j < lines; j++)
      for (int64_t k = 0; k < 4; k++)
        to[64 * j + k] = static_cast<uint8_t>(
            bits == 8 ? line[4 * j + k] : line[8 * j + k] | line[8 * j + 4 + k] << 4);
}

struct Rounded {
  uint16_t factor;  // float16
  uint8_t zero;
};

TARGET_AVX2 INLINE float rounded(float number, float inverse, float zero) {
  const float value = __builtin_rintf(number * inverse) + zero;
  return value < 0.0f ? 0.0f : value > 15.0f ? 15.0f : value;
}

// Rounds a group's numbers, zeros behind them up to a multiple of 8, to 16 values: of several widths
// the one with the least squared error.
TARGET_AVX2 Rounded round_group(const float* numbers, int64_t count, uint8_t* integers) {
  float low = 0.0f, high = 0.0f, least = __builtin_inff();
  for (int64_t i = 0; i < count; i++) {
    low = numbers[i] < low ? numbers[i] : low;
    high = numbers[i] > high ? numbers[i] : high;
  }
  Rounded best{0, 0};
  std::memset(integers, 0, count);
  constexpr float SHARES[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f};
  for (const float share : SHARES) {
    const uint16_t half = _cvtss_sh((high - low) * share / 15.0f, 0);
    const float factor = _cvtsh_ss(half);
    if (half == 0 || half >= 0x7c00) {  // all is zero, or beyond float16: its caller is told
      if (least == __builtin_inff()) best.factor = half;
      break;
    }
    const float inverse = 1.0f / factor;
    const float zero = __builtin_fminf(__builtin_rintf(-low * share * inverse), 15.0f);
    float errors[8] = {}, error = 0.0f;
    for (int64_t first = 0; first < count; first += 8)
      for (int64_t i = 0; i < 8; i++) {
        const float number = numbers[first + i];
        const float off = (rounded(number, inverse, zero) - zero) * factor - number;
        errors[i] += off * off;
      }
    for (const float part : errors) error += part;
    if (error >= least) continue;
    least = error;
    best = {half, static_cast<uint8_t>(zero)};
    for (int64_t i = 0; i < count; i++)
      integers[i] = static_cast<uint8_t>(static_cast<int32_t>(rounded(numbers[i], inverse, zero)));
  }
  return best;
}

template <typename T>
void quantize(const T* weight, int64_t num_outputs, int64_t num_inputs, int64_t size, bool is_gated,
              uint8_t* packed, uint16_t* factors, uint8_t* zeros, int num_threads) {
  const int64_t num_blocks = padded_inputs(num_inputs) / K_BLOCK;
  const int64_t num_groups = divide_up(num_inputs, size);
  parallel(num_threads, panels_of(num_outputs, is_gated), [&](Cursor& cursor) {
    uint8_t* line = static_cast<uint8_t*>(scratch(0, num_blocks * K_BLOCK));
    float numbers[MOST_OF_GROUP];
    for (int64_t panel; (panel = cursor.take()) < cursor.total;)
      for (int64_t i = 0; i < PANEL; i++) {
        const int64_t output = output_at(panel, i, num_outputs, is_gated);
        std::memset(line, 0, num_blocks * K_BLOCK);
        for (int64_t group = 0; group < num_groups; group++) {
          const int64_t first = group * size;
          const int64_t count = output < num_outputs ? smaller(size, num_inputs - first) : 0;
          std::memset(numbers, 0, sizeof numbers);
          for (int64_t k = 0; k < count; k++)
            numbers[k] = widened(weight[output * num_inputs + first + k]);
          const Rounded rounded = round_group(numbers, count, line + first);
          factors[(panel * num_groups + group) * PANEL + i] = rounded.factor;
          zeros[(panel * num_groups + group) * PANEL + i] = rounded.zero;
        }
        place_integers(line, num_blocks, 4, panel, i, packed);
      }
  });
}

// Rows as bytes, [rows][blocks of 32 inputs][32 high, 32 low], and what each group's add up to.
struct ByteRows {
  int8_t* bytes;
  float* factors;  // of each row; no number if one of its inputs is none
  float* sums;     // [rows][groups]
  int64_t num_blocks, num_groups;
  int8_t* row(int64_t number) const { return bytes + number * num_blocks * 2 * K_BLOCK; }
};

TARGET_VNNI void split_row(const LinearBf16& task, int64_t row, const ByteRows& rows) {
  const bf16* x = task.x + row * task.x_stride;
  const RowScale scale = scale_of_row(task, x, LARGEST_VALUE);
  rows.factors[row] = scale.factor;
  const __m512 inverse = _mm512_set1_ps(scale.inverse);
  for (int64_t group = 0; group < rows.num_groups; group++) {
    __m512i sum = _mm512_setzero_si512();
    const int64_t end = smaller((group + 1) * task.groups.size, rows.num_blocks * K_BLOCK);
    for (int64_t k = group * task.groups.size; k < end; k += 16) {
      const __m512i value = scaled_inputs(task, x, k, inverse);
      const __m512i high =
          _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
      int8_t* place = rows.row(row) + k / K_BLOCK * 2 * K_BLOCK + k % K_BLOCK;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(place), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(place + K_BLOCK), _mm512_cvtepi32_epi8(value));
      sum = _mm512_add_epi32(sum, value);
    }
    rows.sums[row * rows.num_groups + group] =
        static_cast<float>(_mm512_reduce_add_epi32(sum));
  }
}

TARGET_VNNI INLINE __m512i four_bytes(const int8_t* from) {
  int32_t value;
  std::memcpy(&value, from, sizeof value);
  return _mm512_set1_epi32(value);
}

TARGET_VNNI INLINE __m512 half_factors(const Groups& groups, int64_t place) {
  return _mm512_cvtph_ps(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(groups.factors + place)));
}

TARGET_VNNI INLINE __m512 half_zeros(const Groups& groups, int64_t place) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(groups.zeros + place))));
}

// R rows by one panel.
template <int BITS, int R>
TARGET_VNNI static inline void vector_panel(const LinearBf16& task, const ByteRows& rows,
                                            int64_t first_row, int64_t panel,
                                            const Ahead& ahead) {
  constexpr int LINES = BITS == 4 ? 4 : 8, LINE_INPUTS = K_BLOCK / LINES, HALF = 64 * LINES;
  const __m512i mask = _mm512_set1_epi8(0x0f);
  __m512 sums[R][2];
  for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
  const uint8_t* numbers = task.groups.numbers + panel * rows.num_blocks * 2 * HALF;
  const int8_t* x[R];
  for (int r = 0; r < R; r++) x[r] = rows.row(first_row + r);
  const int64_t blocks = task.groups.size / K_BLOCK;
  for (int64_t group = 0, block = 0; group < rows.num_groups; group++) {
    __m512i high[R][2], low[R][2];
    for (int r = 0; r < R; r++)
      high[r][0] = high[r][1] = low[r][0] = low[r][1] = _mm512_setzero_si512();
    for (const int64_t end = smaller(block + blocks, rows.num_blocks); block < end; block++) {
#pragma GCC unroll 8
      for (int j = 0; j < LINES; j++)
        for (int half = 0; half < 2; half++) {
          const uint8_t* line = numbers + half * HALF + 64 * j;
          fetch_beyond(ahead, numbers + 128 * j + 64 * half);
          const __m512i bytes = _mm512_loadu_si512(line);
          const __m512i first = BITS == 4 ? _mm512_and_si512(bytes, mask) : bytes;
          const __m512i second = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            const int8_t* own = x[r] + block * 2 * K_BLOCK + LINE_INPUTS * j;
            high[r][half] = _mm512_dpbusd_epi32(high[r][half], first, four_bytes(own));
            low[r][half] = _mm512_dpbusd_epi32(low[r][half], first, four_bytes(own + K_BLOCK));
            if (BITS == 8) continue;
            high[r][half] = _mm512_dpbusd_epi32(high[r][half], second, four_bytes(own + 4));
            low[r][half] = _mm512_dpbusd_epi32(low[r][half], second, four_bytes(own + 4 + K_BLOCK));
          }
        }
      numbers += 2 * HALF;
    }
    for (int half = 0; half < 2; half++) {
      const int64_t place = (panel * rows.num_groups + group) * PANEL + 16 * half;
      const __m512 factors = half_factors(task.groups, place);
      const __m512 zeros = half_zeros(task.groups, place);
      for (int r = 0; r < R; r++) {
        const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(high[r][half], 8), low[r][half]);
        const __m512 sum = _mm512_set1_ps(rows.sums[(first_row + r) * rows.num_groups + group]);
        const __m512 product = _mm512_fnmadd_ps(zeros, sum, _mm512_cvtepi32_ps(both));
        sums[r][half] = _mm512_fmadd_ps(factors, product, sums[r][half]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    const __m512 factor = _mm512_set1_ps(rows.factors[first_row + r]);
    store_32(task, first_row + r, panel, _mm512_mul_ps(sums[r][0], factor),
             _mm512_mul_ps(sums[r][1], factor));
  }
}

template <int BITS>
TARGET_VNNI void vector_rows(const LinearBf16& task, const ByteRows& rows, int64_t first_row,
                             int64_t panel, const Ahead& ahead) {
#define CASE(R)                                                  \
  case R:                                                        \
    vector_panel<BITS, R>(task, rows, first_row, panel, ahead);  \
    break;
  switch (smaller(MOST_ROWS, task.num_rows - first_row)) {
    CASE(1) CASE(2) CASE(3) CASE(4)
  }
#undef CASE
}

void linear_bytes(const LinearBf16& task, int num_threads) {
  ByteRows rows;
  rows.num_blocks = padded_inputs(task.num_inputs) / K_BLOCK;
  rows.num_groups = divide_up(task.num_inputs, task.groups.size);
  const int64_t num_bytes = task.num_rows * rows.num_blocks * 2 * K_BLOCK;
  rows.bytes = static_cast<int8_t*>(
      scratch(2, num_bytes + task.num_rows * (1 + rows.num_groups) * sizeof(float)));
  rows.factors = reinterpret_cast<float*>(rows.bytes + num_bytes);
  rows.sums = rows.factors + task.num_rows;
  // Small activations are split sooner than another thread would notice.
  parallel(num_bytes < (128 << 10) ? 1 : num_threads, task.num_rows, [&](Cursor& cursor) {
    for (int64_t row; (row = cursor.take()) < cursor.total;) split_row(task, row, rows);
  });
  const auto multiply = task.groups.bits == 4 ? vector_rows<4> : vector_rows<8>;
  over_panels_ahead(task, task.groups.numbers, rows.num_blocks * block_bytes_of(task.groups.bits), 1,
                    num_threads, [&](int64_t panel, Ahead& ahead) {
                      for (int64_t row = 0; row < task.num_rows; row += MOST_ROWS)
                        multiply(task, rows, row, panel, ahead);
                    });
}

template <int BITS>
TARGET_VNNI void widen(const LinearBf16& task, int64_t panel, int64_t first_block,
                       int64_t num_blocks, bf16* out) {
  constexpr int LINES = BITS == 4 ? 4 : 8, HALF = 64 * LINES;
  const int64_t all_blocks = padded_inputs(task.num_inputs) / K_BLOCK;
  const int64_t num_groups = divide_up(task.num_inputs, task.groups.size);
  const uint8_t* line = task.groups.numbers + (panel * all_blocks + first_block) * 2 * HALF;
  const __m512i mask = _mm512_set1_epi32((1 << BITS) - 1);
  alignas(64) uint16_t places[32];
  for (int i = 0; i < 32; i++) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i in_turn = _mm512_load_si512(places);
  for (int64_t block = first_block; block < first_block + num_blocks; block++) {
    const int64_t group = block * K_BLOCK / task.groups.size;
    for (int half = 0; half < 2; half++) {
      const int64_t place = (panel * num_groups + group) * PANEL + 16 * half;
      const __m512 factors = half_factors(task.groups, place);
      const __m512 offsets = _mm512_mul_ps(half_zeros(task.groups, place), factors);
      const auto number = [&](__m512i integers) TARGET_VNNI {
        const __m512i own = _mm512_and_si512(integers, mask);
        return _mm512_fmsub_ps(_mm512_cvtepi32_ps(own), factors, offsets);
      };
      for (int j = 0; j < LINES; j++, line += 64) {
        const __m512i bytes = _mm512_loadu_si512(line);
        for (int part = 0; part < 8 / BITS; part++)
          for (int pair = 0; pair < 2; pair++, out += 32) {
            const int shift = 16 * pair + BITS * part;
            const __m512 even = number(_mm512_srli_epi32(bytes, shift));
            const __m512 odd = number(_mm512_srli_epi32(bytes, shift + 8));
            _mm512_storeu_si512(out, _mm512_permutexvar_epi16(
                                         in_turn, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
          }
      }
    }
  }
}

// Rows as tiles, [pairs][blocks][2][16 rows][32 inputs], and what each group's inputs add up to.
struct TileRows {
  bf16* tiles;
  float* sums;  // [groups][rows of all pairs]
  int64_t num_blocks, num_groups, num_pairs;
  bf16* pair(int64_t number) const { return tiles + number * num_blocks * 2 * TILE; }
};

// Inputs of eight stand in the order in which two halves of bytes become a pair: 0 2 1 3 4 6 5 7.
TARGET_AMX void put_row(const LinearBf16& task, int64_t row, const TileRows& rows) {
  alignas(64) uint16_t places[32];
  for (int i = 0; i < 32; i++)
    places[i] = static_cast<uint16_t>(i / 4 * 4 + i % 4 / 2 + i % 2 * 2);
  const __m512i order = _mm512_load_si512(places);
  bf16* to = rows.pair(row / 32) + row % 32 / 16 * TILE + row % 16 * 32;
  const bf16* x = task.x + row * task.x_stride;
  const int64_t blocks = task.groups.size / K_BLOCK;
  for (int64_t group = 0, block = 0; group < rows.num_groups; group++) {
    __m512 sum = _mm512_setzero_ps();
    for (const int64_t end = smaller(block + blocks, rows.num_blocks); block < end; block++) {
      const int64_t left = task.num_inputs - block * K_BLOCK;
      const __mmask32 mask = row >= task.num_rows ? 0 : left >= 32 ? ~0u : (1u << left) - 1;
      const __m512i numbers = _mm512_maskz_loadu_epi16(mask, x + block * K_BLOCK);
      _mm512_storeu_si512(to + block * 2 * TILE, _mm512_permutexvar_epi16(order, numbers));
      sum = _mm512_add_ps(sum, _mm512_add_ps(wide(_mm512_castsi512_si256(numbers)),
                                             wide(_mm512_extracti64x4_epi64(numbers, 1))));
    }
    rows.sums[group * rows.num_pairs * 32 + row] = _mm512_reduce_add_ps(sum);
  }
}

// Writes blocks of 4-bit integers as tiles of 128 + integer.
TARGET_AMX INLINE void shift_blocks(const uint8_t* line, int64_t num_blocks, bf16* out) {
  const __m512i mask = _mm512_set1_epi32(0x000f000f), base = _mm512_set1_epi32(0x43004300);
  constexpr int SELECT = 0xea;  // (a & b) | c
  for (int64_t i = 0; i < 8 * num_blocks; i++, line += 64, out += 128) {
    const __m512i bytes = _mm512_loadu_si512(line);
    _mm_prefetch(reinterpret_cast<const char*>(line) + 4096, _MM_HINT_T0);
    _mm512_store_si512(out, _mm512_ternarylogic_epi32(bytes, mask, base, SELECT));
    _mm512_store_si512(out + 32, _mm512_ternarylogic_epi32(_mm512_srli_epi32(bytes, 8), mask,
                                                           base, SELECT));
    _mm512_store_si512(out + 64, _mm512_ternarylogic_epi32(_mm512_srli_epi32(bytes, 4), mask,
                                                           base, SELECT));
    _mm512_store_si512(out + 96, _mm512_ternarylogic_epi32(_mm512_srli_epi32(bytes, 12), mask,
                                                           base, SELECT));
  }
}

// Multiplies 16 or 32 rows by a panel's group; products [2 of 16 rows][2 halves][16][16].
template <bool TWO>
TARGET_AMX INLINE void multiply_group(const bf16* a, const bf16* b, int64_t num_blocks,
                                      float* products) {
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t block = 0; block < num_blocks; block++, a += 2 * TILE, b += 2 * TILE) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + TILE, 64);
    if (TWO) _tile_loadd(5, a + TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, products, 64);
  _tile_stored(1, products + 256, 64);
  if (TWO) {
    _tile_stored(2, products + 512, 64);
    _tile_stored(3, products + 768, 64);
  }
}

TARGET_AMX void tile_panel(const LinearBf16& task, const TileRows& rows, int64_t panel) {
  const int64_t size = rows.num_pairs * 1024, blocks = task.groups.size / K_BLOCK;
  float* sums = static_cast<float*>(scratch(1, (size + 1024) * sizeof(float)));
  float* products = sums + size;
  bf16* shifted = static_cast<bf16*>(scratch(4, blocks * 2 * TILE * sizeof(bf16)));
  std::memset(sums, 0, size * sizeof(float));
  for (int64_t group = 0; group < rows.num_groups; group++) {
    const int64_t first = group * blocks, count = smaller(blocks, rows.num_blocks - first);
    shift_blocks(task.groups.numbers + (panel * rows.num_blocks + first) * block_bytes_of(4), count,
                 shifted);
    const int64_t place = (panel * rows.num_groups + group) * PANEL;
    __m512 factors[2], zeros[2];
    for (int half = 0; half < 2; half++) {
      factors[half] = half_factors(task.groups, place + 16 * half);
      zeros[half] =
          _mm512_add_ps(half_zeros(task.groups, place + 16 * half), _mm512_set1_ps(SHIFTED_BY));
    }
    for (int64_t pair = 0; pair < rows.num_pairs; pair++) {
      const int64_t num_rows = smaller(32, task.num_rows - pair * 32);
      const bf16* a = rows.pair(pair) + first * 2 * TILE;
      if (num_rows > 16)
        multiply_group<true>(a, shifted, count, products);
      else
        multiply_group<false>(a, shifted, count, products);
      const float* inputs = rows.sums + (group * rows.num_pairs + pair) * 32;
      for (int64_t i = 0; i < num_rows; i++) {
        const __m512 sum = _mm512_set1_ps(inputs[i]);
        for (int half = 0; half < 2; half++) {
          const int64_t line = i / 16 * 512 + half * 256 + i % 16 * 16;
          const __m512 own = _mm512_fnmadd_ps(zeros[half], sum, _mm512_load_ps(products + line));
          float* to = sums + pair * 1024 + line;
          _mm512_store_ps(to, _mm512_fmadd_ps(factors[half], own, _mm512_load_ps(to)));
        }
      }
    }
  }
  for (int64_t row = 0; row < task.num_rows; row++) {
    const float* line = sums + row / 32 * 1024 + row % 32 / 16 * 512 + row % 16 * 16;
    store_32(task, row, panel, _mm512_load_ps(line), _mm512_load_ps(line + 256));
  }
}

TARGET_AMX void linear_tiles(const LinearBf16& task, int num_threads) {
  TileRows rows;
  rows.num_blocks = padded_inputs(task.num_inputs) / K_BLOCK;
  rows.num_groups = divide_up(task.num_inputs, task.groups.size);
  rows.num_pairs = divide_up(task.num_rows, 32);
  const int64_t num_bytes = rows.num_pairs * rows.num_blocks * 2 * TILE * sizeof(bf16);
  rows.tiles = static_cast<bf16*>(
      scratch(2, num_bytes + rows.num_groups * rows.num_pairs * 32 * sizeof(float)));
  rows.sums = reinterpret_cast<float*>(rows.tiles + num_bytes / sizeof(bf16));
  // Small activations are put into tiles sooner than another thread would notice.
  parallel(num_bytes < (128 << 10) ? 1 : num_threads, rows.num_pairs * 32, [&](Cursor& cursor) {
    for (int64_t row; (row = cursor.take()) < cursor.total;) put_row(task, row, rows);
  });
  const int64_t num_panels = task.num_panels();
  const int64_t size = panels_of_chunk(num_panels, rows.num_blocks * block_bytes_of(4), num_threads);
  parallel(num_threads, divide_up(num_panels, size), [&](Cursor& cursor) TARGET_AMX {
    configure_tiles();
    for (int64_t chunk; (chunk = cursor.take()) < cursor.total;)
      for (int64_t panel = chunk * size; panel < smaller(num_panels, (chunk + 1) * size); panel++)
        tile_panel(task, rows, panel);
    _tile_release();
  });
}

}  // namespace

void widen_groups(const LinearBf16& task, int64_t panel, int64_t first_block, int64_t num_blocks,
                  bf16* out) {
  (task.groups.bits == 4 ? widen<4> : widen<8>)(task, panel, first_block, num_blocks, out);
}

void linear_groups(const Linear<float>& task, int32_t level, int num_threads) {
  (level >= AVX512 ? avx512::linear_groups<float> : avx2::linear_groups<float>)(task, num_threads);
}

void linear_groups(const LinearBf16& task, int32_t level, int num_threads) {
  if (level >= AMX && task.num_rows > VECTOR_ROWS)
    return (task.groups.bits == 4 && task.num_rows <= TILE_ROWS ? linear_tiles : linear_bf16_amx)(
        task, num_threads);
  if (level == AVX512_BF16 && task.num_rows >= WIDENED_ROWS) return linear_widened(task, num_threads);
  if (level >= AVX512_BF16) return linear_bytes(task, num_threads);
  (level >= AVX512 ? avx512::linear_groups<bf16> : avx2::linear_groups<bf16>)(task, num_threads);
}

// Returns how many bytes a weight in groups has; its factors and zeros are padded to panels.
EXPORT int64_t core_packed_size_groups(int64_t num_outputs, int64_t num_inputs, int64_t bits,
                                       int32_t is_gated) {
  return panels_of(num_outputs, is_gated != 0) * (padded_inputs(num_inputs) / K_BLOCK) *
         block_bytes_of(bits);
}

// Packs integers [num_outputs, num_inputs], contiguous, each below 2 to the power of `bits`.
EXPORT void core_pack_groups(const uint8_t* integers, int64_t num_outputs, int64_t num_inputs,
                             int64_t bits, uint8_t* packed, int32_t num_threads) {
  const int64_t num_blocks = padded_inputs(num_inputs) / K_BLOCK;
  parallel(num_threads, divide_up(num_outputs, PANEL), [&](Cursor& cursor) {
    uint8_t* line = static_cast<uint8_t*>(scratch(0, num_blocks * K_BLOCK));
    for (int64_t panel; (panel = cursor.take()) < cursor.total;)
      for (int64_t i = 0; i < PANEL; i++) {
        const int64_t output = panel * PANEL + i;
        std::memset(line, 0, num_blocks * K_BLOCK);
        if (output < num_outputs) std::memcpy(line, integers + output * num_inputs, num_inputs);
        place_integers(line, num_blocks, bits, panel, i, packed);
      }
  });
}

// Rounds weight [num_outputs, num_inputs], contiguous, to 4 bits in groups of `size`.
#define OPERATIONS(T, name)                                                                       \
  EXPORT void core_quantize_groups_##name(const T* weight, int64_t num_outputs,                   \
                                          int64_t num_inputs, int64_t size, int32_t is_gated,     \
                                          uint8_t* packed, uint16_t* factors, uint8_t* zeros,     \
                                          int32_t num_threads) {                                  \
    quantize(weight, num_outputs, num_inputs, size, is_gated != 0, packed, factors, zeros,        \
             num_threads);                                                                        \
  }
OPERATIONS(float, f32)
OPERATIONS(bf16, bf16)
