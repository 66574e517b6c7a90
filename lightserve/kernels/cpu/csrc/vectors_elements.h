// What is done number by number, and LayerNorm, for any width of vectors; included after vectors.h.

namespace SPACE {

// x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3): GELU by its approximation with tanh.
TARGET INLINE F gelu_tanh_of(F x) {
  const F twice = x * (1.59576912f + 0.0713548162f * x * x);
  return x / (exp_of(-twice) + 1.0f);
}

// x * Phi(x); 1 - erf by Abramowitz and Stegun, 7.1.26, to 1.5e-7.
TARGET INLINE F gelu_of(F x) {
  const F size = x < 0.0f ? -x : x, z = size * 0.707106781f;
  const F t = 1.0f / (1.0f + 0.3275911f * z);
  F sum = F{} + 1.061405429f;
  sum = sum * t - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  const F outside = 0.5f * size * t * sum * exp_of(-z * z);
  return (x < 0.0f ? F{} : x) - outside;
}

template <Element E>
TARGET INLINE F element_of(F a, F b, float factor) {
  if constexpr (E == COPY) return a;
  if constexpr (E == SUM) return a + b;
  if constexpr (E == PRODUCT) return a * b;
  if constexpr (E == SCALED) return a * factor;
  if constexpr (E == RELU) return a < 0.0f ? F{} : a;
  if constexpr (E == GELU) return gelu_of(a);
  if constexpr (E == GELU_TANH) return gelu_tanh_of(a);
  if constexpr (E == GATE) return a / (exp_of(-b) + 1.0f);
}

template <Element E, typename T>
TARGET static void elements_of_row(const Elements<T>& task, int64_t row) {
  // GELU of a gate is rounded, as in torch, and multiplied by what stands beside it.
  constexpr bool is_gate = E == GELU || E == GELU_TANH;
  const T* a = task.a + row * task.a_stride;
  const T* b = task.b == nullptr ? nullptr : task.b + row * task.b_stride;
  T* out = task.out + row * task.out_stride;
  FOR_VECTORS(offset, count, task.size) {
    const F other = b == nullptr ? F{} : load_some(b + offset, count);
    F value = element_of<E>(load_some(a + offset, count), other, task.factor);
    if (is_gate && b != nullptr) value = rounded(value, a) * other;
    store_some(out + offset, value, count);
  }
}

template <typename T>
void elements(Element element, const Elements<T>& task, int num_threads) {
  static void (*const functions[])(const Elements<T>&, int64_t) = {
      elements_of_row<COPY, T>,   elements_of_row<SUM, T>,  elements_of_row<PRODUCT, T>,
      elements_of_row<SCALED, T>, elements_of_row<RELU, T>, elements_of_row<GELU, T>,
      elements_of_row<GELU_TANH, T>, elements_of_row<GATE, T>};
  const int64_t chunk = larger(1, 16384 / larger(1, task.size));
  parallel(num_threads, divide_up(task.num_rows, chunk), [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;)
      for (int64_t row = i * chunk; row < smaller(task.num_rows, (i + 1) * chunk); row++)
        functions[element](task, row);
  });
}

// out = (x - mean) / deviation * weight + bias.
template <typename T>
TARGET static void layer_norm_row(const LayerNorm<T>& task, const T* x, T* out) {
  const float share = 1.0f / static_cast<float>(task.size);
  F sums = {}, squares = {};
  FOR_VECTORS(offset, count, task.size) sums += load_some(x + offset, count);
  const float mean = total_of(sums) * share;
  FOR_VECTORS(offset, count, task.size) {
    F apart = load_some(x + offset, count) - mean;
    for (int64_t i = count; i < W; i++) apart[i] = 0.0f;
    squares += apart * apart;
  }
  const float scale = 1.0f / __builtin_sqrtf(total_of(squares) * share + task.eps);
  FOR_VECTORS(offset, count, task.size) {
    F value = (load_some(x + offset, count) - mean) * scale * load_some(task.weight + offset, count);
    if (task.bias != nullptr) value += load_some(task.bias + offset, count);
    store_some(out + offset, value, count);
  }
}

template <typename T>
void layer_norm(const LayerNorm<T>& task, int num_threads) {
  const int64_t chunk = larger(1, 16384 / larger(1, task.size));
  parallel(num_threads, divide_up(task.num_rows, chunk), [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;)
      for (int64_t row = i * chunk; row < smaller(task.num_rows, (i + 1) * chunk); row++)
        layer_norm_row(task, task.x + row * task.x_stride, task.out + row * task.size);
  });
}

#define INSTANCES(T)                                                  \
  template void elements<T>(Element, const Elements<T>&, int);        \
  template void layer_norm<T>(const LayerNorm<T>&, int);
INSTANCES(float)
INSTANCES(bf16)
#undef INSTANCES

}  // namespace SPACE
