// Weight matrices, laid out once after loading for the kernels that multiply with them.
#pragma once

#include "memory.hpp"
#include "tiles.hpp"

namespace legato {

// How far ahead of the present product a matrix is prefetched.
constexpr long kAheadBytes = 8 << 10;
constexpr int kPanel = 32;  // outputs computed at a time: two tiles

// A matrix [outputs, depth] from a file: bfloat16 values, or codes of 4 or 8 bits in a byte each. Every
// 32 codes share a scale and a minimum, half floats [outputs, depth / 32]. A weight is
// scale * code + minimum. Codes of 16 bits exist only in a file: their weights are packed as bfloat16.
struct Weight {
    const bf16 *values = nullptr;
    const uint8_t *codes = nullptr;
    const uint16_t *scales = nullptr, *minima = nullptr;
    int bits = 16;
};

inline bf16 to_bf16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A matrix packed in panels of 32 outputs, padded to whole panels.
//
// In bfloat16 a panel is a row of pairs of tiles: within a tile, row r holds values 2r and 2r + 1 of
// 16 outputs side by side. Quantized, it is two rows of blocks, each of 16 outputs by 32 values: 8
// groups of 4 values of each output, where 4-bit codes lie in the lower halves of the bytes for the
// first 4 groups and in the upper ones for the last; then 16 scales, then 16 minima.
class PackedMatrix {
public:
    // Output i is row row_of(i) of the weight.
    template <typename RowOf>
    PackedMatrix(const Weight &weight, int num_outputs, int depth, RowOf row_of)
        : num_outputs(num_outputs),
          depth(depth),
          bits(weight.bits),
          num_panels((num_outputs + kPanel - 1) / kPanel),
          num_steps(depth / kTileDepth),
          memory_(aligned_array<uint8_t>(num_panels * panel_bytes())) {
        if (num_outputs % kPanel)
            std::fill_n(memory_.get() + (num_panels - 1) * panel_bytes(), panel_bytes(), uint8_t{0});
        // Tile by tile, so that one is written while it is in the cache.
        for (int first = 0; first < num_outputs; first += 16)
            for (int step = 0; step < num_steps; ++step)
                for (int output = first; output < std::min(first + 16, num_outputs); ++output)
                    put(weight, row_of(output), output, step);
    }

    bool is_quantized() const { return bits < 16; }
    size_t block_bytes() const { return 64 * bits + 64; }
    size_t panel_bytes() const {
        return 2 * num_steps * (is_quantized() ? block_bytes() : kTileValues * sizeof(bf16));
    }
    size_t num_bytes() const { return num_panels * panel_bytes(); }

    const uint8_t *panel(int index) const { return memory_.get() + index * panel_bytes(); }
    const bf16 *tiles(int index) const { return reinterpret_cast<const bf16 *>(panel(index)); }

    const int num_outputs, depth, bits, num_panels, num_steps;

private:
    // Packs the 32 values of a row that belong to a step.
    void put(const Weight &weight, size_t row, int output, int step) {
        if (is_quantized()) return put_codes(weight, row, output, step);
        if (!weight.codes)
            return put_values(weight.values + row * depth + step * kTileDepth, output, step);
        bf16 values[kTileDepth];
        const uint8_t *codes = weight.codes + row * depth + step * kTileDepth;
        const float scale = _cvtsh_ss(weight.scales[row * num_steps + step]);
        const float minimum = _cvtsh_ss(weight.minima[row * num_steps + step]);
        // The product is exact, so the result is the same with or without a fused sum.
        for (int i = 0; i < kTileDepth; ++i) values[i] = to_bf16(scale * codes[i] + minimum);
        put_values(values, output, step);
    }

    void put_values(const bf16 *from, int output, int step) {
        bf16 *to = reinterpret_cast<bf16 *>(memory_.get() + output / kPanel * panel_bytes()) +
                   (2 * step + output % kPanel / 16) * kTileValues + output % 16 * 2;
        for (int i = 0; i < kTileDepth; i += 2)
            __builtin_memcpy(to + 16 * i, from + i, 2 * sizeof(bf16));
    }

    void put_codes(const Weight &weight, size_t row, int output, int step) {
        const uint8_t *from = weight.codes + row * depth + step * kTileDepth;
        uint8_t *block = memory_.get() + output / kPanel * panel_bytes() +
                         (output % kPanel / 16 * num_steps + step) * block_bytes();
        const auto at = [=](int i) { return i / 4 * 64 + output % 16 * 4 + i % 4; };
        if (bits == 8)
            for (int i = 0; i < kTileDepth; ++i) block[at(i)] = from[i];
        else
            for (int i = 0; i < 16; ++i) block[at(i)] = from[i] | from[i + 16] << 4;
        uint16_t *numbers = reinterpret_cast<uint16_t *>(block + 64 * bits) + output % 16;
        numbers[0] = weight.scales[row * num_steps + step];
        numbers[16] = weight.minima[row * num_steps + step];
    }

    std::unique_ptr<uint8_t[], Free> memory_;
};

}  // namespace legato
