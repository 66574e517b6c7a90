// Drawing tokens from logits: what its files share.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "core.h"

struct Logits {
  const float* numbers;
  int64_t stride, num_rows, vocab_size;
};

// Rows that are drawn.
struct Chosen {
  const int64_t* rows;  // [count], of the logits
  int64_t count;
  const int64_t* largest;  // [count], token with the row's largest logit, which is finite
  const float* temperature;
  const float* min_p;  // or null
};

// A token with its weight, which is not negative: less where the weight is larger, and of equal ones
// where the token is the vocabulary's earlier one.
using Candidate = uint64_t;

INLINE Candidate candidate_of(float weight, int64_t token_id) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return static_cast<uint64_t>(~bits) << 32 | static_cast<uint64_t>(token_id);
}

INLINE float weight_of(Candidate candidate) {
  const uint32_t bits = ~static_cast<uint32_t>(candidate >> 32);
  float weight;
  std::memcpy(&weight, &bits, sizeof weight);
  return weight;
}
