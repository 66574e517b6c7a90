// One pool of threads. Work is cut into chunks that are handed out one by one, so a thread that
// shares its core with another process takes fewer of them instead of holding up the others.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "core.h"

namespace {

constexpr int MAX_THREADS = 256;
constexpr size_t LARGE_PAGE = 2 << 20;
constexpr int64_t SPIN_NS = 80'000;
// Operations of a step follow each other sooner than that; waking a thread takes as long.

// The job that is open, in one number: [which job | closed | threads inside].
constexpr uint64_t INSIDE = 0x7fffffff, CLOSED = 0x80000000;

std::mutex one_caller;
std::atomic<uint64_t> gate{CLOSED};
std::atomic<uint32_t> newest{0};
std::atomic<int> num_sleeping{0};
int num_started = 0;

struct Job {
  void (*body)(void*, Cursor&);
  void* context;
  Cursor* cursor;
  int num_threads;
};
Job job;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Returns when there is a newer job than `seen`: watches for a moment, then sleeps.
uint32_t wait_for_job(uint32_t seen) {
  const int64_t until_ns = now_ns() + SPIN_NS;
  do {
    for (int i = 0; i < 32; i++) {
      const uint32_t value = newest.load(std::memory_order_acquire);
      if (value != seen) return value;
      __builtin_ia32_pause();
    }
  } while (now_ns() < until_ns);
  num_sleeping.fetch_add(1);
  uint32_t value;
  while ((value = newest.load()) == seen) futex(&newest, FUTEX_WAIT, seen);
  num_sleeping.fetch_sub(1);
  return value;
}

void* work(void* argument) {
  const int number = static_cast<int>(reinterpret_cast<intptr_t>(argument));
  for (uint32_t seen = 0;;) {
    seen = wait_for_job(seen);
    uint64_t value = gate.load(std::memory_order_acquire);
    bool is_inside = false;
    while (!is_inside && (value >> 32) == seen && !(value & CLOSED))
      is_inside = gate.compare_exchange_weak(value, value + 1, std::memory_order_acq_rel);
    if (!is_inside) continue;
    if (number < job.num_threads) job.body(job.context, *job.cursor);
    gate.fetch_sub(1, std::memory_order_release);
  }
  return nullptr;
}

void start_threads(int num_threads) {
  for (; num_started + 1 < num_threads; num_started++) {
    pthread_t thread;
    void* number = reinterpret_cast<void*>(static_cast<intptr_t>(num_started + 1));
    if (pthread_create(&thread, nullptr, work, number) != 0) return;  // fewer are enough
    pthread_setname_np(thread, "cpu-core");
    pthread_detach(thread);
  }
}

// In a child that was forked there are no threads, whatever the parent noted.
void forget_threads() {
  num_started = 0;
  num_sleeping.store(0);
  gate.store(CLOSED);
  new (&one_caller) std::mutex;
}

struct Scratch {
  void* memory[8] = {};
  size_t size[8] = {};
  ~Scratch() {
    for (void* some : memory) std::free(some);
  }
};
thread_local Scratch own_scratch;

}  // namespace

void* scratch(int slot, size_t num_bytes) {
  Scratch& own = own_scratch;
  if (own.size[slot] < num_bytes) {
    std::free(own.memory[slot]);
    const size_t wanted = num_bytes + num_bytes / 4, page = wanted < LARGE_PAGE ? 4096 : LARGE_PAGE;
    own.size[slot] = (wanted + page - 1) / page * page;
    own.memory[slot] = std::aligned_alloc(page, own.size[slot]);
    if (own.memory[slot] == nullptr) {
      std::fprintf(stderr, "the CPU core has no memory for %zu bytes\n", own.size[slot]);
      std::abort();
    }
    if (page == LARGE_PAGE) madvise(own.memory[slot], own.size[slot], MADV_HUGEPAGE);
  }
  return own.memory[slot];
}

void run_threads(int num_threads, int64_t num_chunks, void (*body)(void*, Cursor&), void* context) {
  Cursor cursor;
  cursor.total = num_chunks;
  if (num_threads > num_chunks) num_threads = static_cast<int>(num_chunks);
  if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
  std::unique_lock<std::mutex> lock(one_caller, std::defer_lock);
  if (num_threads <= 1 || !lock.try_lock()) {
    body(context, cursor);
    return;
  }
  static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
  static_cast<void>(registered);
  start_threads(num_threads);
  job = {body, context, &cursor, num_threads};
  uint32_t number = newest.load(std::memory_order_relaxed) + 1;
  gate.store(static_cast<uint64_t>(number) << 32, std::memory_order_release);
  newest.store(number);
  if (num_sleeping.load() > 0) futex(&newest, FUTEX_WAKE, INT32_MAX);
  body(context, cursor);
  gate.fetch_or(CLOSED, std::memory_order_acq_rel);
  for (int64_t since_ns = 0; gate.load(std::memory_order_acquire) & INSIDE;) {
    __builtin_ia32_pause();
    const int64_t time_ns = now_ns();
    if (since_ns == 0) since_ns = time_ns;
    if (time_ns - since_ns > SPIN_NS) sched_yield();
  }
}
