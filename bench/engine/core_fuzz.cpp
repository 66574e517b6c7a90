// See core_fuzz.sh.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "core.h"

extern "C" {
int32_t core_level();
int64_t core_packed_size(int64_t, int64_t, int32_t, int32_t);
int64_t core_packed_size_int8(int64_t, int64_t, int32_t);
int64_t core_packed_size_groups(int64_t, int64_t, int64_t, int32_t);
void core_pack_groups(const uint8_t*, int64_t, int64_t, int64_t, uint8_t*, int32_t);
void core_choose_experts_f32(const float*, int64_t, const float*, int64_t, int64_t, int64_t, int64_t,
                             int64_t, int32_t, int32_t, float, float, int64_t*, float*, int32_t);
#define DECLARE(T, name)                                                                         \
  void core_pack_##name(const T*, int64_t, int64_t, int32_t, T*, int32_t);                       \
  void core_pack_int8_##name(const T*, int64_t, int64_t, int32_t, int8_t*, float*, int32_t);     \
  void core_quantize_groups_##name(const T*, int64_t, int64_t, int64_t, int32_t, uint8_t*,       \
                                   uint16_t*, uint8_t*, int32_t);                                \
  void core_linear_##name(const T*, int64_t, int64_t, const void*, const void*, const uint8_t*,  \
                          int64_t, int64_t, int64_t, int64_t, const T*, int32_t, void*,          \
                          const int64_t*, int32_t, int32_t);                                     \
  void core_norm_##name(const T*, int64_t, T*, const void*, int32_t, float, int64_t, int64_t,    \
                        T*, int32_t, int32_t);                                                   \
  void core_elements_##name(int32_t, const T*, int64_t, const T*, int64_t, float, int64_t,       \
                            int64_t, T*, int64_t, int32_t, int32_t);                             \
  void core_layer_norm_##name(const T*, int64_t, const T*, const T*, float, int64_t, int64_t,    \
                              T*, int32_t, int32_t);                                             \
  int32_t core_rotate_##name(T*, const T*, const T*, int64_t, int64_t, int64_t, int64_t,         \
                             int64_t, const float*, const float*, int64_t, void*, void*,         \
                             int64_t, int64_t, int32_t, const int64_t*, int64_t, const void*,     \
                             const void*, int32_t, float, int32_t, int32_t);                     \
  void core_attention_##name(const T*, int64_t, void*, void*, int64_t, int64_t, int32_t,         \
                             const int32_t*, int64_t, const int64_t*, int64_t, int64_t, int64_t, \
                             int64_t, int64_t, float, float, const float*, const float*,         \
                             int32_t, T*, int32_t, int32_t);                                     \
  int32_t core_mix_experts_##name(const T*, int64_t, int64_t, const int64_t*, const float*,      \
                                  int64_t, const void*, int64_t, int64_t, int64_t, T*, int32_t,  \
                                  int32_t);                                                      \
  int32_t core_rows_##name(const T*, int64_t, int64_t, const int64_t*, int64_t, T*, int32_t);    \
  int32_t core_rows_int8_##name(const int8_t*, const float*, int64_t, int64_t, const int64_t*,   \
                                int64_t, T*, int32_t);
int32_t core_gather(const char*, int64_t, int64_t, int64_t, const int64_t*, int64_t, char*);
DECLARE(float, f32)
DECLARE(bf16, bf16)
}

static std::mt19937 chance(7);

static int64_t among(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(chance);
}

// Memory of exactly so many numbers, so that the sanitizer sees one too many.
template <typename T>
struct Buffer {
  explicit Buffer(int64_t size) : numbers(new T[size]) {
    for (int64_t i = 0; i < size; i++) numbers[i] = static_cast<T>(among(0, 2));
  }
  operator T*() { return numbers.get(); }
  std::unique_ptr<T[]> numbers;
};

