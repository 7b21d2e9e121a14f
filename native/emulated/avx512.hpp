// The intrinsics of AVX-512 that vector512.hpp uses, in plain C++: for tests on processors without them.
//
// Names, types and results are Intel's, denormals and special numbers included (Software Developer's
// Manual, volume 2). The compiler declares the real intrinsics for every target; name lookup finds
// the ones in this namespace first.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace legato {

namespace emulated {

constexpr int kLanes = 16;

using Shorts = int16_t __attribute__((vector_size(64)));
using Lanes = int32_t __attribute__((vector_size(64)));

// Maps the lanes of `From` to lanes of `To`: values[lane] is work(from[lane]).
template <typename To, typename From, typename Work>
inline To each(const From &from, Work work) {
    To to;
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = work(from[lane]);
    return to;
}

template <typename Vector>
inline Vector loaded(const void *from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
}
template <typename Vector>
inline void stored(void *to, const Vector &vector) {
    std::memcpy(to, &vector, sizeof(vector));
}

// Applies work to the halves of 256 bits of each vector, which AVX2 has instructions for: what products
// call most, lane by lane, would be most of the tests' time.
template <typename To, typename... From, typename Work>
[[gnu::always_inline]] inline To of_halves(Work work, const From &...from) {
    To to;
    for (int i = 0; i < 2; ++i)
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(&to) + i,
                            work(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(&from) + i)...));
    return to;
}

inline float flushed(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

// Rounds to the nearest bfloat16, ties to even; denormals become zero.
inline uint16_t rounded_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(flushed(x));
    if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Returns 2^n for an integer n.
inline float power_of_two(float n) {
    const bool is_normal = n >= -126.0f && n <= 127.0f;
    return is_normal ? std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23) : std::exp2(n);
}

inline __m256 flushed(__m256 x) {
    const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7f800000));
    const __m256i is_small = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
    const __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
    return _mm256_blendv_ps(x, sign, _mm256_castsi256_ps(is_small));
}
// Returns total + a * b of bfloat16 values, rounded once.
inline __m256 add_products(__m256 total, __m256 a, __m256 b) {
    return flushed(_mm256_fmadd_ps(flushed(a), flushed(b), flushed(total)));
}
// The upper and the lower value of each pair.
inline __m256 upper_bf16(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)));
}
inline __m256 lower_bf16(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

}  // namespace emulated

inline __m512 _mm512_set1_ps(float x) { return x - __m512{}; }
inline __m512 _mm512_setr_ps(float a, float b, float c, float d, float e, float f, float g, float h,
                             float i, float j, float k, float l, float m, float n, float o,
                             float p) {
    return __m512{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
inline __m512 _mm512_loadu_ps(const void *from) { return emulated::loaded<__m512>(from); }
inline void _mm512_storeu_ps(void *to, __m512 x) { emulated::stored(to, x); }
inline void _mm512_stream_ps(void *to, __m512 x) {
    emulated::stored(__builtin_assume_aligned(to, 64), x);
}

inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
[[gnu::always_inline]] inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    const auto fmadd = [](__m256i left, __m256i right, __m256i total) {
        return _mm256_castps_si256(_mm256_fmadd_ps(_mm256_castsi256_ps(left),
                                                   _mm256_castsi256_ps(right),
                                                   _mm256_castsi256_ps(total)));
    };
    return emulated::of_halves<__m512>(fmadd, a, b, c);
}
inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
inline __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
inline __m512 _mm512_abs_ps(__m512 x) {
    return emulated::each<__m512>(x, [](float value) { return std::fabs(value); });
}
// Adds halves, like the compiler's sequence for the real intrinsic.
inline float _mm512_reduce_add_ps(__m512 x) {
    for (int half = emulated::kLanes / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) x[lane] += x[lane + half];
    return x[0];
}
inline float _mm512_reduce_max_ps(__m512 x) {
    for (int half = emulated::kLanes / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane)
            x[lane] = x[lane] > x[lane + half] ? x[lane] : x[lane + half];
    return x[0];
}

inline __m512 _mm512_mask_mov_ps(__m512 other, __mmask16 mask, __m512 x) {
    for (int lane = 0; lane < emulated::kLanes; ++lane)
        if (mask >> lane & 1) other[lane] = x[lane];
    return other;
}
inline __m512i _mm512_castps_si512(__m512 x) { return std::bit_cast<__m512i>(x); }
inline __m512 _mm512_castsi512_ps(__m512i x) { return std::bit_cast<__m512>(x); }
inline __mmask16 _mm512_movepi32_mask(__m512i x) {
    const auto lanes = std::bit_cast<emulated::Lanes>(x);
    __mmask16 mask = 0;
    for (int lane = 0; lane < emulated::kLanes; ++lane) mask |= (lanes[lane] < 0) << lane;
    return mask;
}

inline __m512 _mm512_cvtph_ps(__m256i x) {
    uint16_t halves[emulated::kLanes];
    emulated::stored(halves, x);
    return emulated::each<__m512>(halves, [](uint16_t half) { return _cvtsh_ss(half); });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
    uint16_t shorts[emulated::kLanes];
    emulated::stored(shorts, x);
    return std::bit_cast<__m512i>(
        emulated::each<emulated::Lanes>(shorts, [](uint16_t value) { return int32_t{value}; }));
}
inline __m512i _mm512_slli_epi32(__m512i x, unsigned count) {
    return std::bit_cast<__m512i>(std::bit_cast<emulated::Lanes>(x) << count);
}

inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
    const auto lanes = std::bit_cast<emulated::Lanes>(x);
    uint16_t shorts[emulated::kLanes];
    for (int lane = 0; lane < emulated::kLanes; ++lane)
        shorts[lane] = static_cast<uint16_t>(lanes[lane]);
    return emulated::loaded<__m256i>(shorts);
}
inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
    uint16_t rounded[emulated::kLanes];
    for (int lane = 0; lane < emulated::kLanes; ++lane)
        rounded[lane] = emulated::rounded_bf16(x[lane]);
    return emulated::loaded<__m256bh>(rounded);
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
    uint16_t rounded[2 * emulated::kLanes];
    for (int lane = 0; lane < emulated::kLanes; ++lane) {
        rounded[lane] = emulated::rounded_bf16(lower[lane]);
        rounded[lane + emulated::kLanes] = emulated::rounded_bf16(upper[lane]);
    }
    return emulated::loaded<__m512bh>(rounded);
}

