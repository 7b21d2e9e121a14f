// Vectors of 16 numbers, as two of AVX2 with FMA and F16C; the same functions as vector512.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace legato {

using bf16 = uint16_t;

struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};
struct ShortPairs {  // pairs of 16-bit numbers
    __m256i low, high;
};

inline Floats fill(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Floats load(const float *from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float *to, Floats x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}
// Stores past the caches; `to` must begin a cache line.
inline void stream(float *to, Floats x) {
    _mm256_stream_ps(to, x.low);
    _mm256_stream_ps(to + 8, x.high);
}

inline Floats operator+(Floats a, Floats b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Floats operator-(Floats a, Floats b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Floats operator*(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Floats operator/(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
// a * b + c
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// If a or b is NaN, these two return b: they keep the NaN of b, and drop that of a.
inline Floats max(Floats a, Floats b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Floats min(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Floats abs(Floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline float sum(Floats x) {
    const __m256 halves = _mm256_add_ps(x.low, x.high);
    __m128 total = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    total = _mm_add_ps(total, _mm_movehl_ps(total, total));
    return _mm_cvtss_f32(_mm_add_ss(total, _mm_movehdup_ps(total)));
}
inline float largest(Floats x) {
    const __m256 halves = _mm256_max_ps(x.low, x.high);
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

// Returns lanes [from, end) of x, and `other` in the rest.
inline Floats keep(Floats x, int from, int end, float other) {
    const auto half = [=](__m256 values, __m256i lanes) {
        const __m256i is_kept = _mm256_and_si256(_mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(from - 1)),
                                                 _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lanes));
        return _mm256_blendv_ps(_mm256_set1_ps(other), values, _mm256_castsi256_ps(is_kept));
    };
    return {half(x.low, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
            half(x.high, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

// Returns the lanes with those at a distance of 1, 2, 4 or 8 swapped.
template <int distance>
inline Floats swapped(Floats x) {
    if constexpr (distance == 8) return {x.high, x.low};
    const auto half = [](__m256 lanes) {
        if constexpr (distance == 4) return _mm256_permute2f128_ps(lanes, lanes, 0x01);
        else return _mm256_permute_ps(lanes, distance == 2 ? 0x4e : 0xb1);
    };
    return {half(x.low), half(x.high)};
}

// Returns `then` in lanes where x is below 0, else `other`.
inline Floats where_negative(Floats x, Floats then, Floats other) {
    return {_mm256_blendv_ps(other.low, then.low, x.low),
            _mm256_blendv_ps(other.high, then.high, x.high)};
}

inline float from_half(uint16_t half) { return _cvtsh_ss(half); }
inline Floats load_halves(const void *from) {
    const auto *halves = static_cast<const __m128i *>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline Floats load_bf16(const bf16 *from) {
    const auto half = [](const bf16 *values) {
        const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i *>(values));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
    };
    return {half(from), half(from + 8)};
}

// Rounds to the nearest bfloat16, ties to even, in the upper half of each lane. The sum would carry some
// NaN over to zero.
inline __m256i rounded_to_bf16(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_or_si256(sum, is_nan);
}

inline void store_bf16(bf16 *to, Floats x) {
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(rounded_to_bf16(x.low), 16),
                                               _mm256_srli_epi32(rounded_to_bf16(x.high), 16));
    // The pack instruction interleaves halves of the vectors.
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store_bf16(bf16 *to, Floats first, Floats second) {
    store_bf16(to, first);
    store_bf16(to + 16, second);
}

// For x = n + fraction with integer n: returns the fraction; and y * 2^n. For x below -125 both take -125:
// a smaller exponent would make a `y` below 1 denormal, or borrow from its sign, and infinity has no
// fraction. NaN has shift 0, and stays NaN.
inline Floats enough(Floats x) { return max(fill(-125.0f), x); }
inline Floats floor(Floats x) { return {_mm256_floor_ps(x.low), _mm256_floor_ps(x.high)}; }
inline Floats fraction(Floats x) { return enough(x) - floor(enough(x)); }
inline Floats scale_by_whole(Floats y, Floats x) {
    const Floats whole = floor(enough(x));
    const auto half = [](__m256 value, __m256 exponent) {
        const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(exponent), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), shift));
    };
    return {half(y.low, whole.low), half(y.high, whole.high)};
}

inline Ints fill(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Ints load_ints(const void *from) {
    const auto *halves = static_cast<const __m256i *>(from);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline void store(void *to, Ints x) {
    auto *halves = static_cast<__m256i *>(to);
    _mm256_storeu_si256(halves, x.low);
    _mm256_storeu_si256(halves + 1, x.high);
}
inline Ints operator&(Ints a, Ints b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
inline Ints operator+(Ints a, Ints b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline Ints operator>>(Ints x, int count) {
    return {reinterpret_cast<__m256i>(reinterpret_cast<__v8su>(x.low) >> count),
            reinterpret_cast<__m256i>(reinterpret_cast<__v8su>(x.high) >> count)};
}
// Returns byte x of the 16 bytes of the table at the same place, for each byte x below 16; 0 for 0x80.
inline Ints look_up(Ints table, Ints x) {
    return {_mm256_shuffle_epi8(table.low, x.low), _mm256_shuffle_epi8(table.high, x.high)};
}
inline Ints operator<<(Ints x, int count) {
    return {reinterpret_cast<__m256i>(reinterpret_cast<__v8su>(x.low) << count),
            reinterpret_cast<__m256i>(reinterpret_cast<__v8su>(x.high) << count)};
}
inline Ints operator|(Ints a, Ints b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
// Returns the half floats in the lower 16 bits of the lanes.
inline Floats from_halves(Ints x) {
    const Ints lower = x & fill(int32_t{0xffff});
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower.low, lower.high), 0xd8);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))};
}
inline Floats with_bits(Ints x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Ints bits_of(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline int32_t largest(Ints x) {
    const __m256i halves = _mm256_max_epi32(x.low, x.high);
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}
inline Ints max(Ints a, Ints b) {
    return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
}
inline int32_t sum(Ints x) {
    const __m256i halves = _mm256_add_epi32(x.low, x.high);
    __m128i total = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(total, _mm_shuffle_epi32(total, 0xb1)));
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Floats load_bytes(const int8_t *from) {
    const auto *const halves = reinterpret_cast<const __m128i *>(from);
    const Ints wide{_mm256_cvtepi8_epi32(_mm_loadl_epi64(halves)),
                    _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from + 8)))};
    return to_floats(wide);
}
inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline void store_bytes(int8_t *to, Ints x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), bytes);
}

inline void store_shorts(int16_t *to, Ints x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), words);
}

// Returns the lowest 4 bits of each lane.
inline Floats lowest_4_bits(Ints x) { return to_floats(x & fill(int32_t{0x0f})); }

// Returns total + the 4 products of each lane's bytes: unsigned codes of `bits` times four signed codes.
template <int bits>
Ints add_products(Ints total, Ints codes, const int32_t *four) {
    const Ints signed_codes = fill(*four);
    const auto half = [](__m256i total, __m256i codes, __m256i factors) {
        const auto products = [=](__m256i small_codes, int16_t times) {
            return _mm256_madd_epi16(_mm256_maddubs_epi16(small_codes, factors),
                                     _mm256_set1_epi16(times));
        };
        if constexpr (bits == 4) return _mm256_add_epi32(total, products(codes, 1));
        // Two products of 8-bit codes exceed 16 bits, so a code is split: twice its half, and its
        // lowest bit.
        const __m256i halved =
            _mm256_and_si256(_mm256_srli_epi16(codes, 1), _mm256_set1_epi8(0x7f));
        const __m256i lowest = _mm256_and_si256(codes, _mm256_set1_epi8(1));
        return _mm256_add_epi32(
            total, _mm256_add_epi32(products(halved, 2), products(lowest, 1)));
    };
    return {half(total.low, codes.low, signed_codes.low),
            half(total.high, codes.high, signed_codes.high)};
}

template <int bits>
class ProductSum;  // as in vector.hpp

// Products of codes of 4 bits fit into 16 bits, and so do the sums of 16 of them.
template <>
class ProductSum<4> {
public:
    void add(Ints codes, const int32_t *four) {
        const Ints signed_codes = fill(*four);
        low_ = _mm256_add_epi16(low_, _mm256_maddubs_epi16(codes.low, signed_codes.low));
        high_ = _mm256_add_epi16(high_, _mm256_maddubs_epi16(codes.high, signed_codes.high));
    }
    Ints total() const {
        const __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(low_, ones), _mm256_madd_epi16(high_, ones)};
    }

private:
    __m256i low_ = _mm256_setzero_si256(), high_ = _mm256_setzero_si256();
};

// The products of so many sets fit into 16 bits.
template <int num_sets>
class NarrowSum {
public:
    void add(Ints codes, const int32_t *four) {
        part_.add(codes, four);
        if (++count_ < num_sets) return;
        total_ = total_ + part_.total();
        part_ = {};
        count_ = 0;
    }
    Ints total() const { return count_ ? total_ + part_.total() : total_; }

private:
    ProductSum<4> part_;
    Ints total_{_mm256_setzero_si256(), _mm256_setzero_si256()};
    int count_ = 0;
};
template <>
class ProductSum<5> : public NarrowSum<4> {};
template <>
class ProductSum<6> : public NarrowSum<2> {};

// Rounds to bfloat16, with `first` in the lower half of each lane.
inline Ints interleave_bf16(Floats first, Floats second) {
    const auto half = [](__m256 lower, __m256 upper) {
        return _mm256_blend_epi16(_mm256_srli_epi32(rounded_to_bf16(lower), 16),
                                  rounded_to_bf16(upper), 0xaa);
    };
    return {half(first.low, second.low), half(first.high, second.high)};
}

// Number of parts in which products of pairs are added. AVX2 has no product of bfloat16 pairs, so the
// first values of all pairs are multiplied, and then the second values: both together would need twice
// the registers, and each sum would wait for itself.
template <typename Column>
constexpr int kPairParts = 1;
template <>
inline constexpr int kPairParts<bf16> = 2;

template <int part>
inline Floats load_pairs(const bf16 *from) {
    const Ints pairs = load_ints(from);
    if constexpr (part == 0)
        return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs.low, 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(pairs.high, 16))};
    const Ints second = pairs & fill(static_cast<int32_t>(0xffff0000));
    return {_mm256_castsi256_ps(second.low), _mm256_castsi256_ps(second.high)};
}
template <int part>
inline Floats fill_pairs(const float *pair) {
    return fill(pair[part]);
}
inline Floats add_products(Floats total, Floats a, Floats b) { return fma(a, b, total); }

