// Attention of bfloat16 by AMX tiles, or by AVX512's dot products.
//
// Scores stand as [keys][lanes]: what softmax does to a lane is then done to vectors. With 16 lanes
// per tile and 64 keys at once:
//
//   scores   [64 keys][16 lanes]     = keys [16 by 16][32 dimensions] x queries [16 pairs][16 lanes]
//   sums     [16 lanes][dimensions] += weights [16 lanes][32 keys] x values [16 pairs][16 dimensions]
#include <immintrin.h>

#include "core.h"
#include "tiles.h"

namespace avx512 {
template <typename T> bool attend(const Attention<T>&, const Piece&, const Tile*, float*);
template <typename T> void finish_lanes(const Attention<T>&, const Tile&, const float*);
}

namespace {

constexpr float NOTHING = -1e30f;  // the score of a key that is not seen: its weight is zero

// Two to the power of x <= 0, with a relative error below 1e-5: it is rounded to bfloat16.
TARGET_BF16 INLINE __m512 exp2_of(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, 0);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(9.6181291e-3f);
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.5504109e-2f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.4022651e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.9314718e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, whole);
}

TARGET_BF16 INLINE void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
  }
}

// Working memory of a piece; sizes in numbers, `size` is the head's rounded up to 32.
struct Room {
  bf16* queries;  // [tiles][size / 32][16 pairs][16 lanes][2]
  bf16* keys;     // [KEY_BLOCK][size]
  bf16* values;   // [KEY_BLOCK / 32][size / 16][16 pairs][16 dimensions][2]
  float* scores;  // [KEY_BLOCK][LANES]
  bf16* weights;  // [KEY_BLOCK / 32][LANES][32]
  float* sums;    // [tiles][size / 16][LANES][16]
  float* best;    // [tiles][LANES], in powers of two
  float* total;   // [tiles][LANES]
};

TARGET_BF16 Room make_room(int64_t num_tiles, int64_t size) {
  const int64_t queries = num_tiles * LANES * size * 2, block = KEY_BLOCK * size * 2;
  const int64_t sums = num_tiles * LANES * size * 4, lanes = num_tiles * LANES * 4;
  char* start = static_cast<char*>(scratch(
      5, queries + 2 * block + KEY_BLOCK * LANES * 6 + sums + 2 * lanes));
  Room room;
  const auto take = [&](int64_t num_bytes) {
    char* part = start;
    start += num_bytes;
    return part;
  };
  room.queries = reinterpret_cast<bf16*>(take(queries));
  room.keys = reinterpret_cast<bf16*>(take(block));
  room.values = reinterpret_cast<bf16*>(take(block));
  room.scores = reinterpret_cast<float*>(take(KEY_BLOCK * LANES * 4));
  room.weights = reinterpret_cast<bf16*>(take(KEY_BLOCK * LANES * 2));
  room.sums = reinterpret_cast<float*>(take(sums));
  room.best = reinterpret_cast<float*>(take(lanes));
  room.total = reinterpret_cast<float*>(take(lanes));
  std::memset(room.sums, 0, sums + lanes);
  for (int64_t i = 0; i < num_tiles * LANES; i++) {
    room.best[i] = NOTHING;
    room.total[i] = 0;
  }
  return room;
}

TARGET_BF16 void put_queries(const Attention<bf16>& task, const Tile& tile, int64_t size,
                            bf16* queries) {
  for (int64_t d = 0; d < size; d += 32) {
    const int64_t left = task.head_dim - d;
    const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
    __m512i pairs[LANES];
    for (int64_t lane = 0; lane < LANES; lane++)
      pairs[lane] = tile.queries[lane] == -1
                        ? _mm512_setzero_si512()
                        : _mm512_maskz_loadu_epi16(mask, task.q + tile.queries[lane] + d);
    transpose(pairs);
    for (int64_t i = 0; i < 16; i++) _mm512_store_si512(queries + d * LANES + 32 * i, pairs[i]);
  }
}

// 32 numbers of a head from `d` on, as many as the mask has.
TARGET_BF16 INLINE __m512i numbers_at(const Pools& pools, const void* pool, int64_t place,
                                     int64_t head_dim, int64_t d, __mmask32 mask) {
  if (!pools.is_int8)
    return _mm512_maskz_loadu_epi16(mask, static_cast<const bf16*>(pool) + place + d);
  if (mask == 0) return _mm512_setzero_si512();
  const int8_t* row = static_cast<const int8_t*>(pool) + place;
  float factor;
  std::memcpy(&factor, row + head_dim, sizeof factor);
  const __m256i bytes = _mm256_maskz_loadu_epi8(mask, row + d);
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
  const __m512 scale = _mm512_set1_ps(factor);
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, scale), _mm512_mul_ps(low, scale));
}

