// Products of up to 32 rows with 32 columns, in steps of 32 values. Attention and matrix products
// consist of them.
#pragma once

#include "vector.hpp"

namespace legato {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;  // bfloat16 values in a tile's row
constexpr int kTileValues = kTileRows * kTileDepth;
constexpr long kTileRowBytes = kTileDepth * sizeof(bf16);  // 32 values, or a pair of 16 columns

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

}  // namespace legato

#ifdef LEGATO_AMX
#include "tiles_amx.hpp"
#else
#include "tiles_avx.hpp"
#endif
