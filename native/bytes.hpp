// Rows rounded to 8 bits with one scale each, for weights that are 8-bit integers with one scale an output.
#pragma once

#include "memory.hpp"
#include "tiles.hpp"

namespace legato {

constexpr float kMostCode = 127.0f;
constexpr float kAsGoodAsZero = 1e-30f;  // kMostCode over this is finite

// Codes of rows [rows, depth] in tiles of 16 rows by 64 values, each contiguous, one row of tiles after
// the other. A matrix of less depth takes the first tiles; values beyond its depth are zero in its last
// one. All threads share them. Sums of products of up to 66,000 values fit into 32 bits.
//
// Values are rotated before they are rounded: a few columns of activations are much larger than all
// others, and one scale for a whole row would leave these others a few codes. A Hadamard matrix spreads
// each value over as many as 16 (Ashkboos et al., 2024, arXiv:2404.00456). Weights are rotated likewise,
// which leaves their products as they were.
class ByteRows {
public:
    ByteRows() = default;
    ByteRows(int num_rows, int depth);

    // Rotates and rounds the first `depth` values of a row of bfloat16, given as tiles of 16 rows by 32.
    void assign(int row, const bf16 *tiles, int depth, Arena memory) const;
    static size_t assign_bytes(int depth) {
        return Arena::bytes<float>(num_tiles(depth) * kByteTileDepth);
    }

    // Tiles of so many values of a row.
    static int num_tiles(int depth) { return (depth + kByteTileDepth - 1) / kByteTileDepth; }
    const RowCode *tiles(int row) const {
        return codes_.get() + static_cast<size_t>(row / kTileRows) * num_tiles_ * kByteTileValues;
    }

    // Turns products [count, 32] of rows from `row` on with a panel into sums. column_scales: [32];
    // zero: the code of weight 0.
    void scale(const int32_t *products, int row, int count, const float *column_scales, int zero,
               float *sums) const;

private:
    int num_tiles_ = 0;  // of a row
    std::unique_ptr<RowCode[], Free> codes_;
    std::unique_ptr<float[], Free> scales_;     // NaN for rows with values that are not finite
    std::unique_ptr<int32_t[], Free> totals_;  // sums of a row's codes
};

}  // namespace legato
