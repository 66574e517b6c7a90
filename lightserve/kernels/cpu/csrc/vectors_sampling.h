// What drawing tokens reads whole vocabularies for; included after vectors.h, for each width.
//
// A token's weight is e to the power of (its logit - the row's largest) / temperature: the largest
// has 1. Weights below `least` are none, nor are those of logits that are minus infinity.

namespace SPACE {

constexpr int64_t TOKENS = 256;  // of a block
constexpr float NO_WEIGHT = -87.0f;  // powers of e below it are as good as zero

// Returns the first of a row's largest logits; `is_finite` says whether all are.
TARGET static int64_t scan_row(const float* row, int64_t vocab_size, bool* is_finite) {
  float largest = -__builtin_inff();
  int64_t block_of_largest = 0;
  U most_bits = {};
  for (int64_t block = 0; block < vocab_size; block += TOKENS) {
    F best = F{} - __builtin_inff();
    FOR_VECTORS(offset, count, smaller(TOKENS, vocab_size - block)) {
      F value = load_some(row + block + offset, count);
      const U bits = (U)value & 0x7fffffffu;
      most_bits = bits > most_bits ? bits : most_bits;
      if (count < W)  // the zeros behind the end are no logits
        for (int64_t i = count; i < W; i++) value[i] = -__builtin_inff();
      best = value > best ? value : best;
    }
    float most = best[0];
    for (int i = 1; i < W; i++) most = best[i] > most ? best[i] : most;
    if (most > largest) {
      largest = most;
      block_of_largest = block;
    }
  }
  *is_finite = true;
  for (int i = 0; i < W; i++) *is_finite = *is_finite && most_bits[i] < 0x7f800000u;
  for (int64_t i = block_of_largest; i < smaller(vocab_size, block_of_largest + TOKENS); i++)
    if (row[i] == largest) return i;
  return 0;
}

void scan_logits(const Logits& logits, int64_t* largest, uint8_t* is_finite, int num_threads) {
  parallel(num_threads, logits.num_rows, [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;) {
      bool is_good;
      largest[i] = scan_row(logits.numbers + i * logits.stride, logits.vocab_size, &is_good);
      is_finite[i] = is_good;
    }
  });
}

struct Weights {
  const float* row;
  float largest, inverse, least;  // inverse: of the temperature
};

TARGET INLINE F weight_of(const Weights& weights, F logit) {
  const F power = (logit - weights.largest) * weights.inverse;
  const F weight = exp_of(power);
  return (power < NO_WEIGHT) | (weight < weights.least) ? F{} : weight;
}

// Writes a block's weights, and zeros beyond the end.
TARGET static void weigh_block(const Weights& weights, int64_t block, int64_t vocab_size,
                               float* line) {
  FOR_VECTORS(offset, count, smaller(TOKENS, vocab_size - block)) {
    F weight = weight_of(weights, load_some(weights.row + block + offset, count));
    for (int64_t i = count; i < W; i++) weight[i] = 0.0f;
    store(line + offset, weight);
  }
  const int64_t end = divide_up(smaller(TOKENS, vocab_size - block), W) * W;
  for (int64_t i = end; i < TOKENS; i++) line[i] = 0.0f;
}

// Adds up the weights of each block, and returns all of them together.
TARGET static double weigh_row(const Weights& weights, int64_t vocab_size, double* totals,
                               float* largest) {
  double all = 0.0;
  float line[TOKENS];
  for (int64_t block = 0; block * TOKENS < vocab_size; block++) {
    weigh_block(weights, block * TOKENS, vocab_size, line);
    F sum = {}, best = {};
    for (int64_t i = 0; i < TOKENS; i += W) {
      const F weight = load(line + i);
      sum += weight;
      best = weight > best ? weight : best;
    }
    totals[block] = total_of(sum);
    all += totals[block];
    if (largest != nullptr) {
      largest[block] = best[0];
      for (int i = 1; i < W; i++)
        largest[block] = best[i] > largest[block] ? best[i] : largest[block];
    }
  }
  return all;
}

