// Products of rows with a weight matrix, by all threads of a pool.
#pragma once

#include "quantized.hpp"
#include "rows.hpp"
#include "thread_pool.hpp"
#include "weights.hpp"

namespace legato {

constexpr size_t kGroupBytes = 512 << 10;  // of panels that stay in the second-level cache
// Likewise, where all rows pass by at once: so little that no thread waits long for another that lost
// its core, and so much that what is read ahead of it does not matter.
constexpr size_t kSmallGroupBytes = 128 << 10;

// sums [32, 32] of up to 32 rows from `row` on, times a panel of tiles.
inline void multiply_rows(const TiledRows &rows, int row, int count, const bf16 *panel,
                          int num_steps, float *sums) {
    constexpr long kSumBytes = kPanel * sizeof(float);
    const bf16 *const upper = rows.tiles(row), *const lower = rows.tiles(row + kTileRows);
    const auto operands = [=](int step) {
        const bf16 *const columns = panel + 2 * step * kTileValues;
        return Operands{upper + step * kTileValues, lower + step * kTileValues, columns,
                        columns + kTileValues, kAheadBytes / static_cast<long>(sizeof(bf16))};
    };
    const StripShape strip{count, num_steps, kTileRowBytes, kTileRowBytes, kSumBytes};
    multiply_strip<false>(strip, operands, sums);
}

// Panels that a thread takes at a time: what its cache holds while all rows pass by, and as many
// such groups as keep all threads busy.
inline int panels_a_group(const PackedMatrix &matrix, int num_rows, int num_threads) {
    const size_t group_bytes = num_rows <= kRowPair ? kSmallGroupBytes : kGroupBytes;
    const size_t rounds = (matrix.num_bytes() - 1) / (num_threads * group_bytes) + 1;
    const int num_groups = static_cast<int>(rounds * num_threads);
    return (matrix.num_panels + num_groups - 1) / num_groups;
}

// As multiply(), for quantized weights: each panel is unpacked once for all rows, or multiplied as
// it is with few.
template <typename Finish>
void multiply_quantized(const TiledRows &rows, int num_rows, const PackedMatrix &matrix,
                        int num_threads, WorkQueue &groups, Finish finish) {
    static thread_local FewRows few;
    static thread_local Buffer<bf16> unpacked;
    alignas(64) float sums[kRowPair * kPanel];
    const bool are_few = num_rows <= kFewRows;
    if (are_few) few.assign(rows, num_rows, matrix.depth);
    else unpacked.reserve(kPanel * matrix.depth);
    const TileScope scope;
    const int group = panels_a_group(matrix, num_rows, num_threads);
    for (int first; (first = groups.take() * group) < matrix.num_panels;) {
        const int end = std::min(first + group, matrix.num_panels);
        for (int panel = first; panel < end; ++panel) {
            if (are_few) {
                few.multiply(matrix, panel, sums);
                finish(0, num_rows, panel, sums);
                continue;
            }
            unpack(matrix, panel, unpacked.get());
            for (int row = 0; row < num_rows; row += kRowPair) {
                const int count = std::min(kRowPair, num_rows - row);
                multiply_rows(rows, row, count, unpacked.get(), matrix.num_steps, sums);
                finish(row, count, panel, sums);
            }
        }
    }
}

// One thread's share of the rows times the matrix, where `groups` hands out groups of panels to all
// threads.
//
// finish(first_row, num_rows, panel, sums): takes sums [num_rows, 32] of outputs [32 * panel, ...).
template <typename Finish>
void multiply(const TiledRows &rows, int num_rows, const PackedMatrix &matrix, int num_threads,
              WorkQueue &groups, Finish finish) {
    if (matrix.is_quantized()) {
        multiply_quantized(rows, num_rows, matrix, num_threads, groups, finish);
        return;
    }
    alignas(64) float sums[kRowPair * kPanel];
    const TileScope scope;
    const int group = panels_a_group(matrix, num_rows, num_threads);
    for (int first; (first = groups.take() * group) < matrix.num_panels;) {
        const int end = std::min(first + group, matrix.num_panels);
        for (int row = 0; row < num_rows; row += kRowPair) {
            const int count = std::min(kRowPair, num_rows - row);
            for (int panel = first; panel < end; ++panel) {
                multiply_rows(rows, row, count, matrix.tiles(panel), matrix.num_steps, sums);
                finish(row, count, panel, sums);
            }
        }
    }
}

}  // namespace legato
