// Vectors of 16 numbers in AVX-512 with bfloat16 and VNNI; the same functions as vector256.hpp.
#pragma once

#include <array>
#include <cstdint>

#ifdef LEGATO_EMULATED
#include "emulated/avx512.hpp"
#else
#include <immintrin.h>
#endif

namespace legato {

using bf16 = uint16_t;

struct Floats {
    __m512 values;
};
struct Ints {
    __m512i values;
};
struct Pairs {  // pairs of bfloat16 values
    __m512bh values;
};
struct ShortPairs {  // pairs of 16-bit numbers
    __m512i values;
};

inline Floats fill(float value) { return {_mm512_set1_ps(value)}; }
inline Floats load(const float *from) { return {_mm512_loadu_ps(from)}; }
inline void store(float *to, Floats x) { _mm512_storeu_ps(to, x.values); }
// Stores past the caches; `to` must begin a cache line.
inline void stream(float *to, Floats x) { _mm512_stream_ps(to, x.values); }

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.values, b.values)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.values, b.values)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.values, b.values)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.values, b.values)}; }
// a * b + c
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm512_fmadd_ps(a.values, b.values, c.values)};
}
// If a or b is NaN, these two return b: they keep the NaN of b, and drop that of a.
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.values, b.values)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.values, b.values)}; }
inline Floats abs(Floats x) { return {_mm512_abs_ps(x.values)}; }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x.values); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x.values); }

// Returns lanes [from, end) of x, and `other` in the rest.
inline Floats keep(Floats x, int from, int end, float other) {
    const auto mask = static_cast<__mmask16>((1u << end) - (1u << from));
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), mask, x.values)};
}

// Returns the lanes with those at a distance of 1, 2, 4 or 8 swapped.
template <int distance>
inline Floats swapped(Floats x) {
    static constexpr auto kPlaces = [] {
        std::array<int32_t, 16> places{};
        for (int i = 0; i < 16; ++i) places[i] = i ^ distance;
        return places;
    }();
    return {_mm512_permutexvar_ps(_mm512_loadu_si512(kPlaces.data()), x.values)};
}

// Returns `then` in lanes where x is below 0, else `other`.
inline Floats where_negative(Floats x, Floats then, Floats other) {
    const __mmask16 is_negative = _mm512_movepi32_mask(_mm512_castps_si512(x.values));
    return {_mm512_mask_mov_ps(other.values, is_negative, then.values)};
}

inline float from_half(uint16_t half) { return _cvtsh_ss(half); }
inline Floats load_halves(const void *from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(from)))};
}
inline Floats load_bf16(const bf16 *from) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16))};
}
inline void store_bf16(bf16 *to, Floats x) {
    const __m256bh rounded = _mm512_cvtneps_pbh(x.values);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), reinterpret_cast<const __m256i &>(rounded));
}
inline void store_bf16(bf16 *to, Floats first, Floats second) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(second.values, first.values);
    _mm512_storeu_si512(to, reinterpret_cast<const __m512i &>(rounded));
}

// For x = n + fraction with integer n: returns the fraction; and y * 2^n.
inline Floats fraction(Floats x) { return {_mm512_reduce_ps(x.values, 0x09)}; }
inline Floats scale_by_whole(Floats y, Floats x) { return {_mm512_scalef_ps(y.values, x.values)}; }

inline Ints fill(int32_t value) { return {_mm512_set1_epi32(value)}; }
inline Ints load_ints(const void *from) { return {_mm512_loadu_si512(from)}; }
inline void store(void *to, Ints x) { _mm512_storeu_si512(to, x.values); }
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.values, b.values)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.values, b.values)}; }
inline Ints operator>>(Ints x, int count) {
    return {reinterpret_cast<__m512i>(reinterpret_cast<__v16su>(x.values) >> count)};
}
// Returns byte x of the 16 bytes of the table at the same place, for each byte x below 16; 0 for 0x80.
inline Ints look_up(Ints table, Ints x) { return {_mm512_shuffle_epi8(table.values, x.values)}; }
inline Ints operator<<(Ints x, int count) {
    return {reinterpret_cast<__m512i>(reinterpret_cast<__v16su>(x.values) << count)};
}
// Returns the half floats in the lower 16 bits of the lanes.
inline Floats from_halves(Ints x) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(x.values))}; }
inline Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.values, b.values)}; }
inline Floats with_bits(Ints x) { return {_mm512_castsi512_ps(x.values)}; }
inline Ints bits_of(Floats x) { return {_mm512_castps_si512(x.values)}; }
inline Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.values, b.values)}; }
inline int32_t largest(Ints x) { return _mm512_reduce_max_epi32(x.values); }
inline int32_t sum(Ints x) { return _mm512_reduce_add_epi32(x.values); }
inline Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.values)}; }
inline Ints to_ints(Floats x) { return {_mm512_cvtps_epi32(x.values)}; }
inline void store_bytes(int8_t *to, Ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtsepi32_epi8(x.values));
}

