// Products of bfloat16 weights by AMX tiles. Weights in groups are widened panel by panel on their way
// to the tiles; few rows go by AVX512-bf16, see linear_bf16.cpp.
#include <immintrin.h>

#include "core.h"
#include "tiles.h"

namespace {

constexpr int64_t PAIR_BYTES = 2 * TILE * 2;
constexpr int64_t A_BYTES = 1 << 20;
// Activations that a thread multiplies with panel after panel: they stay in half of a cache of 2 MB.
constexpr int64_t MOST_INPUTS = 1536;
// With more, and many rows, inputs are cut, and sums are kept in between. (4,864 inputs, TFLOP/s of
// one busy core: at 512 rows 0.78, with cuts of 2,432 inputs 0.65; at 128 rows 0.80, without 0.63.)
constexpr int64_t CUT_INPUTS = 640, CUT_ROWS = 256, CUT_PANELS = 14, CUT_FROM_ROWS = 65;
// Up to so many rows the vector instructions read weights at the memory's speed.
constexpr int64_t VECTOR_ROWS = 2;

// Copies rows of x into pairs of tiles, [pairs][blocks of inputs][2][16][32], zeros beyond the end.
TARGET_AMX void pack_rows(const LinearBf16& task, int64_t pair, int64_t first_block,
                          int64_t end_block, bf16* packed) {
  for (int64_t i = 0; i < 32; i++) {
    const int64_t row = pair * 32 + i;
    bf16* out = packed + (i / 16) * TILE + (i % 16) * 32;
    for (int64_t block = first_block; block < end_block; block++) {
      const int64_t left = task.num_inputs - block * K_BLOCK;
      const __mmask32 mask = row >= task.num_rows ? 0 : left >= 32 ? ~0u : (1u << left) - 1;
      const bf16* x = task.x + row * task.x_stride + block * K_BLOCK;
      _mm512_storeu_si512(out + block * 2 * TILE, _mm512_maskz_loadu_epi16(mask, x));
    }
  }
}

struct Prefetch {
  const char* next;
  int64_t lines;  // in each step
};

// Sums that wait to become outputs: their rows are stored between the multiplications of the next
// block, while the tiles' unit is busy with those.
struct Waiting {
  const LinearBf16& task;
  const float* sums;  // [2 of 16 rows][2 halves][16][16]
  int64_t panel, first_row, num_rows, next;
};

TARGET_AMX INLINE void store_next(Waiting& waiting) {
  const float* line = waiting.sums + waiting.next / 16 * 512 + waiting.next % 16 * 16;
  store_32(waiting.task, waiting.first_row + waiting.next, waiting.panel, _mm512_load_ps(line),
           _mm512_load_ps(line + 256));
  waiting.next++;
}

TARGET_AMX INLINE void store_rest(Waiting& waiting) {
  while (waiting.next < waiting.num_rows) store_next(waiting);
}

// Multiplies 16 or 32 rows by a panel over `num_blocks` blocks of inputs; sums as those of `Waiting`.
template <bool TWO>
TARGET_AMX static inline void tile_panel(const bf16* a, const bf16* b, int64_t num_blocks,
                                         float* sums, bool continues, Prefetch& prefetch,
                                         Waiting& waiting) {
  if (continues) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    if (TWO) {
      _tile_loadd(2, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t block = 0; block < num_blocks; block++) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + TILE, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
      _tile_loadd(5, a + TILE, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (int64_t line = 0; line < prefetch.lines; line++, prefetch.next += 64)
      _mm_prefetch(prefetch.next, _MM_HINT_T1);
    if (waiting.next < waiting.num_rows) store_next(waiting);
    if (waiting.next < waiting.num_rows) store_next(waiting);
    a += 2 * TILE;
    b += 2 * TILE;
  }
  store_rest(waiting);
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (TWO) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

// How a product is cut.
struct Cut {
  int64_t num_blocks;       // of inputs, all
  int64_t blocks;           // of inputs at once
  int64_t num_pairs;        // of 16 rows, all
  int64_t pairs;            // of 16 rows at once
  int64_t num_panels;       // all
  int64_t panels;           // of a chunk
  int64_t num_row_parts() const { return divide_up(num_pairs, pairs); }
  int64_t num_panel_parts() const { return divide_up(num_panels, panels); }
};

Cut cut_of(const LinearBf16& task, int num_threads) {
  Cut cut;
  const int64_t padded = padded_inputs(task.num_inputs);
  cut.num_blocks = cut.blocks = padded / K_BLOCK;
  cut.num_pairs = cut.pairs = divide_up(task.num_rows, 32);
  cut.num_panels = task.num_panels();
  cut.panels = panels_of_chunk(cut.num_panels, padded * PANEL * 2, num_threads);
  if (padded > MOST_INPUTS && task.num_rows >= CUT_FROM_ROWS) {
    cut.blocks = divide_up(cut.num_blocks, divide_up(padded, CUT_INPUTS));
    cut.pairs = CUT_ROWS / 32;
    cut.panels = larger(1, smaller(CUT_PANELS, cut.num_panels / (2 * num_threads)));
  } else {
    cut.pairs = larger(2, A_BYTES / (padded * 64));
  }
  cut.pairs = smaller(cut.pairs, cut.num_pairs);
  cut.pairs = divide_up(cut.num_pairs, divide_up(cut.num_pairs, cut.pairs));  // evenly
  return cut;
}

const char* place_of(const LinearBf16& task, int64_t row, int64_t panel) {
  const int64_t place = row * task.num_columns() + panel * task.panel_columns();
  return static_cast<const char*>(task.out) + place * (task.form == WIDE ? 4 : 2);
}

// Multiplies one part of the rows by one chunk of panels.
TARGET_AMX void tile_chunk(const LinearBf16& task, const Cut& cut, const bf16* packed,
                           int64_t chunk, int64_t next_chunk) {
  const int64_t first_pair = chunk / cut.num_panel_parts() * cut.pairs;
  const int64_t end_pair = smaller(first_pair + cut.pairs, cut.num_pairs);
  const int64_t first = chunk % cut.num_panel_parts() * cut.panels;
  const int64_t end = smaller(first + cut.panels, cut.num_panels);
  const int64_t next_first = next_chunk % cut.num_panel_parts() * cut.panels;
  const int64_t num_pairs = end_pair - first_pair, panel_size = cut.num_blocks * 2 * TILE;
  const bool is_cut = cut.blocks < cut.num_blocks;
  float* sums = static_cast<float*>(
      scratch(1, 4096 * (is_cut ? num_pairs * (end - first) : 2)));
  Waiting waiting{task, nullptr, 0, 0, 0, 0};
  const bool is_grouped = task.groups.numbers != nullptr;
  const char* weight = is_grouped ? reinterpret_cast<const char*>(task.groups.numbers)
                                  : reinterpret_cast<const char*>(task.weight);
  bf16* widened = static_cast<bf16*>(is_grouped ? scratch(4, cut.blocks * PAIR_BYTES) : nullptr);
  const int64_t bytes_of_block =
      is_grouped ? block_bytes_of(task.groups.bits) : 2 * TILE * sizeof(bf16);
  int64_t turn = 0;
  for (int64_t block = 0; block < cut.num_blocks; block += cut.blocks) {
    const int64_t num_blocks = smaller(cut.blocks, cut.num_blocks - block);
    const bool is_last = block + num_blocks == cut.num_blocks;
    for (int64_t panel = first; panel < end; panel++) {
      const int64_t ahead = panel + 1 < end ? panel + 1 : is_last ? next_first : first;
      const int64_t ahead_block = panel + 1 < end ? block : is_last ? 0 : block + num_blocks;
      Prefetch prefetch{weight + (ahead * cut.num_blocks + ahead_block) * bytes_of_block,
                        divide_up(bytes_of_block / 64, num_pairs)};
      const bf16* b = widened;
      if (is_grouped)
        widen_groups(task, panel, block, num_blocks, widened);
      else
        b = task.weight + panel * panel_size + block * 2 * TILE;
      for (int64_t pair = 0; pair < num_pairs; pair++, turn++) {
        const int64_t row = (first_pair + pair) * 32, num_rows = smaller(32, task.num_rows - row);
        const bf16* a = packed + ((first_pair + pair) * cut.num_blocks + block) * 2 * TILE;
        float* own = sums + (is_cut ? (panel - first) * num_pairs + pair : turn % 2) * 1024;
        for (int64_t i = 0; is_last && i < num_rows; i++)
          __builtin_prefetch(place_of(task, row + i, panel), 1);
        if (num_rows > 16)
          tile_panel<true>(a, b, num_blocks, own, block > 0, prefetch, waiting);
        else
          tile_panel<false>(a, b, num_blocks, own, block > 0, prefetch, waiting);
        if (!is_last) continue;
        waiting.sums = own;
        waiting.panel = panel;
        waiting.first_row = row;
        waiting.num_rows = num_rows;
        waiting.next = 0;
      }
    }
  }
  store_rest(waiting);
}

}  // namespace

void linear_bf16_amx(const LinearBf16& task, int num_threads) {
  if (task.num_rows <= VECTOR_ROWS) return linear_bf16_avx512_bf16(task, num_threads);
  const Cut cut = cut_of(task, num_threads);
  const int64_t a_bytes = cut.num_pairs * cut.num_blocks * PAIR_BYTES;
  bf16* packed = static_cast<bf16*>(scratch(2, a_bytes));
  // Small activations are packed sooner than another thread would notice.
  const int64_t span = larger(1, divide_up(32, cut.num_pairs));
  const int64_t spans = divide_up(cut.num_blocks, span);
  parallel(a_bytes < (128 << 10) ? 1 : num_threads, cut.num_pairs * spans, [&](Cursor& cursor) {
    for (int64_t i; (i = cursor.take()) < cursor.total;) {
      const int64_t pair = i / spans, block = i % spans * span;
      pack_rows(task, pair, block, smaller(block + span, cut.num_blocks),
                packed + pair * cut.num_blocks * 2 * TILE);
    }
  });
  const int64_t num_chunks = cut.num_row_parts() * cut.num_panel_parts();
  parallel(num_threads, num_chunks, [&](Cursor& cursor) TARGET_AMX {
    configure_tiles();
    for (int64_t chunk = cursor.take(); chunk < cursor.total;) {
      const int64_t next = cursor.take();  // known early, so that its weights are on their way
      tile_chunk(task, cut, packed, chunk, next < cursor.total ? next : chunk);
      chunk = next;
    }
    _tile_release();
  });
}
