#include "quantized.hpp"

#include <array>
#include <utility>

namespace legato {

namespace {

constexpr bool are_nibbles(Codes codes) { return codes == Codes::kFour || codes == Codes::kTable; }

// Bits of a code as integer products take it.
template <Codes codes>
constexpr int kProductBits = codes == Codes::kFour ? 4 : 8;

// Loads a set of a block's codes, or of the numbers that a table has for them.
template <Codes codes>
Ints load_codes(const uint8_t *block, Ints table, int set) {
    if constexpr (!are_nibbles(codes)) return load_ints(block + 64 * set);
    const Ints both = load_ints(block + 64 * (set % (kSets / 2)));
    const Ints nibbles = (set < kSets / 2 ? both : both >> 4) & fill(int32_t{0x0f0f0f0f});
    return codes == Codes::kTable ? look_up(table, nibbles) : nibbles;
}

// Returns number `index`, in [0, 32), of each output.
template <Codes codes>
Floats number(const uint8_t *block, Ints table, int index) {
    const int set = index / 4, shift = index % 4 * 8;
    if constexpr (codes == Codes::kEight) {
        return to_floats(load_ints(block + 64 * set) >> shift & fill(int32_t{0xff}));
    } else {
        const int half = kSets / 2;
        const Ints both = load_ints(block + 64 * (set % half)) >> (set / half * 4);
        if constexpr (codes == Codes::kFour) return lowest_4_bits(both >> shift);
        const Ints found = look_up(table, both & fill(int32_t{0x0f0f0f0f}));
        return to_floats(found >> shift & fill(int32_t{0xff}));
    }
}

// Returns numbers 2 * `index` and the next of each output, times 1 / kPairFactor.
template <Codes codes>
constexpr float kPairFactor = codes == Codes::kFloat ? kFloat8Factor : 1.0f;
template <Codes codes>
FloatPairs number_pairs(const uint8_t *block, Ints table, int index) {
    if constexpr (codes == Codes::kFloat) return load_float8(block + 64 * (index / 2), index % 2);
    else return {number<codes>(block, table, 2 * index), number<codes>(block, table, 2 * index + 1)};
}

// Numbers of a step's groups, one or two.
template <int num_groups>
struct StepNumbers {
    StepNumbers(const PackedMatrix &matrix, const uint8_t *from) {
        for (int i = 0; i < num_groups; ++i) groups[i] = matrix.load_numbers(from, num_groups, i);
    }

