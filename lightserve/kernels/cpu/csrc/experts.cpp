// A mixture of experts: what each token's experts give, times their shares, one expert after another.
#include "core.h"

extern "C" {
#define DECLARE(T, name)                                                                          \
  void core_linear_##name(const T*, int64_t, int64_t, const void*, const void*, const uint8_t*,   \
                          int64_t, int64_t, int64_t, int64_t, const T*, int32_t, void*, int32_t,  \
                          int32_t);
DECLARE(float, f32)
DECLARE(bf16, bf16)
}

namespace {

// As `core_linear` takes it.
struct Weight {
  const void* numbers;
  const void* factors;
  const uint8_t* zeros;
  int64_t bits, group_size;
};

struct Expert {
  Weight gate_up, down;
};

void multiply(const float* x, int64_t num_rows, const Weight& w, int64_t num_inputs,
              int64_t num_outputs, Form form, float* out, int32_t level, int32_t num_threads) {
  core_linear_f32(x, num_inputs, num_rows, w.numbers, w.factors, w.zeros, w.bits, w.group_size,
                  num_inputs, num_outputs, nullptr, form, out, level, num_threads);
}

void multiply(const bf16* x, int64_t num_rows, const Weight& w, int64_t num_inputs,
              int64_t num_outputs, Form form, bf16* out, int32_t level, int32_t num_threads) {
  core_linear_bf16(x, num_inputs, num_rows, w.numbers, w.factors, w.zeros, w.bits, w.group_size,
                   num_inputs, num_outputs, nullptr, form, out, level, num_threads);
}

// Puts the pairs of tokens and experts in the order of experts, then of tokens. Afterwards `ends` says
// where each expert's end. Returns the most that one has, -1 if an expert is none.
int64_t sort_pairs(const int64_t* chosen, int64_t num_pairs, int64_t num_experts, int64_t* ends,
                   int64_t* pairs) {
  std::memset(ends, 0, (num_experts + 1) * sizeof *ends);
  for (int64_t i = 0; i < num_pairs; i++) {
    if (chosen[i] < 0 || chosen[i] >= num_experts) return -1;
    ends[chosen[i] + 1]++;
  }
  int64_t most = 0;
  for (int64_t expert = 1; expert <= num_experts; expert++) {
    most = larger(most, ends[expert]);
    ends[expert] += ends[expert - 1];
  }
  for (int64_t i = 0; i < num_pairs; i++) pairs[ends[chosen[i]]++] = i;
  return most;
}

template <typename T>
int32_t mix_experts(const T* x, int64_t x_stride, int64_t num_rows, const int64_t* chosen,
                    const float* shares, int64_t num_chosen, const Expert* experts,
                    int64_t num_experts, int64_t num_inputs, int64_t size, T* out, int32_t level,
                    int32_t num_threads) {
  const int64_t num_pairs = num_rows * num_chosen;
  int64_t* ends =
      static_cast<int64_t*>(scratch(5, (num_experts + 1 + num_pairs) * sizeof(int64_t)));
  int64_t* pairs = ends + num_experts + 1;
  const int64_t most = sort_pairs(chosen, num_pairs, num_experts, ends, pairs);
  if (most < 0) return 0;
  T* rows = static_cast<T*>(scratch(6, most * (2 * num_inputs + size) * sizeof(T)));
  T* features = rows + most * num_inputs;
  T* added = features + most * size;
  float* sums = static_cast<float*>(scratch(7, num_rows * num_inputs * sizeof(float)));
  std::memset(sums, 0, num_rows * num_inputs * sizeof *sums);
  for (int64_t expert = 0, first = 0; expert < num_experts; first = ends[expert++]) {
    const int64_t count = ends[expert] - first;
    if (count == 0) continue;
    for (int64_t i = 0; i < count; i++)
      std::memcpy(rows + i * num_inputs, x + pairs[first + i] / num_chosen * x_stride,
                  num_inputs * sizeof(T));
    const Expert& own = experts[expert];
    multiply(rows, count, own.gate_up, num_inputs, 2 * size, GATED, features, level, num_threads);
    multiply(features, count, own.down, size, num_inputs, PLAIN, added, level, num_threads);
    for (int64_t i = 0; i < count; i++) {
      const float share = shares[pairs[first + i]];
      float* to = sums + pairs[first + i] / num_chosen * num_inputs;
      const T* from = added + i * num_inputs;
      for (int64_t k = 0; k < num_inputs; k++) to[k] += share * widened(from[k]);
    }
  }
  for (int64_t i = 0; i < num_rows * num_inputs; i++) out[i] = narrowed(T{}, sums[i]);
  return 1;
}

}  // namespace

// out [num_rows, num_inputs] = the sum of what the experts `chosen` [num_rows, num_chosen] give, each
// times its share: down @ (silu(gates) * ups). Returns 0, and does nothing, if an expert is none.
#define OPERATIONS(T, name)                                                                       \
  EXPORT int32_t core_mix_experts_##name(                                                         \
      const T* x, int64_t x_stride, int64_t num_rows, const int64_t* chosen, const float* shares, \
      int64_t num_chosen, const Expert* experts, int64_t num_experts, int64_t num_inputs,         \
      int64_t size, T* out, int32_t level, int32_t num_threads) {                                 \
    return mix_experts(x, x_stride, num_rows, chosen, shares, num_chosen, experts, num_experts,   \
                       num_inputs, size, out, level, num_threads);                                \
  }
OPERATIONS(float, f32)
OPERATIONS(bf16, bf16)
