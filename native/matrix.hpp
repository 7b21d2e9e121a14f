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

constexpr int kPanel = 32;       // outputs that one thread computes at a time: two tiles
constexpr int kMaxRows = 512;    // rows whose sums are kept while the depth is walked through
constexpr int kDepthBlock = 288; // of a panel that stays in the first-level cache: 18 KiB

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

// sums [rows of `num_tiles` tiles, 32] (+)= rows * panel over `num_steps` tiles of depth.
template <int num_tiles, bool adds>
inline void multiply_tiles(const bf16 *rows, long row_bytes, const bf16 *panel, int num_steps,
                           float *sums) {
    constexpr int kRowBytes = kPanel * sizeof(float);
    if constexpr (adds) {
        _tile_loadd(0, sums, kRowBytes);
        _tile_loadd(1, sums + 16, kRowBytes);
        if constexpr (num_tiles == 2) {
            _tile_loadd(2, sums + 16 * kPanel, kRowBytes);
            _tile_loadd(3, sums + 16 * kPanel + 16, kRowBytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (num_tiles == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    const bf16 *lower = rows + 16 * (row_bytes / sizeof(bf16));
    for (int step = 0; step < num_steps; ++step) {
        _tile_loadd(6, panel, 64);
        _tile_loadd(7, panel + 512, 64);
        _tile_loadd(4, rows + step * kTileDepth, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (num_tiles == 2) {
            _tile_loadd(5, lower + step * kTileDepth, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        panel += 1024;
    }
    _tile_stored(0, sums, kRowBytes);
    _tile_stored(1, sums + 16, kRowBytes);
    if constexpr (num_tiles == 2) {
        _tile_stored(2, sums + 16 * kPanel, kRowBytes);
        _tile_stored(3, sums + 16 * kPanel + 16, kRowBytes);
    }
}

// One thread's share of rows [num_rows, depth] times the matrix, where `panels` hands out the
// panels to all threads. The rows lie `depth` apart and end in a multiple of 16 that may be read.
//
// finish(first_row, num_rows, panel, sums): takes sums [num_rows, 32] of outputs [32 * panel, ...).
template <typename Finish>
void multiply(const bf16 *rows, int num_rows, const PackedMatrix &matrix, WorkQueue &panels,
              Finish finish) {
    static thread_local const auto scratch = aligned_array<float>(kMaxRows * kPanel);
    float *const sums = scratch.get();
    const TileScope tiles;
    const long row_bytes = matrix.depth * sizeof(bf16);
    const int steps_a_block = kDepthBlock / kTileDepth;
    for (int index; (index = panels.take()) < matrix.num_panels;) {
        const bf16 *const panel = matrix.panel(index);
        for (int first = 0; first < num_rows; first += kMaxRows) {
            const int count = std::min(kMaxRows, num_rows - first);
            // Few rows read the panel once in any case, and then all of its depth in one go.
            const int block = count <= 32 ? matrix.num_steps : steps_a_block;
            for (int step = 0; step < matrix.num_steps; step += block) {
                const int num_steps = std::min(block, matrix.num_steps - step);
                const bf16 *const from = panel + step * 1024;
                for (int row = 0; row < count; row += 32) {
                    const bf16 *const at =
                        rows + static_cast<size_t>(first + row) * matrix.depth + step * kTileDepth;
                    float *const to = sums + row * kPanel;
                    const bool is_half = count - row <= 16;
                    if (step == 0) {
                        if (is_half) multiply_tiles<1, false>(at, row_bytes, from, num_steps, to);
                        else multiply_tiles<2, false>(at, row_bytes, from, num_steps, to);
                    } else {
                        if (is_half) multiply_tiles<1, true>(at, row_bytes, from, num_steps, to);
                        else multiply_tiles<2, true>(at, row_bytes, from, num_steps, to);
                    }
                    if (step + num_steps == matrix.num_steps)
                        finish(first + row, std::min(32, count - row), index, to);
                }
            }
        }
    }
}

}  // namespace legato
