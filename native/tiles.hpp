// Products of up to 32 rows with 32 columns, in steps of 32 values. Attention and matrix products
// consist of them.
#pragma once

#include "vector.hpp"

namespace legato {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;  // bfloat16 values in a tile's row
constexpr int kTileValues = kTileRows * kTileDepth;
constexpr long kTileRowBytes = kTileDepth * sizeof(bf16);  // 32 values, or a pair of 16 columns
constexpr int kByteTileDepth = 64;  // 8-bit codes in a tile's row
constexpr int kByteTileValues = kTileRows * kByteTileDepth;

// The operands of a step: rows [0, 16) and [16, 32), of 32 values each; and columns [0, 16) and
// [16, 32), as 16 pairs of values, each pair of all columns side by side. The columns that are read next
// are `ahead` values after these.
//
// Columns of bfloat16 are multiplied with rows of bfloat16, columns of int8 codes with rows of CodeRow.
template <typename Row, typename Column>
struct Operands {
    const Row *upper, *lower;
    const Column *left, *right;
    long ahead;
};

// Numbers of rows and steps, and strides in bytes of rows, pairs and rows of sums. Rows of CodeRow have
// scales, which are multiplied into their sums.
struct StripShape {
    int num_rows, num_steps;
    long row_bytes, pair_bytes, sum_bytes;
    const float *row_scales = nullptr;
};

// Up to 32 rows of RowCode, and 32 columns of unsigned 8-bit codes, in tiles. A tile of columns is 16 sets
// of 4 codes of 16 columns side by side.
struct ByteStrip {
    int num_rows, num_tiles;
    const RowCode *upper, *lower;
    const uint8_t *left, *right;
    long ahead;  // bytes from these columns to those that are read next
};

}  // namespace legato

#ifdef LEGATO_AMX
#include "tiles_amx.hpp"
#else
#include "tiles_avx.hpp"
#endif
