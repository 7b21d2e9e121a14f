// Vectors of 16 numbers in the compiler's own terms, for any processor; the same functions as
// vector256.hpp. Compilers make NEON of it on aarch64.
#pragma once

#include <array>
#include <cstdint>

namespace legato {

using bf16 = uint16_t;

typedef float FloatLanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t UnsignedLanes __attribute__((vector_size(64)));
typedef int16_t ShortLanes __attribute__((vector_size(64)));

struct Floats {
    FloatLanes lanes;
};
struct Ints {
    IntLanes lanes;
};
struct ShortPairs {  // pairs of 16-bit numbers
    ShortLanes lanes;
};

constexpr int kLanes = 16;

// Returns f(i) in lane i.
template <typename Vector, typename Function>
[[gnu::always_inline]] inline Vector each(Function f) {
    Vector result;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) result.lanes[i] = f(i);
    return result;
}
template <typename To, typename From>
inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}
template <typename To>
inline To loaded(const void *from) {
    To to;
    __builtin_memcpy(&to, from, sizeof(To));
    return to;
}

inline Floats fill(float value) { return {value - FloatLanes{}}; }
inline Floats load(const float *from) { return loaded<Floats>(from); }
inline void store(float *to, Floats x) { __builtin_memcpy(to, &x, sizeof(x)); }
// Stores past the caches where a processor can; `to` must begin a cache line.
inline void stream(float *to, Floats x) { store(to, x); }

inline Floats operator+(Floats a, Floats b) { return {a.lanes + b.lanes}; }
inline Floats operator-(Floats a, Floats b) { return {a.lanes - b.lanes}; }
inline Floats operator*(Floats a, Floats b) { return {a.lanes * b.lanes}; }
inline Floats operator/(Floats a, Floats b) { return {a.lanes / b.lanes}; }
// a * b + c
inline Floats fma(Floats a, Floats b, Floats c) {
    return each<Floats>([&](int i) { return __builtin_fmaf(a.lanes[i], b.lanes[i], c.lanes[i]); });
}
// If a or b is NaN, these two return b: they keep the NaN of b, and drop that of a.
inline Floats max(Floats a, Floats b) { return {a.lanes > b.lanes ? a.lanes : b.lanes}; }
inline Floats min(Floats a, Floats b) { return {a.lanes < b.lanes ? a.lanes : b.lanes}; }

inline Ints fill(int32_t value) { return {value + IntLanes{}}; }
inline Ints load_ints(const void *from) { return loaded<Ints>(from); }
inline void store(void *to, Ints x) { __builtin_memcpy(to, &x, sizeof(x)); }
inline Ints operator&(Ints a, Ints b) { return {a.lanes & b.lanes}; }
inline Ints operator|(Ints a, Ints b) { return {a.lanes | b.lanes}; }
inline Ints operator+(Ints a, Ints b) {
    return {as<IntLanes>(as<UnsignedLanes>(a.lanes) + as<UnsignedLanes>(b.lanes))};
}
inline Ints operator>>(Ints x, int count) {
    return {as<IntLanes>(as<UnsignedLanes>(x.lanes) >> count)};
}
inline Ints operator<<(Ints x, int count) {
    return {as<IntLanes>(as<UnsignedLanes>(x.lanes) << count)};
}
inline Ints max(Ints a, Ints b) { return {a.lanes > b.lanes ? a.lanes : b.lanes}; }
inline Floats with_bits(Ints x) { return as<Floats>(x); }
inline Ints bits_of(Floats x) { return as<Ints>(x); }
inline Floats to_floats(Ints x) { return {__builtin_convertvector(x.lanes, FloatLanes)}; }
// To the nearest, ties to even.
inline Ints to_ints(Floats x) {
    return each<Ints>([&](int i) { return static_cast<int32_t>(__builtin_rintf(x.lanes[i])); });
}