    GroupNumbers groups[num_groups];
};

template <Codes codes, int num_groups>
void unpack_half(const PackedMatrix &matrix, int panel, int half, bf16 *tiles) {
    const uint8_t *block = matrix.blocks(panel, half), *from = matrix.numbers(panel, half);
    const Ints table = load_ints(matrix.table());
    const Floats factor = fill(matrix.factor);
    for (int step = 0; step < matrix.num_steps; ++step, block += matrix.block_bytes()) {
        const uint8_t *const own = from + step / matrix.steps_a_group * matrix.number_bytes();
        StepNumbers<num_groups> numbers(matrix, own);
        for (auto &[scales, minima] : numbers.groups) {
            scales = scales * factor * fill(kPairFactor<codes>);
            minima = minima * factor;
        }
        bf16 *tile = tiles + (2 * step + half) * kTileValues;
#pragma GCC unroll 16  // shifts by constants take half as long
        for (int row = 0; row < kTileRows; ++row) {
            const auto &[scales, minima] = numbers.groups[row * num_groups / kTileRows];
            const FloatPairs pairs = number_pairs<codes>(block, table, row);
            const Floats first = fma(pairs.first, scales, minima);
            const Floats second = fma(pairs.second, scales, minima);
            store(tile + row * kTileDepth, interleave_bf16(first, second));
        }
    }
}

// Multiplies `num_rows` rows from `first` on with half a panel.
template <Codes codes, int num_groups, int num_rows>
void multiply_block(const RoundedRows &rows, int first, const PackedMatrix &matrix, int panel, int half,
                    float *sums) {
    constexpr int bits = are_nibbles(codes) ? 4 : 8;
    constexpr int sets_a_group = kSets / num_groups;
    const long number_bytes = matrix.number_bytes();
    const Ints table = load_ints(matrix.table());
    const Floats factor = fill(matrix.factor);
    const uint8_t *block = matrix.blocks(panel, half), *from = matrix.numbers(panel, half);
    const bool is_read_first = first == 0;
    Floats totals[num_rows];
    for (auto &total : totals) total = fill(0.0f);
    for (int step = 0; step < matrix.num_steps; from += number_bytes) {
        for (long line = 0; is_read_first && line < number_bytes; line += 64)
            prefetch_twice(from + line, kAheadBytes);
        const StepNumbers<num_groups> numbers(matrix, from);
        const int end = step + matrix.steps_a_group;
        for (; step < end; ++step, block += 64 * bits) {
            for (long line = 0; is_read_first && line < 64 * bits; line += 64)
                prefetch_twice(block + line, kAheadBytes);
            const int32_t *const row_codes = rows.codes(step, first);
            const float *const row_scales = rows.scales(step, first);
            const float *const row_sums = rows.sums<num_groups>(step, first);
            for (int group = 0; group < num_groups; ++group) {
                ProductSum<kProductBits<codes>> products[num_rows];
#pragma GCC unroll 8  // otherwise the sums are kept in memory
                for (int i = 0; i < sets_a_group; ++i) {
                    const int set = group * sets_a_group + i;
                    const Ints found = load_codes<codes>(block, table, set);
#pragma GCC unroll 8
                    for (int row = 0; row < num_rows; ++row)
                        products[row].add(found, row_codes + row * kSets + set);
                }
                for (int row = 0; row < num_rows; ++row) {
                    const Floats by = numbers.groups[group].scales * fill(row_scales[row]);
                    const float sum = row_sums[row * num_groups + group];
                    totals[row] = fma(to_floats(products[row].total()), by, totals[row]);
                    totals[row] = fma(numbers.groups[group].minima, fill(sum), totals[row]);
                }
            }
        }
    }
    for (int row = 0; row < num_rows; ++row)
        store(sums + row * kPanel + 16 * half, totals[row] * factor);
}

using MultiplyBlock = void (*)(const RoundedRows &, int, const PackedMatrix &, int, int, float *);

template <Codes codes, int num_groups, int... counts>
constexpr std::array<MultiplyBlock, kRowsAtOnce> blocks(std::integer_sequence<int, counts...>) {
    return {multiply_block<codes, num_groups, counts + 1>...};
}

using UnpackHalf = void (*)(const PackedMatrix &, int, int, bf16 *);

// The kernels for a kind of codes, with groups of 32 values or more, or of 16.
template <int num_groups>
struct Kernels {
    template <Codes codes>
    static MultiplyBlock multiply_by(int num_rows) {
        static constexpr auto all =
            blocks<codes, num_groups>(std::make_integer_sequence<int, kRowsAtOnce>());
        return all[num_rows - 1];
    }

    static MultiplyBlock multiply(Codes codes, int num_rows) {
        if (codes == Codes::kFour) return multiply_by<Codes::kFour>(num_rows);
        if (codes == Codes::kTable) return multiply_by<Codes::kTable>(num_rows);
        return multiply_by<Codes::kEight>(num_rows);
    }

