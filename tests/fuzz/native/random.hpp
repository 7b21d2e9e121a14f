// Random numbers, weights and experts, each on the heap and of its exact size, so that the sanitizer guards
// both ends.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

#include "experts.hpp"

namespace legato {

class Case {
public:
    explicit Case(int seed) : seed_(seed), engine_(seed) {}

    int whole(int least, int most) { return std::uniform_int_distribution<int>(least, most)(engine_); }
    bool coin() { return whole(0, 1) == 1; }
    float real() { return std::normal_distribution<float>()(engine_); }
    int one_of(std::initializer_list<int> values) {
        return *(values.begin() + whole(0, static_cast<int>(values.size()) - 1));
    }
    auto &engine() { return engine_; }

    template <typename... Numbers>
    void begin(const char *format, Numbers... numbers) {
        std::printf("seed %d: ", seed_);
        std::printf(format, numbers...);
        std::printf("\n");
        std::fflush(stdout);
    }
    void require(bool is_so, const char *what) {
        if (is_so) return;
        std::printf("seed %d: WRONG: %s\n", seed_, what);
        has_failed = true;
    }

    static inline bool has_failed = false;

private:
    const int seed_;
    std::mt19937 engine_;
};

template <typename T>
std::unique_ptr<T[]> heap(size_t count) {
    return std::unique_ptr<T[]>(new T[count]());
}

inline std::unique_ptr<bf16[]> random_bf16(Case &own, size_t count, float scale = 1.0f) {
    auto values = heap<bf16>(count);
    for (size_t i = 0; i < count; ++i) values[i] = to_bf16(own.real() * scale);
    return values;
}

inline std::vector<float> random_floats(Case &own, size_t count, float scale, float mean = 0.0f) {
    std::vector<float> values(count);
    for (auto &value : values) value = mean + scale * own.real();
    return values;
}

// A random weight [outputs, depth] of any form, and its numbers.
struct RandomWeight {
    RandomWeight(Case &own, int outputs, int depth, bool may_be_rotated = true)
        : plain(static_cast<size_t>(outputs) * depth) {
        const size_t count = plain.size();
        if (own.whole(0, 3) == 0) {
            values = random_bf16(own, count);
            for (size_t i = 0; i < count; ++i) plain[i] = to_float(values[i]);
            weight.values = values.get();
            return;
        }
        is_float = own.whole(0, 6) == 0;
        weight.is_rotated = may_be_rotated && !is_float && own.whole(0, 6) == 0;
        weight.bits = is_float || weight.is_rotated ? 8 : own.one_of({4, 8});
        const bool has_table = weight.bits == 4 && own.whole(0, 3) == 0;
        const bool has_minima = !is_float && !weight.is_rotated && !has_table && own.coin();
        weight.group = weight.is_rotated ? depth : own.one_of({16, 32, 32, 96});
        if (depth % weight.group) weight.group = 32;
        weight.is_float = is_float;
        weight.rounds_rows = !is_float && !weight.is_rotated && own.whole(0, 3) == 0;
        weight.zero = is_float || has_minima ? 0 : weight.bits == 4 && !has_table ? 8 : 128;
        weight.exponent = own.whole(-2, 2);
        codes = heap<uint8_t>(count);
        for (size_t i = 0; i < count; ++i) codes[i] = own.whole(0, (1 << weight.bits) - 1);
        if (is_float)
            for (size_t i = 0; i < count; ++i)
                if ((codes[i] & 0x7f) == 0x7f) codes[i] = 0x38;  // NaN
        const size_t groups = count / weight.group;
        scales = heap<uint16_t>(groups);
        minima = heap<uint16_t>(groups);
        for (size_t i = 0; i < groups; ++i) {
            scales[i] = _cvtss_sh(0.01f + 0.01f * std::abs(own.real()), 0);
            minima[i] = _cvtss_sh(0.05f * own.real(), 0);
        }
        weight.codes = codes.get();
        weight.scales = scales.get();
        if (has_minima) weight.minima = minima.get();
        if (has_table) {
            table = heap<uint8_t>(16);
            for (int i = 0; i < 16; ++i) table[i] = own.whole(0, 255);
            weight.table = table.get();
        }
        if (!weight.is_rotated && own.whole(0, 4) == 0) {
            order = heap<int32_t>(depth);
            for (int i = 0; i < depth; ++i) order[i] = i;
            std::shuffle(order.get(), order.get() + depth, own.engine());
            weight.order = order.get();
        }
        for (int output = 0; output < outputs; ++output)
            for (int i = 0; i < depth; ++i) {
                const size_t at = static_cast<size_t>(output) * depth + i, group = at / weight.group;
                const int code = codes[at];
                const float number = is_float ? float8(code) : table ? table[code] : code;
                const float minimum = has_minima ? _cvtsh_ss(minima[group]) : 0.0f;
                const float value = _cvtsh_ss(scales[group]) * (number - weight.zero) + minimum;
                plain[at - i + (order ? order[i] : i)] = std::ldexp(value, weight.exponent);
            }
    }

    static float float8(int code) {
        const int exponent = code >> 3 & 15, fraction = code & 7;
        const float size = exponent ? std::ldexp(1.0f + fraction / 8.0f, exponent - 7)
                                    : std::ldexp(fraction / 8.0f, -6);
        return code & 128 ? -size : size;
    }

    Weight weight;
    bool is_float = false;
    std::vector<float> plain;
    std::unique_ptr<bf16[]> values;
    std::unique_ptr<uint8_t[]> codes, table;
    std::unique_ptr<uint16_t[]> scales, minima;
    std::unique_ptr<int32_t[]> order;
};

struct RandomExperts {
    RandomExperts(Case &own, const ExpertsShape &shape) : are_plain(own.coin()) {
        const int size = shape.hidden_size, inner = shape.size, entry = shape.entry_size();
        for (int i = 0; i < shape.count; ++i) {
            ExpertWeights expert{};
            if (are_plain) {
                plain.push_back(random_bf16(own, static_cast<size_t>(entry) * size, 0.1f));
                plain.push_back(random_bf16(own, static_cast<size_t>(size) * inner, 0.1f));
                expert.gate_up.values = plain[2 * i].get();
                expert.down.values = plain[2 * i + 1].get();
            } else {
                if (!i || own.whole(0, 3) == 0) {
                    entries.push_back(std::make_unique<RandomWeight>(own, entry, size, false));
                    ends.push_back(std::make_unique<RandomWeight>(own, size, inner, false));
                }
                expert.gate_up = entries.back()->weight;
                expert.down = ends.back()->weight;
            }
            weights.push_back(expert);
        }
    }

    const bool are_plain;
    std::vector<ExpertWeights> weights;
    std::vector<std::unique_ptr<bf16[]>> plain;
    std::vector<std::unique_ptr<RandomWeight>> entries, ends;
};

}  // namespace legato
