// Eight tiles of 16 rows of 64 bytes, as all kernels use them.
#pragma once

#include <immintrin.h>

#include "core.h"

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_row[16] = {};
  uint8_t num_rows[16] = {};
};

TARGET_AMX static inline void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.bytes_of_row[tile] = 64;
    config.num_rows[tile] = 16;
  }
  _tile_loadconfig(&config);
}
