// Blocks of GGUF files: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include <algorithm>
#include <cstdint>

namespace legato {

// Types of blocks, in the order of legato.model.file_weight.
enum class BlockType { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kIq4Nl, kQ4K, kQ5K, kQ6K };

constexpr int kSuperBlock = 256;  // values of a block with scales of scales

struct BlockShape {
    int values, bytes;
    bool has_minima;
};

constexpr BlockShape block_shape(BlockType type) {
    switch (type) {
        case BlockType::kQ4_0:
        case BlockType::kIq4Nl: return {32, 18, false};
        case BlockType::kQ4_1: return {32, 20, true};
        case BlockType::kQ5_0: return {32, 22, false};
        case BlockType::kQ5_1: return {32, 24, true};
        case BlockType::kQ8_0: return {32, 34, false};
        case BlockType::kQ4K: return {kSuperBlock, 144, true};
        case BlockType::kQ5K: return {kSuperBlock, 176, true};
        case BlockType::kQ6K: return {kSuperBlock, 210, false};
    }
    return {};
}

// Places of a Q6_K block's parts.
constexpr int kQ6Upper = 128, kQ6Scales = 192, kQ6Scale = 208;

// The lower halves of all bytes come first.
inline void read_nibbles(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = from[i] & 15;
        codes[16 + i] = from[i] >> 4;
    }
}

inline void read_fifths(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 32; ++i) codes[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

// Writes the 32 codes of values [32 * step, 32 * step + 32) of a block.
inline void read_codes(BlockType type, const uint8_t *block, int step, uint8_t *codes) {
    const auto half_bytes = [&](const uint8_t *from) {
        for (int i = 0; i < 32; ++i) codes[i] = from[32 * (step / 2) + i] >> step % 2 * 4 & 15;
    };
    switch (type) {
        case BlockType::kQ4_0:
        case BlockType::kIq4Nl: return read_nibbles(block + 2, codes);
        case BlockType::kQ4_1: return read_nibbles(block + 4, codes);
        case BlockType::kQ5_0:
            read_nibbles(block + 6, codes);
            return read_fifths(block + 2, codes);
        case BlockType::kQ5_1:
            read_nibbles(block + 8, codes);
            return read_fifths(block + 4, codes);
        case BlockType::kQ8_0:
            for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 0x80;
            return;
        case BlockType::kQ4K: return half_bytes(block + 16);
        case BlockType::kQ5K:
            half_bytes(block + 48);
            for (int i = 0; i < 32; ++i) codes[i] |= (block[16 + i] >> step & 1) << 4;
            return;
        case BlockType::kQ6K: {
            // Of 128 values, 64 bytes have four bits of two each, and 32 bytes two bits of four.
            const uint8_t *const lower = block + step / 4 * 64 + step % 2 * 32;
            const uint8_t *const upper = block + kQ6Upper + step / 4 * 32;
            const int shift = step % 4 / 2 * 4, upper_shift = step % 4 * 2;
            for (int i = 0; i < 32; ++i)
                codes[i] = (lower[i] >> shift & 15) | (upper[i] >> upper_shift & 3) << 4;
            return;
        }
    }
}

}  // namespace legato
