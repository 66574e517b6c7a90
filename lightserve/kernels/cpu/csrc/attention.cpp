// How attention is cut into pieces, and how pieces of one context are put together.
#include <cmath>
#include <memory>
#include <vector>

#include "core.h"

namespace {

template <typename T>
void fill_tile(const Attention<T>& task, const Piece& piece, int64_t first_lane, Tile& tile) {
  const int64_t* row = task.rows + piece.row * 4;
  const int64_t num_new = row[1], context = row[2], first_token = row[3];
  const int64_t group = task.num_heads / task.num_kv_heads;
  tile.begin = tile.end_of_all = context;
  tile.end = tile.begin_of_all = -1;
  for (int64_t i = 0; i < LANES; i++) {
    const int64_t lane = first_lane + i;
    tile.queries[i] = tile.outputs[i] = -1;
    tile.first_key[i] = 0;
    tile.last_key[i] = -1;
    tile.slopes[i] = 0.0f;
    if (lane >= num_new * group) continue;
    const int64_t token = first_token + lane / group, head = piece.kv_head * group + lane % group;
    const int64_t place = context - num_new + lane / group;
    const int64_t first = task.window > 0 ? larger(0, place + 1 - task.window) : 0;
    tile.queries[i] = token * task.token_stride + head * task.head_dim;
    tile.outputs[i] = (token * task.num_heads + head) * task.head_dim;
    tile.first_key[i] = static_cast<int32_t>(first);
    tile.last_key[i] = static_cast<int32_t>(place);
    tile.slopes[i] = task.slopes == nullptr ? 0.0f : task.slopes[head];
    tile.begin = smaller(tile.begin, first);
    tile.end = larger(tile.end, place);
    tile.begin_of_all = larger(tile.begin_of_all, first);
    tile.end_of_all = smaller(tile.end_of_all, place);
  }
}

template <typename T>
std::vector<Piece> pieces_of(const Attention<T>& task, int64_t& num_states) {
  std::vector<Piece> pieces;
  const int64_t group = task.num_heads / task.num_kv_heads, step = MAX_TILES * LANES;
  num_states = 0;
  for (int64_t r = task.num_rows - 1; r >= 0; r--) {
    const int64_t* row = task.rows + r * 4;
    const int64_t num_new = row[1], context = row[2], lanes = num_new * group;
    for (int64_t head = 0; head < task.num_kv_heads; head++)
      // The last queries see most: their pieces are begun first.
      for (int64_t lane = (divide_up(lanes, step) - 1) * step; lane >= 0; lane -= step) {
        const int64_t end_lane = smaller(lane + step, lanes);
        const int64_t place = context - num_new + lane / group;
        int64_t begin = task.window > 0 ? larger(0, place + 1 - task.window) : 0;
        if (task.is_invariant) begin = begin / KEY_BLOCK * KEY_BLOCK;
        const int64_t end = context - num_new + (end_lane - 1) / group + 1;
        const int64_t num_tiles = divide_up(end_lane - lane, LANES);
        const bool is_cut = lanes <= step && !task.is_invariant;
        const int64_t num_parts = is_cut ? divide_up(end - begin, KEYS_OF_PIECE) : 1;
        const int64_t keys = divide_up(divide_up(end - begin, num_parts), KEY_BLOCK) * KEY_BLOCK;
        const int64_t first_part = num_parts > 1 ? num_states : -1;
        for (int64_t part = 0; part < num_parts; part++)
          pieces.push_back({r, row[0], head, lane, num_tiles, smaller(end, begin + part * keys),
                            smaller(end, begin + (part + 1) * keys), first_part, part, num_parts});
        if (num_parts > 1) num_states += num_parts * num_tiles;
      }
  }
  return pieces;
}

void clear_state(float* state, int64_t size) {
  for (int64_t i = 0; i < LANES; i++) state[i] = -INFINITY;
  std::memset(state + LANES, 0, (size - LANES) * sizeof(float));
}

// Adds a later part's state to an earlier one's.
void add_state(float* state, const float* other, int64_t size) {
  for (int64_t lane = 0; lane < LANES; lane++) {
    const float best = std::fmax(state[lane], other[lane]);
    if (best == -INFINITY) continue;
    const float own = std::exp(state[lane] - best), added = std::exp(other[lane] - best);
    state[lane] = best;
    for (int64_t i = lane + LANES; i < size; i += LANES) state[i] = state[i] * own + other[i] * added;
  }
}

}  // namespace

template <typename T>
void run_attention(const Attention<T>& task, int num_threads,
                   bool (*attend)(const Attention<T>&, const Piece&, const Tile*, float*),
                   void (*finish)(const Attention<T>&, const Tile&, const float*)) {
  int64_t num_states = 0;
  const std::vector<Piece> pieces = pieces_of(task, num_states);
  const int64_t size = state_size(task.head_dim);
  float* shared = static_cast<float*>(scratch(6, num_states * size * sizeof(float)));
  const std::unique_ptr<std::atomic<int64_t>[]> done(new std::atomic<int64_t>[num_states + 1]);
  for (int64_t i = 0; i < num_states; i++) done[i].store(0, std::memory_order_relaxed);
  parallel(num_threads, static_cast<int64_t>(pieces.size()), [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;) {
      const Piece& piece = pieces[i];
      const int64_t num_tiles = piece.num_tiles;
      Tile tiles[MAX_TILES];
      for (int64_t t = 0; t < num_tiles; t++)
        fill_tile(task, piece, piece.first_lane + t * LANES, tiles[t]);
      float* states = piece.num_parts == 1
                          ? static_cast<float*>(scratch(7, num_tiles * size * sizeof(float)))
                          : shared + (piece.first_part + piece.part * num_tiles) * size;
      for (int64_t t = 0; t < num_tiles; t++) clear_state(states + t * size, size);
      if (attend(task, piece, tiles, states)) continue;
      if (piece.num_parts > 1) {
        // Who comes last puts the parts together, in their order.
        if (done[piece.first_part].fetch_add(1) + 1 < piece.num_parts) continue;
        states = shared + piece.first_part * size;
        for (int64_t part = 1; part < piece.num_parts; part++)
          for (int64_t t = 0; t < num_tiles; t++)
            add_state(states + t * size, states + (part * num_tiles + t) * size, size);
      }
      for (int64_t t = 0; t < num_tiles; t++) finish(task, tiles[t], states + t * size);
    }
  });
}

