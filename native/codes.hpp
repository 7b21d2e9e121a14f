// Rounds values to integer codes with a scale.
#pragma once

#include <limits>

#include "vector.hpp"

namespace legato {

inline void store_codes(int8_t *to, Ints x) { store_bytes(to, x); }
inline void store_codes(int16_t *to, Ints x) { store_shorts(to, x); }

// Rounds `count` values, a multiple of 16, and returns the scale: the largest value gets the largest
// code. The scale is NaN if a value is not finite, so that all results become NaN.
template <typename Code>
float round_to_codes(const float *values, int count, Code *codes) {
    constexpr float most_code = std::numeric_limits<Code>::max();
    constexpr float as_good_as_zero = 1e-30f;  // most_code over this is finite
    Floats largest_values = fill(0.0f), zeros = fill(0.0f);
    for (int i = 0; i < count; i += 16) {
        const Floats some = load(values + i);
        largest_values = max(largest_values, abs(some));
        zeros = fma(some, fill(0.0f), zeros);
    }
    const float most = largest(largest_values);
    const Floats by = fill(most > as_good_as_zero ? most_code / most : 0.0f);
    for (int i = 0; i < count; i += 16) store_codes(codes + i, to_ints(load(values + i) * by));
    return most / most_code + sum(zeros);
}

}  // namespace legato
