// Intel AMX tiles: 16 rows of 64 bytes, and the products of bfloat16 tiles that are summed in float.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace legato {

using bf16 = uint16_t;

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;  // bfloat16 values in a tile's row

// Whether this processor and kernel let a process use AMX and AVX-512 in bfloat16; asks for it.
bool has_amx();

// Every thread that uses tiles holds one of these meanwhile.
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
            config.bytes_a_row[tile] = 64;
            config.num_rows[tile] = kTileRows;
        }
        // GCC 12 believes that the next line reads 8 bytes only, and leaves the others unwritten.
        asm volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope &) = delete;
};

inline float to_float(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    __builtin_memcpy(&result, &bits, 4);
    return result;
}

inline __m512 widen(__m256i values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

inline void store_bf16(bf16 *to, __m512 values) {
    const __m256bh rounded = _mm512_cvtneps_pbh(values);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), reinterpret_cast<const __m256i &>(rounded));
}

// 2^x for x <= 0, within 8e-5 of it: what comes of it is rounded to bfloat16.
inline __m512 exp2_fast(__m512 x) {
    const __m512 fraction = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
    __m512 result = _mm512_set1_ps(0.07790716377386403f);
    result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(0.22623319419985954f));
    result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(0.6957770964274216f));
    result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(0.999927826644514f));
    return _mm512_scalef_ps(result, x);
}

}  // namespace legato
