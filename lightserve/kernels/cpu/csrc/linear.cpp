// Packing weights, and the choice of instructions.
#include "core.h"

namespace avx2 {
void linear_f32(const float*, int64_t, int64_t, const float*, int64_t, int64_t, const float*,
                float*, int);
void linear_bf16(const LinearBf16&, int);
}  // namespace avx2
namespace avx512 {
void linear_f32(const float*, int64_t, int64_t, const float*, int64_t, int64_t, const float*,
                float*, int);
void linear_bf16(const LinearBf16&, int);
}  // namespace avx512

// Returns how many numbers a packed weight has.
EXPORT int64_t core_packed_size(int64_t num_outputs, int64_t num_inputs, int32_t is_bf16) {
  return divide_up(num_outputs, PANEL) * PANEL *
         (is_bf16 ? padded_inputs(num_inputs) : num_inputs);
}

// Packs weight [num_outputs, num_inputs], contiguous.
EXPORT void core_pack_f32(const float* weight, int64_t num_outputs, int64_t num_inputs,
                          float* packed, int32_t num_threads) {
  parallel(num_threads, divide_up(num_outputs, PANEL), [&](Cursor& cursor) {
    for (int64_t panel; (panel = cursor.take()) < cursor.total;) {
      float* to = packed + panel * PANEL * num_inputs;
      const int64_t num_columns = smaller(PANEL, num_outputs - panel * PANEL);
      for (int64_t k = 0; k < num_inputs; k++)
        for (int64_t i = 0; i < PANEL; i++)
          *to++ = i < num_columns ? weight[(panel * PANEL + i) * num_inputs + k] : 0.0f;
    }
  });
}

EXPORT void core_pack_bf16(const bf16* weight, int64_t num_outputs, int64_t num_inputs,
                           bf16* packed, int32_t num_threads) {
  const int64_t padded = padded_inputs(num_inputs);
  parallel(num_threads, divide_up(num_outputs, PANEL), [&](Cursor& cursor) {
    for (int64_t panel; (panel = cursor.take()) < cursor.total;) {
      bf16* to = packed + panel * PANEL * padded;
      for (int64_t block = 0; block < padded; block += K_BLOCK)
        for (int64_t half = 0; half < 2; half++, to += TILE)
          for (int64_t i = 0; i < 16; i++) {
            const int64_t output = panel * PANEL + half * 16 + i;
            const bf16* from = weight + output * num_inputs + block;
            const int64_t count =
                output < num_outputs ? smaller(K_BLOCK, num_inputs - block) : 0;
            for (int64_t k = 0; k < K_BLOCK; k++)
              to[k / 2 * 32 + 2 * i + k % 2] = k < count ? from[k] : 0;
          }
    }
  });
}

// out [num_rows, num_outputs] = x [num_rows, num_inputs] @ weight.T + bias; bias may be null.
EXPORT void core_linear_f32(const float* x, int64_t x_stride, int64_t num_rows,
                            const float* weight, int64_t num_inputs, int64_t num_outputs,
                            const float* bias, float* out, int32_t level, int32_t num_threads) {
  (level >= AVX512 ? avx512::linear_f32 : avx2::linear_f32)(
      x, x_stride, num_rows, weight, num_inputs, num_outputs, bias, out, num_threads);
}

EXPORT void core_linear_bf16(const bf16* x, int64_t x_stride, int64_t num_rows, const bf16* weight,
                             int64_t num_inputs, int64_t num_outputs, const bf16* bias, bf16* out,
                             int32_t level, int32_t num_threads) {
  const LinearBf16 task{x,           x_stride, num_rows, weight,  num_inputs,
                        num_outputs, bias,     out,      nullptr, nullptr};
  auto run = level >= AMX           ? linear_bf16_amx
             : level >= AVX512_BF16 ? linear_bf16_avx512_bf16
             : level >= AVX512      ? avx512::linear_bf16
                                    : avx2::linear_bf16;
  run(task, num_threads);
}