TARGET_BF16 void put_keys_and_values(const Attention<bf16>& task, const Piece& piece,
                                    int64_t first_key, int64_t num_keys, int64_t size,
                                    const Room& room) {
  const int32_t* slots = task.table + piece.table_row * task.table_stride + first_key;
  const Pools& pools = task.pools;
  const int64_t head = piece.kv_head * pools.head_stride, head_dim = task.head_dim;
  alignas(64) uint16_t order[2][32];
  for (int i = 0; i < 32; i++) {
    order[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    order[1][i] = static_cast<uint16_t>(16 + i / 2 + i % 2 * 32);
  }
  const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
  for (int64_t key = 0; key < KEY_BLOCK; key += 2) {
    const bool has_first = key < num_keys, has_second = key + 1 < num_keys;
    const int64_t first = has_first ? slots[key] * pools.slot_stride + head : 0;
    const int64_t second = has_second ? slots[key + 1] * pools.slot_stride + head : 0;
    for (int64_t d = 0; d < size; d += 32) {
      const int64_t left = head_dim - d;
      const __mmask32 part = left >= 32 ? ~0u : (1u << left) - 1;
      const __mmask32 mask_1 = has_first ? part : 0, mask_2 = has_second ? part : 0;
      _mm512_store_si512(room.keys + key * size + d,
                         numbers_at(pools, pools.k, first, head_dim, d, mask_1));
      _mm512_store_si512(room.keys + (key + 1) * size + d,
                         numbers_at(pools, pools.k, second, head_dim, d, mask_2));
      const __m512i a = numbers_at(pools, pools.v, first, head_dim, d, mask_1);
      const __m512i b = numbers_at(pools, pools.v, second, head_dim, d, mask_2);
      bf16* to = room.values + (key / 32 * (size / 16) + d / 16) * 512 + key % 32 / 2 * 32;
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(to + 512, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// Turns scores into weights; returns the factor of what was summed before, and whether it is not 1.
// `is_full`: all lanes see all keys of the block.
template <bool is_full>
TARGET_BF16 bool soften(const Tile& tile, int64_t first_key, int64_t num_keys, float scale,
                       const Room& room, float* best_of, float* total_of, __m512* factor) {
  const __m512i last = _mm512_loadu_si512(tile.last_key);
  const __m512i first = _mm512_loadu_si512(tile.first_key);
  const __m512 unit = _mm512_set1_ps(scale * 1.44269504f), nothing = _mm512_set1_ps(NOTHING);
  const __m512 before = _mm512_loadu_ps(best_of);
  __m512 best = before;
  if (is_full) {
    __m512 most[4];
    for (int64_t i = 0; i < 4; i++) most[i] = _mm512_load_ps(room.scores + i * LANES);
    for (int64_t key = 4; key < KEY_BLOCK; key += 4)
      for (int64_t i = 0; i < 4; i++)
        most[i] = _mm512_max_ps(most[i], _mm512_load_ps(room.scores + (key + i) * LANES));
    const __m512 both = _mm512_max_ps(_mm512_max_ps(most[0], most[1]),
                                      _mm512_max_ps(most[2], most[3]));
    best = _mm512_max_ps(best, _mm512_mul_ps(both, unit));
  }
  for (int64_t key = 0; !is_full && key < KEY_BLOCK; key++) {
    const __m512i place = _mm512_set1_epi32(static_cast<int32_t>(first_key + key));
    __mmask16 seen = _mm512_cmple_epi32_mask(place, last) & _mm512_cmpge_epi32_mask(place, first);
    if (key >= num_keys) seen = 0;
    __m512 value = _mm512_mul_ps(_mm512_load_ps(room.scores + key * LANES), unit);
    value = _mm512_mask_mov_ps(nothing, seen, value);
    _mm512_store_ps(room.scores + key * LANES, value);
    best = _mm512_max_ps(best, value);
  }
  const __mmask16 sees = _mm512_cmp_ps_mask(best, nothing, _CMP_NEQ_OQ);
  const __m512 base = _mm512_maskz_mov_ps(sees, best);
  *factor = exp2_of(_mm512_sub_ps(before, base));
  __m512 total = _mm512_mul_ps(_mm512_loadu_ps(total_of), *factor);
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; i++) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i in_turn = _mm512_load_si512(order);
  for (int64_t half = 0; half < KEY_BLOCK / 32; half++) {
    __m512i pairs[16];
    for (int i = 0; i < 16; i++) {
      const float* scores = room.scores + (half * 32 + 2 * i) * LANES;
      __m512 a = _mm512_load_ps(scores), b = _mm512_load_ps(scores + LANES);
      a = exp2_of(is_full ? _mm512_fmsub_ps(a, unit, base) : _mm512_sub_ps(a, base));
      b = exp2_of(is_full ? _mm512_fmsub_ps(b, unit, base) : _mm512_sub_ps(b, base));
      total = _mm512_add_ps(total, _mm512_add_ps(a, b));
      pairs[i] = _mm512_permutexvar_epi16(in_turn, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    transpose(pairs);
    for (int i = 0; i < 16; i++)
      _mm512_store_si512(room.weights + half * 512 + i * 32, pairs[i]);
  }
  _mm512_storeu_ps(best_of, best);
  _mm512_storeu_ps(total_of, total);
  return _mm512_cmp_ps_mask(*factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0;
}

TARGET_BF16 void scale_sums(int64_t size, float* sums, __m512 factor) {
  alignas(64) float factors[LANES];
  _mm512_store_ps(factors, factor);
  for (int64_t part = 0; part < size / 16; part++)
    for (int64_t lane = 0; lane < LANES; lane++) {
      float* line = sums + part * 256 + lane * 16;
      _mm512_store_ps(line, _mm512_mul_ps(_mm512_load_ps(line), _mm512_set1_ps(factors[lane])));
    }
}

// What multiplies: scores of one tile of queries, and weighted values added to its sums.

struct Tiles {
  TARGET_AMX static void begin() { configure_tiles(); }
  TARGET_AMX static void end() { _tile_release(); }

  TARGET_AMX static void score(const bf16* queries, const Room& room, int64_t size) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < size; d += 32) {
      _tile_loadd(4, queries + d * LANES, 64);
      _tile_loadd(5, room.keys + d, size * 2);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, room.keys + 16 * size + d, size * 2);
      _tile_dpbf16ps(1, 6, 4);
      _tile_loadd(7, room.keys + 32 * size + d, size * 2);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, room.keys + 48 * size + d, size * 2);
      _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, room.scores, 64);
    _tile_stored(1, room.scores + 256, 64);
    _tile_stored(2, room.scores + 512, 64);
    _tile_stored(3, room.scores + 768, 64);
  }

  TARGET_AMX static void add_values(const Room& room, int64_t size, float* sums, bool is_scaled,
                             __m512 factor) {
    if (is_scaled) scale_sums(size, sums, factor);
    _tile_loadd(6, room.weights, 64);
    _tile_loadd(7, room.weights + 512, 64);
    const bf16* values = room.values;
    for (int64_t part = 0; part < size / 16; part += 2) {
      _tile_loadd(0, sums + part * 256, 64);
      _tile_loadd(4, values + part * 512, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_loadd(1, sums + part * 256 + 256, 64);
      _tile_loadd(5, values + part * 512 + 512, 64);
      _tile_dpbf16ps(1, 6, 5);
      _tile_loadd(4, values + (size / 16 + part) * 512, 64);
      _tile_dpbf16ps(0, 7, 4);
      _tile_loadd(5, values + (size / 16 + part) * 512 + 512, 64);
      _tile_dpbf16ps(1, 7, 5);
      _tile_stored(0, sums + part * 256, 64);
      _tile_stored(1, sums + part * 256 + 256, 64);
    }
  }
};

struct Dots {
  static void begin() {}
  static void end() {}

  TARGET_BF16 INLINE __m512bh pair_at(const bf16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }

  TARGET_BF16 static void score(const bf16* queries, const Room& room, int64_t size) {
    constexpr int KEYS = 16;
    for (int64_t key = 0; key < KEY_BLOCK; key += KEYS) {
      const bf16* keys = room.keys + key * size;
      __m512 sums[KEYS];
      for (auto& sum : sums) sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < size; d += 2) {
        const __m512bh query = (__m512bh)_mm512_load_si512(queries + d * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++)
          sums[i] = _mm512_dpbf16_ps(sums[i], query, pair_at(keys + i * size + d));
      }
      for (int i = 0; i < KEYS; i++) _mm512_store_ps(room.scores + (key + i) * LANES, sums[i]);
    }
  }

  TARGET_BF16 static void add_values(const Room& room, int64_t size, float* sums, bool is_scaled,
                                     __m512 factor) {
    constexpr int SOME = 8;  // lanes, each with 32 numbers of a head
    if (is_scaled) scale_sums(size, sums, factor);
    for (int64_t part = 0; part < size / 16; part += 2)
      for (int64_t lane = 0; lane < LANES; lane += SOME) {
        float* own = sums + part * 256 + lane * 16;
        __m512 totals[SOME][2];
        for (int i = 0; i < SOME; i++)
          for (int j = 0; j < 2; j++) totals[i][j] = _mm512_load_ps(own + j * 256 + i * 16);
        for (int64_t half = 0; half < KEY_BLOCK / 32; half++) {
          const bf16* values = room.values + (half * (size / 16) + part) * 512;
          const bf16* weights = room.weights + half * 512 + lane * 32;
          for (int64_t pair = 0; pair < 16; pair++, values += 32, weights += 2) {
            const __m512bh low = (__m512bh)_mm512_load_si512(values);
            const __m512bh high = (__m512bh)_mm512_load_si512(values + 512);
#pragma GCC unroll 8
            for (int i = 0; i < SOME; i++) {
              const __m512bh weight = pair_at(weights + i * 32);
              totals[i][0] = _mm512_dpbf16_ps(totals[i][0], low, weight);
              totals[i][1] = _mm512_dpbf16_ps(totals[i][1], high, weight);
            }
          }
        }
        for (int i = 0; i < SOME; i++)
          for (int j = 0; j < 2; j++) _mm512_store_ps(own + j * 256 + i * 16, totals[i][j]);
      }
  }
};

TARGET_BF16 void store_lanes(const Attention<bf16>& task, const Tile& tile, const float* sums,
                             const float* best, const float* total) {
  for (int64_t lane = 0; lane < LANES; lane++) {
    if (tile.queries[lane] == -1) continue;
    // As in states, in powers of e.
    const __m512 scale = _mm512_set1_ps(
        share_of(task, tile.outputs[lane], best[lane] * 0.693147181f, total[lane]));
    bf16* out = task.out + tile.outputs[lane];
    for (int64_t d = 0; d < task.head_dim; d += 16) {
      const int64_t left = task.head_dim - d;
      const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
      const __m512 values = _mm512_mul_ps(_mm512_load_ps(sums + d * LANES + lane * 16), scale);
      _mm256_mask_storeu_epi16(out + d, mask, (__m256i)_mm512_cvtneps_pbh(values));
    }
  }
}

template <typename Unit>
TARGET_BF16 bool attend_piece(const Attention<bf16>& task, const Piece& piece, const Tile* tiles,
                             float* states) {
  const int64_t size = padded_inputs(task.head_dim);
  const Room room = make_room(piece.num_tiles, size);
  for (int64_t t = 0; t < piece.num_tiles; t++)
    put_queries(task, tiles[t], size, room.queries + t * LANES * size);
  Unit::begin();
  for (int64_t key = piece.first_key; key < piece.end_key; key += KEY_BLOCK) {
    const int64_t num_keys = smaller(KEY_BLOCK, piece.end_key - key);
    put_keys_and_values(task, piece, key, num_keys, size, room);
    for (int64_t t = 0; t < piece.num_tiles; t++) {
      if (key > tiles[t].end || key + num_keys <= tiles[t].begin) continue;
      Unit::score(room.queries + t * LANES * size, room, size);
      __m512 factor;
      const bool is_full = num_keys == KEY_BLOCK && key >= tiles[t].begin_of_all &&
                           key + KEY_BLOCK - 1 <= tiles[t].end_of_all;
      const bool is_scaled = (is_full ? soften<true> : soften<false>)(
          tiles[t], key, num_keys, task.scale, room, room.best + t * LANES,
          room.total + t * LANES, &factor);
      Unit::add_values(room, size, room.sums + t * LANES * size, is_scaled, factor);
    }
  }
  Unit::end();
  if (piece.num_parts == 1) {
    for (int64_t t = 0; t < piece.num_tiles; t++)
      store_lanes(task, tiles[t], room.sums + t * LANES * size, room.best + t * LANES,
                  room.total + t * LANES);
    return true;
  }
  for (int64_t t = 0; t < piece.num_tiles; t++) {
    float* state = states + t * state_size(task.head_dim);
    const float* sums = room.sums + t * LANES * size;
    for (int64_t lane = 0; lane < LANES; lane++) {
      state[lane] = room.best[t * LANES + lane] * 0.693147181f;  // as other pieces have it
      state[LANES + lane] = room.total[t * LANES + lane];
      for (int64_t d = 0; d < task.head_dim; d++)
        state[(2 + d) * LANES + lane] = sums[d / 16 * 256 + lane * 16 + d % 16];
    }
  }
  return false;
}

// Few lanes, as decodes have them, would leave most of a tile empty.
bool attend_by_dots(const Attention<bf16>& task, const Piece& piece, const Tile* tiles,
                    float* states) {
  const bool are_few = piece.num_tiles == 1 && tiles[0].queries[FEW_LANES] == -1;
  return are_few ? avx512::attend(task, piece, tiles, states)
                 : attend_piece<Dots>(task, piece, tiles, states);
}

}  // namespace

void attention_amx(const Attention<bf16>& task, int num_threads) {
  run_attention<bf16>(task, num_threads, attend_piece<Tiles>, avx512::finish_lanes<bf16>);
}

void attention_dots(const Attention<bf16>& task, int num_threads) {
  run_attention<bf16>(task, num_threads, attend_by_dots, avx512::finish_lanes<bf16>);
}
