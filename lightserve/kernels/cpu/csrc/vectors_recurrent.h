// Recurrent layers for any width of vectors; included after vectors.h.
//
// Every token changes its row's state by itself, in order: no cut of a prompt changes a bit.

namespace SPACE {

constexpr int64_t CHANNELS = 256;  // of a convolution, that a thread takes at once
constexpr int64_t SPAN = 32;     // of a row that are widened at once
constexpr int64_t COLUMNS = 4;     // vectors of a state's columns that stay in the first cache

// Some channels of a row's tokens; `inputs` has room for the row's last ones and one more.
template <typename T>
TARGET static void convolve_row(const Convolution<T>& task, const int64_t* row, int64_t first,
                                int64_t size, T* inputs) {
  const int64_t kept = task.width - 1, num_new = row[1];
  for (int64_t i = 0; i < kept; i++)
    if (row[2] == num_new)
      std::memset(inputs + i * CHANNELS, 0, size * sizeof(T));
    else
      task.states.copy(row[0], (i * task.channels + first) * sizeof(T), size * sizeof(T),
                       reinterpret_cast<char*>(inputs + i * CHANNELS), false);
  const T* x = task.x + row[3] * task.x_stride + first;
  // The input that stands `back` before token `i`.
  const auto input = [&](int64_t i, int64_t back) {
    return i >= back ? x + (i - back) * task.x_stride : inputs + (kept + i - back) * CHANNELS;
  };
  for (int64_t i = 0; i < num_new; i++) {
    T* out = task.out + (row[3] + i) * task.channels + first;
    FOR_VECTORS(offset, count, size) {
      F sum = task.bias == nullptr ? F{} : load_some(task.bias + first + offset, count);
      for (int64_t j = 0; j < task.width; j++)
        sum += load_some(input(i, kept - j) + offset, count) *
               load_some(task.weight + j * task.channels + first + offset, count);
      store_some(out + offset, task.is_plain ? sum : sum / (exp_of(-sum) + 1.0f), count);
    }
  }
  for (int64_t i = 0; i < kept; i++)  // from the first on: none that is read is overwritten
    std::memmove(inputs + i * CHANNELS, input(num_new, kept - i), size * sizeof(T));
  for (int64_t i = 0; i < kept; i++)
    task.states.copy(row[0], (i * task.channels + first) * sizeof(T), size * sizeof(T),
                     reinterpret_cast<char*>(inputs + i * CHANNELS), true);
}

template <typename T>
void convolve(const Convolution<T>& task, int num_threads) {
  const int64_t blocks = divide_up(task.channels, CHANNELS);
  parallel(num_threads, task.states.num_rows * blocks, [&](Cursor& cursor) {
    T* inputs = static_cast<T*>(scratch(5, task.width * CHANNELS * sizeof(T)));
    for (int64_t i; (i = cursor.take()) < cursor.total;) {
      const int64_t first = i % blocks * CHANNELS;
      convolve_row(task, task.states.rows + i / blocks * 4, first,
                   smaller(CHANNELS, task.channels - first), inputs);
    }
  });
}

// Widened numbers of some tokens of a head, each behind the other.
struct HeadTokens {
  float *q, *k, *v;       // [SPAN][padded]
  float *grown, *beta;    // [SPAN]
  float* out;             // [SPAN][padded]
};

INLINE int64_t padded_to_vectors(int64_t size) { return divide_up(size, W) * W; }

// A query or key of length `scale`.
template <typename T>
TARGET static void unit(const T* from, int64_t size, float scale, float* to) {
  F squares = {};
  FOR_VECTORS(offset, count, size) {
    const F value = load_some(from + offset, count);
    squares += value * value;
  }
  const float factor = scale / __builtin_sqrtf(total_of(squares) + 1e-6f);
  FOR_VECTORS(offset, count, size)
    store_some(to + offset, load_some(from + offset, count) * factor, count);
}

// Changes N vectors of columns by each token's key, and asks them each token's query.
template <int64_t N, bool CORRECTS>
TARGET static void columns(const HeadTokens& head, int64_t num_tokens, int64_t key_dim,
                           int64_t key_stride, int64_t value_stride, float* state, int64_t stride,
                           int64_t first) {
  for (int64_t token = 0; token < num_tokens; token++) {
    const float *q = head.q + token * key_stride, *k = head.k + token * key_stride;
    F known[N], said[N];
    for (int n = 0; n < N; n++) known[n] = said[n] = F{};
    for (int64_t i = 0; CORRECTS && i < key_dim; i++)
      for (int n = 0; n < N; n++) known[n] += load(state + i * stride + n * W) * (F{} + k[i]);
    const F grown = F{} + head.grown[token];
    for (int n = 0; n < N; n++) {
      const F value = load(head.v + token * value_stride + first + n * W);
      known[n] = CORRECTS ? (value - grown * known[n]) * head.beta[token] : value;
    }
    for (int64_t i = 0; i < key_dim; i++)
      for (int n = 0; n < N; n++) {
        float* place = state + i * stride + n * W;
        const F own = load(place) * grown + (F{} + k[i]) * known[n];
        store(place, own);
        said[n] += own * (F{} + q[i]);
      }
    for (int n = 0; n < N; n++) store(head.out + token * value_stride + first + n * W, said[n]);
  }
}

INLINE float softplus(float rate) { return rate > 20.0f ? rate : std::log1p(std::exp(rate)); }

template <typename T>
TARGET static void widen_tokens(const DeltaRule<T>& task, int64_t head, int64_t first,
                                int64_t num_tokens, const HeadTokens& to) {
  const int64_t keys = task.num_key_heads * task.key_dim, key_stride = padded_to_vectors(task.key_dim);
  const int64_t key_head = head / (task.num_heads / task.num_key_heads);
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(task.key_dim));
  for (int64_t i = 0; i < num_tokens; i++) {
    const T* own = task.mixed + (first + i) * task.mixed_stride + key_head * task.key_dim;
    unit(own, task.key_dim, scale, to.q + i * key_stride);
    unit(own + keys, task.key_dim, 1.0f, to.k + i * key_stride);
    const T* v = task.mixed + (first + i) * task.mixed_stride + 2 * keys + head * task.value_dim;
    FOR_VECTORS(offset, count, task.value_dim)
      store(to.v + i * padded_to_vectors(task.value_dim) + offset, load_some(v + offset, count));
    const float* gates = task.gates + (first + i) * task.gate_stride + head;
    const float rate = gates[task.num_heads] + task.rate_bias[head];
    to.grown[i] = std::exp(task.decay[head] * softplus(rate));
    to.beta[i] = task.beta_scale / (1.0f + std::exp(-gates[0]));
  }
}

