// AMX tiles in plain C++, so that code for them runs on any machine with AVX512-bf16: put in front of
// the core's sources by the compiler (-include), see tests/support/software_tiles.py.
//
// As the instruction set reference says (Intel, volume 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO,
// TDPBF16PS, TDPBSSD). What would fault is noted in place, its tile is left without numbers.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace software_tiles {

constexpr int NUM_TILES = 8, MOST_ROWS = 16, MOST_BYTES = 64;

struct State {
  bool is_configured = false;
  int num_rows[NUM_TILES], num_bytes[NUM_TILES];  // of a row
  alignas(64) uint8_t numbers[NUM_TILES][MOST_ROWS][MOST_BYTES];
};
inline thread_local State state;
inline std::atomic<const char*> first_fault{nullptr};
inline std::atomic<int64_t> num_products{0};

inline bool faults(bool is_wrong, const char* what) {
  const char* none = nullptr;
  if (is_wrong) first_fault.compare_exchange_strong(none, what);
  return is_wrong;
}

inline bool cannot_use(int tile) {
  return faults(!state.is_configured, "no configuration is loaded") ||
         faults(state.num_rows[tile] == 0, "a tile that is not configured is used");
}

inline void load_config(const void* from) {
  uint8_t bytes[64];
  std::memcpy(bytes, from, 64);
  state.is_configured = false;
  bool is_wrong = bytes[0] != 1 || bytes[1] != 0;  // the palette; the row where a load goes on
  for (int i = 2; i < 16; i++) is_wrong |= bytes[i] != 0;
  for (int i = 32; i < 48; i++) is_wrong |= bytes[i] != 0;
  for (int i = 56; i < 64; i++) is_wrong |= bytes[i] != 0;
  for (int tile = 0; tile < NUM_TILES; tile++) {
    uint16_t num_bytes;
    std::memcpy(&num_bytes, bytes + 16 + 2 * tile, 2);
    state.num_bytes[tile] = num_bytes;
    state.num_rows[tile] = bytes[48 + tile];
    is_wrong |= num_bytes > MOST_BYTES || bytes[48 + tile] > MOST_ROWS;
    is_wrong |= (num_bytes == 0) != (bytes[48 + tile] == 0);
  }
  std::memset(state.numbers, 0, sizeof state.numbers);
  state.is_configured = !faults(is_wrong, "a configuration that is none");
}

inline void release() { state.is_configured = false; }

inline void zero(int tile) {
  if (!cannot_use(tile)) std::memset(state.numbers[tile], 0, sizeof state.numbers[tile]);
}

inline void load(int tile, const void* from, ptrdiff_t stride) {
  zero(tile);
  for (int row = 0; row < state.num_rows[tile]; row++)
    std::memcpy(state.numbers[tile][row], static_cast<const char*>(from) + row * stride,
                state.num_bytes[tile]);
}

inline void store(int tile, void* to, ptrdiff_t stride) {
  if (cannot_use(tile)) return;
  for (int row = 0; row < state.num_rows[tile]; row++)
    std::memcpy(static_cast<char*>(to) + row * stride, state.numbers[tile][row],
                state.num_bytes[tile]);
}

inline float wide(uint16_t number) {
  const uint32_t exponent = number & 0x7f80u, bits = (exponent ? number : number & 0x8000u) << 16;
  float value;  // what is too small for a whole mantissa counts as zero
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Adds products of a [rows][fours of bytes] and b [fours][columns] to the numbers of `to`, each column
// by `add` of its number and two fours.
template <typename Number, typename Add>
inline void multiply(int to, int a, int b, Add&& add) {
  if (cannot_use(to) || cannot_use(a) || cannot_use(b)) return;
  const int num_rows = state.num_rows[to], fours = state.num_bytes[a] / 4;
  if (faults(to == a || to == b || a == b, "a tile is in one product twice") ||
      faults(num_rows != state.num_rows[a] || fours != state.num_rows[b] ||
                 state.num_bytes[to] != state.num_bytes[b] || state.num_bytes[a] % 4 != 0 ||
                 state.num_bytes[b] % 4 != 0,
             "tiles in a product do not fit each other")) {
    std::memset(state.numbers[to], 0xff, sizeof state.numbers[to]);
    return;
  }
  num_products.fetch_add(1, std::memory_order_relaxed);
  for (int row = 0; row < num_rows; row++)
    for (int column = 0; column < state.num_bytes[to] / 4; column++) {
      Number number;
      std::memcpy(&number, state.numbers[to][row] + 4 * column, 4);
      number = add(number, state.numbers[a][row], state.numbers[b][0] + 4 * column, fours);
      std::memcpy(state.numbers[to][row] + 4 * column, &number, 4);
    }
}

inline void multiply_bf16(int to, int a, int b) {
  multiply<float>(to, a, b, [](float number, const uint8_t* x, const uint8_t* y, int fours) {
    float sums[2] = {};  // of first and of second numbers of pairs
    for (int four = 0; four < fours; four++, x += 4, y += MOST_BYTES)
      for (int i = 0; i < 2; i++) {
        uint16_t own, other;
        std::memcpy(&own, x + 2 * i, 2);
        std::memcpy(&other, y + 2 * i, 2);
        sums[i] += wide(own) * wide(other);  // a product loses no bit
      }
    return number + (sums[0] + sums[1]);
  });
}

template <typename X>
inline void multiply_bytes(int to, int a, int b) {
  multiply<int32_t>(to, a, b, [](int32_t number, const uint8_t* x, const uint8_t* y, int fours) {
    for (int four = 0; four < fours; four++, x += 4, y += MOST_BYTES)
      for (int i = 0; i < 4; i++) number += static_cast<X>(x[i]) * static_cast<int8_t>(y[i]);
    return number;
  });
}

}  // namespace software_tiles

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig software_tiles::load_config
#define _tile_release software_tiles::release
#define _tile_loadd software_tiles::load
#define _tile_stored software_tiles::store
#define _tile_zero software_tiles::zero
#define _tile_dpbf16ps software_tiles::multiply_bf16
#define _tile_dpbssd software_tiles::multiply_bytes<int8_t>
#define _tile_dpbusd software_tiles::multiply_bytes<uint8_t>

// What was wrong first, or null; and how many products there were.
extern "C" __attribute__((visibility("default"), used)) inline const char* tiles_fault() {
  return software_tiles::first_fault.exchange(nullptr);
}
extern "C" __attribute__((visibility("default"), used)) inline int64_t tiles_products() {
  return software_tiles::num_products;
}
