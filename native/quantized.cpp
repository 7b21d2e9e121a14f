#include "quantized.hpp"

#include <array>
#include <utility>

namespace legato {

namespace {

constexpr bool are_nibbles(Codes codes) { return codes == Codes::kFour || codes == Codes::kTable; }

constexpr bool have_planes(Codes codes) { return codes == Codes::kFive || codes == Codes::kSix; }

// Bits of a code in a block.
template <Codes codes>
constexpr int kCodeBits = are_nibbles(codes)        ? 4
                          : codes == Codes::kFive ? 5
                          : codes == Codes::kSix  ? 6
                                                  : 8;

// Bits of a code as integer products take it.
template <Codes codes>
constexpr int kProductBits = codes == Codes::kTable ? 8 : kCodeBits<codes>;

inline Ints shifted(Ints x, int left) { return left < 0 ? x >> -left : x << left; }

// Loads the bits of a set's codes above the fourth, in their places.
template <Codes codes>
Ints load_upper(const uint8_t *block, int set) {
    constexpr int bits = kCodeBits<codes> - 4, sets = kSets / bits;
    const Ints plane = load_ints(block + 64 * (kSets / 2 + set / sets));
    constexpr int32_t mask = bits == 1 ? 0x10101010 : 0x30303030;
    return shifted(plane, 4 - bits * (set % sets)) & fill(mask);
}

// Loads a set of a block's codes, or of the numbers that a table has for them.
template <Codes codes>
Ints load_codes(const uint8_t *block, Ints table, int set) {
    if constexpr (kCodeBits<codes> == 8) return load_ints(block + 64 * set);
    const Ints both = load_ints(block + 64 * (set % (kSets / 2)));
    const Ints nibbles = (set < kSets / 2 ? both : both >> 4) & fill(int32_t{0x0f0f0f0f});
    if constexpr (have_planes(codes)) return nibbles | load_upper<codes>(block, set);
    return codes == Codes::kTable ? look_up(table, nibbles) : nibbles;
}

// Returns number `index`, in [0, 32), of each output.
template <Codes codes>
Floats number(const uint8_t *block, Ints table, int index) {
    const int set = index / 4, shift = index % 4 * 8;
    if constexpr (codes == Codes::kEight || have_planes(codes)) {
        return to_floats(load_codes<codes>(block, table, set) >> shift & fill(int32_t{0xff}));
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

// A kind of packed matrix: groups of 32 values or more are one in a step, groups of 16 are two.
template <Codes own_codes, Numbers own_form, int groups>
struct Kind {
    static constexpr Codes codes = own_codes;
    static constexpr Numbers form = own_form;
    static constexpr int num_groups = groups;
};

// Numbers that lie together, of `steps_a_group` steps. at(step, group): those of a step's group.
template <Numbers form, int num_groups>
class StepNumbers {
public:
    StepNumbers(const PackedMatrix &matrix, const uint8_t *from) {
        for (int i = 0; i < num_groups; ++i) groups_[i] = matrix.load_numbers(from, num_groups, i);
    }
    // Not a copy, which GCC 12 would write in parts and read as a whole.
    const GroupNumbers &at(int, int group) const { return groups_[group]; }

private:
    GroupNumbers groups_[num_groups];
};

// As put_numbers() has them: scales of 6 bits and then minima; the last four of these have their upper bits
// in the first.
template <>
class StepNumbers<Numbers::kSixBits, 1> {
public:
    StepNumbers(const PackedMatrix &, const uint8_t *from)
        : scale_(load_halves(from)), minimum_(load_halves(from + 32) * fill(-1.0f)) {
        const uint8_t *const bytes = from + kSixBitsAt;
        const Ints first = load_ints(bytes), second = load_ints(bytes + 64);
        const Ints last = load_ints(bytes + 128);
        const Ints six = fill(int32_t{0x3f3f3f3f}), four = fill(int32_t{0x0f0f0f0f});
        const Ints upper = fill(int32_t{0x30303030});
        store(bytes_, first & six);
        store(bytes_ + 64, (last & four) | (first >> 2 & upper));
        store(bytes_ + 128, second & six);
        store(bytes_ + 192, (last >> 4 & four) | (second >> 2 & upper));
    }
    GroupNumbers at(int step, int) const {
        return {load_bytes(bytes_ + 16 * step) * scale_, load_bytes(bytes_ + 128 + 16 * step) * minimum_};
    }

private:
    const Floats scale_, minimum_;
    alignas(64) int8_t bytes_[256];
};

template <>
class StepNumbers<Numbers::kEightBits, 2> {
public:
    StepNumbers(const PackedMatrix &matrix, const uint8_t *from)
        : scale_(load_halves(from)),
          zero_(fill(-matrix.zero)),
          bytes_(reinterpret_cast<const int8_t *>(from) + kEightBitsAt) {}
    GroupNumbers at(int step, int group) const {
        const Floats scales = load_bytes(bytes_ + 16 * (2 * step + group)) * scale_;
        return {scales, scales * zero_};
    }

private:
    const Floats scale_, zero_;
    const int8_t *const bytes_;
};

template <typename Kind>
void unpack_half(const PackedMatrix &matrix, int panel, int half, bf16 *tiles) {
    constexpr Codes codes = Kind::codes;
    constexpr int num_groups = Kind::num_groups;
    const uint8_t *block = matrix.blocks(panel, half), *from = matrix.numbers(panel, half);
    const Ints table = load_ints(matrix.table());
    const Floats factor = fill(matrix.factor);
    for (int step = 0; step < matrix.num_steps;
         from += matrix.number_stride(), block += matrix.block_gap()) {
        const StepNumbers<Kind::form, num_groups> numbers(matrix, from);
        for (int i = 0; i < matrix.steps_a_group; ++i, ++step, block += matrix.block_bytes()) {
            GroupNumbers groups[num_groups];
            for (int group = 0; group < num_groups; ++group) {
                const auto &[scales, minima] = numbers.at(i, group);
                groups[group] = {scales * factor * fill(kPairFactor<codes>), minima * factor};
            }
            bf16 *tile = tiles + (2 * step + half) * kTileValues;
#pragma GCC unroll 16  // shifts by constants take half as long
            for (int row = 0; row < kTileRows; ++row) {
                const auto &[scales, minima] = groups[row * num_groups / kTileRows];
                const FloatPairs pairs = number_pairs<codes>(block, table, row);
                const Floats first = fma(pairs.first, scales, minima);
                const Floats second = fma(pairs.second, scales, minima);
                store(tile + row * kTileDepth, interleave_bf16(first, second));
            }
        }
    }
}

// Multiplies `num_rows` rows from `first` on with half a panel.
template <typename Kind, int num_rows>
void multiply_block(const RoundedRows &rows, int first, const PackedMatrix &matrix, int panel, int half,
                    float *sums) {
    constexpr Codes codes = Kind::codes;
    constexpr int num_groups = Kind::num_groups, sets_a_group = kSets / num_groups;
    constexpr int block_bytes = 64 * kCodeBits<codes>;
    const long number_bytes = matrix.number_bytes(), number_stride = matrix.number_stride();
    const long block_gap = matrix.block_gap();
    const Ints table = load_ints(matrix.table());
    const Floats factor = fill(matrix.factor);
    const uint8_t *block = matrix.blocks(panel, half), *from = matrix.numbers(panel, half);
    const bool is_read_first = first == 0;
    Floats totals[num_rows];
#pragma GCC unroll 8  // as below
    for (auto &total : totals) total = fill(0.0f);
    for (int step = 0; step < matrix.num_steps; from += number_stride, block += block_gap) {
        for (long line = 0; is_read_first && line < number_bytes; line += 64)
            prefetch_twice(from + line, kAheadBytes);
        const StepNumbers<Kind::form, num_groups> numbers(matrix, from);
        for (int i = 0; i < matrix.steps_a_group; ++i, ++step, block += block_bytes) {
            for (long line = 0; is_read_first && line < block_bytes; line += 64)
                prefetch_twice(block + line, kAheadBytes);
            const int32_t *const row_codes = rows.codes(step, first);
            const float *const row_scales = rows.scales(step, first);
            const float *const row_sums = rows.sums<num_groups>(step, first);
            for (int group = 0; group < num_groups; ++group) {
                ProductSum<kProductBits<codes>> products[num_rows];
#pragma GCC unroll 8  // otherwise the sums are kept in memory
                for (int j = 0; j < sets_a_group; ++j) {
                    const int set = group * sets_a_group + j;
                    const Ints found = load_codes<codes>(block, table, set);
#pragma GCC unroll 8
                    for (int row = 0; row < num_rows; ++row)
                        products[row].add(found, row_codes + row * kSets + set);
                }
                const auto &[scales, minima] = numbers.at(i, group);
#pragma GCC unroll 8
                for (int row = 0; row < num_rows; ++row) {
                    const Floats by = scales * fill(row_scales[row]);
                    const float sum = row_sums[row * num_groups + group];
                    totals[row] = fma(to_floats(products[row].total()), by, totals[row]);
                    totals[row] = fma(minima, fill(sum), totals[row]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row)
        store(sums + row * kPanel + 16 * half, totals[row] * factor);
}

using MultiplyBlock = void (*)(const RoundedRows &, int, const PackedMatrix &, int, int, float *);

template <typename Kind, int... counts>
constexpr std::array<MultiplyBlock, kRowsAtOnce> blocks(std::integer_sequence<int, counts...>) {
    return {multiply_block<Kind, counts + 1>...};
}

// Returns of(kind) with the kind of the matrix. 8-bit floats have no products in blocks.
template <typename Of>
auto with_kind(const PackedMatrix &matrix, Of of) {
    using enum Codes;
    using enum Numbers;
    if (matrix.form == kEightBits) return of(Kind<kSix, kEightBits, 2>());
    if (matrix.form == kSixBits)
        return matrix.codes == kFour ? of(Kind<kFour, kSixBits, 1>()) : of(Kind<kFive, kSixBits, 1>());
    if (matrix.groups_a_step == 1) {
        if (matrix.codes == kFour) return of(Kind<kFour, kHalves, 1>());
        if (matrix.codes == kTable) return of(Kind<kTable, kHalves, 1>());
        if (matrix.codes == kFive) return of(Kind<kFive, kHalves, 1>());
        if (matrix.codes == kEight) return of(Kind<kEight, kHalves, 1>());
        return of(Kind<kFloat, kHalves, 1>());
    }
    if (matrix.codes == kFour) return of(Kind<kFour, kHalves, 2>());
    if (matrix.codes == kTable) return of(Kind<kTable, kHalves, 2>());
    if (matrix.codes == kEight) return of(Kind<kEight, kHalves, 2>());
    return of(Kind<kFloat, kHalves, 2>());
}

}  // namespace

void unpack(const PackedMatrix &matrix, int panel, bf16 *tiles) {
    with_kind(matrix, [&](auto kind) {
        for (int half = 0; half < 2; ++half)
            unpack_half<decltype(kind)>(matrix, panel, half, tiles);
    });
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
    const MultiplyBlock *const kernels = with_kind(matrix, [](auto kind) -> const MultiplyBlock * {
        if constexpr (kind.codes == Codes::kFloat) return nullptr;
        else {
            static constexpr auto all =
                blocks<decltype(kind)>(std::make_integer_sequence<int, kRowsAtOnce>());
            return all.data();
        }
    });
    const int num_blocks = (count + kRowsAtOnce - 1) / kRowsAtOnce;
    for (int half = 0; half < 2; ++half)
        for (int block = 0, row = 0; block < num_blocks; ++block) {
            const int end = count * (block + 1) / num_blocks;  // equally large, as in multiply_strip()
            kernels[end - row - 1](*this, first + row, matrix, panel, half, sums + row * kPanel);
            row = end;
        }
}

}  // namespace legato
