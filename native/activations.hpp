// Functions of what a product gives, 16 numbers at a time, and of a row before a norm.
#pragma once

#include <vector>

#include "vector.hpp"

namespace legato {

constexpr float kLog2E = 1.4426950408889634f;

// Returns 16 sums plus the biases of their outputs, if there are any.
inline Floats biased(const float *sums, const std::vector<float> &bias, int output) {
    return bias.empty() ? load(sums) : load(sums) + load(&bias[output]);
}

// x * sigmoid(y), where `e` is e^-|y|, so that nothing overflows.
inline Floats gated(Floats x, Floats y, Floats e) {
    const Floats one = fill(1.0f);
    return x * where_negative(y, e, one) / (one + e);
}

// x * sigmoid(y), within 8e-5.
inline Floats gated(Floats x, Floats y) { return gated(x, y, exp2_fast(abs(y) * fill(-kLog2E))); }

// SiLU of numbers that stay in float32.
inline Floats silu_exact(Floats x) { return gated(x, x, exp2_exact(abs(x) * fill(-kLog2E))); }

inline Floats silu(Floats x) { return gated(x, x); }

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), where 1 + tanh(y) = 2 sigmoid(2y).
inline Floats gelu(Floats x) {
    constexpr float kSlope = 1.5957691216057308f;
    return gated(x, x * fma(x * x, fill(kSlope * 0.044715f), fill(kSlope)));
}

inline float mean_square(const float *values, int count) {
    Floats total = fill(0.0f);
    for (int i = 0; i < count; i += 16) total = fma(load(values + i), load(values + i), total);
    return sum(total) / count;
}

// Limits numbers; NaN stays NaN.
inline Floats at_most(Floats x, Floats limit) { return min(limit, x); }
inline Floats at_least(Floats x, Floats limit) { return max(limit, x); }

}  // namespace legato
