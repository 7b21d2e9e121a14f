// Strips as tiles_amx.hpp has them, in vector registers.
#pragma once

#include "memory.hpp"
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

// Where a row of a step begins.
inline const bf16 *row_of(const Operands &operands, int row, long row_values) {
    return row < kTileRows ? operands.upper + row * row_values
                           : operands.lower + (row - kTileRows) * row_values;
}

// Rows [first_row, first_row + kBlockRows) of a strip, as they are multiplied.
#ifdef __AVX512F__
class BlockRows {
public:
    template <typename OperandsAt>
    BlockRows(const StripShape &shape, int first_row, int, OperandsAt)
        : row_values_(shape.row_bytes / sizeof(bf16)), first_row_(first_row) {}

    const bf16 *at(const Operands &operands, int, int row) const {
        return row_of(operands, first_row_, row_values_) + row * row_values_;
    }

private:
    const long row_values_;
    const int first_row_;
};
#else
// Widened once for all columns: there is no instruction that multiplies bfloat16.
class BlockRows {
public:
    template <typename OperandsAt>
    BlockRows(const StripShape &shape, int first_row, int num_rows, OperandsAt at)
        : row_values_(shape.num_steps * kTileDepth) {
        static thread_local Buffer<float> room;
        room.reserve(kBlockRows * row_values_);
        values_ = room.get();
        const long row_values = shape.row_bytes / sizeof(bf16);
        for (int step = 0; step < shape.num_steps; ++step) {
            const Operands operands = at(step);
            float *to = values_ + step * kTileDepth;
            for (int row = 0; row < num_rows; ++row, to += row_values_) {
                const bf16 *const from = row_of(operands, first_row + row, row_values);
                for (int i = 0; i < kTileDepth; i += 16) store(to + i, load_bf16(from + i));
            }
        }
    }

    const float *at(const Operands &, int step, int row) const {
        return values_ + row * row_values_ + step * kTileDepth;
    }

private:
    const long row_values_;
    float *values_;
};
#endif

// As multiply_strip(), of a block's rows and some halves of the columns.
//
// The first rows bring near what lies ahead. With few of them the time goes into waiting for memory:
// processors fetch ahead by themselves, but no further than to the page's end.
template <bool adds, int num_rows, typename OperandsAt>
inline void multiply_block(const StripShape &shape, const BlockRows &rows, int first_row,
                           int first_half, OperandsAt at, float *sums) {
    const long pair_values = shape.pair_bytes / sizeof(bf16);
    const long row_sums = shape.sum_bytes / sizeof(float);
    float *const block_sums = sums + first_row * row_sums + 16 * first_half;
    Floats totals[num_rows][kBlockHalves];
    for (int row = 0; row < num_rows; ++row)
        for (int half = 0; half < kBlockHalves; ++half)
            totals[row][half] = adds ? load(block_sums + row * row_sums + 16 * half) : fill(0.0f);
    for (int step = 0; step < shape.num_steps; ++step) {
        const Operands operands = at(step);
        for (int pair = 0; pair < kTileDepth / 2; ++pair) {
            Pairs columns[kBlockHalves];
            for (int half = 0; half < kBlockHalves; ++half) {
                const bf16 *const from =
                    (first_half + half ? operands.right : operands.left) + pair * pair_values;
                if (first_row == 0) prefetch(from + operands.ahead);
                columns[half] = load_pairs(from);
            }
#pragma GCC unroll 8  // else sums are kept in memory
            for (int row = 0; row < num_rows; ++row) {
                const Pairs values = fill_pairs(rows.at(operands, step, row) + 2 * pair);
                for (int half = 0; half < kBlockHalves; ++half)
                    totals[row][half] = add_products(totals[row][half], values, columns[half]);
            }
        }
    }
    for (int row = 0; row < num_rows; ++row)
        for (int half = 0; half < kBlockHalves; ++half)
            store(block_sums + row * row_sums + 16 * half, totals[row][half]);
}

template <bool adds, int num_rows, typename OperandsAt>
inline void multiply_halves(const StripShape &shape, int first_row, OperandsAt at, float *sums) {
    const BlockRows rows(shape, first_row, num_rows, at);
    for (int half = 0; half < 2; half += kBlockHalves)
        multiply_block<adds, num_rows>(shape, rows, first_row, half, at, sums);
}

// Of fewer rows than a block.
template <bool adds, int num_rows, typename OperandsAt>
inline void multiply_rest(const StripShape &shape, int first_row, OperandsAt at, float *sums) {
    if constexpr (num_rows > 0) {
        if (shape.num_rows - first_row == num_rows)
            multiply_halves<adds, num_rows>(shape, first_row, at, sums);
        else multiply_rest<adds, num_rows - 1>(shape, first_row, at, sums);
    }
}

// sums [num_rows, 32] = the rows times the columns, or that added; at(step) has the operands.
template <bool adds, typename OperandsAt>
inline void multiply_strip(const StripShape &shape, OperandsAt at, float *sums) {
    int row = 0;
    for (; row + kBlockRows <= shape.num_rows; row += kBlockRows)
        multiply_halves<adds, kBlockRows>(shape, row, at, sums);
    multiply_rest<adds, kBlockRows - 1>(shape, row, at, sums);
}

}  // namespace legato
