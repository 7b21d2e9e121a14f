// The intrinsics of Intel AMX that tiles_amx.hpp uses, in plain C++: see avx512.hpp.
//
// As on a processor, the use of an unconfigured tile ends the process.
#pragma once

#include <cstdlib>

#include "avx512.hpp"

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud

namespace legato {

namespace emulated {

struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_a_row[16];
    uint8_t num_rows[16];
};

struct Tile {
    alignas(64) uint8_t rows[16][64];
};

inline thread_local TileConfig tile_config{};
inline thread_local Tile tile_registers[8];

inline Tile &configured_tile(int index) {
    const bool is_configured = tile_config.palette == 1 && tile_config.bytes_a_row[index] == 64 &&
                               tile_config.num_rows[index] == 16;
    if (!is_configured) std::abort();
    return tile_registers[index];
}

}  // namespace emulated

inline void _tile_loadconfig(const void *config) {
    std::memcpy(&emulated::tile_config, config, sizeof(emulated::TileConfig));
    std::memset(emulated::tile_registers, 0, sizeof(emulated::tile_registers));
}
inline void _tile_release() { emulated::tile_config = {}; }

inline void _tile_zero(int to) { emulated::configured_tile(to) = {}; }
inline void _tile_loadd(int to, const void *from, long stride) {
    for (auto &row : emulated::configured_tile(to).rows) {
        std::memcpy(row, from, sizeof(row));
        from = static_cast<const char *>(from) + stride;
    }
}
inline void _tile_stored(int from, void *to, long stride) {
    for (const auto &row : emulated::configured_tile(from).rows) {
        std::memcpy(to, row, sizeof(row));
        to = static_cast<char *>(to) + stride;
    }
}

// Sums even and odd values of a row separately, then adds both to the tile.
inline void _tile_dpbf16ps(int to, int left, int right) {
    const emulated::Tile &a = emulated::configured_tile(left), &b = emulated::configured_tile(right);
    for (int m = 0; m < 16; ++m) {
        for (int half : {0, 32}) {
            __m256 even{}, odd{};
            for (int k = 0; k < 16; ++k) {
                const __m256i row = _mm256_set1_epi32(emulated::loaded<int32_t>(a.rows[m] + 4 * k));
                const auto columns = emulated::loaded<__m256i>(b.rows[k] + half);
                even = emulated::add_products(even, emulated::lower_bf16(row),
                                              emulated::lower_bf16(columns));
                odd = emulated::add_products(odd, emulated::upper_bf16(row),
                                             emulated::upper_bf16(columns));
            }
            auto *sums = emulated::configured_tile(to).rows[m] + half;
            emulated::stored(sums, emulated::loaded<__m256>(sums) + (even + odd));
        }
    }
}

// Adds products of signed bytes with unsigned bytes, 4 a lane.
inline void _tile_dpbsud(int to, int left, int right) {
    const emulated::Tile &a = emulated::configured_tile(left), &b = emulated::configured_tile(right);
    for (int m = 0; m < 16; ++m) {
        auto &sums = emulated::configured_tile(to).rows[m];
        auto total = emulated::loaded<__m512i>(sums);
        for (int k = 0; k < 16; ++k) {
            const auto four = emulated::loaded<int32_t>(a.rows[m] + 4 * k);
            total = _mm512_dpbusd_epi32(total, emulated::loaded<__m512i>(b.rows[k]),
                                        _mm512_set1_epi32(four));
        }
        emulated::stored(sums, total);
    }
}

}  // namespace legato
