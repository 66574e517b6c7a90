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

struct Candidate {
  float weight;
  int64_t token_id;
  bool operator<(const Candidate& other) const {
    return weight != other.weight ? weight > other.weight : token_id < other.token_id;
  }
};
