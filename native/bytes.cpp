#include "bytes.hpp"

#include <cmath>

namespace legato {

namespace {

constexpr int kMostRotated = 16;

// Multiplies `count` vectors with the Hadamard matrix of that size: number i of each is mixed with
// number i of the others.
template <int count>
void rotate_vectors(float *values) {
    Floats vectors[count];
    for (int i = 0; i < count; ++i) vectors[i] = load(values + 16 * i);
    mix(vectors);
    const Floats length = fill(1.0f / std::sqrt(static_cast<float>(count)));
    for (int i = 0; i < count; ++i) store(values + 16 * i, vectors[i] * length);
}

// Rotates as many vectors at a time as are left, at most 16 and a power of two.
template <int count = kMostRotated>
void rotate(float *values, int num_vectors) {
    for (; num_vectors >= count; num_vectors -= count, values += 16 * count)
        rotate_vectors<count>(values);
    if constexpr (count > 2) rotate<count / 2>(values, num_vectors);
}

}  // namespace

ByteRows::ByteRows(int num_rows, int depth) : num_tiles_(num_tiles(depth)) {
    constexpr int rows_a_strip = 2 * kTileRows;
    const size_t count = static_cast<size_t>(num_rows + rows_a_strip - 1) / rows_a_strip * rows_a_strip;
    codes_ = aligned_array<RowCode>(count * num_tiles_ * kByteTileDepth);
    scales_ = aligned_array<float>(count);
    totals_ = aligned_array<int32_t>(count);
}

void ByteRows::assign(int row, const bf16 *tiles, int depth, Arena memory) const {
    const int padded = num_tiles(depth) * kByteTileDepth;
    float *const values = memory.take<float>(padded);
    const bf16 *from = tiles + row % kTileRows * kTileDepth;
    for (int i = 0; i < depth; i += kTileDepth, from += kTileValues) {
        store(values + i, load_bf16(from));
        store(values + i + 16, load_bf16(from + 16));
    }
    rotate(values, depth / 16);
    std::fill(values + depth, values + padded, 0.0f);
    Floats largest_values = fill(0.0f), zeros = fill(0.0f);
    for (int i = 0; i < depth; i += 16) {
        const Floats some = load(values + i);
        largest_values = max(largest_values, abs(some));
        zeros = fma(some, fill(0.0f), zeros);
    }
    const float most = largest(largest_values);
    const Floats by = fill(most > kAsGoodAsZero ? kMostCode / most : 0.0f);
    RowCode *to = codes_.get() + static_cast<size_t>(row / kTileRows) * num_tiles_ * kByteTileValues +
                  row % kTileRows * kByteTileDepth;
    Ints total = fill(int32_t{0});
    for (int tile = 0; tile < padded; tile += kByteTileDepth, to += kByteTileValues)
        for (int i = 0; i < kByteTileDepth; i += 16) {
            const Ints codes = to_ints(load(values + tile + i) * by);
            store_row(to + i, codes);
            total = total + codes;
        }
    scales_[row] = most / kMostCode + sum(zeros);
    totals_[row] = sum(total);
}

void ByteRows::scale(const int32_t *products, int row, int count, const float *column_scales,
                     int zero, float *sums) const {
    const Floats columns[] = {load(column_scales), load(column_scales + 16)};
    for (int i = 0; i < count; ++i) {
        const Ints zeros = fill(-zero * totals_[row + i]);
        const Floats row_scale = fill(scales_[row + i]);
        for (int half = 0; half < 2; ++half, products += 16, sums += 16)
            store(sums, to_floats(load_ints(products) + zeros) * (columns[half] * row_scale));
    }
}

}  // namespace legato
