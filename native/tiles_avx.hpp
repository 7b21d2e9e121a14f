// Strips as in tiles_amx.hpp, computed in vector registers.
#pragma once

#include <type_traits>

#include "codes.hpp"
#include "memory.hpp"
#include "tiles.hpp"

namespace legato {

// Rows of a block, and halves of the columns, such that all sums fit into registers. With few rows a
// block needs more columns: an addition to a sum waits for the one before it.
#ifdef LEGATO_AVX512
constexpr int kBlockRows = 8;
constexpr int block_halves(int) { return 2; }
#else
constexpr int kBlockRows = 6;
constexpr int block_halves(int num_rows) { return num_rows > 2 ? 1 : 2; }
#endif

// Nothing to prepare without AMX.
class TileScope {
public:
    TileScope() {}
    TileScope(const TileScope &) = delete;
};

// Type of rows that are multiplied with codes: 256 such products fit into 32 bits.
using CodeRow = int16_t;

// Rounds `count` values, a multiple of 16, to a row, and returns its scale.
inline float round_row(const float *values, int count, CodeRow *row) {
    return round_to_codes(values, count, row);
}

// Returns the start of a row in a step.
template <typename Row, typename Column>
inline const Row *row_of(const Operands<Row, Column> &operands, int row, long row_values) {
    return row < kTileRows ? operands.upper + row * row_values
                           : operands.lower + (row - kTileRows) * row_values;
}

// Rows [first_row, first_row + kBlockRows) of a strip, ready to multiply. They may be in two tiles.
template <typename Row>
class PlainRows {
public:
    template <typename OperandsAt>
    PlainRows(const StripShape &shape, int first_row, int, OperandsAt, Arena)
        : row_values_(shape.row_bytes / sizeof(Row)), first_row_(first_row) {}

    template <typename Column>
    const Row *at(const Operands<Row, Column> &operands, int, int row) const {
        return row_of(operands, first_row_ + row, row_values_);
    }

private:
    const long row_values_;
    const int first_row_;
};

#ifdef LEGATO_AVX512
template <typename Row>
using BlockRows = PlainRows<Row>;
constexpr size_t strip_bytes(long) { return 0; }
#else
// Rows of bfloat16, widened once for all columns: AVX2 has no instruction that multiplies bfloat16.
class WideRows {
public:
    template <typename OperandsAt>
    WideRows(const StripShape &shape, int first_row, int num_rows, OperandsAt at, Arena memory)
        : row_values_(shape.num_steps * kTileDepth),
          values_(memory.take<float>(kBlockRows * row_values_)) {
        const long row_values = shape.row_bytes / sizeof(bf16);
        for (int step = 0; step < shape.num_steps; ++step) {
            const auto operands = at(step);
            float *to = values_ + step * kTileDepth;
            for (int row = 0; row < num_rows; ++row, to += row_values_) {
                const bf16 *const from = row_of(operands, first_row + row, row_values);
                for (int i = 0; i < kTileDepth; i += 16) store(to + i, load_bf16(from + i));
            }
        }
    }

