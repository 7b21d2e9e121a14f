// Weight matrices, laid out once after loading for the kernels that multiply with them.
#pragma once

#include <cmath>
#include <vector>

#include "file_blocks.hpp"
#include "memory.hpp"
#include "tiles.hpp"

namespace legato {

// How far ahead of the present product a matrix is prefetched.
constexpr long kAheadBytes = 8 << 10;
constexpr int kPanel = 32;  // outputs computed at a time: two tiles
constexpr int kTableBytes = 64;
constexpr int kSets = 8;  // sets of 4 values by 16 outputs in a block
constexpr int kSixBitsAt = 64, kEightBitsAt = 64;  // where a super-block's whole numbers begin

// How codes stand for numbers: 4 bits, 4 bits that index a table of 16 bytes, 5, 6 or 8 bits, or 8-bit
// floats of 4 exponent bits (e4m3fn).
enum class Codes { kFour, kTable, kFive, kSix, kEight, kFloat };

// What groups have: half floats; or whole numbers, which the half floats of a super-block multiply: scales
// and minima of 6 bits of 32 values each (Q4_K, Q5_K), or scales of 8 bits of 16 values (Q6_K).
enum class Numbers { kHalves, kSixBits, kEightBits };

// A matrix [outputs, depth] from a file: bfloat16 values, or codes in a byte each. `group` adjacent codes,
// 16 or a multiple of 32, share a scale, and a minimum if there are minima: half floats
// [outputs, depth / group]. A weight is 2^exponent * (scale * (number - zero) + minimum). Codes of 16 bits
// exist only in a file: their weights, in groups of 32, are packed as bfloat16.
//
// Or blocks of a type that files have, which give codes, scales and minima.
struct Weight {
    const bf16 *values = nullptr;
    const uint8_t *codes = nullptr;
    const uint8_t *blocks = nullptr;
    BlockType type{};
    const uint16_t *scales = nullptr, *minima = nullptr;
    const uint8_t *table = nullptr;  // [16]
    const int32_t *order = nullptr;  // [depth], the inputs that the columns multiply; null if as they are
    int bits = 16, group = kTileDepth, zero = 0, exponent = 0;
    bool is_float = false;
    bool rounds_rows = false;  // rows are rounded to 8 bits however many there are
    bool is_rotated = false;  // it multiplies ByteRows; one group, codes of 8 bits, and no minima
};

inline bf16 to_bf16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A group's scales and minima of 16 outputs.
struct GroupNumbers {
    Floats scales, minima;
};

// A matrix packed in panels of 32 outputs, padded to whole panels.
//
// In bfloat16 a panel is a row of pairs of tiles: within a tile, row r holds values 2r and 2r + 1 of
// 16 outputs side by side. Quantized, it is two halves of 16 outputs. A half has a block of codes for
// each 32 values: 8 sets of 4 values of each output, where 4-bit codes lie in the lower halves of the
// bytes for the first 4 sets and in the upper ones for the last. After these, codes of 5 bits have 64 bytes
// with the fifth bits, those of set i at bit i; codes of 6 bits have twice 64 with two bits more, those of
// sets i and 4 + i at bit 2i. After the blocks come its numbers: 16 scales, then 16 minima if there are any,
// for each group, or for each two groups of 16 values. The numbers of a super-block lie before its blocks,
// see put_numbers(): a matrix that is read in order is prefetched as a whole. Two blocks of 8-bit codes are
// a tile of bytes; a tile may be read that begins in the last block.
class PackedMatrix {
public:
    PackedMatrix(const Weight &weight, int num_outputs, int depth)
        : PackedMatrix(weight, num_outputs, depth, [](int i) { return i; }) {}

    // Output i is row row_of(i) of the weight.
    template <typename RowOf>
    PackedMatrix(const Weight &weight, int num_outputs, int depth, RowOf row_of)
        : num_outputs(num_outputs),
          depth(depth),
          bits(weight.bits),
          codes(weight.is_float    ? Codes::kFloat
                : weight.table     ? Codes::kTable
                : weight.bits == 4 ? Codes::kFour
                : weight.bits == 5 ? Codes::kFive
                : weight.bits == 6 ? Codes::kSix
                                   : Codes::kEight),
          form(form_of(weight)),
          num_panels((num_outputs + kPanel - 1) / kPanel),
          num_steps(depth / kTileDepth),
          groups_a_step(weight.group < kTileDepth ? kTileDepth / weight.group : 1),
          steps_a_group(form != Numbers::kHalves       ? kSuperBlock / kTileDepth
                        : weight.group < kTileDepth ? 1
                                                    : weight.group / kTileDepth),
          has_minima(weight.blocks ? block_shape(weight.type).has_minima
                                   : weight.minima != nullptr),
          rounds_rows(weight.rounds_rows),
          is_rotated(weight.is_rotated),
          zero(static_cast<float>(weight.zero)),
          factor(std::ldexp(1.0f, weight.exponent)),
          order(weight.order ? std::vector<int32_t>(weight.order, weight.order + depth)
                             : std::vector<int32_t>()),
          memory_(aligned_array<uint8_t>(num_panels * panel_bytes() + kByteTileValues)) {
        if (weight.table)
            for (int i = 0; i < kTableBytes; ++i) table_[i] = weight.table[i % 16];
        if (num_outputs % kPanel)
            std::fill_n(memory_.get() + (num_panels - 1) * panel_bytes(), panel_bytes(), uint8_t{0});
        // Tile by tile, so that one is written while it is in the cache.
        for (int first = 0; first < num_outputs; first += 16)
            for (int step = 0; step < num_steps; ++step)
                for (int output = first; output < std::min(first + 16, num_outputs); ++output)
                    put(weight, row_of(output), output, step);
    }

