#include "thread_pool.hpp"

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace legato {

namespace {

constexpr int kSpinsBeforeSleep = 10'000;  // some hundreds of microseconds
constexpr int kSpinsBeforeYield = 2'000;

// Tells the processor that this thread only waits.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits for an event that usually comes within microseconds. Later it yields the core to other programs.
template <typename IsOver>
void spin_until(IsOver is_over) {
    for (int spins = 0; !is_over(); ++spins) {
        if (spins < kSpinsBeforeYield) relax();
        else std::this_thread::yield();
    }
}

// Thrown by a thread that waits in a run where another thread has failed.
struct Abandoned {};

}  // namespace

// Waits until so many shares are done.
void Phase::await(const Worker &worker, int count) const {
    bool is_abandoned = false;
    spin_until([&] {
        return num_done_.load(std::memory_order_acquire) >= count ||
               (is_abandoned = worker.has_failed.load(std::memory_order_relaxed));
    });
    if (is_abandoned) throw Abandoned();
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), memory_(num_threads) {
    try {
        while (static_cast<int>(threads_.size()) + 1 < num_threads)
            threads_.emplace_back([this, index = static_cast<int>(threads_.size()) + 1] { serve(index); });
    } catch (const std::system_error &error) {
        end();
        throw std::runtime_error("thread " + std::to_string(threads_.size() + 2) + " of " +
                                 std::to_string(num_threads) + " does not start: " + error.what());
    } catch (...) {
        end();
        throw;
    }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
    is_ending_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (auto &thread : threads_) thread.join();
}

void ThreadPool::reserve(size_t num_bytes) {
    for (auto &memory : memory_) memory.reserve(num_bytes);
    num_bytes_ = num_bytes;
}

void ThreadPool::run_reserved(const Work &work) {
    work_ = &work;
    has_failed_ = false;
    is_open_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    attempt(0);
    // A thread that arrives now must leave, because `work` ends with this call. It either sees the
    // flag, or is counted in `num_helping_`.
    is_open_ = false;
    spin_until([this] { return num_helping_ == 0; });
    if (has_failed_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

// Runs the work on this thread. An exception makes the run fail, so that no thread waits for this one.
void ThreadPool::attempt(int index) noexcept {
    try {
        (*work_)({num_threads_, {memory_[index].get(), num_bytes_}, has_failed_});
    } catch (...) {
        if (!has_failed_.exchange(true)) failure_ = std::current_exception();
    }
}

void ThreadPool::serve(int index) {
    unsigned seen = 0;
    while (!is_ending_) {
        await_generation(seen);
        seen = generation_.load(std::memory_order_acquire);
        help(index);
    }
}

void ThreadPool::help(int index) {
    num_helping_.fetch_add(1);
    if (is_open_) attempt(index);
    num_helping_.fetch_sub(1);
}

void ThreadPool::await_generation(unsigned seen) {
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
        if (generation_.load(std::memory_order_acquire) != seen) return;
        relax();
    }
    while (generation_.load(std::memory_order_acquire) == seen) generation_.wait(seen);
}

}  // namespace legato
