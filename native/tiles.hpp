// Products of up to 32 rows with 32 columns, step by step of 32 values: what attention and matrices
// consist of.
#pragma once

#include "vector.hpp"

namespace legato {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;  // bfloat16 values in a tile's row
constexpr int kTileValues = kTileRows * kTileDepth;
constexpr long kTileRowBytes = kTileDepth * sizeof(bf16);  // 32 values, or a pair of 16 columns

// Where a step's operands begin: rows [0, 16) and [16, 32), of 32 values; and of columns [0, 16) and
// [16, 32) the 16 pairs of values, of all columns side by side. So many values `ahead` of the columns
// lie those that will be read next.
//
// Columns of bfloat16 values are multiplied with such rows, columns of int8 codes with rows of CodeRow.
template <typename Row, typename Column>
struct Operands {
    const Row *upper, *lower;
    const Column *left, *right;
    long ahead;
};

// How many rows and steps there are, and how far one row, pair and row of sums is from the next. Rows
// of CodeRow have scales, which are factors of their sums.
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