#define FUZZ(T, name, is_bf16)                                                                  \
  static void fuzz_##name(int32_t level) {                                                      \
    const int32_t threads = static_cast<int32_t>(among(1, 3));                                  \
    {                                                                                           \
      const int64_t rows = among(1, 70), inputs = among(1, 200);                                \
      const Form form = static_cast<Form>(among(0, 2));                                         \
      const int32_t gated = form == GATED;                                                      \
      const int64_t outputs = among(1, 150) * (1 + gated), panels = panels_of(outputs, gated);  \
      Buffer<T> x(rows * inputs), weight(outputs * inputs), biases(outputs);                    \
      Buffer<T> plain(rows * outputs / (1 + gated));                                            \
      Buffer<float> wide(rows * outputs);                                                       \
      const T* bias = rows % 2 ? static_cast<T*>(biases) : nullptr;                             \
      void* out = form == WIDE ? static_cast<void*>(static_cast<float*>(wide))                  \
                               : static_cast<void*>(static_cast<T*>(plain));                    \
      Buffer<T> packed(core_packed_size(outputs, inputs, is_bf16, gated));                      \
      core_pack_##name(weight, outputs, inputs, gated, packed, threads);                        \
      core_linear_##name(x, inputs, rows, (T*)packed, nullptr, nullptr, 0, 0, inputs, outputs,  \
                         bias, form, out, nullptr, level, threads);                             \
      Buffer<int8_t> bytes(core_packed_size_int8(outputs, inputs, gated));                      \
      Buffer<float> factors(panels * PANEL);                                                    \
      core_pack_int8_##name(weight, outputs, inputs, gated, bytes, factors, threads);           \
      Buffer<int64_t> rounded(4);                                                               \
      rounded[0] = rows, rounded[1] = 1, rounded[2] = among(0, rows);                           \
      rounded[3] = among(rounded[2], rows);                                                     \
      core_linear_##name(x, inputs, rows, (int8_t*)bytes, (float*)factors, nullptr, 8, 0,       \
                         inputs, outputs, bias, form, out,                                      \
                         among(0, 1) ? (int64_t*)rounded : nullptr, level, threads);            \
      Buffer<int64_t> chosen(rows);                                                             \
      for (int64_t i = 0; i < rows; i++) chosen[i] = among(0, outputs - 1);                     \
      Buffer<T> found(rows * inputs);                                                           \
      if (!gated) {                                                                             \
        core_rows_##name(packed, outputs, inputs, chosen, rows, found, threads);                \
        core_rows_int8_##name(bytes, factors, outputs, inputs, chosen, rows, found, threads);   \
      }                                                                                         \
      const int64_t bits = among(1, 2) * 4, size = among(1, 4) * K_BLOCK;                       \
      const int64_t places = panels * PANEL * divide_up(inputs, size);                          \
      Buffer<uint8_t> integers(outputs * inputs), zeros(places);                                \
      Buffer<uint8_t> grouped(core_packed_size_groups(outputs, inputs, bits, gated));           \
      Buffer<uint16_t> halves(places);                                                          \
      if (!gated) core_pack_groups(integers, outputs, inputs, bits, grouped, threads);          \
      if (bits == 4)                                                                            \
        core_quantize_groups_##name(weight, outputs, inputs, size, gated, grouped, halves,      \
                                    zeros, threads);                                            \
      core_linear_##name(x, inputs, rows, (uint8_t*)grouped, (uint16_t*)halves, zeros, bits,    \
                         size, inputs, outputs, bias, form, out, nullptr, level, threads);      \
      if (gated) {                                                                              \
        const int64_t each = outputs / 2, count = among(1, 4), most = among(1, count);          \
        Buffer<T> downs(inputs * each), down(core_packed_size(inputs, each, is_bf16, 0));       \
        core_pack_##name(downs, inputs, each, 0, down, threads);                                \
        Buffer<int8_t> down8(core_packed_size_int8(inputs, each, 0));                           \
        Buffer<float> factors8(panels_of(inputs, 0) * PANEL);                                   \
        core_pack_int8_##name(downs, inputs, each, 0, down8, factors8, threads);                \
        const int64_t places4 = panels_of(inputs, 0) * PANEL * divide_up(each, size);           \
        Buffer<uint8_t> down4(core_packed_size_groups(inputs, each, 4, 0)), zeros4(places4);    \
        Buffer<uint16_t> halves4(places4);                                                      \
        core_quantize_groups_##name(downs, inputs, each, size, 0, down4, halves4, zeros4,       \
                                    threads);                                                   \
        const void* const group = (const void*)size;                                            \
        const void *const four = (const void*)4, *const eight = (const void*)8;                 \
        const void* kinds[3][10] = {                                                            \
            {(T*)packed, 0, 0, 0, 0, (T*)down, 0, 0, 0, 0},                                     \
            {(int8_t*)bytes, (float*)factors, 0, eight, 0, (int8_t*)down8, (float*)factors8, 0, \
             eight, 0},                                                                         \
            {(uint8_t*)grouped, (uint16_t*)halves, (uint8_t*)zeros, four, group,                \
             (uint8_t*)down4, (uint16_t*)halves4, (uint8_t*)zeros4, four, group}};              \
        const void** words = kinds[among(0, bits == 4 ? 2 : 1)];                                \
        const int64_t stride = inputs + among(0, 9);                                            \
        Buffer<T> spread((rows - 1) * stride + inputs);                                         \
        std::vector<const void*> experts;                                                       \
        for (int64_t i = 0; i < count; i++)                                                     \
          experts.insert(experts.end(), words, words + 10);                                     \
        Buffer<int64_t> own(rows * most);                                                       \
        Buffer<float> shares(rows * most);                                                      \
        for (int64_t i = 0; i < rows * most; i++) own[i] = among(0, count - 1);                 \
        if (!core_mix_experts_##name(spread, stride, rows, own, shares, most, experts.data(), count, \
                                     inputs, each, found, level, threads))                      \
          std::abort();                                                                         \
      }                                                                                         \
      Buffer<T> other(rows * inputs), normed(rows * inputs), scale(inputs);                     \
      Buffer<float> wide_scale(inputs);                                                         \
      const int32_t is_wide = inputs % 2;                                                       \
      core_norm_##name(x, inputs, rows % 2 ? static_cast<T*>(other) : nullptr,                  \
                       is_wide ? (void*)(float*)wide_scale : (void*)(T*)scale, is_wide, 1e-5f,  \
                       rows, inputs, normed, level, threads);                                   \
      core_layer_norm_##name(x, inputs, scale, rows % 2 ? static_cast<T*>(scale) : nullptr,     \
                             1e-5f, rows, inputs, normed, level, threads);                      \
      for (int32_t element = COPY; element <= GELU_TANH; element++)                             \
        core_elements_##name(element, x, inputs,                                                \
                             element < GELU || rows % 2 ? static_cast<T*>(other) : nullptr,     \
                             inputs, 0.5f, rows, inputs, normed, inputs, level, threads);       \
    }                                                                                           \
    const int64_t kv_heads = among(1, 3), heads = kv_heads * among(1, 9), size = among(1, 100); \
    const int64_t num_slots = among(1, 900), count = among(1, 4);                               \
    std::vector<int64_t> rows;                                                                  \
    int64_t tokens = 0;                                                                         \
    for (int64_t i = 0; i < count; i++) {                                                       \
      const int64_t context = among(1, num_slots);                                              \
      const int64_t fresh = i % 2 ? 1 : among(1, smaller(context, 60));                         \
      for (int64_t value : {i, fresh, context, tokens}) rows.push_back(value);                  \
      tokens += fresh;                                                                          \
    }                                                                                           \
    Buffer<int32_t> table(count * num_slots);                                                   \
    for (int64_t i = 0; i < count * num_slots; i++)                                             \
      table[i] = static_cast<int32_t>(among(0, num_slots - 1));                                 \
    Buffer<float> slopes(heads), sinks(heads);                                                  \
    Buffer<T> q(tokens * heads * size), k(kv_heads * num_slots * size);                         \
    Buffer<T> v(kv_heads * num_slots * size), out(tokens * heads * size);                       \
    core_attention_##name(q, heads * size, (T*)k, (T*)v, size, num_slots * size, 0, table,      \
                          num_slots, rows.data(), count, heads, kv_heads, size,                 \
                          among(0, 1) ? among(1, 100) : 0, 0.1f, count % 2 ? 0.0f : 5.0f,       \
                          count < 3 ? nullptr : static_cast<float*>(slopes),                    \
                          count == 2 ? static_cast<float*>(sinks) : nullptr, 0, out, level,     \
                          threads);                                                             \
    Buffer<T> some(tokens * heads * size);                                                      \
    Buffer<int64_t> wanted(tokens);                                                             \
    for (int64_t i = 0; i < tokens; i++) wanted[i] = among(0, tokens - 1);                      \
    const int64_t row_bytes = heads * size * sizeof(T);                                         \
    core_gather((const char*)(T*)out, tokens, row_bytes, row_bytes, wanted, tokens,             \
                (char*)(T*)some);                                                               \
    Buffer<int8_t> k8(kv_heads * num_slots * (size + 4)), v8(kv_heads * num_slots * (size + 4)); \
    core_attention_##name(q, heads * size, (int8_t*)k8, (int8_t*)v8, size + 4,                  \
                          num_slots * (size + 4), 1, table, num_slots, rows.data(), count,      \
                          heads, kv_heads, size, among(0, 1) ? among(1, 100) : 0, 0.1f, 0.0f,   \
                          nullptr, count == 4 ? static_cast<float*>(sinks) : nullptr, 0, out,   \
                          level, threads);                                                      \
    const int64_t all = heads + 2 * kv_heads, half = among(1, 50);                              \
    if (2 * half > size) return;                                                                \
    Buffer<T> qkv(tokens * all * size), norm(size);                                             \
    Buffer<float> cos(tokens * half), sin(tokens * half);                                       \
    Buffer<int64_t> slots(tokens);                                                              \
    for (int64_t i = 0; i < tokens; i++) slots[i] = among(0, num_slots - 1);                    \
    Buffer<float> wide_norm(size);                                                              \
    const int32_t wide = half % 3 == 0;                                                         \
    void* scale = half % 2 == 0 ? nullptr : wide ? (void*)(float*)wide_norm : (void*)(T*)norm;  \
    core_rotate_##name(qkv, qkv + heads * size, qkv + (heads + kv_heads) * size, all * size,    \
                       tokens, heads, kv_heads, size, cos, sin, half, (T*)k, (T*)v, size,       \
                       num_slots * size, 0, slots, num_slots, scale, scale, wide, 1e-5f, level, \
                       threads);                                                                \
    core_rotate_##name(qkv, qkv + heads * size, qkv + (heads + kv_heads) * size, all * size,    \
                       tokens, heads, kv_heads, size, cos, sin, half, (int8_t*)k8, (int8_t*)v8, \
                       size + 4, num_slots * (size + 4), 1, slots, num_slots, scale, scale,     \
                       wide, 1e-5f, level, threads);                                            \
  }