    const float *at(const Operands<bf16, bf16> &, int step, int row) const {
        return values_ + row * row_values_ + step * kTileDepth;
    }

private:
    const long row_values_;
    float *const values_;
};

template <typename Row>
using BlockRows = std::conditional_t<std::is_same_v<Row, bf16>, WideRows, PlainRows<Row>>;
// Bytes of memory that multiply_strip() takes for rows of bfloat16.
constexpr size_t strip_bytes(long num_steps) {
    return Arena::bytes<float>(kBlockRows * num_steps * kTileDepth);
}
#endif

// Initial and final values of sums of products.
template <bool adds>
inline Floats first_total(const bf16 *, const float *sums) {
    return adds ? load(sums) : fill(0.0f);
}
template <bool adds>
inline Ints first_total(const int8_t *, const float *) {
    return fill(int32_t{0});
}
template <bool adds>
inline Floats final_sum(Floats total, const StripShape &, int, const float *) {
    return total;
}
template <bool adds>
inline Floats final_sum(Ints total, const StripShape &shape, int row, const float *sums) {
    const Floats scaled = to_floats(total) * fill(shape.row_scales[row]);
    return adds ? load(sums) + scaled : scaled;
}

// Adds one part of the products of each row's pair of values with the columns' pairs.
template <int part, int num_rows, int halves, typename Total, typename Column, typename PairOf>
inline void add_part(Total (&totals)[num_rows][halves], Column *const (&columns)[halves],
                     PairOf pair_of) {
    decltype(load_pairs<part>(columns[0])) factors[halves];
    for (int half = 0; half < halves; ++half) factors[half] = load_pairs<part>(columns[half]);
#pragma GCC unroll 8  // otherwise the sums are kept in memory
    for (int row = 0; row < num_rows; ++row) {
        const auto values = fill_pairs<part>(pair_of(row));
        for (int half = 0; half < halves; ++half)
            totals[row][half] = add_products(totals[row][half], values, factors[half]);
    }
}

// multiply_strip() for a block's rows and some halves of the columns.
//
// The first rows prefetch the columns ahead. With few rows most of the time is waiting for memory:
// processors prefetch by themselves, but no further than to the page's end.
template <bool adds, int num_rows, typename Row, typename Column, typename OperandsAt>
inline void multiply_block(const StripShape &shape, const BlockRows<Row> &rows, int first_row,
                           int first_half, OperandsAt at, float *sums) {
    constexpr int kHalves = block_halves(num_rows);
    const long pair_values = shape.pair_bytes / sizeof(Column);
    const long row_sums = shape.sum_bytes / sizeof(float);
    float *const block_sums = sums + first_row * row_sums + 16 * first_half;
    const Column *const kind = nullptr;
    decltype(first_total<adds>(kind, sums)) totals[num_rows][kHalves];
    for (int row = 0; row < num_rows; ++row)
        for (int half = 0; half < kHalves; ++half)
            totals[row][half] = first_total<adds>(kind, block_sums + row * row_sums + 16 * half);
    for (int step = 0; step < shape.num_steps; ++step) {
        const Operands<Row, Column> operands = at(step);
        decltype(rows.at(operands, step, 0)) values[num_rows];
        for (int row = 0; row < num_rows; ++row) values[row] = rows.at(operands, step, row);
        for (int pair = 0; pair < kTileDepth / 2; ++pair) {
            const Column *columns[kHalves];
            for (int half = 0; half < kHalves; ++half) {
                columns[half] =
                    (first_half + half ? operands.right : operands.left) + pair * pair_values;
                if (first_row == 0) prefetch_twice(columns[half], operands.ahead);
            }
            const auto pair_of = [&](int row) { return values[row] + 2 * pair; };
            add_part<0>(totals, columns, pair_of);
            if constexpr (kPairParts<Column> == 2) add_part<1>(totals, columns, pair_of);
        }
    }
    for (int row = 0; row < num_rows; ++row)
        for (int half = 0; half < kHalves; ++half) {
            float *const to = block_sums + row * row_sums + 16 * half;
            store(to, final_sum<adds>(totals[row][half], shape, first_row + row, to));
        }
}

template <typename Row, typename Column>
Row row_type(const Operands<Row, Column> &);
template <typename Row, typename Column>
Column column_type(const Operands<Row, Column> &);

template <bool adds, int num_rows, typename OperandsAt>
inline void multiply_halves(const StripShape &shape, int first_row, OperandsAt at, float *sums,
                            Arena memory) {
    using Row = decltype(row_type(at(0)));
    using Column = decltype(column_type(at(0)));
    const BlockRows<Row> rows(shape, first_row, num_rows, at, memory);
    for (int half = 0; half < 2; half += block_halves(num_rows))
        multiply_block<adds, num_rows, Row, Column>(shape, rows, first_row, half, at, sums);
}

// multiply_strip() for `count` rows, at most a block's.
template <bool adds, typename OperandsAt, int num_rows = kBlockRows>
inline void multiply_some(const StripShape &shape, int first_row, int count, OperandsAt at,
                          float *sums, Arena memory) {
    if (count == num_rows) multiply_halves<adds, num_rows>(shape, first_row, at, sums, memory);
    else if constexpr (num_rows > 1)
        multiply_some<adds, OperandsAt, num_rows - 1>(shape, first_row, count, at, sums, memory);
}

// sums [num_rows, 32] = the rows times the columns, or += if `adds`; at(step) returns the operands.
//
// Blocks are equally large: a small block takes longer than its rows would in other blocks.
template <bool adds, typename OperandsAt>
inline void multiply_strip(const StripShape &shape, OperandsAt at, float *sums, Arena memory) {
    const int num_blocks = (shape.num_rows + kBlockRows - 1) / kBlockRows;
    for (int block = 0, row = 0; block < num_blocks; ++block) {
        const int end = shape.num_rows * (block + 1) / num_blocks;
        multiply_some<adds>(shape, row, end - row, at, sums, memory);
        row = end;
    }
}

// Adds one part of the products of each row's 4 codes with the columns' sets of 4.
template <int part, int num_rows, int halves>
inline void add_sets(Ints (&totals)[num_rows][halves], const RowCode *const (&rows)[num_rows],
                     const uint8_t *const (&columns)[halves]) {
    decltype(load_set<part>(columns[0])) factors[halves];
    for (int half = 0; half < halves; ++half) factors[half] = load_set<part>(columns[half]);
#pragma GCC unroll 8  // otherwise the sums are kept in memory
    for (int row = 0; row < num_rows; ++row) {
        const auto codes = fill_set<part>(rows[row]);
        for (int half = 0; half < halves; ++half)
            totals[row][half] = add_set(totals[row][half], factors[half], codes);
    }
}

// multiply_bytes() for a block's rows and some halves of the columns.
template <int num_rows>
inline void multiply_byte_block(const ByteStrip &strip, int first_row, int first_half,
                                int32_t *products) {
    constexpr int kHalves = block_halves(num_rows);
    Ints totals[num_rows][kHalves];
    for (auto &row : totals)
        for (auto &total : row) total = fill(int32_t{0});
    for (long tile = 0; tile < strip.num_tiles; ++tile) {
        const RowCode *rows[num_rows];
        for (int i = 0; i < num_rows; ++i) {
            const int row = first_row + i;
            rows[i] = (row < kTileRows ? strip.upper : strip.lower) + tile * kByteTileValues +
                      row % kTileRows * kByteTileDepth;
        }
        const uint8_t *columns[kHalves];
        for (int half = 0; half < kHalves; ++half)
            columns[half] = (first_half + half ? strip.right : strip.left) + tile * kByteTileValues;
        for (int set = 0; set < kTileRows; ++set) {
            if (first_row == 0)
                for (const auto *column : columns) prefetch_twice(column, strip.ahead);
            add_sets<0>(totals, rows, columns);
            if constexpr (kSetParts == 2) add_sets<1>(totals, rows, columns);
            for (auto &row : rows) row += 4;
            for (auto &column : columns) column += 64;
        }
    }
    for (int row = 0; row < num_rows; ++row)
        for (int half = 0; half < kHalves; ++half)
            store(products + 32 * (first_row + row) + 16 * (first_half + half), totals[row][half]);
}

// multiply_bytes() for `count` rows, at most a block's.
template <int num_rows = kBlockRows>
inline void multiply_byte_rows(const ByteStrip &strip, int first_row, int count, int32_t *products) {
    if (count == num_rows) {
        for (int half = 0; half < 2; half += block_halves(num_rows))
            multiply_byte_block<num_rows>(strip, first_row, half, products);
    } else if constexpr (num_rows > 1) {
        multiply_byte_rows<num_rows - 1>(strip, first_row, count, products);
    }
}

// products [num_rows, 32] = the rows times the columns, in equally large blocks as multiply_strip().
inline void multiply_bytes(const ByteStrip &strip, int32_t *products) {
    const int num_blocks = (strip.num_rows + kBlockRows - 1) / kBlockRows;
    for (int block = 0, row = 0; block < num_blocks; ++block) {
        const int end = strip.num_rows * (block + 1) / num_blocks;
        multiply_byte_rows(strip, row, end - row, products);
        row = end;
    }
}

}  // namespace legato
