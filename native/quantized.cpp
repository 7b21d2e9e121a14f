#include "quantized.hpp"

#include <array>
#include <utility>

namespace legato {

namespace {

template <int bits>
void load_codes(const uint8_t *block, Ints *groups) {
    if constexpr (bits == 8) {
        for (int i = 0; i < kGroups; ++i) groups[i] = load_ints(block + 64 * i);
    } else {
        const Ints lower = fill(int32_t{0x0f0f0f0f});
        for (int i = 0; i < kGroups / 2; ++i) {
            const Ints both = load_ints(block + 64 * i);
            groups[i] = both & lower;
            groups[i + kGroups / 2] = both >> 4 & lower;
        }
    }
}

// Returns code `index`, in [0, 32), of each output.
template <int bits>
Floats code(const uint8_t *block, int index) {
    const int group = index / 4, shift = index % 4 * 8;
    if constexpr (bits == 8)
        return to_floats(load_ints(block + 64 * group) >> shift & fill(int32_t{0xff}));
    const int half = kGroups / 2;
    return lowest_4_bits(load_ints(block + 64 * (group % half)) >> (shift + group / half * 4));
}

template <int bits>
void unpack_block(const uint8_t *block, bf16 *tile) {
    const Floats scale = load_halves(block + 64 * bits);
    const Floats minimum = load_halves(block + 64 * bits + 32);
#pragma GCC unroll 16  // shifts by constants take half as long
    for (int row = 0; row < kTileRows; ++row) {
        const Floats first = fma(code<bits>(block, 2 * row), scale, minimum);
        const Floats second = fma(code<bits>(block, 2 * row + 1), scale, minimum);
        store(tile + row * kTileDepth, interleave_bf16(first, second));
    }
}

template <int bits, int num_rows>
void multiply_few(const FewRows &rows, const PackedMatrix &matrix, int panel, float *sums) {
    const uint8_t *block = matrix.panel(panel);
    for (int half = 0; half < 2; ++half) {
        Floats totals[num_rows];
        for (auto &total : totals) total = fill(0.0f);
        for (int step = 0; step < matrix.num_steps; ++step, block += 64 * bits + 64) {
            for (long line = 0; line < 64 * bits + 64; line += 64) prefetch(block + kAheadBytes + line);
            Ints groups[kGroups];
            load_codes<bits>(block, groups);
            const Floats scale = load_halves(block + 64 * bits);
            const Floats minimum = load_halves(block + 64 * bits + 32);
            for (int row = 0; row < num_rows; ++row) {
                const int32_t *codes = rows.codes(row) + step * kGroups;
                Ints total = fill(int32_t{0});
                for (int i = 0; i < kGroups; ++i)
                    total = add_products<bits>(total, groups[i], fill(codes[i]));
                const Floats by = scale * fill(rows.scales(row)[step]);
                totals[row] = fma(to_floats(total), by, totals[row]);
                totals[row] = fma(minimum, fill(rows.sums(row)[step]), totals[row]);
            }
        }
        for (int row = 0; row < num_rows; ++row)
            store(sums + row * kPanel + 16 * half, totals[row]);
    }
}

using MultiplyFew = void (*)(const FewRows &, const PackedMatrix &, int, float *);

template <int bits, int... counts>
constexpr std::array<MultiplyFew, kFewRows> few(std::integer_sequence<int, counts...>) {
    return {multiply_few<bits, counts + 1>...};
}

constexpr auto kFew4 = few<4>(std::make_integer_sequence<int, kFewRows>());
constexpr auto kFew8 = few<8>(std::make_integer_sequence<int, kFewRows>());

}  // namespace

void unpack(const PackedMatrix &matrix, int panel, bf16 *tiles) {
    const uint8_t *block = matrix.panel(panel);
    const auto unpack_one = matrix.bits == 4 ? unpack_block<4> : unpack_block<8>;
    for (int half = 0; half < 2; ++half)
        for (int step = 0; step < matrix.num_steps; ++step, block += matrix.block_bytes())
            unpack_one(block, tiles + (2 * step + half) * kTileValues);
}

void FewRows::assign(const TiledRows &rows, int num_rows, int depth) {
    num_rows_ = num_rows;
    num_steps_ = depth / kTileDepth;
    codes_.reserve(kFewRows * num_steps_ * kGroups);
    scales_.reserve(kFewRows * num_steps_);
    sums_.reserve(kFewRows * num_steps_);
    for (int row = 0; row < num_rows; ++row)
        for (int step = 0; step < num_steps_; ++step) {
            const int at = row * num_steps_ + step;
            round(rows.at(row, step * kTileDepth),
                  reinterpret_cast<int8_t *>(codes_.get() + at * kGroups), scales_[at], sums_[at]);
        }
}

void FewRows::round(const bf16 *values, int8_t *codes, float &scale, float &sum) const {
    const Floats halves[] = {load_bf16(values), load_bf16(values + 16)};
    const float most = largest(max(abs(halves[0]), abs(halves[1])));
    scale = most / 127.0f;
    const Floats by = fill(most > 0.0f ? 127.0f / most : 0.0f);
    const Ints rounded[] = {to_ints(halves[0] * by), to_ints(halves[1] * by)};
    for (int i = 0; i < 2; ++i) store_bytes(codes + 16 * i, rounded[i]);
    sum = scale * static_cast<float>(legato::sum(rounded[0] + rounded[1]));
}

void FewRows::multiply(const PackedMatrix &matrix, int panel, float *sums) const {
    const auto &kernels = matrix.bits == 4 ? kFew4 : kFew8;
    kernels[num_rows_ - 1](*this, matrix, panel, sums);
}

}  // namespace legato