#define INSTANCE(T)                                                                           \
  template void run_attention<T>(                                                             \
      const Attention<T>&, int, bool (*)(const Attention<T>&, const Piece&, const Tile*, float*), \
      void (*)(const Attention<T>&, const Tile&, const float*));
INSTANCE(float)
INSTANCE(bf16)

namespace avx2 {
template <typename T, typename N>
void norm(const T*, int64_t, T*, const N*, float, int64_t, int64_t, T*, int);
template <typename T> void rotate(const Rotation<T>&, int);
template <typename T> void attention(const Attention<T>&, int);
}  // namespace avx2
namespace avx512 {
template <typename T, typename N>
void norm(const T*, int64_t, T*, const N*, float, int64_t, int64_t, T*, int);
template <typename T> void rotate(const Rotation<T>&, int);
template <typename T> void attention(const Attention<T>&, int);
}  // namespace avx512

// `core_rotate` returns 0, and does nothing, if a slot is none of the pool's.
// `residual` [num_rows, size] may be null; with one, x is added to it and the sum is normalised. A
// weight is T's, or float32.
#define OPERATIONS(T, name)                                                                      \
  EXPORT void core_norm_##name(const T* x, int64_t x_stride, T* residual, const void* weight,    \
                               int32_t is_wide, float eps, int64_t num_rows, int64_t size,       \
                               T* out, int32_t level, int32_t num_threads) {                     \
    if (is_wide)                                                                                 \
      (level >= AVX512 ? avx512::norm<T, float> : avx2::norm<T, float>)(                         \
          x, x_stride, residual, static_cast<const float*>(weight), eps, num_rows, size, out,    \
          num_threads);                                                                          \
    else                                                                                         \
      (level >= AVX512 ? avx512::norm<T, T> : avx2::norm<T, T>)(                                 \
          x, x_stride, residual, static_cast<const T*>(weight), eps, num_rows, size, out,        \
          num_threads);                                                                          \
  }                                                                                              \
  BY_WORDS(core_norm_##name)                                                                     \
  EXPORT int32_t core_rotate_##name(                                                             \
      T* q, const T* k, const T* v, int64_t token_stride, int64_t num_tokens, int64_t num_heads, \
      int64_t num_kv_heads, int64_t head_dim, const float* cos, const float* sin, int64_t half,  \
      void* k_pool, void* v_pool, int64_t slot_stride, int64_t head_stride, int32_t is_int8,     \
      const int64_t* slots, int64_t num_slots, const void* q_weight, const void* k_weight,       \
      int32_t has_wide_norms, float eps, int32_t level, int32_t num_threads) {                                                      \
    for (int64_t i = 0; i < num_tokens; i++)                                                     \
      if (slots[i] < 0 || slots[i] >= num_slots) return 0;                                       \
    const Pools pools{k_pool, v_pool, slot_stride, head_stride, is_int8 != 0};                   \
    const Rotation<T> task{q,        k,   v,   token_stride, num_tokens, num_heads, num_kv_heads, \
                           head_dim, cos, sin, half,         pools,      slots,     num_slots,    \
                           q_weight, k_weight, has_wide_norms != 0, eps};                                     \
    (level >= AVX512 ? avx512::rotate<T> : avx2::rotate<T>)(task, num_threads);                  \
    return 1;                                                                                    \
  }                                                                                              \
  BY_WORDS(core_rotate_##name)                                                                   \
  EXPORT void core_attention_##name(                                                             \
      const T* q, int64_t token_stride, void* k_pool, void* v_pool, int64_t slot_stride,         \
      int64_t head_stride, int32_t is_int8, const int32_t* table, int64_t table_stride,          \
      const int64_t* rows, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,            \
      int64_t head_dim, int64_t window, float scale, float soft_cap, const float* slopes,        \
      const float* sinks, int32_t is_invariant, T* out, int32_t level,         \
      int32_t num_threads) {                                                                     \
    const Pools pools{k_pool, v_pool, slot_stride, head_stride, is_int8 != 0};                   \
    const Attention<T> task{q,        token_stride, pools,        table,    table_stride, rows,  \
                            num_rows, num_heads,    num_kv_heads, head_dim, window,       scale, \
                            out,      is_invariant != 0, soft_cap, slopes, sinks};               \
    attention_##name(task, level, num_threads);                                                  \
  }                                                                                              \
  BY_WORDS(core_attention_##name)

static void attention_f32(const Attention<float>& task, int32_t level, int32_t num_threads) {
  (level >= AVX512 ? avx512::attention<float> : avx2::attention<float>)(task, num_threads);
}
static void attention_bf16(const Attention<bf16>& task, int32_t level, int32_t num_threads) {
  // Scores that are modified stay in vectors of float32.
  if (level >= AVX512_BF16 && !task.modifies())
    return (level >= AMX ? attention_amx : attention_dots)(task, num_threads);
  (level >= AVX512 ? avx512::attention<bf16> : avx2::attention<bf16>)(task, num_threads);
}

OPERATIONS(float, f32)
OPERATIONS(bf16, bf16)
