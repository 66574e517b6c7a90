// What is done number by number, and LayerNorm.
#include "core.h"

namespace avx2 {
template <typename T> void elements(Element, const Elements<T>&, int);
template <typename T> void layer_norm(const LayerNorm<T>&, int);
}  // namespace avx2
namespace avx512 {
template <typename T> void elements(Element, const Elements<T>&, int);
template <typename T> void layer_norm(const LayerNorm<T>&, int);
}  // namespace avx512

// `b` may be null where an element needs none, `bias` where there is none.
#define OPERATIONS(T, name)                                                                       \
  EXPORT void core_elements_##name(int32_t element, const T* a, int64_t a_stride, const T* b,     \
                                   int64_t b_stride, float factor, int64_t num_rows, int64_t size, \
                                   T* out, int64_t out_stride, int32_t level,                     \
                                   int32_t num_threads) {                                         \
    const Elements<T> task{a, a_stride, b, b_stride, factor, num_rows, size, out, out_stride};    \
    (level >= AVX512 ? avx512::elements<T> : avx2::elements<T>)(static_cast<Element>(element),    \
                                                                task, num_threads);               \
  }                                                                                               \
  BY_WORDS(core_elements_##name)                                                                  \
  EXPORT void core_layer_norm_##name(const T* x, int64_t x_stride, const T* weight,               \
                                     const T* bias, float eps, int64_t num_rows, int64_t size,    \
                                     T* out, int32_t level, int32_t num_threads) {                \
    const LayerNorm<T> task{x, x_stride, weight, bias, eps, num_rows, size, out};                 \
    (level >= AVX512 ? avx512::layer_norm<T> : avx2::layer_norm<T>)(task, num_threads);           \
  }                                                                                               \
  BY_WORDS(core_layer_norm_##name)
OPERATIONS(float, f32)
OPERATIONS(bf16, bf16)
