// Work on each row of a step, divided among threads.
#pragma once

#include <algorithm>

#include "thread_pool.hpp"

namespace legato {

constexpr int kRowSharesAThread = 4;

// Divides rows into shares, several for each thread.
struct RowShares {
    RowShares(int num_rows, int num_threads)
        : num_rows(num_rows),
          size((num_rows - 1) / (kRowSharesAThread * num_threads) + 1),
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

}  // namespace legato