    static UnpackHalf unpack(Codes codes) {
        if (codes == Codes::kFour) return unpack_half<Codes::kFour, num_groups>;
        if (codes == Codes::kTable) return unpack_half<Codes::kTable, num_groups>;
        if (codes == Codes::kEight) return unpack_half<Codes::kEight, num_groups>;
        return unpack_half<Codes::kFloat, num_groups>;
    }
};

}  // namespace

void unpack(const PackedMatrix &matrix, int panel, bf16 *tiles) {
    const auto unpack_one = matrix.groups_a_step == 1 ? Kernels<1>::unpack(matrix.codes)
                                                      : Kernels<2>::unpack(matrix.codes);
    for (int half = 0; half < 2; ++half) unpack_one(matrix, panel, half, tiles);
}

int most_packed([[maybe_unused]] int bits, bool rounds_rows) {
    if (rounds_rows) return kMostInBlocks;
#ifndef LEGATO_AVX512
    if (bits == 8) return kFewRows;  // each code is multiplied in two parts
#endif
    return kRoundsMany ? kSeveralRows : kFewRows;
}

bool are_multiplied_in_bytes(const PackedMatrix &matrix, int num_rows) {
    if (matrix.is_rotated) return true;
    return matrix.rounds_rows && matrix.codes == Codes::kFour && matrix.order.empty() &&
           num_rows > kMostInBlocks;
}

bool are_rounded(const PackedMatrix &matrix, int num_rows) {
    return num_rows == most_rounded(matrix, num_rows);
}

int most_rounded(const PackedMatrix &matrix, int num_rows) {
    if (matrix.codes == Codes::kFloat) return 0;
    // An expert's rows are multiplied in blocks, however many they are.
    if (matrix.rounds_rows && kRoundsMany) return num_rows;
    return std::min(num_rows, most_packed(matrix.bits, matrix.rounds_rows));
}

RowTiles reordered(const RowTiles &rows, int first, int num_rows, const std::vector<int32_t> &order,
                   bf16 *memory) {
    const int depth = static_cast<int>(order.size());
    const RowTiles result(num_rows, depth, memory);
    for (int row = 0; row < num_rows; ++row)
        for (int i = 0; i < depth; ++i) *result.at(row, i) = *rows.at(first + row, order[i]);
    return result;
}

size_t RoundedRows::bytes(int num_rows, int depth) {
    const size_t count = static_cast<size_t>(num_rows) * (depth / kTileDepth);
    return Arena::bytes<int32_t>(count * kSets) + 2 * Arena::bytes<float>(count) +
           Arena::bytes<float>(2 * count);
}

RoundedRows::RoundedRows(const RowTiles &rows, int first, int num_rows, int depth, Arena &memory)
    : num_rows_(num_rows) {
    const int num_steps = depth / kTileDepth;
    const size_t count = static_cast<size_t>(num_rows) * num_steps;
    codes_ = memory.take<int32_t>(count * kSets);
    scales_ = memory.take<float>(count);
    sums_ = memory.take<float>(count);
    half_sums_ = memory.take<float>(2 * count);
    for (int row = 0; row < num_rows; ++row)
        for (int step = 0; step < num_steps; ++step)
            round(rows.at(first + row, step * kTileDepth), at(step, row));
}

void RoundedRows::round(const bf16 *values, long at) {
    int8_t *const codes = reinterpret_cast<int8_t *>(codes_ + at * kSets);
    const Floats halves[] = {load_bf16(values), load_bf16(values + 16)};
    const float most = largest_magnitude(halves[0], halves[1]);
    const float scale = most / 127.0f;
    const Floats by = fill(most > kAsGoodAsZero ? kMostCode / most : 0.0f);
    int32_t total = 0;
    for (int i = 0; i < 2; ++i) {
        const Ints rounded = to_ints(halves[i] * by);
        store_bytes(codes + 16 * i, rounded);
        const int32_t part = legato::sum(rounded);
        half_sums_[2 * at + i] = scale * static_cast<float>(part);
        total += part;
    }
    scales_[at] = scale;
    sums_[at] = scale * static_cast<float>(total);
}

void RoundedRows::multiply(int first, int count, const PackedMatrix &matrix, int panel,
                           float *sums) const {
    const int num_blocks = (count + kRowsAtOnce - 1) / kRowsAtOnce;
    for (int half = 0; half < 2; ++half)
        for (int block = 0, row = 0; block < num_blocks; ++block) {
            const int end = count * (block + 1) / num_blocks;  // equally large, as in multiply_strip()
            const auto kernel = matrix.groups_a_step == 1
                                    ? Kernels<1>::multiply(matrix.codes, end - row)
                                    : Kernels<2>::multiply(matrix.codes, end - row);
            kernel(*this, first + row, matrix, panel, half, sums + row * kPanel);
            row = end;
        }
}

}  // namespace legato
