#include "byte_panels.hpp"

#include <cmath>

namespace legato {

namespace {

constexpr int kZero = 128;

#ifdef LEGATO_AVX512
constexpr int kMostSteps = 8;  // that are mixed at a time: 16 vectors, as in ByteRows
constexpr float kLargestNumber = 15.0f;
// The largest weight has so many units. Sixteen such weights, a little larger once scales are rounded, add up
// within 16 bits.
constexpr float kUnits = 2040.0f;

// A group's weights are codes * factors + shifts, in units.
struct UnitNumbers {
    ShortPairs factors, shifts;
};

// Loads the numbers of the group, or of one of a step's groups of 16 values.
GroupNumbers load_group(const PackedMatrix &matrix, const uint8_t *numbers, int step, int part) {
    const uint8_t *from = numbers + step / matrix.steps_a_group * matrix.number_bytes();
    return matrix.load_numbers(from, matrix.groups_a_step, part);
}

// Returns the same 16-bit number in both halves of the lanes.
ShortPairs twice(Ints x) { return as_pairs((x & fill(int32_t{0xffff})) | x << 16); }

int steps_mixed(int num_steps) {
    int steps = kMostSteps;
    while (steps > num_steps) steps /= 2;
    return steps;
}

// Returns the unit of each of 16 outputs: what the largest weight has kUnits of.
Floats load_unit(const PackedMatrix &matrix, const uint8_t *numbers) {
    Floats most = fill(kAsGoodAsZero);
    for (int step = 0; step < matrix.num_steps; step += matrix.steps_a_group)
        for (int part = 0; part < matrix.groups_a_step; ++part) {
            const GroupNumbers group = load_group(matrix, numbers, step, part);
            const Floats last = fma(group.scales, fill(kLargestNumber), group.minima);
            most = max(most, max(abs(group.minima), abs(last)));
        }
    return most * fill(1.0f / kUnits);
}

// Writes the numbers [num_steps, groups_a_step] of 16 outputs. Fewer vectors than 16 are mixed with longer
// ones: a rotation divides by the root of their number, and here all are divided by that of 16.
void write_numbers(const PackedMatrix &matrix, const uint8_t *numbers, Floats unit,
                   UnitNumbers *to) {
    const Floats by = fill(1.0f) / unit;
    for (int begin = 0, count; begin < matrix.num_steps; begin += count) {
        count = steps_mixed(matrix.num_steps - begin);
        const Floats length = by * fill(std::sqrt(static_cast<float>(kMostSteps) / count));
        for (int step = begin; step < begin + count; ++step)
            for (int part = 0; part < matrix.groups_a_step; ++part, ++to) {
                const GroupNumbers group = load_group(matrix, numbers, step, part);
                const Ints factors = to_ints(group.scales * length);
                // Exact in the middle of the group's codes, so that a rounded scale shifts none by much.
                const Floats middle = fma(group.scales, fill(kLargestNumber / 2), group.minima);
                const Floats shifts =
                    fma(to_floats(factors), fill(-kLargestNumber / 2), middle * length);
                *to = {twice(factors), twice(to_ints(shifts))};
            }
    }
}

// Mixes the weights of so many steps: as ByteRows, value i of each 16 with value i of the others. Writes
// them as [num_steps, kSets, 2, 32]: of each set the first and third values of 16 outputs, then the
// others. Returns the largest.
template <int num_steps>
ShortPairs mix_steps(const uint8_t *blocks, const UnitNumbers *numbers, int groups_a_step,
                     int16_t *mixed) {
    constexpr int kVectors = 2 * num_steps;
    constexpr int kBlockBytes = 256;
    ShortPairs most = as_pairs(fill(int32_t{0}));
    for (int place = 0; place < kSets; ++place) {
        const int set = place / 2, shift = place % 2 * 8;
        ShortPairs vectors[kVectors];
#pragma GCC unroll 8
        for (int step = 0; step < num_steps; ++step) {
            const Ints both = load_ints(blocks + step * kBlockBytes + set * 64);
            const UnitNumbers *const first = numbers + step * groups_a_step;
            const UnitNumbers *const last = first + groups_a_step - 1;
            const Ints lower = both >> shift & fill(int32_t{0x000f000f});
            const Ints upper = both >> (shift + 4) & fill(int32_t{0x000f000f});
            vectors[2 * step] = as_pairs(lower) * first->factors + first->shifts;
            vectors[2 * step + 1] = as_pairs(upper) * last->factors + last->shifts;
        }
        mix(vectors);
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) {
            const int at = (i / 2 * kSets + i % 2 * (kSets / 2) + set) * 2 + place % 2;
            store(mixed + at * 32, as_ints(vectors[i]));
            most = max(most, abs(vectors[i]));
        }
    }
    return most;
}

ShortPairs mix_steps(int num_steps, const uint8_t *blocks, const UnitNumbers *numbers,
                     int groups_a_step, int16_t *mixed) {
    if (num_steps == 8) return mix_steps<8>(blocks, numbers, groups_a_step, mixed);
    if (num_steps == 4) return mix_steps<4>(blocks, numbers, groups_a_step, mixed);
    if (num_steps == 2) return mix_steps<2>(blocks, numbers, groups_a_step, mixed);
    return mix_steps<1>(blocks, numbers, groups_a_step, mixed);
}

constexpr int kStepValues = 16 * kTileDepth;

// Bytes of memory that unpack_half() takes.
size_t unpacking_bytes(const PackedMatrix &matrix) {
    return Arena::bytes<UnitNumbers>(matrix.num_steps * matrix.groups_a_step) +
           Arena::bytes<int16_t>(matrix.num_steps * kStepValues);
}

// Unpacks 16 outputs.
void unpack_half(const PackedMatrix &matrix, int panel, int half, Arena memory, uint8_t *codes,
                 float *scales) {
    auto *const numbers = memory.take<UnitNumbers>(matrix.num_steps * matrix.groups_a_step);
    auto *const mixed = memory.take<int16_t>(matrix.num_steps * kStepValues);
    const Floats unit = load_unit(matrix, matrix.numbers(panel, half));
    write_numbers(matrix, matrix.numbers(panel, half), unit, numbers);

    ShortPairs most = as_pairs(fill(int32_t{0}));
    for (int step = 0, count; step < matrix.num_steps; step += count) {
        count = steps_mixed(matrix.num_steps - step);
        most = max(most, mix_steps(count, matrix.blocks(panel, half) + step * matrix.block_bytes(),
                             numbers + step * matrix.groups_a_step, matrix.groups_a_step,
                             mixed + step * kStepValues));
    }
    const Ints both = as_ints(most);
    const Floats largest =
        max(to_floats(both & fill(int32_t{0xffff})), max(to_floats(both >> 16), fill(kMostCode)));
    // A little less than the largest code, as the factor is rounded.
    const Ints factors = to_ints(fill((kMostCode - 0.1f) * (1 << 15)) / largest);
    const ShortPairs by = twice(factors), zero = as_pairs(fill(int32_t{kZero << 16 | kZero}));
    for (int i = 0; i < matrix.num_steps * kSets; ++i) {
        const auto codes_at = [=](int values) {
            return as_ints(scaled(as_pairs(load_ints(mixed + (2 * i + values) * 32)), by) + zero);
        };
        store(codes + 64 * i, codes_at(0) | codes_at(1) << 8);
    }
    const Floats length = fill(matrix.factor * (1 << 15) / 4.0f);
    store(scales, unit * length / to_floats(factors));
}

#else
// Never called: see kMostInBlocks.
size_t unpacking_bytes(const PackedMatrix &) { return 0; }
void unpack_half(const PackedMatrix &, int, int, Arena, uint8_t *, float *) {}
#endif

// Bytes of the codes of 16 outputs, in whole tiles.
size_t half_bytes(const PackedMatrix &matrix) {
    return static_cast<size_t>(ByteRows::num_tiles(matrix.depth)) * kByteTileValues;
}

}  // namespace

size_t BytePanels::bytes(const PackedMatrix &matrix, int num_panels) {
    const size_t scales = Arena::bytes<float>(num_panels * kPanel);
    if (matrix.is_rotated) return scales;
    return scales + num_panels * 2 * half_bytes(matrix) + unpacking_bytes(matrix);
}

BytePanels::BytePanels(const PackedMatrix &matrix, int first, int end, Arena memory)
    : matrix_(matrix),
      first_(first),
      zero_(matrix.is_rotated ? static_cast<int>(matrix.zero) : kZero),
      half_bytes_(half_bytes(matrix)),
      scales_(memory.take<float>((end - first) * kPanel)),
      codes_(matrix.is_rotated ? nullptr : memory.take<uint8_t>((end - first) * 2 * half_bytes_)) {
    for (int panel = first; panel < end; ++panel) {
        float *const scales = scales_ + (panel - first) * kPanel;
        if (matrix.is_rotated) {
            matrix.load_column_scales(panel, scales);
            continue;
        }
        for (int half = 0; half < 2; ++half)
            unpack_half(matrix, panel, half, memory, unpacked(panel, half), scales + 16 * half);
    }
}

}  // namespace legato
