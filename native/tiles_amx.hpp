// Strips in tiles of Intel AMX: 16 rows of 64 bytes, with products summed in float.
#pragma once

#include <type_traits>

#include "memory.hpp"
#include "tiles.hpp"
#ifdef LEGATO_EMULATED
#include "emulated/amx.hpp"
#endif

namespace legato {

// Configures the tiles of a thread; each thread holds one while it multiplies strips.
class TileScope {
public:
    TileScope() {
        alignas(64) struct {
            uint8_t palette = 1;
            uint8_t start_row = 0;
            uint8_t reserved[14] = {};
            uint16_t bytes_a_row[16] = {};
            uint8_t num_rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; ++tile) {
            config.bytes_a_row[tile] = kTileRowBytes;
            config.num_rows[tile] = kTileRows;
        }
        // GCC 12 believes that the next line reads only 8 bytes, and does not write the others.
        asm volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope &) = delete;
};

// Type of rows that are multiplied with codes. Tiles hold codes as bfloat16, too.
using CodeRow = bf16;

// Rounds `count` values, a multiple of 16, to a row, and returns its scale.
inline float round_row(const float *values, int count, CodeRow *row) {
    for (int i = 0; i < count; i += 16) store_bf16(row + i, load(values + i));
    return 1.0f;
}

// multiply_strip() for one or two whole rows of tiles.
template <bool adds, bool is_pair, typename OperandsAt>
inline void multiply_tiles(const StripShape &shape, OperandsAt at, float *sums) {
    float *const lower_sums = sums + kTileRows * shape.sum_bytes / sizeof(float);
    if constexpr (adds) {
        _tile_loadd(0, sums, shape.sum_bytes);
        _tile_loadd(1, sums + 16, shape.sum_bytes);
        if constexpr (is_pair) {
            _tile_loadd(2, lower_sums, shape.sum_bytes);
            _tile_loadd(3, lower_sums + 16, shape.sum_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < shape.num_steps; ++step) {
        const Operands<bf16, bf16> operands = at(step);
        _tile_loadd(6, operands.left, shape.pair_bytes);
        _tile_loadd(4, operands.upper, shape.row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, operands.right, shape.pair_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (is_pair) {
            _tile_loadd(5, operands.lower, shape.row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, shape.sum_bytes);
    _tile_stored(1, sums + 16, shape.sum_bytes);
    if constexpr (is_pair) {
        _tile_stored(2, lower_sums, shape.sum_bytes);
        _tile_stored(3, lower_sums + 16, shape.sum_bytes);
    }
}

// Codes of 32 columns, widened to tiles.
struct WideColumns {
    alignas(64) bf16 left[kTileValues], right[kTileValues];

    void widen(const int8_t *from_left, const int8_t *from_right, long pair_values, long ahead) {
        for (long pair = 0; pair < kTileDepth / 2; ++pair) {
            const int8_t *const from[] = {from_left + pair * pair_values,
                                          from_right + pair * pair_values};
            prefetch(from[0] + ahead);
            prefetch(from[1] + ahead);
            widen_bytes(left + pair * kTileDepth, from[0]);
            widen_bytes(right + pair * kTileDepth, from[1]);
        }
    }
};

// Returns operands with widened columns, which are in the same place each time.
inline auto as_tiles(const Operands<bf16, bf16> &operands, const StripShape &, WideColumns &) {
    return operands;
}
inline auto as_tiles(const Operands<bf16, int8_t> &operands, const StripShape &shape,
                     WideColumns &wide) {
    wide.widen(operands.left, operands.right, shape.pair_bytes, operands.ahead);
    return Operands<bf16, bf16>{operands.upper, operands.lower, wide.left, wide.right, 0};
}
template <typename Column>
long tile_pair_bytes(const Operands<bf16, Column> &, const StripShape &shape) {
    return std::is_same_v<Column, int8_t> ? kTileRowBytes : shape.pair_bytes;
}

// Bytes of memory that multiply_strip() takes.
constexpr size_t strip_bytes(long) { return 0; }

// sums [num_rows, 32] = the rows times the columns, or += if `adds`; at(step) returns the operands.
// It may read and write rows up to the next multiple of 16.
template <bool adds, typename OperandsAt>
inline void multiply_strip(const StripShape &shape, OperandsAt at, float *sums, Arena) {
    WideColumns wide;
    const auto tiles_at = [&](int step) { return as_tiles(at(step), shape, wide); };
    StripShape tiles = shape;
    tiles.pair_bytes = tile_pair_bytes(at(0), shape);
    if (shape.num_rows > kTileRows) multiply_tiles<adds, true>(tiles, tiles_at, sums);
    else multiply_tiles<adds, false>(tiles, tiles_at, sums);
}

// multiply_bytes() for one or two whole rows of tiles.
template <bool is_pair>
inline void multiply_byte_tiles(const ByteStrip &strip, int32_t *products) {
    constexpr long kProductBytes = 2 * kTileRows * sizeof(int32_t);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long at = 0; at < strip.num_tiles * kByteTileValues; at += kByteTileValues) {
        if constexpr (!is_pair)
            for (long line = 0; line < kByteTileValues; line += 64) {
                prefetch(strip.left + at + line + strip.ahead);
                prefetch(strip.right + at + line + strip.ahead);
            }
        _tile_loadd(6, strip.left + at, kByteTileDepth);
        _tile_loadd(4, strip.upper + at, kByteTileDepth);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, strip.right + at, kByteTileDepth);
        _tile_dpbsud(1, 4, 7);
        if constexpr (is_pair) {
            _tile_loadd(5, strip.lower + at, kByteTileDepth);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
    }
    _tile_stored(0, products, kProductBytes);
    _tile_stored(1, products + 16, kProductBytes);
    if constexpr (is_pair) {
        products += kTileRows * 2 * kTileRows;
        _tile_stored(2, products, kProductBytes);
        _tile_stored(3, products + 16, kProductBytes);
    }
}

// products [num_rows, 32] = the rows times the columns. It writes rows up to the next multiple of 16.
inline void multiply_bytes(const ByteStrip &strip, int32_t *products) {
    if (strip.num_rows > kTileRows) multiply_byte_tiles<true>(strip, products);
    else multiply_byte_tiles<false>(strip, products);
}

}  // namespace legato