template <int part>
inline ShortPairs load_pairs(const int8_t *from) {
    const auto *halves = reinterpret_cast<const __m128i *>(from);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)),
            _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
}
template <int part>
inline ShortPairs fill_pairs(const int16_t *pair) {
    int32_t both;
    __builtin_memcpy(&both, pair, 4);
    return {_mm256_set1_epi32(both), _mm256_set1_epi32(both)};
}
inline Ints add_products(Ints total, ShortPairs a, ShortPairs b) {
    return {_mm256_add_epi32(total.low, _mm256_madd_epi16(a.low, b.low)),
            _mm256_add_epi32(total.high, _mm256_madd_epi16(a.high, b.high))};
}

// Codes of rows that are multiplied with sets of 4 unsigned codes of 16 columns, and the number of parts in
// which a set's products are added. AVX2 sums products of bytes in 16 bits, which two products of 8-bit
// codes exceed, so the codes are widened: the first and third, then the second and fourth.
using RowCode = int16_t;
constexpr int kSetParts = 2;

// Stores the second and third of each four codes swapped.
inline void store_row(RowCode *to, Ints codes) {
    const __m256i words =
        _mm256_permute4x64_epi64(_mm256_packs_epi32(codes.low, codes.high), 0xd8);
    const __m256i swapped = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), swapped);
}
template <int part>
inline ShortPairs load_set(const uint8_t *from) {
    const Ints bytes = load_ints(from);
    const Ints shorts = (part == 0 ? bytes : bytes >> 8) & fill(int32_t{0x00ff00ff});
    return {shorts.low, shorts.high};
}
template <int part>
inline ShortPairs fill_set(const RowCode *four) {
    return fill_pairs<0>(four + 2 * part);
}
// Returns total + the products of a part of a set with codes of a row.
inline Ints add_set(Ints total, ShortPairs set, ShortPairs codes) {
    return add_products(total, set, codes);
}

}  // namespace legato