// Returns the token at which the sum of weights, in the order of the vocabulary, passes `target`.
TARGET static int64_t token_at(const Weights& weights, int64_t vocab_size, const double* totals,
                               double target) {
  int64_t chosen = 0;
  double before = 0.0, sum = 0.0;
  for (int64_t block = 0; block * TOKENS < vocab_size; block++) {
    if (totals[block] > 0.0) {
      chosen = block;
      before = sum;
    }
    sum += totals[block];
    if (sum > target) break;
  }
  float line[TOKENS];
  weigh_block(weights, chosen * TOKENS, vocab_size, line);
  int64_t token = chosen * TOKENS;
  for (int64_t i = 0; i < TOKENS; i++) {
    if (line[i] == 0.0f) continue;
    token = chosen * TOKENS + i;
    before += line[i];
    if (before > target) break;
  }
  return token;
}

TARGET static Weights weights_of(const Logits& logits, const Chosen& chosen, int64_t i) {
  const float* row = logits.numbers + chosen.rows[i] * logits.stride;
  return {row, row[chosen.largest[i]], 1.0f / chosen.temperature[i],
          chosen.min_p == nullptr ? 0.0f : chosen.min_p[i]};
}

void draw_tokens(const Logits& logits, const Chosen& chosen, const double* numbers,
                 int64_t* token_ids, int num_threads) {
  const int64_t num_blocks = divide_up(logits.vocab_size, TOKENS);
  parallel(num_threads, chosen.count, [&](Cursor& cursor) {
    double* totals = static_cast<double*>(scratch(0, num_blocks * sizeof(double)));
    for (int64_t i; (i = cursor.take()) < cursor.total;) {
      const Weights weights = weights_of(logits, chosen, i);
      const double all = weigh_row(weights, logits.vocab_size, totals, nullptr);
      token_ids[i] = token_at(weights, logits.vocab_size, totals, numbers[i] * all);
    }
  });
}

// Writes the `count` largest weights of a row, the largest first, equal ones in the vocabulary's
// order. As many blocks as there are to be tokens hold one each of what the least of them has.
TARGET static void largest_weights(const Weights& weights, int64_t vocab_size, int64_t count,
                                   const float* largest, std::vector<Candidate>& found,
                                   float* values, int64_t* token_ids) {
  const int64_t num_blocks = divide_up(vocab_size, TOKENS);
  float bound = 0.0f;
  if (num_blocks > count) {
    std::vector<float> sorted(largest, largest + num_blocks);
    std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(),
                     std::greater<float>());
    bound = sorted[count - 1];
  }
  found.clear();
  float line[TOKENS];
  for (int64_t block = 0; block < num_blocks; block++) {
    if (largest[block] < bound) continue;
    weigh_block(weights, block * TOKENS, vocab_size, line);
    for (int64_t i = 0; i < smaller(TOKENS, vocab_size - block * TOKENS); i++)
      if (line[i] >= bound) found.push_back(candidate_of(line[i], block * TOKENS + i));
  }
  std::nth_element(found.begin(), found.begin() + (count - 1), found.end());
  std::sort(found.begin(), found.begin() + count);
  for (int64_t i = 0; i < count; i++) {
    values[i] = ::weight_of(found[i]);
    token_ids[i] = static_cast<uint32_t>(found[i]);
  }
}

void top_tokens(const Logits& logits, const Chosen& chosen, int64_t count, float* values,
                int64_t* token_ids, double* all, int num_threads) {
  const int64_t num_blocks = divide_up(logits.vocab_size, TOKENS);
  parallel(num_threads, chosen.count, [&](Cursor& cursor) {
    double* totals = static_cast<double*>(
        scratch(0, num_blocks * (sizeof(double) + sizeof(float))));
    float* largest = reinterpret_cast<float*>(totals + num_blocks);
    std::vector<Candidate> found;
    for (int64_t i; (i = cursor.take()) < cursor.total;) {
      const Weights weights = weights_of(logits, chosen, i);
      all[i] = weigh_row(weights, logits.vocab_size, totals, largest);
      largest_weights(weights, logits.vocab_size, count, largest, found, values + i * count,
                      token_ids + i * count);
    }
  });
}

}  // namespace SPACE