// Supports only the immediate 0x09: no bits of fraction kept, rounded down.
inline __m512 _mm512_reduce_ps(__m512 x, int) {
    return emulated::each<__m512>(
        x, [](float value) { return std::isinf(value) ? 0.0f : value - std::floor(value); });
}
inline __m512 _mm512_scalef_ps(__m512 x, __m512 exponent) {
    for (int lane = 0; lane < emulated::kLanes; ++lane)
        x[lane] *= emulated::power_of_two(std::floor(exponent[lane]));
    return x;
}

inline __m512i _mm512_set1_epi32(int32_t x) {
    return std::bit_cast<__m512i>(x - emulated::Lanes{});
}
inline __m512i _mm512_loadu_si512(const void *from) { return emulated::loaded<__m512i>(from); }
inline void _mm512_storeu_si512(void *to, __m512i x) { emulated::stored(to, x); }
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i _mm512_shuffle_epi8(__m512i from, __m512i index) {
    uint8_t bytes[64], places[64], found[64];
    emulated::stored(bytes, from);
    emulated::stored(places, index);
    for (int i = 0; i < 64; ++i)
        found[i] = places[i] & 0x80 ? 0 : bytes[i / 16 * 16 + (places[i] & 15)];
    return emulated::loaded<__m512i>(found);
}
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    return std::bit_cast<__m512i>(std::bit_cast<emulated::Lanes>(a) +
                                  std::bit_cast<emulated::Lanes>(b));
}
inline int32_t _mm512_reduce_add_epi32(__m512i x) {
    const auto lanes = std::bit_cast<emulated::Lanes>(x);
    int32_t total = 0;
    for (int lane = 0; lane < emulated::kLanes; ++lane) total += lanes[lane];
    return total;
}
inline __m512i _mm512_max_epi32(__m512i a, __m512i b) {
    return emulated::of_halves<__m512i>(
        [](__m256i left, __m256i right) { return _mm256_max_epi32(left, right); }, a, b);
}
inline int32_t _mm512_reduce_max_epi32(__m512i x) {
    const auto lanes = std::bit_cast<emulated::Lanes>(x);
    int32_t most = lanes[0];
    for (int lane = 1; lane < emulated::kLanes; ++lane) most = std::max(most, lanes[lane]);
    return most;
}
inline __m512 _mm512_cvtepi32_ps(__m512i x) {
    return emulated::each<__m512>(std::bit_cast<emulated::Lanes>(x),
                                  [](int32_t value) { return static_cast<float>(value); });
}
// Rounds ties to even; NaN and values that do not fit become the smallest number.
inline __m512i _mm512_cvtps_epi32(__m512 x) {
    return std::bit_cast<__m512i>(emulated::each<emulated::Lanes>(x, [](float value) {
        const float whole = std::nearbyint(value);
        const bool fits = whole >= -0x1p31f && whole < 0x1p31f;
        return fits ? static_cast<int32_t>(whole) : std::numeric_limits<int32_t>::min();
    }));
}
inline __m128i _mm512_cvtsepi32_epi8(__m512i x) {
    const auto lanes = std::bit_cast<emulated::Lanes>(x);
    int8_t bytes[emulated::kLanes];
    for (int lane = 0; lane < emulated::kLanes; ++lane)
        bytes[lane] = static_cast<int8_t>(std::clamp<int32_t>(lanes[lane], -128, 127));
    return emulated::loaded<__m128i>(bytes);
}
inline __m256i _mm512_cvtsepi32_epi16(__m512i x) {
    const auto lanes = std::bit_cast<emulated::Lanes>(x);
    int16_t shorts[emulated::kLanes];
    for (int lane = 0; lane < emulated::kLanes; ++lane)
        shorts[lane] = static_cast<int16_t>(std::clamp<int32_t>(lanes[lane], -32768, 32767));
    return emulated::loaded<__m256i>(shorts);
}