inline void store_shorts(int16_t *to, Ints x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtsepi32_epi16(x.values));
}

inline ShortPairs as_pairs(Ints x) { return {x.values}; }
inline Ints as_ints(ShortPairs x) { return {x.values}; }
inline ShortPairs operator+(ShortPairs a, ShortPairs b) {
    return {_mm512_add_epi16(a.values, b.values)};
}
inline ShortPairs operator-(ShortPairs a, ShortPairs b) {
    return {_mm512_sub_epi16(a.values, b.values)};
}
// Returns the lower 16 bits of the products.
inline ShortPairs operator*(ShortPairs a, ShortPairs b) {
    return {_mm512_mullo_epi16(a.values, b.values)};
}
// Returns a * b / 2^15, rounded.
inline ShortPairs scaled(ShortPairs a, ShortPairs b) {
    return {_mm512_mulhrs_epi16(a.values, b.values)};
}
inline ShortPairs abs(ShortPairs x) { return {_mm512_abs_epi16(x.values)}; }
inline ShortPairs max(ShortPairs a, ShortPairs b) {
    return {_mm512_max_epi16(a.values, b.values)};
}

// Returns the lowest 4 bits of each lane.
inline Floats lowest_4_bits(Ints x) {
    const __m512 floats = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(x.values, floats)};
}

// Returns total + the 4 products of each lane's bytes: unsigned codes of `bits` times four signed codes.
template <int bits>
Ints add_products(Ints total, Ints codes, const int32_t *four) {
#ifdef LEGATO_EMULATED
    return {_mm512_dpbusd_epi32(total.values, codes.values, _mm512_set1_epi32(*four))};
#else
    // With the intrinsic, GCC 12 loads the four codes by an instruction of its own.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(total.values) : "v"(codes.values), "m"(*four));
    return total;
#endif
}

// Codes of rows that are multiplied with sets of 4 unsigned codes of 16 columns, and the number of parts in
// which a set's products are added.
using RowCode = int8_t;
constexpr int kSetParts = 1;

inline void store_row(RowCode *to, Ints codes) { store_bytes(to, codes); }
template <int part>
inline Ints load_set(const uint8_t *from) {
    return load_ints(from);
}
template <int part>
inline Ints fill_set(const RowCode *four) {
    int32_t all;
    __builtin_memcpy(&all, four, 4);
    return fill(all);
}
// Returns total + the products of a set with 4 codes of a row.
inline Ints add_set(Ints total, Ints set, Ints codes) {
#ifdef LEGATO_EMULATED
    return {_mm512_dpbusd_epi32(total.values, set.values, codes.values)};
#else
    // As below: the intrinsic copies the total.
    asm("vpdpbusd %2, %1, %0" : "+v"(total.values) : "v"(set.values), "v"(codes.values));
    return total;
#endif
}

// Rounds to bfloat16, with `first` in the lower half of each lane.
inline Ints interleave_bf16(Floats first, Floats second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    const __m512bh rounded = _mm512_cvtne2ps_pbh(second.values, first.values);
    return {_mm512_permutexvar_epi16(order, reinterpret_cast<const __m512i &>(rounded))};
}

// Number of parts in which products of pairs are added.
template <typename Column>
constexpr int kPairParts = 1;

template <int part>
inline Pairs load_pairs(const bf16 *from) {
    const __m512i pairs = _mm512_loadu_si512(from);
    return {reinterpret_cast<const __m512bh &>(pairs)};
}
template <int part>
inline Pairs fill_pairs(const bf16 *pair) {
    int32_t both;
    __builtin_memcpy(&both, pair, 4);
    const __m512i pairs = _mm512_set1_epi32(both);
    return {reinterpret_cast<const __m512bh &>(pairs)};
}
// Returns total + both products of each lane's pairs.
inline Floats add_products(Floats total, Pairs a, Pairs b) {
    return {_mm512_dpbf16_ps(total.values, a.values, b.values)};
}

template <int part>
inline ShortPairs load_pairs(const int8_t *from) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    return {_mm512_cvtepi8_epi16(bytes)};
}
template <int part>
inline ShortPairs fill_pairs(const int16_t *pair) {
    int32_t both;
    __builtin_memcpy(&both, pair, 4);
    return {_mm512_set1_epi32(both)};
}
inline Ints add_products(Ints total, ShortPairs a, ShortPairs b) {
#ifdef LEGATO_EMULATED
    return {_mm512_dpwssd_epi32(total.values, a.values, b.values)};
#else
    // With the intrinsic, GCC 12 copies the total twice.
    asm("vpdpwssd %2, %1, %0" : "+v"(total.values) : "v"(a.values), "v"(b.values));
    return total;
#endif
}

inline Floats load_bytes(const int8_t *from) {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(narrow))};
}

// Widens 32 numbers, which bfloat16 represents exactly.
inline void widen_bytes(bf16 *to, const int8_t *from) {
    store_bf16(to, load_bytes(from), load_bytes(from + 16));
}

}  // namespace legato
