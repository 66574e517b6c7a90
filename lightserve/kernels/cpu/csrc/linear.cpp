// Packing weights, and the choice of instructions.
#include "core.h"

namespace avx2 {
void linear_f32(const Linear<float>&, int);
void linear_bf16(const LinearBf16&, int);
}  // namespace avx2
namespace avx512 {
void linear_f32(const Linear<float>&, int);
void linear_bf16(const LinearBf16&, int);
}  // namespace avx512

// Returns how many numbers a packed weight has; `is_gated` as in `output_at`.
EXPORT int64_t core_packed_size(int64_t num_outputs, int64_t num_inputs, int32_t is_bf16,
                                int32_t is_gated) {
  return panels_of(num_outputs, is_gated != 0) * PANEL *
         (is_bf16 ? padded_inputs(num_inputs) : num_inputs);
}

// Packs weight [num_outputs, num_inputs], contiguous.
EXPORT void core_pack_f32(const float* weight, int64_t num_outputs, int64_t num_inputs,
                          int32_t is_gated, float* packed, int32_t num_threads) {
  parallel(num_threads, panels_of(num_outputs, is_gated != 0), [&](Cursor& cursor) {
    for (int64_t panel; (panel = cursor.take()) < cursor.total;)
      for (int64_t i = 0; i < PANEL; i++) {
        const int64_t output = output_at(panel, i, num_outputs, is_gated != 0);
        float* to = packed + panel * PANEL * num_inputs + i;
        for (int64_t k = 0; k < num_inputs; k++, to += PANEL)
          *to = output < num_outputs ? weight[output * num_inputs + k] : 0.0f;
      }
  });
}

EXPORT void core_pack_bf16(const bf16* weight, int64_t num_outputs, int64_t num_inputs,
                           int32_t is_gated, bf16* packed, int32_t num_threads) {
  const int64_t padded = padded_inputs(num_inputs);
  parallel(num_threads, panels_of(num_outputs, is_gated != 0), [&](Cursor& cursor) {
    for (int64_t panel; (panel = cursor.take()) < cursor.total;) {
      bf16* to = packed + panel * PANEL * padded;
      for (int64_t block = 0; block < padded; block += K_BLOCK)
        for (int64_t i = 0; i < PANEL; i++) {
          const int64_t output = output_at(panel, i, num_outputs, is_gated != 0);
          const bf16* from = weight + output * num_inputs + block;
          const int64_t count = output < num_outputs ? smaller(K_BLOCK, num_inputs - block) : 0;
          bf16* own = to + block * PANEL + i / 16 * TILE + i % 16 * 2;
          for (int64_t k = 0; k < K_BLOCK; k++) own[k / 2 * 32 + k % 2] = k < count ? from[k] : 0;
        }
    }
  });
}

static void multiply(const Linear<float>& task, int32_t level, int num_threads) {
  (level >= AVX512 ? avx512::linear_f32 : avx2::linear_f32)(task, num_threads);
}

static void multiply(const LinearBf16& task, int32_t level, int num_threads) {
  const auto run = level >= AMX           ? linear_bf16_amx
                   : level >= AVX512_BF16 ? linear_bf16_avx512_bf16
                   : level >= AVX512      ? avx512::linear_bf16
                                          : avx2::linear_bf16;
  run(task, num_threads);
}

static void multiply_int8(const Linear<float>& task, const int64_t*, int32_t level,
                          int num_threads) {
  linear_int8(task, level, num_threads);
}

static void multiply_int8(const LinearBf16& task, const int64_t* rounded, int32_t level,
                          int num_threads) {
  if (rounded == nullptr)
    linear_int8(task, level, num_threads);
  else
    linear_rounded(task, rounded, level, num_threads);
}

