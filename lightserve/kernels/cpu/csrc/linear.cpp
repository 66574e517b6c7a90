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

float plain(float, float value) { return value; }

bf16 plain(bf16, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
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
      out[i * num_inputs + k] = plain(
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
