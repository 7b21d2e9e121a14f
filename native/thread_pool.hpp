// Threads that run one function together, phase by phase.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "memory.hpp"

namespace legato {

// A thread of a run, as its work sees it.
struct Worker {
    const int num_threads;  // of the pool
    const Arena memory;     // of this thread, as large as the run's caller has stated
    const std::atomic<bool> &has_failed;  // whether the run has
};

// A phase consists of shares, each taken by the next free thread. It is over when all shares are done,
// by whichever thread: one that has lost its core to another program delays the others by at most its
// present share, and not at all between two shares. A thread that waits for a share which will never be
// done, because the run has failed, leaves the run by an exception.
class Phase {
public:
    // Called before the threads run the phase.
    void reset() {
        next_.store(0, std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
    }

    // Calls work(share) for some of the shares [0, count), and waits until all are done.
    template <typename Work>
    void run(const Worker &worker, int count, Work work) {
        int num_own = 0;
        for (int share; (share = take()) < count; ++num_own) work(share);
        if (num_own) num_done_.fetch_add(num_own, std::memory_order_acq_rel);
        await(worker, count);
    }

    // Calls first(share) for the shares [0, num_first), and after all of them work(share) for [0, count).
    template <typename First, typename Work>
    void run(const Worker &worker, int num_first, First first, int count, Work work) {
        int num_own = 0;
        for (int share; (share = take()) < num_first + count;) {
            if (share < num_first) {
                first(share);
                num_done_.fetch_add(1, std::memory_order_acq_rel);
                continue;
            }
            if (num_own++ == 0) await(worker, num_first);
            work(share - num_first);
        }
        if (num_own) num_done_.fetch_add(num_own, std::memory_order_acq_rel);
        await(worker, num_first + count);
    }

private:
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }
    void await(const Worker &worker, int count) const;

    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> num_done_{0};
};

// Divides rows into shares, several for each thread.
struct RowShares {
    static constexpr int kAThread = 4;

    RowShares(int num_rows, const Worker &worker)
        : worker(worker),
          num_rows(num_rows),
          size((num_rows - 1) / (kAThread * worker.num_threads) + 1),
          count((num_rows + size - 1) / size) {}

    // Calls work(row) for all rows, by all threads.
    template <typename Work>
    void run(Phase &phase, Work work) const {
        phase.run(worker, count, [&](int share) {
            const int end = std::min((share + 1) * size, num_rows);
            for (int row = share * size; row < end; ++row) work(row);
        });
    }

    const Worker &worker;
    const int num_rows, size, count;
};

// Waiting threads spin for a while; with nothing to do for longer, they sleep.
class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;

    int size() const { return num_threads_; }

    using Work = std::function<void(const Worker &)>;

    // Runs work(worker) on the calling thread, and on each other thread that arrives before the caller is
    // done. It returns when no thread is in work() any more. Each has memory of `num_bytes`, allocated
    // before any begins: a kernel states what it needs, and allocates nothing in work().
    //
    // If work() throws on any thread, all threads leave it, and the first exception is thrown to the
    // caller. The pool can run again; phases must be reset.
    void run(size_t num_bytes, const Work &work) {
        reserve(num_bytes);
        run_reserved(work);
    }

private:
    void reserve(size_t num_bytes);
    void run_reserved(const Work &work);
    void serve(int index);
    void help(int index);
    void attempt(int index) noexcept;
    void end();
    void await_generation(unsigned seen);

    const int num_threads_;
    size_t num_bytes_ = 0;
    std::vector<Buffer<std::byte>> memory_;  // of each thread, the calling one first
    std::vector<std::thread> threads_;
    const Work *work_ = nullptr;
    std::exception_ptr failure_;  // of the present run, written by the thread that failed first
    alignas(64) std::atomic<unsigned> generation_{0};
    alignas(64) std::atomic<bool> is_open_{false}, is_ending_{false}, has_failed_{false};
    alignas(64) std::atomic<int> num_helping_{0};
};

}  // namespace legato
