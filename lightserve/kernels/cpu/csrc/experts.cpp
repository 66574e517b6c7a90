// A mixture of experts: which ones a token goes through, and what they give, times their shares, one
// expert after another.
#include "core.h"

extern "C" {
#define DECLARE(T, name)                                                                          \
  void core_linear_##name(const T*, int64_t, int64_t, const void*, const void*, const uint8_t*,   \
                          int64_t, int64_t, int64_t, int64_t, const T*, int32_t, void*,           \
                          const int64_t*, int32_t, int32_t);
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
                  num_inputs, num_outputs, nullptr, form, out, nullptr, level,
                  num_threads);
}

void multiply(const bf16* x, int64_t num_rows, const Weight& w, int64_t num_inputs,
              int64_t num_outputs, Form form, bf16* out, int32_t level, int32_t num_threads) {
  core_linear_bf16(x, num_inputs, num_rows, w.numbers, w.factors, w.zeros, w.bits, w.group_size,
                   num_inputs, num_outputs, nullptr, form, out, nullptr, level,
                  num_threads);
}

// Puts the pairs of tokens and experts in the order of experts, then of tokens. Afterwards `ends` says
// where each expert's end. Returns the most that one has.
int64_t sort_pairs(const int64_t* chosen, int64_t num_pairs, int64_t num_experts, int64_t* ends,
                   int64_t* pairs) {
  std::memset(ends, 0, (num_experts + 1) * sizeof *ends);
  for (int64_t i = 0; i < num_pairs; i++) ends[chosen[i] + 1]++;
  int64_t most = 0;
  for (int64_t expert = 1; expert <= num_experts; expert++) {
    most = larger(most, ends[expert]);
    ends[expert] += ends[expert - 1];
  }
  for (int64_t i = 0; i < num_pairs; i++) pairs[ends[chosen[i]]++] = i;
  return most;
}

template <typename T>
void mix_block(const T* x, int64_t x_stride, int64_t num_rows, const int64_t* chosen,
               const float* shares, int64_t num_chosen, const Expert* experts, int64_t num_experts,
               int64_t num_inputs, int64_t size, T* out, int32_t level, int32_t num_threads) {
  const int64_t num_pairs = num_rows * num_chosen;
  int64_t* ends =
      static_cast<int64_t*>(scratch(5, (num_experts + 1 + num_pairs) * sizeof(int64_t)));
  int64_t* pairs = ends + num_experts + 1;
  const int64_t most = sort_pairs(chosen, num_pairs, num_experts, ends, pairs);
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
}

// So many rows at a time: what is kept of their sums stays for the next call.
constexpr int64_t BLOCK_ROWS = 2048;

template <typename T>
int32_t mix_experts(const T* x, int64_t x_stride, int64_t num_rows, const int64_t* chosen,
                    const float* shares, int64_t num_chosen, const Expert* experts,
                    int64_t num_experts, int64_t num_inputs, int64_t size, T* out, int32_t level,
                    int32_t num_threads) {
  for (int64_t i = 0; i < num_rows * num_chosen; i++)
    if (chosen[i] < 0 || chosen[i] >= num_experts) return 0;
  for (int64_t row = 0; row < num_rows; row += BLOCK_ROWS)
    mix_block(x + row * x_stride, x_stride, smaller(BLOCK_ROWS, num_rows - row),
              chosen + row * num_chosen, shares + row * num_chosen, num_chosen, experts,
              num_experts, num_inputs, size, out + row * num_inputs, level, num_threads);
  return 1;
}

// How a token's experts follow from its products with the router's weight; see `ExpertChoice`.
struct Choice {
  const float* bias;  // or null
  int64_t num_experts, num_groups, num_chosen_groups, group_best, num_chosen;
  bool is_sigmoid, normalises;
  float added, scale;
};

// Writes the places of the `count` largest numbers, largest first; of equals, and of what is no number,
// the first ones.
void find_largest(const float* numbers, int64_t num_numbers, int64_t count, uint8_t* is_taken,
                  int64_t* places) {
  std::memset(is_taken, 0, num_numbers);
  for (int64_t i = 0; i < count; i++) {
    int64_t best = -1;
    for (int64_t k = 0; k < num_numbers; k++)
      if (!is_taken[k] && (best < 0 || numbers[k] > numbers[best])) best = k;
    is_taken[best] = 1;
    places[i] = best;
  }
}