template <typename T>
TARGET static void widen_tokens(const Mamba<T>& task, int64_t head, int64_t first,
                                int64_t num_tokens, const HeadTokens& to) {
  const int64_t keys = task.num_key_heads * task.key_dim, key_stride = padded_to_vectors(task.key_dim);
  const int64_t key_head = head / (task.num_heads / task.num_key_heads);
  for (int64_t i = 0; i < num_tokens; i++) {
    const T* v = task.mixed + (first + i) * task.mixed_stride + head * task.value_dim;
    const T* k = task.mixed + (first + i) * task.mixed_stride + task.num_heads * task.value_dim +
                 key_head * task.key_dim;
    const float rate = task.rates[(first + i) * task.rate_stride + head] + task.rate_bias[head];
    const float soft = softplus(rate);
    to.grown[i] = std::exp(task.decay[head] * soft);
    FOR_VECTORS(offset, count, task.key_dim) {
      store(to.k + i * key_stride + offset, load_some(k + offset, count));
      store(to.q + i * key_stride + offset, load_some(k + keys + offset, count));
    }
    FOR_VECTORS(offset, count, task.value_dim)
      store(to.v + i * padded_to_vectors(task.value_dim) + offset,
            load_some(v + offset, count) * soft);
  }
}

// A head's result with the token's own numbers, gated.
template <typename T>
TARGET static void store_result(const Mamba<T>& task, const float* from, int64_t head,
                                int64_t token) {
  const int64_t size = task.value_dim;
  const T* x = task.mixed + token * task.mixed_stride + head * size;
  const T* z = task.z + token * task.z_stride + head * size;
  T* out = task.out + (token * task.num_heads + head) * size;
  FOR_VECTORS(offset, count, size) {
    const F gate = load_some(z + offset, count);
    const F value = load_some(from + offset, count) + load_some(x + offset, count) * task.skip[head];
    store_some(out + offset, value * gate / (exp_of(-gate) + 1.0f), count);
  }
}