// Returns the lanes with those at a distance of 1, 2, 4 or 8 swapped.
template <int distance, typename Vector>
inline Vector swapped(Vector x) {
    return each<Vector>([&](int i) { return x.lanes[i ^ distance]; });
}
inline Floats abs(Floats x) { return with_bits(bits_of(x) & fill(int32_t{0x7fffffff})); }
// In the order of vector256.hpp, so that sums are the same.
inline float sum(Floats x) {
    x = x + swapped<8>(x);
    x = x + swapped<4>(x);
    x = x + swapped<2>(x);
    return x.lanes[0] + x.lanes[1];
}
inline float largest(Floats x) {
    x = max(x, swapped<8>(x));
    x = max(x, swapped<4>(x));
    x = max(x, swapped<2>(x));
    return max(x, swapped<1>(x)).lanes[0];
}
inline int32_t sum(Ints x) {
    x = x + swapped<8>(x);
    x = x + swapped<4>(x);
    x = x + swapped<2>(x);
    return (x + swapped<1>(x)).lanes[0];
}
inline int32_t largest(Ints x) {
    x = max(x, swapped<8>(x));
    x = max(x, swapped<4>(x));
    x = max(x, swapped<2>(x));
    return max(x, swapped<1>(x)).lanes[0];
}

// Returns lanes [from, end) of x, and `other` in the rest.
inline Floats keep(Floats x, int from, int end, float other) {
    return each<Floats>([&](int i) { return from <= i && i < end ? x.lanes[i] : other; });
}
// Returns `then` in lanes where x has a sign, else `other`.
inline Floats where_negative(Floats x, Floats then, Floats other) {
    return {bits_of(x).lanes < 0 ? then.lanes : other.lanes};
}

// A half float times 2^-112 is a float with its bits, 13 further up. The exponent 31 is of infinity and of
// NaN, which becomes quiet.
inline Floats halves_in_lanes(Ints halves) {
    const Ints magnitude = (halves & fill(int32_t{0x7fff})) << 13;
    const Ints sign = (halves & fill(int32_t{0x8000})) << 16;
    const Floats scaled = with_bits(magnitude) * fill(0x1p112f);
    const IntLanes is_special = magnitude.lanes >= 0x0f800000, is_nan = magnitude.lanes > 0x0f800000;
    const Ints special = magnitude | fill(int32_t{0x7f800000}) | Ints{is_nan & 0x00400000};
    return with_bits(Ints{is_special ? special.lanes : bits_of(scaled).lanes} | sign);
}
// Returns the half floats in the lower 16 bits of the lanes.
inline Floats from_halves(Ints x) { return halves_in_lanes(x & fill(int32_t{0xffff})); }
inline float from_half(uint16_t half) { return halves_in_lanes(fill(int32_t{half})).lanes[0]; }
inline Ints widened(const void *from) {
    uint16_t values[kLanes];
    __builtin_memcpy(values, from, sizeof(values));
    return each<Ints>([&](int i) { return int32_t{values[i]}; });
}
inline Floats load_halves(const void *from) { return halves_in_lanes(widened(from)); }
inline Floats load_bf16(const bf16 *from) { return with_bits(widened(from) << 16); }

// Rounds to the nearest bfloat16, ties to even, in the upper half of each lane. The sum would carry some
// NaN over to zero.
inline Ints rounded_to_bf16(Floats x) {
    const Ints bits = bits_of(x);
    const Ints is_odd = bits >> 16 & fill(int32_t{1});
    const Ints is_nan{x.lanes != x.lanes};
    return (bits + is_odd + fill(int32_t{0x7fff})) | is_nan;
}
inline void store_bf16(bf16 *to, Floats x) {
    const Ints rounded = rounded_to_bf16(x) >> 16;
    bf16 values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = static_cast<bf16>(rounded.lanes[i]);
    __builtin_memcpy(to, values, sizeof(values));
}
inline void store_bf16(bf16 *to, Floats first, Floats second) {
    store_bf16(to, first);
    store_bf16(to + 16, second);
}

// For x = n + fraction with integer n: returns the fraction; and y * 2^n, as in vector256.hpp.
inline Floats enough(Floats x) { return max(fill(-125.0f), x); }
inline Floats floor(Floats x) {
    return each<Floats>([&](int i) { return __builtin_floorf(x.lanes[i]); });
}
inline Floats fraction(Floats x) { return enough(x) - floor(enough(x)); }
inline Floats scale_by_whole(Floats y, Floats x) {
    const Floats whole = floor(enough(x));
    // NaN, whose conversion is undefined, has shift 0.
    const Floats number{whole.lanes == whole.lanes ? whole.lanes : FloatLanes{}};
    return with_bits(bits_of(y) + (to_ints(number) << 23));
}

