// Attention for any width of vectors, included behind vectors.h for each set of instructions.

namespace SPACE {

// ---- attention of tiles ----

// What 16 lanes (queries of heads) have seen so far; numbers of a lane stand in a column.
constexpr int64_t LANE_VECTORS = LANES / W;
// Keys, and numbers of a head, at once: as many chains of additions as keep the processor busy.
constexpr int64_t KEYS_AT_ONCE = 8 / LANE_VECTORS, NUMBERS_AT_ONCE = 8;
// Tiles that share what is loaded of a key or a value, as many as the registers hold.
constexpr int TILES_AT_ONCE = W == 16 ? 2 : 1;

// Scores of N tiles, [N][KEY_BLOCK][LANES].
template <int N>
TARGET static void tile_scores(const float* queries, const float* keys, int64_t num_keys,
                               int64_t size, float* scores) {
  for (int64_t key = 0; key < num_keys; key += KEYS_AT_ONCE) {
    F sums[N][KEYS_AT_ONCE][LANE_VECTORS];
    for (auto& tile : sums)
      for (auto& sum : tile)
        for (auto& part : sum) part = F{};
    const float* rows[KEYS_AT_ONCE];
    for (int64_t i = 0; i < KEYS_AT_ONCE; i++) rows[i] = keys + smaller(key + i, num_keys - 1) * size;
    for (int64_t d = 0; d < size; d++)
      for (int v = 0; v < LANE_VECTORS; v++) {
        F query[N];
        for (int t = 0; t < N; t++) query[t] = load(queries + (t * size + d) * LANES + v * W);
        for (int i = 0; i < KEYS_AT_ONCE; i++) {
          const F number = F{} + rows[i][d];
          for (int t = 0; t < N; t++) sums[t][i][v] += query[t] * number;
        }
      }
    for (int t = 0; t < N; t++)
      for (int64_t i = 0; i < smaller(KEYS_AT_ONCE, num_keys - key); i++)
        for (int v = 0; v < LANE_VECTORS; v++)
          store(scores + (t * KEY_BLOCK + key + i) * LANES + v * W, sums[t][i][v]);
  }
}

// cap * tanh(score / cap), less than a millionth of the cap away.
TARGET INLINE F capped(F score, float cap) {
  const F power = exp_of(score * (2.0f / cap));
  return (power - 1.0f) / (power + 1.0f) * cap;
}

// Does to a block's scores [keys][LANES] what the model does; see `ScoreMod`.
template <typename T>
TARGET static void tile_modified(const Attention<T>& task, const Tile& tile, int64_t first_key,
                                 int64_t num_keys, float* scores) {
  for (int v = 0; v < LANE_VECTORS; v++) {
    const F slopes = load(tile.slopes + v * W);
    float places[W];
    for (int i = 0; i < W; i++) places[i] = static_cast<float>(tile.last_key[v * W + i]);
    const F place = load(places);
    for (int64_t key = 0; key < num_keys; key++) {
      F score = load(scores + key * LANES + v * W);
      if (task.soft_cap > 0.0f) score = capped(score, task.soft_cap);
      score += slopes * (static_cast<float>(first_key + key) - place);
      store(scores + key * LANES + v * W, score);
    }
  }
}

// Makes weights of some lanes' scores, and returns what is summed up already is to be multiplied by.
TARGET static F tile_weights(const Tile& tile, int v, int64_t first_key, int64_t num_keys,
                             float* scores, float* state) {
  const F nothing = F{} - __builtin_inff();
  const I last = read<I>(tile.last_key + v * W), first = read<I>(tile.first_key + v * W);
  F best = load(state + v * W), total = load(state + LANES + v * W);
  const F before = best;
  for (int64_t key = 0; key < num_keys; key++) {
    const I place = I{} + static_cast<int32_t>(first_key + key);
    F score = load(scores + key * LANES + v * W);
    score = (place > last) | (place < first) ? nothing : score;
    store(scores + key * LANES + v * W, score);
    best = score > best ? score : best;
  }
  const F base = best == nothing ? F{} : best;
  const F factor = before == nothing ? F{} : exp_of(before - base);
  total *= factor;
  for (int64_t key = 0; key < num_keys; key++) {
    const F score = load(scores + key * LANES + v * W);
    const F weight = score == nothing ? F{} : exp_of(score - base);
    store(scores + key * LANES + v * W, weight);
    total += weight;
  }
  store(state + v * W, best);
  store(state + LANES + v * W, total);
  return factor;
}

// Adds values, weighted, to the states of N tiles.
template <int N>
TARGET static void tile_values(const float* weights, const float* values, int64_t num_keys,
                               int64_t size, int v, const F (&factors)[N], float* states) {
  const int64_t state = state_size(size);
  float* sums = states + 2 * LANES + v * W;
  for (int64_t d = 0; d < size; d += NUMBERS_AT_ONCE) {
    F parts[N][NUMBERS_AT_ONCE];
    for (int t = 0; t < N; t++)
      for (int64_t i = 0; i < NUMBERS_AT_ONCE; i++)
        parts[t][i] = load(sums + t * state + smaller(d + i, size - 1) * LANES) * factors[t];
    for (int64_t key = 0; key < num_keys; key++) {
      const float* value = values + key * size + d;  // padded behind the last
      F weight[N];
      for (int t = 0; t < N; t++) weight[t] = load(weights + (t * KEY_BLOCK + key) * LANES + v * W);
      for (int i = 0; i < NUMBERS_AT_ONCE; i++) {
        const F number = F{} + value[i];
        for (int t = 0; t < N; t++) parts[t][i] += weight[t] * number;
      }
    }
    for (int t = 0; t < N; t++)
      for (int64_t i = 0; i < smaller(NUMBERS_AT_ONCE, size - d); i++)
        store(sums + t * state + (d + i) * LANES, parts[t][i]);
  }
}

// Adds a block of keys to the states of N tiles that lie one behind the other.
template <int N, typename T>
TARGET static void attend_block(const Attention<T>& task, const Tile* tiles, const float* queries,
                                const float* keys, const float* values, int64_t first_key,
                                int64_t num_keys, float* states) {
  alignas(64) float scores[N * KEY_BLOCK * LANES];
  const int64_t size = task.head_dim;
  tile_scores<N>(queries, keys, num_keys, size, scores);
  for (int t = 0; t < N && task.modifies(); t++)
    tile_modified(task, tiles[t], first_key, num_keys, scores + t * KEY_BLOCK * LANES);
  for (int v = 0; v < LANE_VECTORS; v++) {
    F factors[N];
    for (int t = 0; t < N; t++)
      factors[t] = tile_weights(tiles[t], v, first_key, num_keys, scores + t * KEY_BLOCK * LANES,
                                states + t * state_size(size));
    tile_values<N>(scores, values, num_keys, size, v, factors, states);
  }
}

template <typename T>
TARGET static void widen(const T* from, int64_t size, float* to) {
  FOR_VECTORS(offset, count, size) store_some(to + offset, load_some(from + offset, count), count);
}

template <typename T>
TARGET static bool attend_piece(const Attention<T>& task, const Piece& piece, const Tile* tiles,
                                float* states) {
  const int64_t size = task.head_dim;
  float* queries = static_cast<float*>(
      scratch(5, ((piece.num_tiles * LANES + 2 * KEY_BLOCK) * size + 16) * sizeof(float)));
  float* keys = queries + piece.num_tiles * LANES * size;
  float* values = keys + KEY_BLOCK * size;
  for (int64_t t = 0; t < piece.num_tiles; t++)
    for (int64_t lane = 0; lane < LANES; lane++) {
      const T* q = tiles[t].queries[lane] == -1
                       ? nullptr
                       : task.q + tiles[t].queries[lane];
      for (int64_t d = 0; d < size; d++) {
        const float number = q == nullptr ? 0.0f : widened(q[d]) * task.scale;
        queries[(t * size + d) * LANES + lane] = number;
      }
    }
  const int32_t* slots = task.table + piece.table_row * task.table_stride;
  for (int64_t key = piece.first_key; key < piece.end_key; key += KEY_BLOCK) {
    const int64_t count = smaller(KEY_BLOCK, piece.end_key - key);
    for (int64_t i = 0; i < count; i++) {
      const Pools& pools = task.pools;
      const int64_t place = slots[key + i] * pools.slot_stride + piece.kv_head * pools.head_stride;
      if (pools.is_int8) {
        widen_bytes(static_cast<const int8_t*>(pools.k) + place, size, keys + i * size);
        widen_bytes(static_cast<const int8_t*>(pools.v) + place, size, values + i * size);
        continue;
      }
      widen(static_cast<const T*>(pools.k) + place, size, keys + i * size);
      widen(static_cast<const T*>(pools.v) + place, size, values + i * size);
    }
    const auto sees = [&](int64_t t) {
      return t < piece.num_tiles && key <= tiles[t].end && key + count > tiles[t].begin;
    };
    for (int64_t t = 0, step; t < piece.num_tiles; t += step) {
      const float* own = queries + t * size * LANES;
      float* state = states + t * state_size(size);
      step = TILES_AT_ONCE == 2 && sees(t) && sees(t + 1) ? 2 : 1;
      if (step == 2)
        attend_block<TILES_AT_ONCE>(task, tiles + t, own, keys, values, key, count, state);
      else if (sees(t))
        attend_block<1>(task, tiles + t, own, keys, values, key, count, state);
    }
  }
  return false;
}

// ---- attention of few lanes ----
//
// Where a piece has so few lanes that most of a tile would be empty, as decodes have, vectors go along
// a head's numbers and along keys in place of lanes.

// Returns vector i's total in place i.
TARGET INLINE F totals_of(F (&sums)[W]) {
  for (int64_t count = W; count > 1; count /= 2)
    for (int64_t i = 0; i < count / 2; i++)
      sums[i] = evens_of(sums[2 * i], sums[2 * i + 1]) + odds_of(sums[2 * i], sums[2 * i + 1]);
  return sums[0];
}

TARGET INLINE float largest_of(F value) {
  float most = value[0];
  for (int i = 1; i < W; i++) most = value[i] > most ? value[i] : most;
  return most;
}

// What L lanes have seen so far.
template <int L>
struct Few {
  float* queries;  // [L][padded], scaled
  float* sums;     // [L][padded], of weighted values
  float* scores;   // [L][KEY_BLOCK], then weights
  int64_t padded;
  float best[L], total[L];
};

template <int L, typename K>
TARGET static void few_scores(const Few<L>& few, const K* const* keys, int64_t num_keys,
                              int64_t size) {
  for (int64_t key = 0; key < num_keys; key += W) {
    F sums[L][W];
    for (int64_t i = 0; i < W; i++) {
      const K* row = keys[smaller(key + i, num_keys - 1)];
      F own[L];
      for (int lane = 0; lane < L; lane++) own[lane] = F{};
      FOR_VECTORS(offset, count, size) {
        const F numbers = load_some(row + offset, count);
        for (int lane = 0; lane < L; lane++)
          own[lane] += numbers * load(few.queries + lane * few.padded + offset);
      }
      for (int lane = 0; lane < L; lane++) sums[lane][i] = own[lane];
    }
    for (int lane = 0; lane < L; lane++)
      store(few.scores + lane * KEY_BLOCK + key, totals_of(sums[lane]));
  }
}

// See `tile_modified`.
template <int L, typename T>
TARGET static void few_modified(const Attention<T>& task, const Few<L>& few, const Tile& tile,
                                int64_t first_key, int64_t num_keys) {
  float turn[W];
  for (int i = 0; i < W; i++) turn[i] = static_cast<float>(i);
  for (int lane = 0; lane < L; lane++)
    for (int64_t key = 0; key < num_keys; key += W) {
      float* scores = few.scores + lane * KEY_BLOCK + key;
      F score = load(scores);
      if (task.soft_cap > 0.0f) score = capped(score, task.soft_cap);
      const float before = static_cast<float>(first_key + key - tile.last_key[lane]);
      store(scores, score + (load(turn) + before) * tile.slopes[lane]);
    }
}

// Makes weights of a block's scores, and fits what was summed up before to them.
template <int L>
TARGET static void few_weights(Few<L>& few, const Tile& tile, int64_t first_key, int64_t num_keys) {
  const float nothing = -__builtin_inff();
  I turn;
  for (int i = 0; i < W; i++) turn[i] = i;
  for (int lane = 0; lane < L; lane++) {
    float* scores = few.scores + lane * KEY_BLOCK;
    const int32_t begin = static_cast<int32_t>(tile.first_key[lane] - first_key);
    const int32_t end = static_cast<int32_t>(
        smaller(num_keys, static_cast<int64_t>(tile.last_key[lane]) + 1 - first_key));
    F most = F{} + few.best[lane];
    for (int64_t key = 0; key < num_keys; key += W) {
      const I place = turn + static_cast<int32_t>(key);
      const F score = (place < begin) | (place >= end) ? F{} + nothing : load(scores + key);
      store(scores + key, score);
      most = score > most ? score : most;
    }
    const float before = few.best[lane], best = largest_of(most);
    const float base = best == nothing ? 0.0f : best;
    const float factor = before == nothing ? 0.0f : exp_of(F{} + (before - base))[0];
    F total = F{};
    for (int64_t key = 0; key < num_keys; key += W) {
      const F score = load(scores + key);
      const F weight = score == F{} + nothing ? F{} : exp_of(score - base);
      store(scores + key, weight);
      total += weight;
    }
    few.best[lane] = best;
    few.total[lane] = few.total[lane] * factor + total_of(total);
    float* sums = few.sums + lane * few.padded;
    for (int64_t d = 0; d < few.padded; d += W) store(sums + d, load(sums + d) * factor);
  }
}

// Adds `count` values, weighted, from the number `d` of a head on.
template <int L, int VALUES, typename K>
TARGET INLINE void add_values(const Few<L>& few, const K* const* values, int64_t num_keys,
                              int64_t d, int64_t size) {
  F sums[L][VALUES];
  for (int lane = 0; lane < L; lane++)
    for (int v = 0; v < VALUES; v++) sums[lane][v] = load(few.sums + lane * few.padded + d + v * W);
  for (int64_t key = 0; key < num_keys; key++) {
    F numbers[VALUES];
    for (int v = 0; v < VALUES; v++)
      numbers[v] = VALUES == 1 ? load_some(values[key] + d, smaller(W, size - d))
                               : load(values[key] + d + v * W);
    for (int lane = 0; lane < L; lane++) {
      const F weight = F{} + few.scores[lane * KEY_BLOCK + key];
      for (int v = 0; v < VALUES; v++) sums[lane][v] += weight * numbers[v];
    }
  }
  for (int lane = 0; lane < L; lane++)
    for (int v = 0; v < VALUES; v++) store(few.sums + lane * few.padded + d + v * W, sums[lane][v]);
}

template <int L, typename K>
TARGET static void few_values(const Few<L>& few, const K* const* values, int64_t num_keys,
                              int64_t size) {
  constexpr int VALUES = W == 16 ? (L <= 4 ? 4 : 2) : (L <= 2 ? 4 : 2);
  int64_t d = 0;
  for (; d + VALUES * W <= size; d += VALUES * W) add_values<L, VALUES>(few, values, num_keys, d, size);
  for (; d < size; d += W) add_values<L, 1>(few, values, num_keys, d, size);
}

template <int L, typename T, typename K>
TARGET static void few_block(const Attention<T>& task, Few<L>& few, const Tile& tile,
                             const K* const* keys, const K* const* values, int64_t first_key,
                             int64_t num_keys) {
  const int64_t size = task.head_dim;
  few_scores<L>(few, keys, num_keys, size);
  if (task.modifies()) few_modified(task, few, tile, first_key, num_keys);
  few_weights<L>(few, tile, first_key, num_keys);
  few_values<L>(few, values, num_keys, size);
}

template <int L, typename T>
TARGET static Few<L> few_lanes(const Attention<T>& task, const Tile& tile) {
  Few<L> few;
  few.padded = divide_up(task.head_dim, W) * W;
  const int64_t wide = task.pools.is_int8 ? 2 * KEY_BLOCK * few.padded : 0;
  few.queries = static_cast<float*>(
      scratch(5, (2 * L * few.padded + L * KEY_BLOCK + wide) * sizeof(float)));
  few.sums = few.queries + L * few.padded;
  few.scores = few.sums + L * few.padded;
  std::memset(few.queries, 0, 2 * L * few.padded * sizeof(float));
  for (int lane = 0; lane < L; lane++) {
    few.best[lane] = -__builtin_inff();
    few.total[lane] = 0.0f;
    if (tile.queries[lane] == -1) continue;
    FOR_VECTORS(offset, count, task.head_dim)
      store(few.queries + lane * few.padded + offset,
            load_some(task.q + tile.queries[lane] + offset, count) * task.scale);
  }
  return few;
}

// Stores the outputs of a piece that is all of its context, or else the lanes' states for others.
template <int L, typename T>
TARGET static bool end_few(const Attention<T>& task, const Piece& piece, const Tile& tile,
                           const Few<L>& few, float* state) {
  for (int lane = 0; lane < L && tile.queries[lane] != -1; lane++) {
    const float* sums = few.sums + lane * few.padded;
    if (piece.num_parts == 1) {
      const float scale = share_of(task, tile.outputs[lane], few.best[lane], few.total[lane]);
      FOR_VECTORS(offset, count, task.head_dim)
        store_some(task.out + tile.outputs[lane] + offset, load(sums + offset) * scale, count);
      continue;
    }
    state[lane] = few.best[lane];
    state[LANES + lane] = few.total[lane];
    for (int64_t d = 0; d < task.head_dim; d++) state[(2 + d) * LANES + lane] = sums[d];
  }
  return piece.num_parts == 1;
}

template <int L, typename T>
TARGET static bool attend_few(const Attention<T>& task, const Piece& piece, const Tile& tile,
                              float* state) {
  const int64_t size = task.head_dim;
  const Pools& pools = task.pools;
  Few<L> few = few_lanes<L>(task, tile);
  float* wide = few.scores + L * KEY_BLOCK;
  const int32_t* slots = task.table + piece.table_row * task.table_stride;
  for (int64_t first = piece.first_key; first < piece.end_key; first += KEY_BLOCK) {
    const int64_t count = smaller(KEY_BLOCK, piece.end_key - first);
    const T *keys[KEY_BLOCK], *values[KEY_BLOCK];
    const float *wide_keys[KEY_BLOCK], *wide_values[KEY_BLOCK];
    for (int64_t i = 0; i < count; i++) {
      const int64_t place = slots[first + i] * pools.slot_stride + piece.kv_head * pools.head_stride;
      if (!pools.is_int8) {
        keys[i] = static_cast<const T*>(pools.k) + place;
        values[i] = static_cast<const T*>(pools.v) + place;
        continue;
      }
      float *key = wide + i * few.padded, *value = key + KEY_BLOCK * few.padded;
      widen_bytes(static_cast<const int8_t*>(pools.k) + place, size, key);
      widen_bytes(static_cast<const int8_t*>(pools.v) + place, size, value);
      wide_keys[i] = key;
      wide_values[i] = value;
    }
    if (pools.is_int8)
      few_block<L>(task, few, tile, wide_keys, wide_values, first, count);
    else
      few_block<L>(task, few, tile, keys, values, first, count);
  }
  return end_few<L>(task, piece, tile, few, state);
}

template <typename T>
TARGET bool attend(const Attention<T>& task, const Piece& piece, const Tile* tiles,
                          float* states) {
  int64_t lanes = 0;
  while (lanes < LANES && tiles[0].queries[lanes] != -1) lanes++;
  if (task.is_invariant || piece.num_tiles > 1 || lanes > FEW_LANES)
    return attend_piece(task, piece, tiles, states);
  const auto run = lanes == 1   ? attend_few<1, T>
                   : lanes == 2 ? attend_few<2, T>
                   : lanes <= 4 ? attend_few<4, T>
                                : attend_few<8, T>;
  return run(task, piece, tiles[0], states);
}

template <typename T>
TARGET void finish_lanes(const Attention<T>& task, const Tile& tile, const float* state) {
  for (int64_t lane = 0; lane < LANES; lane++) {
    if (tile.queries[lane] == -1) continue;
    const float scale = share_of(task, tile.outputs[lane], state[lane], state[LANES + lane]);
    T* out = task.out + tile.outputs[lane];
    FOR_VECTORS(offset, count, task.head_dim) {
      float line[W];
      for (int64_t i = 0; i < count; i++)
        line[i] = state[(2 + offset + i) * LANES + lane] * scale;
      store_some(out + offset, load_some(line, count), count);
    }
  }
}

template <typename T>
void attention(const Attention<T>& task, int num_threads) {
  run_attention<T>(task, num_threads, attend<T>, finish_lanes<T>);
}

#define INSTANCES(T)                                    \
  template void attention<T>(const Attention<T>&, int); \
  template bool attend<T>(const Attention<T>&, const Piece&, const Tile*, float*); \
  template void finish_lanes<T>(const Attention<T>&, const Tile&, const float*);
INSTANCES(float)
INSTANCES(bf16)
#undef INSTANCES

}  // namespace SPACE
