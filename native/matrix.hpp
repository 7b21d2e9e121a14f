// Products of rows with a weight matrix, computed by all threads of a pool.
#pragma once

#include "quantized.hpp"
#include "rows.hpp"
#include "thread_pool.hpp"
#include "weights.hpp"

namespace legato {

constexpr size_t kShareBytes = 512 << 10;  // panels that stay in the second-level cache
// Bytes of a share if all rows are multiplied at once: small enough that no thread waits long for one
// that lost its core, and large enough that reading ahead beyond its end does not matter.
constexpr size_t kSmallShareBytes = 128 << 10;

// sums [32, 32] = up to 32 rows from `row` on, times a panel of tiles.
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

// Returns the panels that a thread takes at a time: few enough to stay in its cache while all rows are
// multiplied, and in so many shares that all threads are busy.
inline int panels_a_share(const PackedMatrix &matrix, int num_rows, int num_threads) {
    const size_t share_bytes = num_rows <= kRowPair ? kSmallShareBytes : kShareBytes;
    const size_t rounds = (matrix.num_bytes() - 1) / (num_threads * share_bytes) + 1;
    const int num_shares = static_cast<int>(rounds * num_threads);
    return (matrix.num_panels + num_shares - 1) / num_shares;
}

// multiply() for quantized weights: each panel is unpacked once for all rows; with few rows it is
// multiplied without unpacking.
template <typename Finish>
void multiply_quantized(const TiledRows &rows, int num_rows, const PackedMatrix &matrix,
                        int panels_a_share, int num_shares, Phase &phase, Finish finish) {
    static thread_local FewRows few;
    static thread_local Buffer<bf16> unpacked;
    alignas(64) float sums[kRowPair * kPanel];
    const bool are_few = can_multiply_few(matrix, num_rows);
    const bool is_ordered = matrix.order.empty();
    TiledRows own;
    const TiledRows &inputs = is_ordered ? rows : own;
    if (!are_few) unpacked.reserve(kPanel * matrix.depth);
    bool needs_rows = true;  // a thread without a share need not reorder or round rows
    const TileScope scope;
    phase.run(num_shares, [&](int share) {
        if (needs_rows && !is_ordered) own = reordered(rows, num_rows, matrix.order);
        if (needs_rows && are_few) few.assign(inputs, num_rows, matrix.depth);
        needs_rows = false;
        const int first = share * panels_a_share;
        const int end = std::min(first + panels_a_share, matrix.num_panels);
        for (int panel = first; panel < end; ++panel) {
            if (are_few) {
                few.multiply(matrix, panel, sums);
                finish(0, num_rows, panel, sums);
                continue;
            }
            unpack(matrix, panel, unpacked.get());
            for (int row = 0; row < num_rows; row += kRowPair) {
                const int count = std::min(kRowPair, num_rows - row);
                multiply_rows(inputs, row, count, unpacked.get(), matrix.num_steps, sums);
                finish(row, count, panel, sums);
            }
        }
    });
}

constexpr int kRowsRounded = 4;  // rows that a thread rounds to 8 bits at a time

// multiply() for weights and rows of 8 bits: first the rows are rounded, each by one thread.
template <typename Finish>
void multiply_rotated(const TiledRows &rows, int num_rows, const PackedMatrix &matrix,
                      int panels_a_share, int num_shares, Phase &phase, Finish finish) {
    alignas(64) int32_t products[kRowPair * kPanel];
    alignas(64) float sums[kRowPair * kPanel], column_scales[kPanel];
    const auto round = [&](int share) {
        const int end = std::min((share + 1) * kRowsRounded, num_rows);
        for (int row = share * kRowsRounded; row < end; ++row)
            rows.bytes.assign(row, rows.tiles(row));
    };
    const auto multiply_share = [&](int share) {
        const int first = share * panels_a_share;
        const int end = std::min(first + panels_a_share, matrix.num_panels);
        for (int row = 0; row < num_rows; row += kRowPair) {
            const int count = std::min(kRowPair, num_rows - row);
            for (int panel = first; panel < end; ++panel) {
                multiply_bytes({count, rows.bytes.num_tiles(), rows.bytes.tiles(row),
                                rows.bytes.tiles(row + kTileRows), matrix.blocks(panel, 0),
                                matrix.blocks(panel, 1), kAheadBytes},
                               products);
                matrix.load_column_scales(panel, column_scales);
                rows.bytes.scale(products, row, count, column_scales, static_cast<int>(matrix.zero),
                                 sums);
                finish(row, count, panel, sums);
            }
        }
    };
    const TileScope scope;
    phase.run((num_rows + kRowsRounded - 1) / kRowsRounded, round, num_shares, multiply_share);
}

// Multiplies the rows with the matrix; called by all threads.
//
// finish(first_row, num_rows, panel, sums): takes sums [num_rows, 32] of outputs [32 * panel, ...).
template <typename Finish>
void multiply(const TiledRows &rows, int num_rows, const PackedMatrix &matrix, int num_threads,
              Phase &phase, Finish finish) {
    const int panels = panels_a_share(matrix, num_rows, num_threads);
    const int num_shares = (matrix.num_panels + panels - 1) / panels;
    if (matrix.is_rotated) {
        multiply_rotated(rows, num_rows, matrix, panels, num_shares, phase, finish);
        return;
    }
    if (matrix.is_quantized()) {
        multiply_quantized(rows, num_rows, matrix, panels, num_shares, phase, finish);
        return;
    }
    alignas(64) float sums[kRowPair * kPanel];
    const TileScope scope;
    phase.run(num_shares, [&](int share) {
        const int first = share * panels, end = std::min(first + panels, matrix.num_panels);
        for (int row = 0; row < num_rows; row += kRowPair) {
            const int count = std::min(kRowPair, num_rows - row);
            for (int panel = first; panel < end; ++panel) {
                multiply_rows(rows, row, count, matrix.tiles(panel), matrix.num_steps, sums);
                finish(row, count, panel, sums);
            }
        }
    });
}

}  // namespace legato