    bool is_quantized() const { return bits < 16; }
    size_t panel_bytes() const {
        return 2 * (is_quantized() ? half_bytes() : num_steps * kTileValues * sizeof(bf16));
    }
    size_t num_bytes() const { return num_panels * panel_bytes(); }

    const uint8_t *panel(int index) const { return memory_.get() + index * panel_bytes(); }
    const bf16 *tiles(int index) const { return reinterpret_cast<const bf16 *>(panel(index)); }

    // Blocks of codes, and numbers, of a panel's half.
    size_t block_bytes() const { return 64 * bits; }
    const uint8_t *blocks(int index, int half) const {
        return panel(index) + half * half_bytes() + block_gap();
    }
    const uint8_t *numbers(int index, int half) const {
        return panel(index) + half * half_bytes() + (is_super() ? 0 : num_steps * block_bytes());
    }
    // Bytes of the numbers for a group, for the groups of a step, or for a super-block.
    size_t number_bytes() const {
        if (form == Numbers::kSixBits) return kSixBitsAt + 3 * 64;
        if (form == Numbers::kEightBits) return kEightBitsAt + 4 * 64;
        return groups_a_step * (has_minima ? 2 : 1) * 16 * sizeof(uint16_t);
    }
    // Bytes from numbers to the next, and between the last block of a group and the next group's first.
    size_t number_stride() const {
        return number_bytes() + (is_super() ? steps_a_group * block_bytes() : 0);
    }
    size_t block_gap() const { return is_super() ? number_bytes() : 0; }
    // Loads the numbers of group `part` of the `num_groups` whose numbers are at `from`.
    GroupNumbers load_numbers(const uint8_t *from, int num_groups, int part) const {
        const Floats scales = load_halves(from + 32 * part);
        return {scales, has_minima ? load_halves(from + 32 * (num_groups + part))
                                   : scales * fill(-zero)};
    }
    // Writes the scales [32] of a panel's outputs, which have one group each.
    void load_column_scales(int panel, float *scales) const {
        for (int half = 0; half < 2; ++half)
            store(scales + 16 * half, load_halves(numbers(panel, half)) * fill(factor));
    }
    const uint8_t *table() const { return table_; }

    const int num_outputs, depth, bits;
    const Codes codes;
    const Numbers form;
    const int num_panels, num_steps, groups_a_step;
    const int steps_a_group;  // whose numbers lie together
    const bool has_minima, rounds_rows, is_rotated;
    const float zero, factor;
    const std::vector<int32_t> order;  // empty if the inputs are as they are

private:
    static Numbers form_of(const Weight &weight) {
        if (!weight.blocks || block_shape(weight.type).values < kSuperBlock) return Numbers::kHalves;
        return weight.type == BlockType::kQ6K ? Numbers::kEightBits : Numbers::kSixBits;
    }

    bool is_super() const { return form != Numbers::kHalves; }

    size_t half_bytes() const {
        const size_t bytes = num_steps * block_bytes() + num_steps / steps_a_group * number_bytes();
        return (bytes + 63) / 64 * 64;
    }

    // Packs the 32 values of a row that belong to a step.
    void put(const Weight &weight, size_t row, int output, int step) {
        if (is_quantized()) return put_codes(weight, row, output, step);
        if (!weight.codes)
            return put_values(weight.values + row * depth + step * kTileDepth, output, step);
        bf16 values[kTileDepth];
        const uint8_t *from = weight.codes + row * depth + step * kTileDepth;
        const float scale = from_half(weight.scales[row * num_steps + step]);
        const float minimum =
            weight.minima ? from_half(weight.minima[row * num_steps + step]) : -zero * scale;
        // The product is exact, so the result is the same with or without a fused sum.
        for (int i = 0; i < kTileDepth; ++i) values[i] = to_bf16(scale * from[i] + minimum);
        put_values(values, output, step);
    }

