// Recurrent layers: a short convolution, the gated delta rule, and Mamba-2; see `Kernels`.
#include "core.h"

namespace avx2 {
template <typename T> void convolve(const Convolution<T>&, int);
template <typename Task> void walk_rows(const Task&, int);
}  // namespace avx2
namespace avx512 {
template <typename T> void convolve(const Convolution<T>&, int);
template <typename Task> void walk_rows(const Task&, int);
}  // namespace avx512

void States::copy(int64_t row, int64_t first_byte, int64_t num_bytes, char* buffer,
                  bool is_stored) const {
  if (is_stored && is_held != nullptr && is_held[row]) return;
  const int32_t* slots = table + row * table_stride + first;
  int64_t place = first_byte / piece_bytes, within = first_byte % piece_bytes;
  int64_t slot = place % num_slots, head = place / num_slots % num_heads;
  char* base = pieces + place / num_slots / num_heads * part_stride;
  while (num_bytes > 0) {
    const int64_t count = smaller(num_bytes, piece_bytes - within);
    char* piece = base + head * head_stride + slots[slot] * slot_stride + within;
    if (is_stored)
      std::memcpy(piece, buffer, count);
    else
      std::memcpy(buffer, piece, count);
    buffer += count;
    num_bytes -= count;
    within = 0;
    if (++slot < num_slots) continue;
    slot = 0;
    if (++head < num_heads) continue;
    head = 0;
    base += part_stride;
  }
}

bool States::are_good() const {
  for (int64_t i = 0; i < num_rows; i++)
    for (int64_t slot = 0; slot < num_slots; slot++) {
      const int32_t number = table[rows[4 * i] * table_stride + first + slot];
      if (number < 0 || number >= pool_slots) return false;
    }
  return true;
}

#define STATES                                                                                  \
  char *pieces, int64_t part_stride, int64_t head_stride, int64_t slot_stride,                  \
      int64_t num_heads_of_slot, int64_t piece_bytes, int64_t pool_slots, const int32_t *table,   \
      int64_t table_stride, int64_t first, int64_t num_slots, const int64_t *rows,              \
      int64_t num_rows, const uint8_t *is_held
#define STATES_OF                                                                               \
  {pieces,     part_stride, head_stride,  slot_stride, num_heads_of_slot, piece_bytes,            \
   pool_slots, table,       table_stride, first,       num_slots,       rows,                   \
   num_rows,   is_held}

// All return 0, and do nothing, if a slot of a state is none of the pool.
#define OPERATIONS(T, name)                                                                     \
  EXPORT int32_t core_convolve_##name(const T* x, int64_t x_stride, const T* weight,            \
                                      const T* bias, int64_t width, int64_t channels,           \
                                      int32_t is_plain, STATES, T* out, int32_t level,          \
                                      int32_t num_threads) {                                    \
    const Convolution<T> task{x,        x_stride,      weight,    bias, width,                  \
                              channels, is_plain != 0, STATES_OF, out};                         \
    if (!task.states.are_good()) return 0;                                                      \
    (level >= AVX512 ? avx512::convolve<T> : avx2::convolve<T>)(task, num_threads);             \
    return 1;                                                                                   \
  }                                                                                             \
  BY_WORDS(core_convolve_##name)                                                                \
  EXPORT int32_t core_delta_rule_##name(                                                        \
      const T* mixed, int64_t mixed_stride, const T* z, int64_t z_stride, const float* gates,   \
      int64_t gate_stride, const float* decay, const float* rate_bias, const T* norm, float eps, \
      float beta_scale, int64_t num_key_heads, int64_t num_heads, int64_t key_dim, int64_t value_dim, STATES,     \
      T* out, int32_t level, int32_t num_threads) {                                             \
    const DeltaRule<T> task{mixed,     mixed_stride, z,   z_stride,      gates,                 \
                            gate_stride, decay,      rate_bias, norm, eps, beta_scale, num_key_heads, \
                            num_heads, key_dim,      value_dim, STATES_OF, out};                \
    if (!task.states.are_good()) return 0;                                                      \
    (level >= AVX512 ? avx512::walk_rows<DeltaRule<T>> : avx2::walk_rows<DeltaRule<T>>)(        \
        task, num_threads);                                                                     \
    return 1;                                                                                   \
  }                                                                                             \
  BY_WORDS(core_delta_rule_##name)                                                              \
  EXPORT int32_t core_mamba_##name(                                                             \
      const T* mixed, int64_t mixed_stride, const T* z, int64_t z_stride, const float* rates,   \
      int64_t rate_stride, const float* decay, const float* rate_bias, const float* skip,       \
      int64_t num_groups, int64_t num_heads, int64_t state_size, int64_t head_dim, STATES,      \
      T* out, int32_t level, int32_t num_threads) {                                             \
    const Mamba<T> task{mixed, mixed_stride, z,         z_stride,   rates,    rate_stride,      \
                        decay, rate_bias,    skip,      num_groups, num_heads, state_size,      \
                        head_dim, STATES_OF, out};                                              \
    if (!task.states.are_good()) return 0;                                                      \
    (level >= AVX512 ? avx512::walk_rows<Mamba<T>> : avx2::walk_rows<Mamba<T>>)(task,           \
                                                                                num_threads);   \
    return 1;                                                                                   \
  }                                                                                             \
  BY_WORDS(core_mamba_##name)
OPERATIONS(float, f32)
OPERATIONS(bf16, bf16)
