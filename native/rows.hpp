// Activations between matrix products.
#pragma once

#include "bytes.hpp"
#include "weights.hpp"

namespace legato {

constexpr int kRowPair = 32;  // rows multiplied at a time: two tiles

// Rows [rows, depth] in the order that strips read: tiles of 16 rows by 32 values, each contiguous, one
// row of tiles after the other. Rows are padded to whole pairs of tiles, which are zero at first. They
// may be deeper than a matrix that multiplies them.
class TiledRows {
public:
    TiledRows() = default;
    TiledRows(int num_rows, int depth)
        : bytes(num_rows, depth), depth_(depth), values_(aligned_array<bf16>(size(num_rows, depth))) {
        std::fill_n(values_.get(), size(num_rows, depth), bf16{0});
    }

    bf16 *at(int row, int column) const {
        return tiles(row) + column / kTileDepth * kTileValues + row % kTileRows * kTileDepth +
               column % kTileDepth;
    }

    // Returns the row of tiles that contains a row.
    bf16 *tiles(int row) const {
        return values_.get() + static_cast<size_t>(row / kTileRows) * kTileRows * depth_;
    }

    // The same rows in 8 bits, for weights that want them so. Memory that is never written costs nothing.
    ByteRows bytes;

private:
    static size_t size(int num_rows, int depth) {
        return static_cast<size_t>(num_rows + kRowPair - 1) / kRowPair * kRowPair * depth;
    }

    int depth_ = 0;
    std::unique_ptr<bf16[], Free> values_;
};

}  // namespace legato
