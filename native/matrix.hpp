// Products of bfloat16 rows with a weight matrix that was laid out for AMX once, after loading.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "amx.hpp"
#include "thread_pool.hpp"

namespace legato {

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};

// Memory at a cache line's start, which is not initialized.
template <typename T>
std::unique_ptr<T[], Free> aligned_array(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    void *memory = std::aligned_alloc(64, std::max<size_t>(bytes, 64));
    if (memory == nullptr) throw std::bad_alloc();
    return std::unique_ptr<T[], Free>(static_cast<T *>(memory));
}

constexpr int kRowPair = 32;           // rows that are multiplied at a time: two tiles
constexpr int kPanel = 32;             // outputs that are computed at a time: two tiles
constexpr int kTileValues = kTileRows * kTileDepth;
constexpr size_t kGroupBytes = 512 << 10;  // of panels that stay in the second-level cache

// Rows [rows, depth] as AMX reads them: tiles of 16 rows by 32 values, each in one piece, one row of
// tiles after the other. There are always whole pairs of tiles, of zeros at first.
class TiledRows {
public:
    TiledRows() = default;
    TiledRows(int num_rows, int depth)
        : depth_(depth), values_(aligned_array<bf16>(size(num_rows, depth))) {
        std::fill_n(values_.get(), size(num_rows, depth), bf16{0});
    }

    bf16 *at(int row, int column) const {
        return tiles(row) + column / kTileDepth * kTileValues + row % kTileRows * kTileDepth +
               column % kTileDepth;
    }

    // The row of tiles that a row lies in.
    bf16 *tiles(int row) const {
        return values_.get() + static_cast<size_t>(row / kTileRows) * kTileRows * depth_;
    }

private:
    static size_t size(int num_rows, int depth) {
        return static_cast<size_t>(num_rows + kRowPair - 1) / kRowPair * kRowPair * depth;
    }

    int depth_ = 0;
    std::unique_ptr<bf16[], Free> values_;
};

// A weight matrix [outputs, depth] as panels of 32 outputs, each a row of pairs of tiles: within a
// tile, row r holds values 2r and 2r + 1 of 16 outputs side by side.
class PackedMatrix {
public:
    // weights: rows of `depth` values; output i is row(i). Outputs are padded to whole panels.
    template <typename Row>
    PackedMatrix(int num_outputs, int depth, Row row)
        : num_outputs(num_outputs),
          depth(depth),
          num_panels((num_outputs + kPanel - 1) / kPanel),
          num_steps(depth / kTileDepth),
          tiles_(aligned_array<bf16>(static_cast<size_t>(num_panels) * kPanel * depth)) {
        bf16 *to = tiles_.get();
        for (int panel = 0; panel < num_panels; ++panel)
            for (int step = 0; step < num_steps; ++step)
                for (int half = 0; half < 2; ++half)
                    for (int pair = 0; pair < kTileRows; ++pair)
                        for (int column = 0; column < 16; ++column) {
                            const int output = panel * kPanel + half * 16 + column;
                            const bf16 *from = output < num_outputs ? row(output) : nullptr;
                            for (int i = 0; i < 2; ++i)
                                *to++ = from ? from[step * kTileDepth + 2 * pair + i] : 0;
                        }
    }

    const bf16 *panel(int index) const {
        return tiles_.get() + static_cast<size_t>(index) * kPanel * depth;
    }

    const int num_outputs, depth, num_panels, num_steps;

private:
    std::unique_ptr<bf16[], Free> tiles_;
};

// sums [32, 32] = a pair of rows of tiles, or the upper one alone, times a panel.
template <bool is_pair>
inline void multiply_tiles(const bf16 *upper, const bf16 *lower, const bf16 *panel, int num_steps,
                           float *sums) {
    constexpr int kRowBytes = kPanel * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < num_steps; ++step) {
        _tile_loadd(6, panel, 64);
        _tile_loadd(4, upper, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + kTileValues, 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (is_pair) {
            _tile_loadd(5, lower, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        upper += kTileValues;
        lower += kTileValues;
        panel += 2 * kTileValues;
    }
    _tile_stored(0, sums, kRowBytes);
    _tile_stored(1, sums + 16, kRowBytes);
    if constexpr (is_pair) {
        _tile_stored(2, sums + 16 * kPanel, kRowBytes);
        _tile_stored(3, sums + 16 * kPanel + 16, kRowBytes);
    }
}

// Panels that a thread takes at a time: what its cache holds while all rows pass by, and as many
// such groups as keep all threads busy.
inline int panels_a_group(const PackedMatrix &matrix, int num_threads) {
    const size_t panel_bytes = static_cast<size_t>(kPanel) * matrix.depth * sizeof(bf16);
    const size_t rounds = (matrix.num_panels * panel_bytes - 1) / (num_threads * kGroupBytes) + 1;
    const int num_groups = static_cast<int>(rounds * num_threads);
    return (matrix.num_panels + num_groups - 1) / num_groups;
}

// One thread's share of the rows times the matrix, where `groups` hands out groups of panels to all
// threads.
//
// finish(first_row, num_rows, panel, sums): takes sums [num_rows, 32] of outputs [32 * panel, ...).
template <typename Finish>
void multiply(const TiledRows &rows, int num_rows, const PackedMatrix &matrix, int num_threads,
              WorkQueue &groups, Finish finish) {
    alignas(64) float sums[kRowPair * kPanel];
    const TileScope scope;
    const int group = panels_a_group(matrix, num_threads);
    for (int first; (first = groups.take() * group) < matrix.num_panels;) {
        const int end = std::min(first + group, matrix.num_panels);
        for (int row = 0; row < num_rows; row += kRowPair) {
            const int count = std::min(kRowPair, num_rows - row);
            const auto multiply_panel =
                count > kTileRows ? multiply_tiles<true> : multiply_tiles<false>;
            for (int panel = first; panel < end; ++panel) {
                multiply_panel(rows.tiles(row), rows.tiles(row + kTileRows), matrix.panel(panel),
                               matrix.num_steps, sums);
                finish(row, count, panel, sums);
            }
        }
    }
}

}  // namespace legato
