// Code for any width of vectors: included once for each set of instructions, with
//
//   SPACE    the namespace
//   TARGET   the instructions
//   WIDTH    numbers in a vector
//   ROWS_F32, ROWS_BF16   rows of a product at once, as many as the registers hold
//
// Vectors are the compiler's own; it fuses multiplications and additions.

namespace SPACE {

typedef float F __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t U __attribute__((vector_size(4 * WIDTH)));
typedef int32_t I __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t H __attribute__((vector_size(2 * WIDTH)));
typedef int8_t S __attribute__((vector_size(WIDTH)));
constexpr int64_t W = WIDTH;
constexpr int64_t VECTORS = PANEL / W;  // of a panel

template <typename V, typename T>
TARGET INLINE V read(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename V, typename T>
TARGET INLINE void write(T* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

TARGET INLINE F load(const float* from) { return read<F>(from); }
TARGET INLINE F load(const bf16* from) {
  return (F)(__builtin_convertvector(read<H>(from), U) << 16);
}

TARGET INLINE H narrow(F value) {
  const U bits = (U)value;
  const U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U is_nan = (U)(value != value);
  return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), H);
}

TARGET INLINE void store(float* to, F value) { write(to, value); }
TARGET INLINE void store(bf16* to, F value) { write(to, narrow(value)); }

// The first `count` numbers, zeros beyond them.
template <typename T>
TARGET INLINE F load_part(const T* from, int64_t count) {
  T line[W] = {};
  std::memcpy(line, from, count * sizeof(T));
  return load(line);
}

template <typename T>
TARGET INLINE void store_part(T* to, F value, int64_t count) {
  T line[W];
  store(line, value);
  std::memcpy(to, line, count * sizeof(T));
}

// Calls body(offset, count) for each vector of `size` numbers; the last may have fewer than W.
#define FOR_VECTORS(offset, count, size)                                      \
  for (int64_t offset = 0, count = smaller(W, size); offset < (size);         \
       offset += W, count = smaller(W, (size) - offset))

template <typename T>
TARGET INLINE F load_some(const T* from, int64_t count) {
  return __builtin_expect(count == W, 1) ? load(from) : load_part(from, count);
}

template <typename T>
TARGET INLINE void store_some(T* to, F value, int64_t count) {
  if (__builtin_expect(count == W, 1))
    store(to, value);
  else
    store_part(to, value, count);
}

// The numbers at even places of a and then those of b, and those at odd ones.
#if defined(__clang__) || __GNUC__ >= 12
#if WIDTH == 16
#define EVERY_OTHER(a, b, i)                                                                       \
  __builtin_shufflevector(a, b, i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14, i + 16,     \
                          i + 18, i + 20, i + 22, i + 24, i + 26, i + 28, i + 30)
#else
#define EVERY_OTHER(a, b, i) \
  __builtin_shufflevector(a, b, i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14)
#endif
#else
TARGET INLINE I every_other(int32_t first) {
  I places;
  for (int i = 0; i < W; i++) places[i] = first + 2 * i;
  return places;
}
#define EVERY_OTHER(a, b, i) __builtin_shuffle(a, b, every_other(i))
#endif
TARGET INLINE F evens_of(F a, F b) { return EVERY_OTHER(a, b, 0); }
TARGET INLINE F odds_of(F a, F b) { return EVERY_OTHER(a, b, 1); }

// ---- products ----

// e to the power of x, with a relative error of about 1e-7; beyond the range, its ends.
TARGET INLINE F exp_of(F x) {
  const F low = F{} - 87.3f, high = F{} + 88.7f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const F shifted = x * 1.44269504f + 12582912.0f;  // rounds to an integer in the low bits
  const F whole = shifted - 12582912.0f;
  const F rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  F sum = F{} + 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return (F)((I)sum + ((I)shifted << 23));
}

// Stores R rows' sums of a panel as the product's form says.
template <int R, typename T>
TARGET INLINE void store_sums(const Linear<T>& task, int64_t row, int64_t panel,
                              const F (&sums)[R][VECTORS]) {
  const int64_t num_columns = task.num_columns(), column = panel * task.panel_columns();
  const int64_t left = smaller(task.panel_columns(), num_columns - column);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS && v * W < left; v++) {
      const int64_t count = smaller(W, left - v * W), place = column + v * W;
      F sum = sums[r][v];
      if (task.bias != nullptr) sum += load_some(task.bias + place, count);
      if (task.form == GATED) {
        F up = sums[r][(v + VECTORS / 2) % VECTORS];
        if (task.bias != nullptr) up += load_some(task.bias + num_columns + place, count);
        sum = sum / (exp_of(-sum) + 1.0f) * up;
      }
      const int64_t to = (row + r) * num_columns + place;
      if (task.form == WIDE)
        store_some(static_cast<float*>(task.out) + to, sum, count);
      else
        store_some(static_cast<T*>(task.out) + to, sum, count);
    }
}

