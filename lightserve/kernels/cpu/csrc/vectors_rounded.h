// Products of weights of 8 and 4 bits for any width of vectors; included after vectors.h.

namespace SPACE {

// Integers of four inputs stand in 32 bits of each output.
template <int R, typename T>
TARGET static inline void panel_int8(const Linear<T>& task, const WideRows& rows, int64_t row,
                                     int64_t number) {
  const float* x = rows.x + row * rows.padded;
  const int8_t* panel = task.bytes + number * rows.padded * PANEL;
  const float* factors = task.factors + number * PANEL;
  constexpr int CHAINS = R <= 2 ? 2 : 1;  // an addition waits for the one before it in its chain
  F sums[CHAINS][R][VECTORS];
  for (auto& chain : sums)
    for (auto& row : chain)
      for (F& sum : row) sum = F{};
  for (int64_t block = 0; block < rows.padded; block += BYTE_BLOCK, panel += 2 * BYTE_TILE)
    for (int j = 0; j < 16; j++) {
      __builtin_prefetch(panel + 4 * BYTE_TILE + 64 * j);
      __builtin_prefetch(panel + 5 * BYTE_TILE + 64 * j);
      const float* own = x + block + 4 * j;
      for (int v = 0; v < VECTORS; v++) {
        const int64_t half = v / (VECTORS / 2), part = v % (VECTORS / 2);
        const I fours = read<I>(panel + half * BYTE_TILE + 64 * j + 4 * W * part);
        const F weights[4] = {
            __builtin_convertvector((fours << 24) >> 24, F),
            __builtin_convertvector((fours << 16) >> 24, F),
            __builtin_convertvector((fours << 8) >> 24, F),
            __builtin_convertvector(fours >> 24, F),
        };
        for (int r = 0; r < R; r++)
          for (int i = 0; i < 4; i++)
            sums[i % CHAINS][r][v] += weights[i] * (F{} + own[r * rows.padded + i]);
      }
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) {
      for (int c = 1; c < CHAINS; c++) sums[0][r][v] += sums[c][r][v];
      sums[0][r][v] *= load(factors + v * W);
    }
  store_sums(task, row, number, sums[0]);
}

template <int R, typename T>
TARGET static void rows_int8(const Linear<T>& task, const WideRows& rows, int64_t row,
                             int64_t panel) {
  if constexpr (R > 0) {
    if (smaller(ROWS_BF16, task.num_rows - row) == R)
      panel_int8<R>(task, rows, row, panel);
    else
      rows_int8<R - 1>(task, rows, row, panel);
  }
}

template <typename T>
void linear_int8(const Linear<T>& task, int num_threads) {
  const int64_t padded = padded_bytes(task.num_inputs);
  float* wide = static_cast<float*>(scratch(3, task.num_rows * padded * sizeof(float)));
  widen_rows(task, padded, wide);
  const WideRows rows{wide, nullptr, padded, 0};
  over_panels(task, padded * PANEL, ROWS_BF16, num_threads,
              [&](int64_t row, int64_t panel) { rows_int8<ROWS_BF16>(task, rows, row, panel); });
}

// ---- groups ----

typedef uint8_t B __attribute__((vector_size(WIDTH)));

// Finite numbers of float16, widened.
TARGET INLINE F load_half(const uint16_t* from) {
  const U bits = __builtin_convertvector(read<H>(from), U);
  const F size = (F)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (F)((U)size | ((bits & 0x8000u) << 16));
}

template <int R, int BITS, typename T>
TARGET static inline void panel_groups(const Linear<T>& task, const WideRows& rows, int64_t row,
                                       int64_t panel) {
  constexpr int LINES = BITS == 4 ? 4 : 8, LINE_INPUTS = K_BLOCK / LINES, HALF = 64 * LINES;
  const int64_t num_blocks = rows.padded / K_BLOCK, blocks = task.groups.size / K_BLOCK;
  const uint8_t* numbers = task.groups.numbers + panel * num_blocks * 2 * HALF;
  const float* x = rows.x + row * rows.padded;
  F sums[R][VECTORS];
  for (auto& line : sums)
    for (F& sum : line) sum = F{};
  for (int64_t group = 0, block = 0; group < rows.num_groups; group++) {
    F own[R][VECTORS];
    for (auto& line : own)
      for (F& sum : line) sum = F{};
    for (const int64_t end = smaller(block + blocks, num_blocks); block < end; block++)
      for (int64_t half = 0; half < 2; half++)
        for (int j = 0; j < LINES; j++, numbers += 64) {
          __builtin_prefetch(numbers + 1024);
          const float* inputs = x + block * K_BLOCK + LINE_INPUTS * j;
          for (int v = 0; v < VECTORS / 2; v++) {
            const U bytes = read<U>(numbers + 4 * W * v);
            for (int i = 0; i < LINE_INPUTS; i++) {
              const U number = (bytes >> (8 * (i % 4) + 4 * (i / 4))) & ((1u << BITS) - 1);
              const F weight = __builtin_convertvector((I)number, F);
              for (int r = 0; r < R; r++)
                own[r][half * (VECTORS / 2) + v] += weight * (F{} + inputs[r * rows.padded + i]);
            }
          }
        }
    for (int v = 0; v < VECTORS; v++) {
      const int64_t place = (panel * rows.num_groups + group) * PANEL + v * W;
      const F factors = load_half(task.groups.factors + place);
      const I zeros = __builtin_convertvector(read<B>(task.groups.zeros + place), I);
      for (int r = 0; r < R; r++) {
        const float sum = rows.sums[(row + r) * rows.num_groups + group];
        sums[r][v] += factors * (own[r][v] - __builtin_convertvector(zeros, F) * (F{} + sum));
      }
    }
  }
  store_sums(task, row, panel, sums);
}

template <int R, int BITS, typename T>
TARGET static void rows_groups(const Linear<T>& task, const WideRows& rows, int64_t row,
                               int64_t panel) {
  if constexpr (R > 0) {
    if (smaller(ROWS_BF16, task.num_rows - row) == R)
      panel_groups<R, BITS>(task, rows, row, panel);
    else
      rows_groups<R - 1, BITS>(task, rows, row, panel);
  }
}

template <typename T>
void linear_groups(const Linear<T>& task, int num_threads) {
  const int64_t padded = padded_inputs(task.num_inputs);
  const int64_t num_groups = divide_up(task.num_inputs, task.groups.size);
  float* wide = static_cast<float*>(
      scratch(3, task.num_rows * (padded + num_groups) * sizeof(float)));
  float* sums = wide + task.num_rows * padded;
  widen_rows(task, padded, wide);
  for (int64_t row = 0; row < task.num_rows; row++)
    for (int64_t group = 0; group < num_groups; group++) {
      float sum = 0.0f;
      for (int64_t k = group * task.groups.size;
           k < smaller(task.num_inputs, (group + 1) * task.groups.size); k++)
        sum += wide[row * padded + k];
      sums[row * num_groups + group] = sum;
    }
  const WideRows rows{wide, sums, padded, num_groups};
  const auto multiply =
      task.groups.bits == 4 ? rows_groups<ROWS_BF16, 4, T> : rows_groups<ROWS_BF16, 8, T>;
  over_panels(task, padded / K_BLOCK * block_bytes_of(task.groups.bits), ROWS_BF16, num_threads,
              [&](int64_t row, int64_t panel) { multiply(task, rows, row, panel); });
}

template void linear_int8<float>(const Linear<float>&, int);
template void linear_int8<bf16>(const Linear<bf16>&, int);
template void linear_groups<float>(const Linear<float>&, int);
template void linear_groups<bf16>(const Linear<bf16>&, int);

}  // namespace SPACE