void score(const float* products, const Choice& choice, float* scores) {
  float most = products[0], total = 0.0f;
  for (int64_t k = 1; k < choice.num_experts; k++) most = products[k] > most ? products[k] : most;
  for (int64_t k = 0; k < choice.num_experts; k++) {
    scores[k] = choice.is_sigmoid ? 1.0f / (1.0f + std::exp(-products[k]))
                                  : std::exp(products[k] - most);
    total += scores[k];
  }
  if (!choice.is_sigmoid)
    for (int64_t k = 0; k < choice.num_experts; k++) scores[k] /= total;
}

// Makes the ranks of experts in all but the best groups the least there is.
void leave_groups_out(const Choice& choice, float* ranks, float* sums, uint8_t* is_taken,
                      int64_t* places) {
  const int64_t size = choice.num_experts / choice.num_groups;
  for (int64_t group = 0; group < choice.num_groups; group++) {
    find_largest(ranks + group * size, size, choice.group_best, is_taken, places);
    sums[group] = 0.0f;
    for (int64_t i = 0; i < choice.group_best; i++) sums[group] += ranks[group * size + places[i]];
  }
  find_largest(sums, choice.num_groups, choice.num_chosen_groups, is_taken, places);
  for (int64_t group = 0; group < choice.num_groups; group++)
    for (int64_t k = 0; !is_taken[group] && k < size; k++)
      ranks[group * size + k] = -__builtin_inff();
}

void choose(const float* products, const Choice& choice, int64_t* chosen, float* shares) {
  const int64_t count = choice.num_experts;
  float* scores = static_cast<float*>(scratch(5, count * (3 * sizeof(float) + 1)));
  float *ranks = scores + count, *sums = ranks + count;
  int64_t* places = static_cast<int64_t*>(scratch(6, count * sizeof(int64_t)));
  uint8_t* is_taken = reinterpret_cast<uint8_t*>(sums + count);
  score(products, choice, scores);
  for (int64_t k = 0; k < count; k++)
    ranks[k] = scores[k] + (choice.bias == nullptr ? 0.0f : choice.bias[k]);
  if (choice.num_groups > 1) leave_groups_out(choice, ranks, sums, is_taken, places);
  find_largest(ranks, count, choice.num_chosen, is_taken, chosen);
  float total = 0.0f;
  for (int64_t i = 0; i < choice.num_chosen; i++) total += shares[i] = scores[chosen[i]];
  for (int64_t i = 0; i < choice.num_chosen; i++) {
    if (choice.normalises) shares[i] /= total + choice.added;
    shares[i] *= choice.scale;
  }
}

}  // namespace

// chosen [num_rows, num_chosen] and their shares of products [num_rows, num_experts], contiguous.
EXPORT void core_choose_experts_f32(const float* products, int64_t num_rows, const float* bias,
                                    int64_t num_experts, int64_t num_groups,
                                    int64_t num_chosen_groups, int64_t group_best,
                                    int64_t num_chosen, int32_t is_sigmoid, int32_t normalises,
                                    float added, float scale, int64_t* chosen, float* shares,
                                    int32_t num_threads) {
  const Choice choice{bias,       num_experts,     num_groups,      num_chosen_groups, group_best,
                      num_chosen, is_sigmoid != 0, normalises != 0, added,             scale};
  const int64_t chunk = larger(1, 2048 / num_experts);
  parallel(num_threads, divide_up(num_rows, chunk), [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;)
      for (int64_t row = i * chunk; row < smaller(num_rows, (i + 1) * chunk); row++)
        choose(products + row * num_experts, choice, chosen + row * num_chosen,
               shares + row * num_chosen);
  });
}
BY_WORDS(core_choose_experts_f32)

// out [num_rows, num_inputs] = the sum of what the experts `chosen` [num_rows, num_chosen] give, each
// times its share: down @ (silu(gates) * ups). Returns 0, and does nothing, if an expert is none.
#define OPERATIONS(T, name)                                                                       \
  EXPORT int32_t core_mix_experts_##name(                                                         \
      const T* x, int64_t x_stride, int64_t num_rows, const int64_t* chosen, const float* shares, \
      int64_t num_chosen, const Expert* experts, int64_t num_experts, int64_t num_inputs,         \
      int64_t size, T* out, int32_t level, int32_t num_threads) {                                 \
    return mix_experts(x, x_stride, num_rows, chosen, shares, num_chosen, experts, num_experts,   \
                       num_inputs, size, out, level, num_threads);                                \
  }                                                                                               \
  BY_WORDS(core_mix_experts_##name)
OPERATIONS(float, f32)
OPERATIONS(bf16, bf16)
