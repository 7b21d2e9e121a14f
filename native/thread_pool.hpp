// Threads that run one function together, with barriers between its phases.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace legato {

// A phase is microseconds long, so waiting threads spin; they sleep when there is nothing to do for
// longer, and give way to other programs that want the core.
class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;

    int size() const { return num_threads_; }

    // Runs work(thread) on all threads, the calling one among them, until all have returned.
    void run(const std::function<void(int)> &work);

    // Within run(): waits until all threads have come here.
    void barrier();

private:
    void serve(int thread);
    void await_generation(unsigned seen);

    int num_threads_;
    std::vector<std::thread> threads_;
    const std::function<void(int)> *work_ = nullptr;
    bool is_ending_ = false;
    alignas(64) std::atomic<unsigned> generation_{0};
    alignas(64) std::atomic<int> num_at_barrier_{0};
    alignas(64) std::atomic<unsigned> barrier_generation_{0};
};

// Hands out [0, count) one by one to whichever thread is free.
class WorkQueue {
public:
    void reset() { next_.store(0, std::memory_order_relaxed); }
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

private:
    alignas(64) std::atomic<int> next_{0};
};

}  // namespace legato