// Multiplies by inputs from `first` to `end`; sums of those before stand in `kept`, [rows][PANEL].
template <int R>
TARGET static inline void panel_f32(const Linear<float>& task, int64_t row, int64_t panel,
                                    int64_t first, int64_t end, float* kept) {
  const float* x = task.x + row * task.x_stride;
  const float* weight = task.weight + (panel * task.num_inputs + first) * PANEL;
  F sums[R][VECTORS];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++)
      sums[r][v] = first > 0 ? load(kept + (row + r) * PANEL + v * W) : F{};
  for (int64_t k = first; k < end; k++, weight += PANEL) {
    __builtin_prefetch(weight + 16 * PANEL);
    __builtin_prefetch(weight + 16 * PANEL + 16);
    F w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = load(weight + v * W);
    for (int r = 0; r < R; r++) {
      const F number = F{} + x[r * task.x_stride + k];
      for (int v = 0; v < VECTORS; v++) sums[r][v] += number * w[v];
    }
  }
  if (end == task.num_inputs) return store_sums(task, row, panel, sums);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) store(kept + (row + r) * PANEL + v * W, sums[r][v]);
}

template <int R = ROWS_F32>
TARGET static void rows_f32(const Linear<float>& task, int64_t row, int64_t panel, int64_t first,
                            int64_t end, float* kept) {
  if constexpr (R > 0) {
    if (smaller(ROWS_F32, task.num_rows - row) == R)
      panel_f32<R>(task, row, panel, first, end, kept);
    else
      rows_f32<R - 1>(task, row, panel, first, end, kept);
  }
}

// A row is a chain of additions from the first input to the last, whatever stands beside it.
void linear_f32(const Linear<float>& task, int num_threads) {
  const int64_t num_inputs = task.num_inputs;
  const int64_t step = task.num_rows > ROWS_F32 ? 512 : num_inputs;  // half a first cache
  over_panels(task, num_inputs * PANEL * sizeof(float), task.num_rows, num_threads,
              [&](int64_t, int64_t panel) {
                float* kept = static_cast<float*>(
                    scratch(1, num_inputs > step ? task.num_rows * PANEL * sizeof(float) : 0));
                for (int64_t k = 0; k < num_inputs; k += step)
                  for (int64_t row = 0; row < task.num_rows; row += ROWS_F32)
                    rows_f32(task, row, panel, k, smaller(num_inputs, k + step), kept);
              });
}

// The rows of a product that are multiplied at once, in float32, and their groups' sums.
struct WideRows {
  const float* x;  // [rows, padded]
  const float* sums;  // [rows, groups], or null
  int64_t padded, num_groups;
};

template <int R>
TARGET static inline void panel_bf16(const LinearBf16& task, const WideRows& rows, int64_t row,
                                     int64_t number) {
  const float* x = rows.x + row * rows.padded;
  const bf16* panel = task.weight + number * rows.padded * PANEL;
  F sums[R][VECTORS];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = F{};
  for (int64_t block = 0; block < rows.padded; block += K_BLOCK)
    for (int half = 0; half < 2; half++)
      for (int j = 0; j < 16; j++, panel += 32) {
        __builtin_prefetch(panel + 2 * TILE);
        for (int v = 0; v < VECTORS / 2; v++) {
          const U pairs = read<U>(panel + 2 * v * W);
          const F even = (F)(pairs << 16), odd = (F)(pairs & 0xffff0000u);
          for (int r = 0; r < R; r++) {
            const float* own = x + r * rows.padded + block + 2 * j;
            F& sum = sums[r][half * (VECTORS / 2) + v];
            sum += even * (F{} + own[0]);
            sum += odd * (F{} + own[1]);
          }
        }
      }
  store_sums(task, row, number, sums);
}

