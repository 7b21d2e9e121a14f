// Vectors of 16 numbers, for the instructions that this module is compiled for.
#pragma once

#include <array>

#ifdef LEGATO_PLAIN
#include "vector_plain.hpp"
#elif defined(LEGATO_AVX512)
#include "vector512.hpp"
#else
#include "vector256.hpp"
#endif

namespace legato {

inline float to_float(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    __builtin_memcpy(&result, &bits, 4);
    return result;
}

// Sums products of unsigned codes of `bits` with signed codes, of up to 8 sets: add() the products of each
// lane's four bytes with four signed codes.
template <int bits>
class ProductSum {
public:
    void add(Ints codes, const int32_t *four) { total_ = add_products<bits>(total_, codes, four); }
    Ints total() const { return total_; }

private:
    Ints total_ = fill(int32_t{0});
};

// Replaces vectors, a power of two of them, by their products with a matrix of 1 and -1: number i of each is
// mixed with number i of the others. Times the root of 1 / count, that is a rotation.
template <typename Vector, int count>
[[gnu::always_inline]] inline void mix(Vector (&vectors)[count]) {
#pragma GCC unroll 4
    for (int distance = 1; distance < count; distance *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) {
            if (i & distance) continue;
            const Vector one = vectors[i], other = vectors[i + distance];
            vectors[i] = one + other;
            vectors[i + distance] = one - other;
        }
}

// Returns the largest magnitude of the numbers; NaN if one is NaN. As an integer, each magnitude is larger
// than smaller ones, and NaN is larger than all.
inline float largest_magnitude(Floats a, Floats b) {
    const Ints magnitude = fill(int32_t{0x7fffffff});
    const int32_t bits = largest(max(bits_of(a) & magnitude, bits_of(b) & magnitude));
    float most;
    __builtin_memcpy(&most, &bits, 4);
    return most;
}

// Prefetches a cache line into the second-level cache.
inline void prefetch(const void *from) { __builtin_prefetch(from, 0, 2); }
// Prefetches `ahead` values after `from`, and again at half of that way. A processor may drop a prefetch
// while many are under way; the second fetches what the first did not.
template <typename T>
inline void prefetch_twice(const T *from, long ahead) {
    prefetch(from + ahead);
    prefetch(from + ahead / 2);
}

// Two numbers of each lane.
struct FloatPairs {
    Floats first, second;
};

// Returns the 8-bit floats (e4m3fn) in bytes 0 and 1 of each lane, or 2 and 3, times 1 / kFloat8Factor.
//
// A half with their bits has another bias. Small ones are subnormal there at no cost; as float32, products
// with them would take a hundred times as long. NaN becomes 480.
constexpr float kFloat8Factor = 256.0f;
inline FloatPairs load_float8(const uint8_t *from, int half) {
    // Into the upper bytes of 16 bits; the rest become zeros.
    static constexpr auto kPlaces = [] {
        std::array<std::array<uint8_t, 64>, 2> places{};
        for (int i = 0; i < 128; ++i)
            places[i / 64][i % 64] = i % 2 ? i / 64 * 2 + i % 16 / 4 * 4 + i % 4 / 2 : 0x80;
        return places;
    }();
    const Ints bytes = look_up(load_ints(from), load_ints(kPlaces[half].data()));
    const Ints signs = bytes & fill(static_cast<int32_t>(0x80008000));
    const Ints halves = (bytes >> 1 & fill(int32_t{0x3f803f80})) | signs;
    return {from_halves(halves), from_halves(halves >> 16)};
}

// Returns 2^x for x <= 0, within 8e-5: results are rounded to bfloat16. NaN for NaN; with AVX2, at least
// 2^-125.
inline Floats exp2_fast(Floats x) {
    const Floats part = fraction(x);
    Floats result = fill(0.07790716377386403f);
    result = fma(result, part, fill(0.22623319419985954f));
    result = fma(result, part, fill(0.6957770964274216f));
    result = fma(result, part, fill(0.999927826644514f));
    return scale_by_whole(result, x);
}

// Returns 2^x for x <= 0, within 2e-7 of itself times x if x is below -1; at least 2^-125. NaN for NaN.
inline Floats exp2_exact(Floats x) {
    x = max(fill(-125.0f), x);
    const Floats part = fraction(x);
    // Taylor's series: at 0 the result is 1 exactly.
    Floats result = fill(1.01780860e-7f);
    result = fma(result, part, fill(1.32154868e-6f));
    result = fma(result, part, fill(1.52527338e-5f));
    result = fma(result, part, fill(1.54035304e-4f));
    result = fma(result, part, fill(1.33335581e-3f));
    result = fma(result, part, fill(9.61812911e-3f));
    result = fma(result, part, fill(5.55041087e-2f));
    result = fma(result, part, fill(0.240226507f));
    result = fma(result, part, fill(0.693147181f));
    result = fma(result, part, fill(1.0f));
    return scale_by_whole(result, x);
}

}  // namespace legato
