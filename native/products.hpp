// Products of small float32 matrices, by one thread: what recurrences compute of 64 tokens at a time.
#pragma once

#include <algorithm>

#include "activations.hpp"

namespace legato {

constexpr int kPiece = 64;  // most rows of a product
constexpr int kLargestPart = 256;  // most columns of a row, or rows of a state

#ifdef LEGATO_AVX512
constexpr int kProductRows = 8;  // as many sums as hide the latency of one
#else
constexpr int kProductRows = 4;
#endif

// A matrix in memory, or its transpose.
struct Matrix {
    const float *values;
    int row_stride, column_stride;

    const float *at(int row, int column) const {
        return values + row * row_stride + column * column_stride;
    }
};

inline Matrix plain(const float *values, int stride) { return {values, stride, 1}; }
inline Matrix transposed(const float *values, int stride) { return {values, 1, stride}; }

// left [num_rows, depth] times right [depth, num_columns].
struct Product {
    Matrix left, right;
    int num_rows, num_columns, depth;
    bool is_lower_left = false;  // left is zero above its diagonal
    bool is_lower = false;       // results above the diagonal's blocks of 16 columns are not needed
};

// Copies 16 columns from `column` on, those beyond the last as zeros.
inline void copy_columns(const Matrix &from, int num_rows, int column, int num_columns, float *to) {
    const int count = std::min(16, num_columns - column);
    if (from.column_stride == 1 && count == 16) {
        for (int row = 0; row < num_rows; ++row) store(to + 16 * row, load(from.at(row, column)));
        return;
    }
    for (int row = 0; row < num_rows; ++row)
        for (int i = 0; i < 16; ++i) to[16 * row + i] = i < count ? *from.at(row, column + i) : 0.0f;
}

// The rows of a block; those beyond the last stand for the last, and their results are not used.
struct BlockIndices {
    BlockIndices(int first, int num_rows) {
        for (int i = 0; i < kProductRows; ++i) index[i] = std::min(first + i, num_rows - 1);
    }
    int index[kProductRows];
};

// Adds left [rows, depth] times columns [depth, 16].
inline void add_block(Floats (&sums)[kProductRows], const Matrix &left, const BlockIndices &rows,
                         const float *columns, int depth) {
    const float *from[kProductRows];
    for (int i = 0; i < kProductRows; ++i) from[i] = left.at(rows.index[i], 0);
    for (int step = 0; step < depth; ++step) {
        const Floats factors = load(columns + 16 * step);
        const int at = step * left.column_stride;
#pragma GCC unroll 8  // otherwise the sums are kept in memory
        for (int i = 0; i < kProductRows; ++i) sums[i] = fma(fill(from[i][at]), factors, sums[i]);
    }
}

// Calls end(row, column, 16 results) with begin(row, column) plus the products. Every row's sums have the
// same order, whatever the number of rows is.
template <typename Begin, typename End>
void multiply(const Product &product, Begin begin, End end) {
    alignas(64) float columns[16 * kLargestPart];
    const int num_rows = product.num_rows;
    for (int column = 0; column < product.num_columns; column += 16) {
        copy_columns(product.right, product.depth, column, product.num_columns, columns);
        for (int row = product.is_lower ? column : 0; row < num_rows; row += kProductRows) {
            const BlockIndices rows(row, num_rows);
            Floats sums[kProductRows];
            for (int i = 0; i < kProductRows; ++i) sums[i] = begin(rows.index[i], column);
            const int depth = product.is_lower_left ? std::min(row + kProductRows, product.depth)
                                                    : product.depth;
            add_block(sums, product.left, rows, columns, depth);
            for (int i = 0; i < kProductRows && row + i < num_rows; ++i)
                end(row + i, column, sums[i]);
        }
    }
}

template <typename End>
void multiply(const Product &product, End end) {
    multiply(product, [](int, int) { return fill(0.0f); }, end);
}

// Solves (I - left) X = X', where X' [num_rows, num_columns] is in `values`, which become X. Of left, what
// is below the diagonal is read.
inline void solve(const Matrix &left, int num_rows, int num_columns, float *values, int stride) {
    alignas(64) float solved[16 * kPiece];
    for (int column = 0; column < num_columns; column += 16)
        for (int row = 0; row < num_rows; row += kProductRows) {
            const BlockIndices rows(row, num_rows);
            Floats sums[kProductRows];
            for (int i = 0; i < kProductRows; ++i)
                sums[i] = load(values + rows.index[i] * stride + column);
            add_block(sums, left, rows, solved, row);
            for (int i = 1; i < kProductRows; ++i)
                for (int j = 0; j < i; ++j)
                    sums[i] = fma(fill(*left.at(rows.index[i], std::min(row + j, num_rows - 1))),
                                  sums[j], sums[i]);
            for (int i = 0; i < kProductRows && row + i < num_rows; ++i) {
                store(solved + 16 * (row + i), sums[i]);
                store(values + (row + i) * stride + column, sums[i]);
            }
        }
}

// What is left of earlier tokens' parts after later gates, of up to 64 tokens.
struct Decays {
    // gates: of each token, none above 0, `stride` apart.
    //
    // Each sum is added up on its own. A difference of two long sums would have lost what a small gate adds
    // after a large one.
    Decays(const float *gates, int stride, int num_rows) {
        alignas(64) float sums[kPiece] = {}, totals[kPiece] = {};
        float total = 0.0f;
        for (int row = 0; row < num_rows; ++row) {
            const float gate = gates[row * stride];
            totals[row] = total += gate;
            float *to = between + row * kPiece;
            const int last = row / 16 * 16;
            for (int i = 0; i <= last; i += 16) {
                const Floats later = load(sums + i) + fill(gate);
                store(sums + i, later);
                store(to + i, exp2_exact(later * fill(kLog2E)));
            }
            store(to + last, keep(load(to + last), 0, row - last, 0.0f));
            sums[row] = 0.0f;
            to[row] = 1.0f;
        }
        for (int i = 0; i < num_rows; i += 16)
            store(until + i, exp2_exact(load(totals + i) * fill(kLog2E)));
    }

    // [rows, kPiece]: exp of the sum of the gates after token j, up to token i; 0 for j above i in the
    // diagonal's block of 16, and nothing after it.
    alignas(64) float between[kPiece * kPiece];
    alignas(64) float until[kPiece];  // exp of the sum of the gates up to token i
};

}  // namespace legato