template <int R = ROWS_BF16>
TARGET static void rows_bf16(const LinearBf16& task, const WideRows& rows, int64_t row,
                             int64_t panel) {
  if constexpr (R > 0) {
    if (smaller(ROWS_BF16, task.num_rows - row) == R)
      panel_bf16<R>(task, rows, row, panel);
    else
      rows_bf16<R - 1>(task, rows, row, panel);
  }
}

template <typename T>
TARGET static void widen_rows(const Linear<T>& task, int64_t padded, float* wide) {
  for (int64_t row = 0; row < task.num_rows; row++) {
    FOR_VECTORS(offset, count, task.num_inputs)
      store(wide + row * padded + offset, load_some(task.x + row * task.x_stride + offset, count));
    for (int64_t k = divide_up(task.num_inputs, W) * W; k < padded; k++) wide[row * padded + k] = 0;
  }
}

void linear_bf16(const LinearBf16& task, int num_threads) {
  const int64_t padded = padded_inputs(task.num_inputs);
  float* wide = static_cast<float*>(scratch(3, task.num_rows * padded * sizeof(float)));
  widen_rows(task, padded, wide);
  const WideRows rows{wide, nullptr, padded, 0};
  over_panels(task, padded * PANEL * 2, ROWS_BF16, num_threads,
              [&](int64_t row, int64_t panel) { rows_bf16(task, rows, row, panel); });
}

// ---- what is done element by element ----

TARGET INLINE float total_of(F value) {
  float sum = 0;
  for (int i = 0; i < W; i++) sum += value[i];
  return sum;
}

TARGET INLINE F rounded(F value, const float*) { return value; }
TARGET INLINE F rounded(F value, const bf16*) {
  return (F)(__builtin_convertvector(narrow(value), U) << 16);
}

// out = x / rms(x) * weight, rounded before the weight unless that is wider than x; with a residual,
// of x added to it.
template <typename T, typename N>
TARGET static void norm_row(const T* x, T* residual, const N* weight, float eps, int64_t size,
                            T* out) {
  F squares = {};
  FOR_VECTORS(offset, count, size) {
    F value = load_some(x + offset, count);
    if (residual != nullptr) {
      value = rounded(value + load_some(residual + offset, count), x);
      store_some(residual + offset, value, count);
    }
    squares += value * value;
  }
  const float scale = 1.0f / __builtin_sqrtf(total_of(squares) / static_cast<float>(size) + eps);
  const T* from = residual != nullptr ? residual : x;
  FOR_VECTORS(offset, count, size) {
    F value = load_some(from + offset, count) * scale;
    if (sizeof(N) == sizeof(T)) value = rounded(value, x);
    store_some(out + offset, value * load_some(weight + offset, count), count);
  }
}

template <typename T, typename N>
void norm(const T* x, int64_t x_stride, T* residual, const N* weight, float eps, int64_t num_rows,
          int64_t size, T* out, int num_threads) {
  const int64_t chunk = larger(1, 16384 / larger(1, size));
  parallel(num_threads, divide_up(num_rows, chunk), [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;)
      for (int64_t row = i * chunk; row < smaller(num_rows, (i + 1) * chunk); row++)
        norm_row(x + row * x_stride, residual == nullptr ? nullptr : residual + row * size, weight,
                 eps, size, out + row * size);
  });
}

template <typename T>
TARGET static void rotate_head(const T* from, int64_t size, const float* cos, const float* sin,
                               int64_t half, T* to) {
  FOR_VECTORS(offset, count, half) {
    const F first = load_some(from + offset, count), second = load_some(from + half + offset, count);
    const F c = load_some(cos + offset, count), s = load_some(sin + offset, count);
    store_some(to + offset, first * c - second * s, count);
    store_some(to + half + offset, second * c + first * s, count);
  }
  if (to != from) std::memcpy(to + 2 * half, from + 2 * half, (size - 2 * half) * sizeof(T));
}

