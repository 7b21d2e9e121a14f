// Strips as tiles_amx.hpp has them, in vector registers.
#pragma once

#include "tiles.hpp"

namespace legato {

// Rows, and halves of the columns, whose sums all fit in registers.
#ifdef __AVX512F__
constexpr int kBlockRows = 8, kBlockHalves = 2;
#else
constexpr int kBlockRows = 4, kBlockHalves = 1;
#endif

// There is nothing to prepare.
class TileScope {
public:
    TileScope() {}
    TileScope(const TileScope &) = delete;
};

// As multiply_strip(), of rows [first_row, first_row + num_rows) and some halves of the columns.
template <bool adds, int num_rows, typename OperandsAt>
inline void multiply_block(const StripShape &shape, int first_row, int first_half, OperandsAt at,
                           float *sums) {
    const long row_values = shape.row_bytes / sizeof(bf16);
    const long pair_values = shape.pair_bytes / sizeof(bf16);
    const long row_sums = shape.sum_bytes / sizeof(float);
    float *const block_sums = sums + first_row * row_sums + 16 * first_half;
    Floats totals[num_rows][kBlockHalves];
    for (int row = 0; row < num_rows; ++row)
        for (int half = 0; half < kBlockHalves; ++half)
            totals[row][half] = adds ? load(block_sums + row * row_sums + 16 * half) : fill(0.0f);
    for (int step = 0; step < shape.num_steps; ++step) {
        const Operands operands = at(step);
        const bf16 *const rows = first_row < kTileRows
                                     ? operands.upper + first_row * row_values
                                     : operands.lower + (first_row - kTileRows) * row_values;
        for (int pair = 0; pair < kTileDepth / 2; ++pair) {
            Pairs columns[kBlockHalves];
            for (int half = 0; half < kBlockHalves; ++half)
                columns[half] = load_pairs((first_half + half ? operands.right : operands.left) +
                                           pair * pair_values);
            for (int row = 0; row < num_rows; ++row) {
                const Pairs values = fill_pairs(rows + row * row_values + 2 * pair);
                for (int half = 0; half < kBlockHalves; ++half)
                    totals[row][half] = add_products(totals[row][half], values, columns[half]);
            }
        }
    }
    for (int row = 0; row < num_rows; ++row)
        for (int half = 0; half < kBlockHalves; ++half)
            store(block_sums + row * row_sums + 16 * half, totals[row][half]);
}

// Of fewer rows than a block.
template <bool adds, int num_rows, typename OperandsAt>
inline void multiply_rest(const StripShape &shape, int first_row, int first_half, OperandsAt at,
                          float *sums) {
    if constexpr (num_rows > 0) {
        if (shape.num_rows - first_row == num_rows)
            multiply_block<adds, num_rows>(shape, first_row, first_half, at, sums);
        else multiply_rest<adds, num_rows - 1>(shape, first_row, first_half, at, sums);
    }
}

// sums [num_rows, 32] = the rows times the columns, or that added; at(step) has the operands.
template <bool adds, typename OperandsAt>
inline void multiply_strip(const StripShape &shape, OperandsAt at, float *sums) {
    for (int half = 0; half < 2; half += kBlockHalves) {
        int row = 0;
        for (; row + kBlockRows <= shape.num_rows; row += kBlockRows)
            multiply_block<adds, kBlockRows>(shape, row, half, at, sums);
        multiply_rest<adds, kBlockRows - 1>(shape, row, half, at, sums);
    }
}

}  // namespace legato
