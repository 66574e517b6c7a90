// What the machine can do.
#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core.h"

#ifndef SOURCES
#define SOURCES "unknown"
#endif

namespace {

bool has_bit(unsigned value, int bit) { return (value >> bit) & 1u; }

uint64_t enabled_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// The kernel gives tiles to processes that ask for them; threads inherit the permission.
bool may_use_tiles() {
  constexpr long GET = 0x1022, REQUEST = 0x1023, TILE_DATA = 18;
  if (syscall(SYS_arch_prctl, REQUEST, TILE_DATA) != 0) return false;
  unsigned long permitted = 0;
  if (syscall(SYS_arch_prctl, GET, &permitted) != 0) return false;
  return (permitted >> TILE_DATA) & 1ul;
}

}  // namespace

// Returns the best `Level` of this machine, having got the kernel's permission for it.
EXPORT int32_t core_level() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return NONE;
  if (!has_bit(c, 27) || !has_bit(c, 12) || !has_bit(c, 29)) return NONE;  // xsave, fma, f16c
  const uint64_t state = enabled_state();
  if ((state & 0x6) != 0x6) return NONE;
  unsigned b7, c7, d7, a71 = 0, unused;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return NONE;
  if (a >= 1) __get_cpuid_count(7, 1, &a71, &unused, &c, &d);
  if (!has_bit(b7, 5)) return NONE;
  // foundation, dq, bw, vl; and the operating system saves the registers
  const bool has_avx512 =
      has_bit(b7, 16) && has_bit(b7, 17) && has_bit(b7, 30) && has_bit(b7, 31);
  if (!has_avx512 || (state & 0xe6) != 0xe6) return AVX2;
  if (!has_bit(a71, 5) || !has_bit(c7, 11)) return AVX512;  // bf16, vnni
  const bool has_amx = has_bit(d7, 24) && has_bit(d7, 22) && has_bit(d7, 25);
  if (!has_amx || (state & 0x60000) != 0x60000 || !may_use_tiles()) return AVX512_BF16;
  return AMX;
}

// Returns what the sources were when this was built.
EXPORT const char* core_sources() { return SOURCES; }

// Asks for large pages under a weight that has not been written yet: reading it takes fewer walks.
EXPORT void core_large_pages(void* start, int64_t num_bytes) {
  constexpr uintptr_t PAGE = 2 << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(start) + num_bytes) / PAGE * PAGE;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}