// out [num_rows, …] = what `form` makes of x [num_rows, num_inputs] @ weight.T + bias; bias may be
// null. The weight is what one of these made:
//
//   core_pack             bits 0
//   core_pack_int8        bits 8, group_size 0, factors float32
//   core_…_groups         bits 4 or 8, group_size, factors float16, zeros
//
// `rounded`, or null: rows of bfloat16 that are rounded, see `linear_rounded`; of `core_pack_int8` alone.
#define OPERATIONS(T, name)                                                                      \
  EXPORT void core_linear_##name(const T* x, int64_t x_stride, int64_t num_rows,                 \
                                 const void* numbers, const void* factors, const uint8_t* zeros, \
                                 int64_t bits, int64_t group_size, int64_t num_inputs,           \
                                 int64_t num_outputs, const T* bias, int32_t form, void* out,    \
                                 const int64_t* rounded, int32_t level, int32_t num_threads) {   \
    Linear<T> task{x,    x_stride, num_rows, num_inputs, num_outputs,                            \
                   bias, static_cast<Form>(form), out,   nullptr, nullptr, {}, nullptr};         \
    if (group_size > 0) {                                                                        \
      task.groups = {static_cast<const uint8_t*>(numbers), static_cast<const uint16_t*>(factors), \
                     zeros, bits, group_size};                                                   \
      linear_groups(task, level, num_threads);                                                   \
    } else if (bits == 8) {                                                                      \
      task.bytes = static_cast<const int8_t*>(numbers);                                          \
      task.factors = static_cast<const float*>(factors);                                         \
      multiply_int8(task, rounded, level, num_threads);                                          \
    } else {                                                                                     \
      task.weight = static_cast<const T*>(numbers);                                              \
      multiply(task, level, num_threads);                                                        \
    }                                                                                            \
  }                                                                                              \
  BY_WORDS(core_linear_##name)
OPERATIONS(float, f32)
OPERATIONS(bf16, bf16)

namespace {

template <typename Body>
int32_t copy_rows(const int64_t* rows, int64_t count, int64_t num_outputs, int num_threads,
                  Body&& body) {
  for (int64_t i = 0; i < count; i++)
    if (rows[i] < 0 || rows[i] >= num_outputs) return 0;
  parallel(count < 8 ? 1 : num_threads, count, [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;) body(i, rows[i] / PANEL, rows[i] % PANEL);
  });
  return 1;
}

template <typename T>
int32_t copy_rows_int8(const int8_t* bytes, const float* factors, int64_t num_outputs,
                       int64_t num_inputs, const int64_t* rows, int64_t count, T* out,
                       int num_threads) {
  const int64_t padded = padded_bytes(num_inputs);
  return copy_rows(rows, count, num_outputs, num_threads, [&](int64_t i, int64_t panel, int64_t o) {
    const int8_t* from = bytes + panel * PANEL * padded + o / 16 * BYTE_TILE + o % 16 * 4;
    const float factor = factors[panel * PANEL + o];
    for (int64_t k = 0; k < num_inputs; k++)
      out[i * num_inputs + k] = narrowed(
          T{}, factor * from[k / BYTE_BLOCK * 2 * BYTE_TILE + k % BYTE_BLOCK / 4 * 64 + k % 4]);
  });
}

}  // namespace

// Copies rows of a packed weight [num_outputs, num_inputs] to out [count, num_inputs]: tokens'
// numbers, where the output layer's weight is the embedding too. Returns 0, and does nothing, if one
// of `rows` is none of the weight's.
EXPORT int32_t core_rows_f32(const float* weight, int64_t num_outputs, int64_t num_inputs,
                             const int64_t* rows, int64_t count, float* out, int32_t num_threads) {
  return copy_rows(rows, count, num_outputs, num_threads, [&](int64_t i, int64_t panel, int64_t o) {
    for (int64_t k = 0; k < num_inputs; k++)
      out[i * num_inputs + k] = weight[(panel * num_inputs + k) * PANEL + o];
  });
}

EXPORT int32_t core_rows_bf16(const bf16* weight, int64_t num_outputs, int64_t num_inputs,
                              const int64_t* rows, int64_t count, bf16* out, int32_t num_threads) {
  const int64_t padded = padded_inputs(num_inputs);
  return copy_rows(rows, count, num_outputs, num_threads, [&](int64_t i, int64_t panel, int64_t o) {
    const bf16* from = weight + panel * PANEL * padded + o / 16 * TILE + o % 16 * 2;
    for (int64_t k = 0; k < num_inputs; k++)
      out[i * num_inputs + k] = from[k / K_BLOCK * 2 * TILE + k % K_BLOCK / 2 * 32 + k % 2];
  });
}

EXPORT int32_t core_rows_int8_f32(const int8_t* bytes, const float* factors, int64_t num_outputs,
                                  int64_t num_inputs, const int64_t* rows, int64_t count,
                                  float* out, int32_t num_threads) {
  return copy_rows_int8(bytes, factors, num_outputs, num_inputs, rows, count, out, num_threads);
}

EXPORT int32_t core_rows_int8_bf16(const int8_t* bytes, const float* factors, int64_t num_outputs,
                                   int64_t num_inputs, const int64_t* rows, int64_t count,
                                   bf16* out, int32_t num_threads) {
  return copy_rows_int8(bytes, factors, num_outputs, num_inputs, rows, count, out, num_threads);
}