    void put_values(const bf16 *from, int output, int step) {
        bf16 *to = reinterpret_cast<bf16 *>(memory_.get() + output / kPanel * panel_bytes()) +
                   (2 * step + output % kPanel / 16) * kTileValues + output % 16 * 2;
        for (int i = 0; i < kTileDepth; i += 2)
            __builtin_memcpy(to + 16 * i, from + i, 2 * sizeof(bf16));
    }

    void put_codes(const Weight &weight, size_t row, int output, int step) {
        const int panel = output / kPanel, half = output % kPanel / 16, lane = output % 16;
        const uint8_t *from = weight.codes + row * depth + step * kTileDepth, *file_block = nullptr;
        uint8_t read[kTileDepth];
        if (weight.blocks) {
            const BlockShape shape = block_shape(weight.type);
            const size_t index = row * (depth / shape.values) + step * kTileDepth / shape.values;
            file_block = weight.blocks + index * shape.bytes;
            read_codes(weight.type, file_block, step % (shape.values / kTileDepth), read);
            from = read;
        }
        const int group = step / steps_a_group;
        uint8_t *block = const_cast<uint8_t *>(blocks(panel, half)) + step * block_bytes() +
                         group * block_gap();
        const auto at = [=](int i) { return i / 4 * 64 + lane * 4 + i % 4; };
        if (bits == 8)
            for (int i = 0; i < kTileDepth; ++i) block[at(i)] = from[i];
        else
            for (int i = 0; i < 16; ++i) block[at(i)] = (from[i] & 15) | from[i + 16] << 4;
        if (bits == 5) put_upper<1>(from, block + 256 + lane * 4);
        if (bits == 6) put_upper<2>(from, block + 256 + lane * 4);
        if (step % steps_a_group) return;
        uint8_t *const to = const_cast<uint8_t *>(numbers(panel, half)) +
                            group * number_stride();
        if (form != Numbers::kHalves) return put_numbers(file_block, lane, to);
        auto *const halves = reinterpret_cast<uint16_t *>(to) + lane;
        if (file_block) {
            __builtin_memcpy(halves, file_block, 2);
            if (has_minima) __builtin_memcpy(halves + 16, file_block + 2, 2);
            return;
        }
        const size_t in_row = row * (num_steps / steps_a_group * groups_a_step) + group * groups_a_step;
        for (int part = 0; part < groups_a_step; ++part) {
            halves[16 * part] = weight.scales[in_row + part];
            if (has_minima) halves[16 * (groups_a_step + part)] = weight.minima[in_row + part];
        }
    }

    // Packs the bits above the fourth, `count` of each code.
    template <int count>
    static void put_upper(const uint8_t *from, uint8_t *to) {
        constexpr int sets = kSets / count;  // of 64 bytes
        for (int i = 0; i < 4; ++i)
            for (int first = 0; first < kSets; first += sets) {
                int byte = 0;
                for (int set = 0; set < sets; ++set)
                    byte |= from[4 * (first + set) + i] >> 4 << count * set;
                to[first / sets * 64 + i] = byte;
            }
    }

    // Packs the numbers of a super-block of one of 16 outputs: half floats, and then the bytes that the file
    // has, byte i of all 16 outputs side by side.
    void put_numbers(const uint8_t *block, int lane, uint8_t *to) const {
        const bool are_six = form == Numbers::kSixBits;
        __builtin_memcpy(to + 2 * lane, are_six ? block : block + kQ6Scale, 2);
        if (are_six) __builtin_memcpy(to + 32 + 2 * lane, block + 2, 2);
        uint8_t *const bytes = to + (are_six ? kSixBitsAt : kEightBitsAt) + lane;
        const uint8_t *const from = block + (are_six ? 4 : kQ6Scales);
        for (int i = 0; i < (are_six ? 12 : 16); ++i) bytes[16 * i] = from[i];
    }

    std::unique_ptr<uint8_t[], Free> memory_;
    uint8_t table_[kTableBytes] = {};
};

// Interleaves gate and up projections by 16 outputs, so that a panel has both for the same outputs.
inline PackedMatrix pack_gate_up(const Weight &weight, int intermediate_size, int depth) {
    return {weight, 2 * intermediate_size, depth, [=](int i) {
                return i / 16 % 2 * intermediate_size + i / 32 * 16 + i % 16;
            }};
}

// Vectors of a layer, copied; empty for null.
inline std::vector<float> copied(const float *values, int count) {
    return values ? std::vector<float>(values, values + count) : std::vector<float>();
}

inline std::vector<float> widened(const bf16 *values, int count) {
    std::vector<float> wide;
    for (int i = 0; values && i < count; ++i) wide.push_back(to_float(values[i]));
    return wide;
}

}  // namespace legato
