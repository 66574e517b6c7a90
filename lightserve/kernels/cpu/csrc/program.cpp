// A pass's operations, noted once by Python and run in one call.
#include "core.h"

namespace {

struct Call {
  int64_t (*function)(const int64_t* words);
  int64_t first_word;
  int64_t rows;  // which of `places` counts its rows: without any it is left out
};

// A word that differs from pass to pass.
struct Patch {
  int64_t word, place, offset;
};

}  // namespace

// Runs calls one after the other; a patched word is a place's value and an offset. Returns the number
// of the first call that refused its arguments, -1 if none did.
EXPORT int64_t core_run(const Call* calls, int64_t num_calls, int64_t* words, const Patch* patches,
                        int64_t num_patches, const int64_t* places) {
  for (int64_t i = 0; i < num_patches; i++)
    words[patches[i].word] = places[patches[i].place] + patches[i].offset;
  for (int64_t i = 0; i < num_calls; i++)
    if (places[calls[i].rows] > 0 && calls[i].function(words + calls[i].first_word) == 0) return i;
  return -1;
}

// Copies some rows of `from` [num_rows, row_bytes] to out. Returns 0, and does nothing, if one of
// `chosen` is none of them.
EXPORT int32_t core_gather(const char* from, int64_t num_rows, int64_t stride, int64_t row_bytes,
                           const int64_t* chosen, int64_t count, char* out) {
  for (int64_t i = 0; i < count; i++)
    if (chosen[i] < 0 || chosen[i] >= num_rows) return 0;
  for (int64_t i = 0; i < count; i++)
    std::memcpy(out + i * row_bytes, from + chosen[i] * stride, row_bytes);
  return 1;
}
BY_WORDS(core_gather)
