#include "thread_pool.hpp"

#include <immintrin.h>

namespace legato {

namespace {

constexpr int kSpinsBeforeSleep = 10'000;  // some hundred microseconds
constexpr int kSpinsBeforeYield = 2'000;

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) {
        threads_.emplace_back([this, thread] { serve(thread); });
    }
}

ThreadPool::~ThreadPool() {
    is_ending_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (auto &thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)> &work) {
    work_ = &work;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    work(0);
    barrier();
}

void ThreadPool::barrier() {
    if (num_threads_ == 1) return;
    const unsigned seen = barrier_generation_.load(std::memory_order_relaxed);
    if (num_at_barrier_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
        num_at_barrier_.store(0, std::memory_order_relaxed);
        barrier_generation_.store(seen + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; barrier_generation_.load(std::memory_order_acquire) == seen; ++spins) {
        if (spins < kSpinsBeforeYield) {
            _mm_pause();
        } else {
            std::this_thread::yield();
        }
    }
}

void ThreadPool::serve(int thread) {
    unsigned seen = 0;
    for (;;) {
        await_generation(seen);
        ++seen;
        if (is_ending_) return;
        (*work_)(thread);
        barrier();
    }
}

void ThreadPool::await_generation(unsigned seen) {
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
        if (generation_.load(std::memory_order_acquire) != seen) return;
        _mm_pause();
    }
    while (generation_.load(std::memory_order_acquire) == seen) generation_.wait(seen);
}

}  // namespace legato