// Returns byte x of the 16 bytes of the table at the same place, for each byte x below 16; 0 for 0x80.
inline Ints look_up(Ints table, Ints x) {
    const auto from = as<std::array<uint8_t, 64>>(table), places = as<std::array<uint8_t, 64>>(x);
    std::array<uint8_t, 64> found;
    for (int i = 0; i < 64; ++i)
        found[i] = places[i] & 0x80 ? 0 : from[(i & ~15) | (places[i] & 15)];
    return as<Ints>(found);
}

template <typename Number>
inline void store_narrow(Number *to, Ints x, int32_t least, int32_t most) {
    const IntLanes above{x.lanes < least ? least + IntLanes{} : x.lanes};
    const IntLanes within{above > most ? most + IntLanes{} : above};
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<Number>(within[i]);
}
inline Floats load_bytes(const int8_t *from) {
    Ints wide;
    for (int i = 0; i < kLanes; ++i) wide.lanes[i] = from[i];
    return to_floats(wide);
}
inline void store_bytes(int8_t *to, Ints x) { store_narrow(to, x, -128, 127); }
inline void store_shorts(int16_t *to, Ints x) { store_narrow(to, x, -32768, 32767); }

// Returns the lowest 4 bits of each lane.
inline Floats lowest_4_bits(Ints x) { return to_floats(x & fill(int32_t{0x0f})); }

// Returns total + the 4 products of each lane's bytes: unsigned codes of `bits` times four signed codes.
template <int bits>
Ints add_products(Ints total, Ints codes, const int32_t *four) {
    for (int place = 0; place < 4; ++place) {
        const int32_t factor = static_cast<int8_t>(*four >> 8 * place);
        const Ints code = codes >> 8 * place & fill(int32_t{0xff});
        total.lanes += code.lanes * factor;
    }
    return total;
}

template <int bits>
class ProductSum;  // as in vector.hpp

// Rounds to bfloat16, with `first` in the lower half of each lane.
inline Ints interleave_bf16(Floats first, Floats second) {
    return (rounded_to_bf16(first) >> 16) |
           (rounded_to_bf16(second) & fill(static_cast<int32_t>(0xffff0000)));
}

// Number of parts in which products of pairs are added, as in vector256.hpp.
template <typename Column>
constexpr int kPairParts = 1;
template <>
inline constexpr int kPairParts<bf16> = 2;

template <int part>
inline Floats load_pairs(const bf16 *from) {
    const Ints pairs = load_ints(from);
    return with_bits(part == 0 ? pairs << 16 : pairs & fill(static_cast<int32_t>(0xffff0000)));
}
template <int part>
inline Floats fill_pairs(const float *pair) {
    return fill(pair[part]);
}
inline Floats add_products(Floats total, Floats a, Floats b) { return fma(a, b, total); }

template <int part>
inline ShortPairs load_pairs(const int8_t *from) {
    ShortPairs result;
    for (int i = 0; i < 2 * kLanes; ++i) result.lanes[i] = from[i];
    return result;
}
template <int part>
inline ShortPairs fill_pairs(const int16_t *pair) {
    int32_t both;
    __builtin_memcpy(&both, pair, 4);
    return as<ShortPairs>(fill(both));
}
inline Ints add_products(Ints total, ShortPairs a, ShortPairs b) {
    return each<Ints>([&](int i) {
        return total.lanes[i] + a.lanes[2 * i] * b.lanes[2 * i] +
               a.lanes[2 * i + 1] * b.lanes[2 * i + 1];
    });
}

// Codes of rows that are multiplied with sets of 4 unsigned codes of 16 columns, as in vector256.hpp.
using RowCode = int16_t;
constexpr int kSetParts = 2;

// Stores the second and third of each four codes swapped.
inline void store_row(RowCode *to, Ints codes) {
    RowCode words[kLanes];
    store_shorts(words, codes);
    for (int i = 0; i < kLanes; ++i) to[i] = words[i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i];
}
template <int part>
inline ShortPairs load_set(const uint8_t *from) {
    const Ints bytes = load_ints(from);
    return as<ShortPairs>((part == 0 ? bytes : bytes >> 8) & fill(int32_t{0x00ff00ff}));
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
