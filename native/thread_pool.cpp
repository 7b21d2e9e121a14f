#include "thread_pool.hpp"

#include <immintrin.h>

namespace legato {

namespace {

constexpr int kSpinsBeforeSleep = 10'000;  // some hundreds of microseconds
constexpr int kSpinsBeforeYield = 2'000;

// Waits for an event that usually comes within microseconds. Later it yields the core to other programs.
template <typename IsOver>
void spin_until(IsOver is_over) {
    for (int spins = 0; !is_over(); ++spins) {
        if (spins < kSpinsBeforeYield) _mm_pause();
        else std::this_thread::yield();
    }
}

}  // namespace

void Phase::await(int count) const {
    spin_until([=, this] { return num_done_.load(std::memory_order_acquire) == count; });
}

void Phase::await_first(int count) const {
    spin_until([=, this] { return num_done_.load(std::memory_order_acquire) >= count; });
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this] { serve(); });
}

ThreadPool::~ThreadPool() {
    is_ending_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (auto &thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void()> &work) {
    work_ = &work;
    is_open_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    work();
    // A thread that arrives now must leave, because `work` ends with this call. It either sees the
    // flag, or is counted in `num_helping_`.
    is_open_ = false;
    spin_until([this] { return num_helping_ == 0; });
}

void ThreadPool::serve() {
    unsigned seen = 0;
    while (!is_ending_) {
        await_generation(seen);
        seen = generation_.load(std::memory_order_acquire);
        help();
    }
}

void ThreadPool::help() {
    num_helping_.fetch_add(1);
    if (is_open_) (*work_)();
    num_helping_.fetch_sub(1);
}

void ThreadPool::await_generation(unsigned seen) {
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
        if (generation_.load(std::memory_order_acquire) != seen) return;
        _mm_pause();
    }
    while (generation_.load(std::memory_order_acquire) == seen) generation_.wait(seen);
}

}  // namespace legato