// Rounds a head's numbers to 8 bits by the largest of them; the factor behind them is no number if
// one of them is none.
template <typename T>
TARGET static void put_bytes(const T* from, int64_t size, int8_t* to) {
  U most = {};
  FOR_VECTORS(offset, count, size) {
    const U bits = (U)load_some(from + offset, count) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  uint32_t largest_bits = most[0];
  for (int i = 1; i < W; i++) largest_bits = most[i] > largest_bits ? most[i] : largest_bits;
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  const bool is_good = largest_bits < 0x7f800000u, is_zero = largest < 1e-30f;
  const float inverse = !is_good || is_zero ? 0.0f : 127.0f / largest;
  const float factor = !is_good ? __builtin_nanf("") : is_zero ? 0.0f : largest / 127.0f;
  FOR_VECTORS(offset, count, size) {
    const F value = load_some(from + offset, count) * inverse;
    const F whole = (value + 12582912.0f) - 12582912.0f;  // ties to even
    int8_t line[W];
    write(line, __builtin_convertvector(__builtin_convertvector(is_good ? whole : F{}, I), S));
    std::memcpy(to + offset, line, count);
  }
  std::memcpy(to + size, &factor, sizeof factor);
}

// The numbers of such a head.
TARGET static void widen_bytes(const int8_t* from, int64_t size, float* to) {
  float factor;
  std::memcpy(&factor, from + size, sizeof factor);
  FOR_VECTORS(offset, count, size) {
    int8_t line[W] = {};
    std::memcpy(line, from + offset, count);
    const F value = __builtin_convertvector(__builtin_convertvector(read<S>(line), I), F);
    store_some(to + offset, value * factor, count);
  }
}

template <typename T>
TARGET static void norm_head(const Rotation<T>& task, const T* x, const void* weight, T* out) {
  T* none = nullptr;
  if (task.has_wide_norms)
    norm_row(x, none, static_cast<const float*>(weight), task.eps, task.head_dim, out);
  else
    norm_row(x, none, static_cast<const T*>(weight), task.eps, task.head_dim, out);
}

template <typename T>
TARGET static void rotate_token(const Rotation<T>& task, int64_t token) {
  const float* cos = task.cos + token * task.half;
  const float* sin = task.sin + token * task.half;
  const int64_t size = task.head_dim, slot = task.slots[token];
  T* normed = static_cast<T*>(scratch(4, size * sizeof(T)));
  for (int64_t head = 0; head < task.num_heads; head++) {
    T* q = task.q + token * task.token_stride + head * size;
    if (task.q_weight != nullptr) norm_head(task, q, task.q_weight, normed);
    rotate_head(task.q_weight != nullptr ? normed : q, size, cos, sin, task.half, q);
  }
  for (int64_t head = 0; head < task.num_kv_heads; head++) {
    const T* k = task.k + token * task.token_stride + head * size;
    if (task.k_weight != nullptr) {
      norm_head(task, k, task.k_weight, normed);
      k = normed;
    }
    const T* v = task.v + token * task.token_stride + head * size;
    const int64_t place = slot * task.pools.slot_stride + head * task.pools.head_stride;
    if (task.pools.is_int8) {
      rotate_head(k, size, cos, sin, task.half, normed);
      put_bytes(normed, size, static_cast<int8_t*>(task.pools.k) + place);
      put_bytes(v, size, static_cast<int8_t*>(task.pools.v) + place);
      continue;
    }
    rotate_head(k, size, cos, sin, task.half, static_cast<T*>(task.pools.k) + place);
    std::memcpy(static_cast<T*>(task.pools.v) + place, v, size * sizeof(T));
  }
}

template <typename T>
void rotate(const Rotation<T>& task, int num_threads) {
  constexpr int64_t CHUNK = 16;
  parallel(num_threads, divide_up(task.num_tokens, CHUNK), [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;)
      for (int64_t token = i * CHUNK; token < smaller(task.num_tokens, (i + 1) * CHUNK); token++)
        rotate_token(task, token);
  });
}

#define INSTANCES(T)                                                                         \
  template void norm(const T*, int64_t, T*, const T*, float, int64_t, int64_t, T*, int);     \
  template void rotate<T>(const Rotation<T>&, int);
INSTANCES(float)
INSTANCES(bf16)
#undef INSTANCES
template void norm(const bf16*, int64_t, bf16*, const float*, float, int64_t, int64_t, bf16*, int);

}  // namespace SPACE
