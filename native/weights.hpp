// Weight matrices, laid out once after loading for the kernels that multiply with them.
#pragma once

#include "memory.hpp"
#include "tiles.hpp"

namespace legato {

// How far ahead of what is multiplied memory is asked for more of a matrix.
constexpr long kAheadBytes = 8 << 10;
constexpr int kPanel = 32;  // outputs that are computed at a time: two tiles

// A matrix [outputs, depth] as it comes: bfloat16 values, or codes of 4 or 8 bits in a byte each, of
// which 32 share a scale and a minimum, half floats [outputs, depth / 32]. A weight is
// scale * code + minimum.
struct Weight {
    const bf16 *values = nullptr;
    const uint8_t *codes = nullptr;
    const uint16_t *scales = nullptr, *minima = nullptr;
    int bits = 16;
};

// Panels of 32 outputs, padded to whole ones.
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
        std::fill_n(memory_.get(), num_panels * panel_bytes(), uint8_t{0});
        for (int output = 0; output < num_outputs; ++output) {
            const size_t row = row_of(output);
            for (int step = 0; step < num_steps; ++step)
                is_quantized() ? put_codes(weight, row, output, step)
                               : put_values(weight, row, output, step);
        }
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
    void put_values(const Weight &weight, size_t row, int output, int step) {
        const bf16 *from = weight.values + row * depth + step * kTileDepth;
        bf16 *to = reinterpret_cast<bf16 *>(memory_.get() + output / kPanel * panel_bytes()) +
                   (2 * step + output % kPanel / 16) * kTileValues + output % 16 * 2;
        for (int i = 0; i < kTileDepth; ++i) to[i / 2 * 32 + i % 2] = from[i];
    }

    void put_codes(const Weight &weight, size_t row, int output, int step) {
        const uint8_t *from = weight.codes + row * depth + step * kTileDepth;
        uint8_t *block = memory_.get() + output / kPanel * panel_bytes() +
                         (output % kPanel / 16 * num_steps + step) * block_bytes();
        for (int i = 0; i < kTileDepth; ++i) {
            const int at = i / 4 * 64 + output % 16 * 4 + i % 4;
            if (bits == 8) block[at] = from[i];
            else block[at % 256] |= from[i] << (at < 256 ? 0 : 4);
        }
        uint16_t *numbers = reinterpret_cast<uint16_t *>(block + 64 * bits) + output % 16;
        numbers[0] = weight.scales[row * num_steps + step];
        numbers[16] = weight.minima[row * num_steps + step];
    }

    std::unique_ptr<uint8_t[], Free> memory_;
};

}  // namespace legato