extern "C" {
void core_scan_logits(const float*, int64_t, int64_t, int64_t, int64_t*, uint8_t*, int32_t, int32_t);
void core_draw_tokens(const float*, int64_t, int64_t, const int64_t*, int64_t, const int64_t*,
                      const float*, const float*, const double*, int64_t*, int32_t, int32_t);
void core_top_tokens(const float*, int64_t, int64_t, const int64_t*, int64_t, const int64_t*,
                     const float*, const float*, int64_t, float*, int64_t*, double*, int32_t,
                     int32_t);
}

static void fuzz_drawing(int32_t level) {
  const int32_t threads = static_cast<int32_t>(among(1, 3));
  const int64_t rows = among(1, 5), vocab = among(1, 3000), top = among(1, smaller(vocab, 300));
  Buffer<float> logits(rows * vocab), temperature(rows), min_p(rows), values(rows * top);
  Buffer<int64_t> chosen(rows), largest(rows), tokens(rows), order(rows * top);
  Buffer<uint8_t> good(rows);
  Buffer<double> numbers(rows), all(rows);
  for (int64_t i = 0; i < rows; i++) {
    chosen[i] = i;
    temperature[i] = 0.5f + temperature[i];
    numbers[i] = static_cast<double>(among(0, 99)) / 100;
  }
  float* least = rows % 2 ? static_cast<float*>(min_p) : nullptr;
  core_scan_logits(logits, vocab, rows, vocab, largest, good, level, threads);
  core_draw_tokens(logits, vocab, vocab, chosen, rows, largest, temperature, least, numbers, tokens,
                   level, threads);
  core_top_tokens(logits, vocab, vocab, chosen, rows, largest, temperature, least, top, values,
                  order, all, level, threads);
  for (int64_t i = 0; i < rows; i++)
    if (tokens[i] < 0 || tokens[i] >= vocab) std::abort();
}

