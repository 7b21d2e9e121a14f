// Threads that run one function together, phase by phase.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace legato {

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
    void run(int count, Work work) {
        int num_own = 0;
        for (int share; (share = take()) < count; ++num_own) work(share);
        if (num_own) num_done_.fetch_add(num_own, std::memory_order_acq_rel);
        await(count);
    }

    // Calls first(share) for the shares [0, num_first), and after all of them work(share) for [0, count).
    template <typename First, typename Work>
    void run(int num_first, First first, int count, Work work) {
        int num_own = 0;
        for (int share; (share = take()) < num_first + count;) {
            if (share < num_first) {
                first(share);
                num_done_.fetch_add(1, std::memory_order_acq_rel);
                continue;
            }
            if (num_own++ == 0) await_first(num_first);
            work(share - num_first);
        }
        if (num_own) num_done_.fetch_add(num_own, std::memory_order_acq_rel);
        await(num_first + count);
    }

private:
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }
    void await(int count) const;
    void await_first(int count) const;

    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> num_done_{0};
};

// Divides rows into shares, several for each thread.
struct RowShares {
    static constexpr int kAThread = 4;

    RowShares(int num_rows, int num_threads)
        : num_rows(num_rows),
          size((num_rows - 1) / (kAThread * num_threads) + 1),
          count((num_rows + size - 1) / size) {}

    // Calls work(row) for all rows, by all threads.
    template <typename Work>
    void run(Phase &phase, Work work) const {
        phase.run(count, [&](int share) {
            const int end = std::min((share + 1) * size, num_rows);
            for (int row = share * size; row < end; ++row) work(row);
        });
    }

    const int num_rows, size, count;
};

// Waiting threads spin for a while; with nothing to do for longer, they sleep.
class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;

    int size() const { return num_threads_; }

    // Runs work() on the calling thread, and on each other thread that arrives before the caller is
    // done. It returns when no thread is in work() any more.
    //
    // If work() throws on any thread, all threads leave it, and the first exception is thrown to the
    // caller. The pool can run again; phases must be reset.
    void run(const std::function<void()> &work);

private:
    void serve();
    void help();
    void attempt() noexcept;
    void end();
    void await_generation(unsigned seen);

    const int num_threads_;
    std::vector<std::thread> threads_;
    const std::function<void()> *work_ = nullptr;
    std::exception_ptr failure_;  // of the present run, written by the thread that failed first
    alignas(64) std::atomic<unsigned> generation_{0};
    alignas(64) std::atomic<bool> is_open_{false}, is_ending_{false}, has_failed_{false};
    alignas(64) std::atomic<int> num_helping_{0};
};

}  // namespace legato
