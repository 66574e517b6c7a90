// Drawing tokens: the choice of instructions.
#include "sampling.h"

#define DECLARE(space)                                                                         \
  namespace space {                                                                            \
  void scan_logits(const Logits&, int64_t*, uint8_t*, int);                                    \
  void draw_tokens(const Logits&, const Chosen&, const double*, int64_t*, int);                \
  void top_tokens(const Logits&, const Chosen&, int64_t, float*, int64_t*, double*, int);      \
  }
DECLARE(avx2)
DECLARE(avx512)
#undef DECLARE

// Finds each row's first largest logit, and whether all of the row are finite.
EXPORT void core_scan_logits(const float* logits, int64_t stride, int64_t num_rows,
                             int64_t vocab_size, int64_t* largest, uint8_t* is_finite,
                             int32_t level, int32_t num_threads) {
  (level >= AVX512 ? avx512::scan_logits : avx2::scan_logits)(
      {logits, stride, num_rows, vocab_size}, largest, is_finite, num_threads);
}

// Draws one token for each of `count` rows, from the whole vocabulary, at a number below 1.
EXPORT void core_draw_tokens(const float* logits, int64_t stride, int64_t vocab_size,
                             const int64_t* rows, int64_t count, const int64_t* largest,
                             const float* temperature, const float* min_p, const double* numbers,
                             int64_t* token_ids, int32_t level, int32_t num_threads) {
  (level >= AVX512 ? avx512::draw_tokens : avx2::draw_tokens)(
      {logits, stride, 0, vocab_size}, {rows, count, largest, temperature, min_p}, numbers,
      token_ids, num_threads);
}

// Gives the `num_top` <= vocab_size most probable tokens of each of `count` rows, their weights,
// and the sum of all of the row's.
EXPORT void core_top_tokens(const float* logits, int64_t stride, int64_t vocab_size,
                            const int64_t* rows, int64_t count, const int64_t* largest,
                            const float* temperature, const float* min_p, int64_t num_top,
                            float* values, int64_t* token_ids, double* all, int32_t level,
                            int32_t num_threads) {
  (level >= AVX512 ? avx512::top_tokens : avx2::top_tokens)(
      {logits, stride, 0, vocab_size}, {rows, count, largest, temperature, min_p}, num_top, values,
      token_ids, all, num_threads);
}