static void fuzz_choice() {
  const int64_t groups = among(1, 4), size = among(1, 9), experts = groups * size;
  const int64_t chosen_groups = among(1, groups), chosen = among(1, chosen_groups * size);
  const int64_t rows = among(1, 40);
  Buffer<float> products(rows * experts), bias(experts), shares(rows * chosen);
  Buffer<int64_t> places(rows * chosen);
  core_choose_experts_f32(products, rows, rows % 2 ? static_cast<float*>(bias) : nullptr, experts,
                          groups, chosen_groups, among(1, size), chosen, rows % 3 == 0,
                          rows % 5 == 0, 1e-6f, 1.5f, places, shares,
                          static_cast<int32_t>(among(1, 3)));
  for (int64_t i = 0; i < rows * chosen; i++)
    if (places[i] < 0 || places[i] >= experts) std::abort();
}

FUZZ(float, f32, 0)
FUZZ(bf16, bf16, 1)

int main(int, char** arguments) {
  const int32_t best = core_level();
  for (int32_t level = AVX2; level <= best; level++)
    for (int i = 0; i < std::atoi(arguments[1]); i++) {
      fuzz_f32(level);
      fuzz_bf16(level);
      fuzz_drawing(level);
      fuzz_choice();
    }
  std::printf("good: %s rounds at each of %d levels\n", arguments[1], best);
}
