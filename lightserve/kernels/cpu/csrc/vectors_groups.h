// Products of weights in groups for any width of vectors; included after vectors.h.

namespace SPACE {

typedef uint8_t B __attribute__((vector_size(WIDTH)));

// Finite numbers of float16, widened.
TARGET INLINE F load_half(const uint16_t* from) {
  const U bits = __builtin_convertvector(read<H>(from), U);
  const F size = (F)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (F)((U)size | ((bits & 0x8000u) << 16));
}

// The rows of a product that are multiplied at once, in float32, and their groups' sums.
struct WideRows {
  const float* x;  // [rows, padded]
  const float* sums;  // [rows, groups]
  int64_t padded, num_groups;
};

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
  const int64_t column = panel * PANEL, num_columns = smaller(PANEL, task.num_outputs - column);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS && v * W < num_columns; v++) {
      const int64_t count = smaller(W, num_columns - v * W);
      F sum = sums[r][v];
      if (task.bias != nullptr) sum += load_some(task.bias + column + v * W, count);
      store_some(task.out + (row + r) * task.num_outputs + column + v * W, sum, count);
    }
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
  const int64_t num_panels = divide_up(task.num_outputs, PANEL);
  const int64_t size = panels_of_chunk(
      num_panels, padded / K_BLOCK * block_bytes_of(task.groups.bits), num_threads);
  const auto multiply =
      task.groups.bits == 4 ? rows_groups<ROWS_BF16, 4, T> : rows_groups<ROWS_BF16, 8, T>;
  parallel(num_threads, divide_up(num_panels, size), [&](Cursor& cursor) {
    for (int64_t chunk; (chunk = cursor.take()) < cursor.total;)
      for (int64_t panel = chunk * size; panel < smaller(num_panels, (chunk + 1) * size); panel++)
        for (int64_t row = 0; row < task.num_rows; row += ROWS_BF16)
          multiply(task, rows, row, panel);
  });
}

template void linear_groups<float>(const Linear<float>&, int);
template void linear_groups<bf16>(const Linear<bf16>&, int);

}  // namespace SPACE
