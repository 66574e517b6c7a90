// The CPU engine's native core: what its files share.
//
// Everything is called by Python through a plain C ABI (see lightserve/kernels/cpu/core.py), with
// buffers as addresses. There is no state but the pool of threads; which instructions are used is
// an argument of each call, so that tests can do with fewer than the machine has.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define TARGET_BF16                                                                               \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")))
#define TARGET_VNNI                                                                               \
  __attribute__((                                                                                 \
      target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c")))
#define TARGET_AMX                                                                                \
  __attribute__((                                                                                 \
      target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-bf16,"        \
             "amx-int8,avx2,fma,f16c")))

using bf16 = uint16_t;

// Sets of instructions, each containing those before it.
enum Level : int32_t { NONE = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, AMX = 4 };

// Hands out the numbers 0 … total-1, each once, to the threads that ask.
struct Cursor {
  std::atomic<int64_t> next{0};
  int64_t total = 0;
  int64_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
};

// Runs `body` on up to `num_threads` threads at once, this one among them, and returns when all
// that began have ended. A thread may come too late to begin; so the work is what `cursor` hands
// out, not what the threads are.
void run_threads(int num_threads, int64_t num_chunks, void (*body)(void*, Cursor&), void* context);

template <typename Body>
void parallel(int num_threads, int64_t num_chunks, Body&& body) {
  using Plain = typename std::remove_reference<Body>::type;
  run_threads(
      num_threads, num_chunks,
      [](void* context, Cursor& cursor) { (*static_cast<Plain*>(context))(cursor); }, &body);
}

// ---- calls that are noted and run later ----
//
// A function's arguments as words of 64 bits each: what Python gives ctypes, noted (see program.cpp).
template <typename A>
INLINE A from_word(int64_t word) {
  if constexpr (std::is_pointer<A>::value) {
    return reinterpret_cast<A>(word);
  } else if constexpr (std::is_same<A, float>::value) {
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  } else {
    return static_cast<A>(word);
  }
}

template <typename Result, typename... A, size_t... I>
int64_t call_with(Result (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
  if constexpr (std::is_void<Result>::value) {
    function(from_word<A>(words[I])...);
    return 1;
  } else {
    return function(from_word<A>(words[I])...);
  }
}

template <typename Result, typename... A>
int64_t call_with(Result (*function)(A...), const int64_t* words) {
  return call_with(function, words, std::index_sequence_for<A...>{});
}

// Exports what calls `function` with words; 0 means that it refused its arguments.
#define BY_WORDS(function)                                     \
  EXPORT int64_t function##_by_words(const int64_t* words) {   \
    return call_with(function, words);                         \
  }

// Memory of this thread, aligned to a cache line, kept for its next call; `slot` says which.
void* scratch(int slot, size_t num_bytes);

INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Weights are kept in panels of PANEL outputs, with zeros where the last panel has fewer.
//
//   float32   [panels][inputs][32]
//   bfloat16  [panels][inputs / 32][2 halves][16 pairs of inputs][16 outputs][2 inputs of a pair]
//
// A half of 1 KB is a tile as AMX multiplies it, and a line of it what one AVX512-bf16 instruction
// takes. Inputs are padded with zeros to a multiple of 32 in bfloat16.
constexpr int64_t PANEL = 32;
constexpr int64_t K_BLOCK = 32;
constexpr int64_t TILE = 16 * 32;  // numbers of a half

INLINE int64_t padded_inputs(int64_t num_inputs) { return divide_up(num_inputs, K_BLOCK) * K_BLOCK; }

// Weights of 8 bits are integers in the same panels, with a factor for each output beside them:
//
//   [panels][inputs / 64][2 halves][16 fours of inputs][16 outputs][4 inputs of a four]
//
// Inputs are padded with zeros to a multiple of 64, factors to a multiple of PANEL.
constexpr int64_t BYTE_BLOCK = 64;
constexpr int64_t BYTE_TILE = 16 * 64;  // numbers of a half

INLINE int64_t padded_bytes(int64_t num_inputs) {
  return divide_up(num_inputs, BYTE_BLOCK) * BYTE_BLOCK;
}

// Weights in groups of inputs are integers without a sign, (integer - zero) * factor each, with a
// factor of float16 and a zero for each group of an output's inputs:
//
//   numbers         [panels][inputs / 32][2 halves][lines][16 outputs][4 bytes]
//   factors, zeros  [panels][groups][32 outputs]
//
// A line of 8-bit integers has 4 inputs. One of 4-bit integers has 8: the first four in the low
// halves of its bytes, the others in the high ones.
struct Groups {
  const uint8_t* numbers;  // or null
  const uint16_t* factors;
  const uint8_t* zeros;
  int64_t bits;  // 4 or 8
  int64_t size;  // inputs of a group, a multiple of K_BLOCK and at most 128
};

INLINE int64_t block_bytes_of(int64_t bits) { return K_BLOCK * PANEL * bits / 8; }

// Gates and ups that belong together share a panel, PANEL / 2 of each: the weight's outputs are all
// gates and then all ups.
INLINE int64_t panels_of(int64_t num_outputs, bool is_gated) {
  return is_gated ? divide_up(num_outputs / 2, PANEL / 2) : divide_up(num_outputs, PANEL);
}

// Returns which of a weight's outputs is number `i` of a panel; `num_outputs` or more: none.
INLINE int64_t output_at(int64_t panel, int64_t i, int64_t num_outputs, bool is_gated) {
  if (!is_gated) return panel * PANEL + i;
  const int64_t place = panel * (PANEL / 2) + i % (PANEL / 2), half = num_outputs / 2;
  return place >= half ? num_outputs : i < PANEL / 2 ? place : half + place;
}

// What becomes of a product's sums.
enum Form : int32_t {
  PLAIN = 0,
  GATED = 1,  // silu(gate) * up
  WIDE = 2,   // float32, whatever the type of the rows
};

template <typename T>
struct Linear {
  const T* x;
  int64_t x_stride;
  int64_t num_rows;
  int64_t num_inputs;
  int64_t num_outputs;  // of the weight
  const T* bias;        // of the weight's outputs, or null
  Form form;
  void* out;  // [num_rows, num_columns()], contiguous
  // One of these is the weight, the others are null.
  const T* weight;
  const int8_t* bytes;
  Groups groups;
  const float* factors;  // of `bytes`

  int64_t num_columns() const { return form == GATED ? num_outputs / 2 : num_outputs; }
  int64_t panel_columns() const { return form == GATED ? PANEL / 2 : PANEL; }
  int64_t num_panels() const { return panels_of(num_outputs, form == GATED); }
};
using LinearBf16 = Linear<bf16>;

// A thread takes panels: enough to be worth a turn, and several turns for each thread.
INLINE int64_t panels_of_chunk(int64_t num_panels, int64_t panel_bytes, int num_threads) {
  const int64_t worth = larger(1, (96 << 10) / larger(1, panel_bytes));
  return larger(1, smaller(worth, num_panels / (4 * num_threads)));
}

// Calls multiply(row, panel) for all panels, on all threads, for every `step` rows.
template <typename T, typename Multiply>
void over_panels(const Linear<T>& task, int64_t panel_bytes, int64_t step, int num_threads,
                 Multiply&& multiply) {
  const int64_t num_panels = task.num_panels();
  const int64_t size = panels_of_chunk(num_panels, panel_bytes, num_threads);
  parallel(num_threads, divide_up(num_panels, size), [&](Cursor& cursor) {
    for (int64_t chunk; (chunk = cursor.take()) < cursor.total;)
      for (int64_t panel = chunk * size; panel < smaller(num_panels, (chunk + 1) * size); panel++)
        for (int64_t row = 0; row < task.num_rows; row += step) multiply(row, panel);
  });
}

void linear_bf16_avx512_bf16(const LinearBf16& task, int num_threads);
void linear_bf16_amx(const LinearBf16& task, int num_threads);

// By AVX512-bf16, of weights of 8 bits or in groups.
void linear_widened(const LinearBf16& task, int num_threads);
void linear_int8(const Linear<float>& task, int32_t level, int num_threads);
void linear_int8(const LinearBf16& task, int32_t level, int num_threads);

// As `linear_int8`, but for runs of rows that are rounded to 8 bits, too. `rounded` is how many rows the
// runs are of, how many runs there are, and each one's begin and end: of other rows none is.
void linear_rounded(const LinearBf16& task, const int64_t* rounded, int32_t level,
                    int num_threads);
void linear_groups(const Linear<float>& task, int32_t level, int num_threads);
void linear_groups(const LinearBf16& task, int32_t level, int num_threads);

// Writes blocks of a panel of `task.groups` as a panel of bfloat16.
void widen_groups(const LinearBf16& task, int64_t panel, int64_t first_block, int64_t num_blocks,
                  bf16* out);

// What is done number by number.
enum Element : int32_t {
  COPY = 0,
  SUM = 1,      // a + b
  PRODUCT = 2,  // a * b
  SCALED = 3,   // a * factor
  RELU = 4,
  GELU = 5,       // of a, times b if there is one
  GELU_TANH = 6,  // … by its approximation with tanh
  GATE = 7,       // a * sigmoid(b)
};

template <typename T>
struct Elements {
  const T* a;
  int64_t a_stride;
  const T* b;
  int64_t b_stride;
  float factor;
  int64_t num_rows, size;
  T* out;  // may be a or b
  int64_t out_stride;
};

template <typename T>
struct LayerNorm {
  const T* x;
  int64_t x_stride;
  const T* weight;
  const T* bias;  // or null
  float eps;
  int64_t num_rows, size;
  T* out;  // [num_rows, size], contiguous
};

// Keys and values: a token's numbers of a head lie together, of the type of the queries or, with
// `is_int8`, integers of 8 bits and behind them their factor, a float32.
struct Pools {
  void* k;
  void* v;
  int64_t slot_stride, head_stride;  // in numbers, or in bytes
  bool is_int8;
};

// Rotary embedding of q in place and of k into the pool, beside v; see `Kernels.rotate_and_write`.
template <typename T>
struct Rotation {
  T* q;  // heads of a token lie side by side
  const T* k;
  const T* v;
  int64_t token_stride, num_tokens, num_heads, num_kv_heads, head_dim;
  const float* cos;  // [num_tokens, half]
  const float* sin;
  int64_t half;
  Pools pools;  // written
  const int64_t* slots;  // each below num_slots
  int64_t num_slots;
  const void* q_weight;  // null: no norms
  const void* k_weight;
  bool has_wide_norms;  // these are float32, whatever T is
  float eps;
};

// ---- recurrent layers ----
//
// States are pieces of a KV pool: a state's bytes are those of some slots of a row, [parts][heads]
// [slots][piece]. A row of `rows` is as in `Attention`; its state begins, with zeros, where all of its
// context is new.
struct States {
  char* pieces;
  int64_t part_stride, head_stride, slot_stride;  // in bytes
  int64_t num_heads, piece_bytes, pool_slots;
  const int32_t* table;  // slots of each row
  int64_t table_stride, first, num_slots;  // … of which a state has these
  const int64_t* rows;
  int64_t num_rows;
  const uint8_t* is_held;  // of each row of the table: its state is left as it is; or null

  // Copies some bytes of a row's state to a buffer, or from it, unless it is held.
  void copy(int64_t table_row, int64_t first_byte, int64_t num_bytes, char* buffer,
            bool is_stored) const;
  bool are_good() const;
};

template <typename T>
struct Convolution {
  const T* x;
  int64_t x_stride;
  const T* weight;  // [width][channels]
  const T* bias;    // or null
  int64_t width, channels;
  bool is_plain;  // or its SiLU
  States states;  // [width - 1][channels]
  T* out;         // [tokens, channels], contiguous
};

template <typename T>
struct DeltaRule {
  static constexpr bool CORRECTS = true;  // what a state says to a key, before it adds the value
  const T* mixed;
  int64_t mixed_stride;
  const T* z;
  int64_t z_stride;
  const float* gates;  // b of all heads, then a
  int64_t gate_stride;
  const float* decay;  // of each head
  const float* rate_bias;
  const T* norm;
  float eps, beta_scale;
  int64_t num_key_heads, num_heads, key_dim, value_dim;
  States states;  // float32 [num_heads][key_dim][value_dim]
  T* out;         // [tokens, num_heads, value_dim], contiguous
};

template <typename T>
struct Mamba {  // keys are a state's inputs, queries its outputs, key heads its groups
  static constexpr bool CORRECTS = false;
  const T* mixed;  // values, keys, queries
  int64_t mixed_stride;
  const T* z;
  int64_t z_stride;
  const float* rates;
  int64_t rate_stride;
  const float* decay;  // of each head
  const float* rate_bias;
  const float* skip;
  int64_t num_key_heads, num_heads, key_dim, value_dim;
  States states;  // float32 [num_heads][key_dim][value_dim]
  T* out;         // [tokens, num_heads, value_dim], contiguous
};

// ---- attention ----
//
// The query heads that share a KV head, of all new tokens of a row, are its lanes, 16 of which are
// a tile. A piece of work is up to MAX_TILES tiles over some keys of one KV head. A context is cut
// into several pieces where a row has few lanes; where depends on its length alone.
constexpr int64_t FEW_LANES = 8;  // of a piece, where vectors go along a head's numbers in place of lanes
constexpr int64_t LANES = 16, KEY_BLOCK = 64, MAX_TILES = 8, KEYS_OF_PIECE = 512;

template <typename T>
struct Attention {
  const T* q;
  int64_t token_stride;  // of q; heads lie side by side
  Pools pools;
  const int32_t* table;  // slots of each row's positions
  int64_t table_stride;
  const int64_t* rows;  // [num_rows][4]: row of the table, new tokens, context, first new token
  int64_t num_rows, num_heads, num_kv_heads, head_dim;
  int64_t window;  // 0: none
  float scale;
  T* out;  // [tokens, num_heads, head_dim], contiguous
  // Whether a query's result may depend on nothing but its own position, keys and values: blocks of
  // keys begin at multiples of KEY_BLOCK then, and no context is cut.
  bool is_invariant;
  // What is done to scores; see `ScoreMod`.
  float soft_cap = 0.0f;          // 0: none
  const float* slopes = nullptr;  // [num_heads], or null
  const float* sinks = nullptr;   // [num_heads], or null

  bool modifies() const { return soft_cap > 0.0f || slopes != nullptr; }
};

struct Tile {
  int64_t queries[LANES];  // where each lane's query begins, -1: no lane
  int64_t outputs[LANES];
  int32_t first_key[LANES];  // that the lane sees
  int32_t last_key[LANES];   // … and where its query stands
  float slopes[LANES];       // of its head, see `Attention.slopes`
  int64_t begin, end;  // first and last key that any lane sees
  int64_t begin_of_all, end_of_all;  // … that every lane sees
};

struct Piece {
  int64_t row;  // in `Attention.rows`
  int64_t table_row, kv_head, first_lane, num_tiles, first_key, end_key;
  int64_t first_part;  // where the states of this context's pieces begin, -1: it is the only one
  int64_t part, num_parts;
};

// What a lane's weighted sum is multiplied by in the end: one over the sum of its weights, and of
// its head's sink. `best` is what was taken off every score, e to the power of which is a weight.
template <typename T>
INLINE float share_of(const Attention<T>& task, int64_t output, float best, float total) {
  if (task.sinks != nullptr)
    total += std::exp(task.sinks[output / task.head_dim % task.num_heads] - best);
  return 1.0f / total;
}

// State of a tile: largest score, sum of weights, then sums of weighted values, [2 + head][LANES].
INLINE int64_t state_size(int64_t head_dim) { return (2 + head_dim) * LANES; }

INLINE float widened(float value) { return value; }
INLINE float widened(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Rounded to a T; what is no number is none of bfloat16 if its lower half is zero, as that of a result of
// bfloat16 numbers is.
INLINE float narrowed(float, float value) { return value; }
INLINE bf16 narrowed(bf16, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// `attend` adds a piece's keys to the states of its tiles, or returns true: the piece was all of its
// context, and outputs are stored. `finish` stores them otherwise.
template <typename T>
void run_attention(const Attention<T>& task, int num_threads,
                   bool (*attend)(const Attention<T>&, const Piece&, const Tile*, float*),
                   void (*finish)(const Attention<T>&, const Tile&, const float*));
void attention_amx(const Attention<bf16>& task, int num_threads);
void attention_dots(const Attention<bf16>& task, int num_threads);