// A head's result, normalised and gated.
template <typename T>
TARGET static void store_result(const DeltaRule<T>& task, const float* from, int64_t head,
                                int64_t token) {
  const int64_t size = task.value_dim;
  F squares = {};
  FOR_VECTORS(offset, count, size) {
    const F value = load_some(from + offset, count);
    squares += value * value;
  }
  const float scale = 1.0f / __builtin_sqrtf(total_of(squares) / static_cast<float>(size) + task.eps);
  const T* z = task.z + token * task.z_stride + head * size;
  T* out = task.out + (token * task.num_heads + head) * size;
  FOR_VECTORS(offset, count, size) {
    const F gate = load_some(z + offset, count);
    const F value = load_some(from + offset, count) * scale * load_some(task.norm + offset, count);
    store_some(out + offset, value * gate / (exp_of(-gate) + 1.0f), count);
  }
}

template <typename Task>
TARGET static void walk_head(const Task& task, const int64_t* row, int64_t head) {
  const int64_t keys = task.key_dim, values = padded_to_vectors(task.value_dim);
  const int64_t key_stride = padded_to_vectors(keys);
  const int64_t stride = values + W;  // so that rows of a state begin in different sets of a cache
  float* state = static_cast<float*>(
      scratch(6, (keys * stride + SPAN * (2 * key_stride + 2 * values + 2)) * sizeof(float)));
  HeadTokens some;
  some.q = state + keys * stride;
  some.k = some.q + SPAN * key_stride;
  some.v = some.k + SPAN * key_stride;
  some.out = some.v + SPAN * values;
  some.grown = some.out + SPAN * values;
  some.beta = some.grown + SPAN;
  const int64_t row_bytes = task.value_dim * sizeof(float), first_byte = head * keys * row_bytes;
  if (row[2] == row[1] || values != task.value_dim) std::memset(state, 0, keys * stride * sizeof(float));
  if (row[2] != row[1])
    for (int64_t i = 0; i < keys; i++)
      task.states.copy(row[0], first_byte + i * row_bytes, row_bytes,
                       reinterpret_cast<char*>(state + i * stride), false);
  for (int64_t done = 0; done < row[1]; done += SPAN) {
    const int64_t num_tokens = smaller(SPAN, row[1] - done), first = row[3] + done;
    widen_tokens(task, head, first, num_tokens, some);
    for (int64_t column = 0; column < values; column += COLUMNS * W) {
      static void (*const functions[])(const HeadTokens&, int64_t, int64_t, int64_t, int64_t,
                                       float*, int64_t, int64_t) = {
          columns<1, Task::CORRECTS>, columns<2, Task::CORRECTS>, columns<3, Task::CORRECTS>,
          columns<4, Task::CORRECTS>};
      functions[smaller(COLUMNS, (values - column) / W) - 1](
          some, num_tokens, keys, key_stride, values, state + column, stride, column);
    }
    for (int64_t i = 0; i < num_tokens; i++)
      store_result(task, some.out + i * values, head, first + i);
  }
  for (int64_t i = 0; i < keys; i++)
    task.states.copy(row[0], first_byte + i * row_bytes, row_bytes,
                     reinterpret_cast<char*>(state + i * stride), true);
}

template <typename Task>
void walk_rows(const Task& task, int num_threads) {
  parallel(num_threads, task.states.num_rows * task.num_heads, [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;)
      walk_head(task, task.states.rows + i / task.num_heads * 4, i % task.num_heads);
  });
}

#define INSTANCES(T)                                             \
  template void convolve<T>(const Convolution<T>&, int);         \
  template void walk_rows<DeltaRule<T>>(const DeltaRule<T>&, int); \
  template void walk_rows<Mamba<T>>(const Mamba<T>&, int);
INSTANCES(float)
INSTANCES(bf16)
#undef INSTANCES

}  // namespace SPACE
