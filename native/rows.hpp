// Activations between matrix products.
#pragma once

#include "bytes.hpp"
#include "weights.hpp"

namespace legato {

constexpr int kRowPair = 32;  // rows multiplied at a time: two tiles

// Rows [rows, depth] in the order that strips read: tiles of 16 rows by 32 values, each contiguous, one
// row of tiles after the other. Rows are padded to whole pairs of tiles, which are zero at first. They
// may be deeper than a matrix that multiplies them.
class RowTiles {
public:
    RowTiles() = default;
    // values: size() uninitialized ones, which someone else frees.
    RowTiles(int num_rows, int depth, bf16 *values) : depth_(depth), values_(values) {
        std::fill_n(values, size(num_rows, depth), bf16{0});
    }

    static size_t size(int num_rows, int depth) {
        return static_cast<size_t>(num_rows + kRowPair - 1) / kRowPair * kRowPair * depth;
    }

    bf16 *at(int row, int column) const {
        return tiles(row) + column / kTileDepth * kTileValues + row % kTileRows * kTileDepth +
               column % kTileDepth;
    }

    // Returns the row of tiles that contains a row.
    bf16 *tiles(int row) const {
        return values_ + static_cast<size_t>(row / kTileRows) * kTileRows * depth_;
    }

private:
    int depth_ = 0;
    bf16 *values_ = nullptr;
};

// Rows that all threads share, in memory of their own.
class TiledRows : public RowTiles {
public:
    TiledRows() = default;
    TiledRows(int num_rows, int depth)
        : TiledRows(num_rows, depth, aligned_array<bf16>(size(num_rows, depth))) {}

    // The same rows in 8 bits, for weights that want them so. Memory that is never written costs nothing.
    ByteRows bytes;

private:
    TiledRows(int num_rows, int depth, std::unique_ptr<bf16[], Free> memory)
        : RowTiles(num_rows, depth, memory.get()), bytes(num_rows, depth), memory_(std::move(memory)) {}

    std::unique_ptr<bf16[], Free> memory_;
};

}  // namespace legato