inline __m512 _mm512_permutexvar_ps(__m512i index, __m512 x) {
    return emulated::each<__m512>(std::bit_cast<emulated::Lanes>(index),
                                  [&](int32_t lane) { return x[lane & 15]; });
}
inline __m512i _mm512_set_epi16(int16_t a, int16_t b, int16_t c, int16_t d, int16_t e, int16_t f,
                                int16_t g, int16_t h, int16_t i, int16_t j, int16_t k, int16_t l,
                                int16_t m, int16_t n, int16_t o, int16_t p, int16_t q, int16_t r,
                                int16_t s, int16_t t, int16_t u, int16_t v, int16_t w, int16_t x,
                                int16_t y, int16_t z, int16_t aa, int16_t bb, int16_t cc,
                                int16_t dd, int16_t ee, int16_t ff) {
    return std::bit_cast<__m512i>(emulated::Shorts{ff, ee, dd, cc, bb, aa, z, y, x, w, v,
                                                   u,  t,  s,  r,  q,  p,  o, n, m, l, k,
                                                   j,  i,  h,  g,  f,  e,  d, c, b, a});
}
inline __m512i _mm512_permutexvar_epi16(__m512i index, __m512i x) {
    const auto from = std::bit_cast<emulated::Shorts>(x);
    auto places = std::bit_cast<emulated::Shorts>(index);
    for (int i = 0; i < 2 * emulated::kLanes; ++i) places[i] = from[places[i] & 31];
    return std::bit_cast<__m512i>(places);
}

inline __m512i _mm512_cvtepi8_epi16(__m256i x) {
    int8_t bytes[2 * emulated::kLanes];
    emulated::stored(bytes, x);
    emulated::Shorts shorts;
    for (int i = 0; i < 2 * emulated::kLanes; ++i) shorts[i] = bytes[i];
    return std::bit_cast<__m512i>(shorts);
}
inline __m512i _mm512_cvtepi8_epi32(__m128i x) {
    int8_t bytes[emulated::kLanes];
    emulated::stored(bytes, x);
    return std::bit_cast<__m512i>(
        emulated::each<emulated::Lanes>(bytes, [](int8_t value) { return int32_t{value}; }));
}

inline __m512i _mm512_add_epi16(__m512i a, __m512i b) {
    return emulated::of_halves<__m512i>(
        [](__m256i left, __m256i right) { return _mm256_add_epi16(left, right); }, a, b);
}
inline __m512i _mm512_sub_epi16(__m512i a, __m512i b) {
    return emulated::of_halves<__m512i>(
        [](__m256i left, __m256i right) { return _mm256_sub_epi16(left, right); }, a, b);
}
inline __m512i _mm512_mullo_epi16(__m512i a, __m512i b) {
    return emulated::of_halves<__m512i>(
        [](__m256i left, __m256i right) { return _mm256_mullo_epi16(left, right); }, a, b);
}
inline __m512i _mm512_mulhrs_epi16(__m512i a, __m512i b) {
    return emulated::of_halves<__m512i>(
        [](__m256i left, __m256i right) { return _mm256_mulhrs_epi16(left, right); }, a, b);
}
inline __m512i _mm512_max_epi16(__m512i a, __m512i b) {
    return emulated::of_halves<__m512i>(
        [](__m256i left, __m256i right) { return _mm256_max_epi16(left, right); }, a, b);
}
inline __m512i _mm512_abs_epi16(__m512i x) {
    return emulated::of_halves<__m512i>([](__m256i half) { return _mm256_abs_epi16(half); }, x);
}

[[gnu::always_inline]] inline __m512i _mm512_dpbusd_epi32(__m512i total, __m512i unsigned_bytes,
                                                          __m512i signed_bytes) {
    // Bytes at even and at odd places, as 16-bit numbers.
    const auto add = [](__m256i sums, __m256i a, __m256i b) {
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)),
                                               _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
        return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
    };
    return emulated::of_halves<__m512i>(add, total, unsigned_bytes, signed_bytes);
}
[[gnu::always_inline]] inline __m512i _mm512_dpwssd_epi32(__m512i total, __m512i a, __m512i b) {
    const auto add = [](__m256i sums, __m256i left, __m256i right) {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(left, right));
    };
    return emulated::of_halves<__m512i>(add, total, a, b);
}
[[gnu::always_inline]] inline __m512 _mm512_dpbf16_ps(__m512 total, __m512bh a, __m512bh b) {
    const auto add = [](__m256i sums, __m256i left, __m256i right) {
        using namespace emulated;
        const __m256 upper = add_products(_mm256_castsi256_ps(sums), upper_bf16(left), upper_bf16(right));
        return _mm256_castps_si256(add_products(upper, lower_bf16(left), lower_bf16(right)));
    };
    return emulated::of_halves<__m512>(add, total, a, b);
}

}  // namespace legato
