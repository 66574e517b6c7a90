// What a machine with AVX512-bf16 can do at most, beside which products are to be read: reading 1 GiB
// of memory, and dot products of registers, by one thread and by two. The best of five turns.
//
//   c++ -O2 -std=c++17 -pthread bench/engine/ceilings.cpp -o /tmp/ceilings && /tmp/ceilings
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <sys/mman.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512bf16,avx512vnni")))

constexpr int64_t NUM_BYTES = int64_t{1} << 30, NUM_TURNS = 4'000'000;
volatile int32_t result;  // so that nothing is left out

TARGET static void read(const char* from, int64_t num_bytes) {
  __m512i found[4] = {};
  for (int64_t i = 0; i < num_bytes; i += 256)
    for (int j = 0; j < 4; j++)
      found[j] = _mm512_or_si512(found[j], _mm512_loadu_si512(from + i + 64 * j));
  for (const __m512i& part : found) result = result + _mm512_reduce_add_epi32(part);
}

TARGET static void multiply_bf16() {
  __m512 sums[16] = {};
  for (__m512& sum : sums) asm volatile("" : "+v"(sum));  // none is another's
  __m512i numbers = _mm512_set1_epi32(0x3f803f80);
  for (int64_t turn = 0; turn < NUM_TURNS; turn++) {
    asm volatile("" : "+v"(numbers));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)numbers, (__m512bh)numbers);
  }
  for (const __m512& sum : sums) result = result + static_cast<int32_t>(_mm512_reduce_add_ps(sum));
}

TARGET static void multiply_bytes() {
  __m512i sums[16] = {}, numbers = _mm512_set1_epi32(0x01010101);
  for (__m512i& sum : sums) asm volatile("" : "+v"(sum));
  for (int64_t turn = 0; turn < NUM_TURNS; turn++) {
    asm volatile("" : "+v"(numbers));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], numbers, numbers);
  }
  for (const __m512i& sum : sums) result = result + _mm512_reduce_add_epi32(sum);
}

template <typename Body>
static double least_s(int num_threads, Body&& body) {
  double least = 1e9;
  for (int turn = 0; turn < 5; turn++) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int i = 1; i < num_threads; i++) others.emplace_back([&body, i] { body(i); });
    body(0);
    for (std::thread& other : others) other.join();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    least = std::min(least, time.count());
  }
  return least;
}

int main() {
  void* memory = mmap(nullptr, NUM_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return std::perror("mmap"), 1;
  madvise(memory, NUM_BYTES, MADV_HUGEPAGE);
  std::memset(memory, 1, NUM_BYTES);
  for (int num_threads = 1; num_threads <= 2; num_threads++) {
    const int64_t part = NUM_BYTES / num_threads;
    const double read_s = least_s(
        num_threads, [&](int i) { read(static_cast<const char*>(memory) + i * part, part); });
    const double numbers = 16.0 * NUM_TURNS * num_threads;
    const double bf16_s = least_s(num_threads, [](int) { multiply_bf16(); });
    const double bytes_s = least_s(num_threads, [](int) { multiply_bytes(); });
    std::printf("%d threads: memory %.1f GB/s, bfloat16 %.3f TFLOP/s, bytes %.3f TOP/s\n",
                num_threads, NUM_BYTES / read_s / 1e9, numbers * 64 / bf16_s / 1e12,
                numbers * 128 / bytes_s / 1e12);
  }
}
