#include "cache.hpp"

#include <algorithm>
#include <cmath>

#include "codes.hpp"

namespace legato {

namespace {

// Replaces two vectors by their sum and their difference.
void mix_vectors(float *one, float *other) {
    const Floats a = load(one), b = load(other);
    store(one, a + b);
    store(other, a - b);
}

// Replaces lanes at a distance by their sum and their difference.
template <int distance>
Floats mix_lanes(Floats x) {
    static constexpr auto kSigns = [] {
        std::array<float, 16> signs{};
        for (int i = 0; i < 16; ++i) signs[i] = i & distance ? -1.0f : 1.0f;
        return signs;
    }();
    return fma(x, load(kSigns.data()), swapped<distance>(x));
}

// Reflects a half of a head, as that many pieces, at the plane on which their sum is zero.
void reflect(float *half, int num_pieces, int piece) {
    const Floats by = fill(-2.0f / num_pieces);
    for (int at = 0; at < piece; at += 16) {
        Floats total = fill(0.0f);
        for (int i = 0; i < num_pieces; ++i) total = total + load(half + i * piece + at);
        for (int i = 0; i < num_pieces; ++i) {
            float *const own = half + i * piece + at;
            store(own, fma(total, by, load(own)));
        }
    }
}

void round_to_bf16(const float *values, int count, bf16 *rounded) {
    for (int i = 0; i < count; i += 16) store_bf16(rounded + i, load(values + i));
}

template <typename Number>
void spread_key(const Number *numbers, int count, Number *to) {
    for (int dim = 0; dim < count; dim += 2, to += 32) {
        to[0] = numbers[dim];
        to[1] = numbers[dim + 1];
    }
}

template <typename Number>
void spread_value(const Number *numbers, int count, Number *to) {
    for (int dim = 0; dim < count; ++dim) to[2 * dim] = numbers[dim];
}

// Writes [head_dim] values, mixed and rounded to codes if the cache is quantized; `spread` lays them out.
template <typename Spread>
void write(std::byte *head, const CacheShape &shape, size_t at, int64_t slot, const float *values,
           Spread spread) {
    if (shape.is_quantized) {
        alignas(64) float mixed[kLargestHead];
        alignas(64) int8_t codes[kLargestHead];
        std::copy_n(values, shape.head_dim, mixed);
        mix_head(mixed, shape.head_dim);
        const float scale = round_to_codes(mixed, shape.head_dim, codes);
        *reinterpret_cast<float *>(head + shape.scale_at(slot)) = scale;
        spread(codes, shape.head_dim, reinterpret_cast<int8_t *>(head) + at);
    } else {
        alignas(64) bf16 rounded[kLargestHead];
        round_to_bf16(values, shape.head_dim, rounded);
        spread(rounded, shape.head_dim, reinterpret_cast<bf16 *>(head) + at);
    }
}

void expect(const std::byte *from, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i, 1);
}

}  // namespace

void mix_head(float *head, int head_dim) {
    const int half = head_dim / 2, piece = (head_dim & -head_dim) / 2, num_pieces = half / piece;
    for (int i = 0; i < half; i += 16) mix_vectors(head + i, head + half + i);
    for (int distance = 16; distance < piece; distance *= 2)
        for (int i = 0; i < head_dim; i += 16)
            if (i % piece / distance % 2 == 0) mix_vectors(head + i, head + i + distance);
    const Floats length = fill(1.0f / std::sqrt(2.0f * piece));
    for (int i = 0; i < head_dim; i += 16) {
        const Floats pairs = mix_lanes<2>(mix_lanes<1>(load(head + i)));
        store(head + i, mix_lanes<8>(mix_lanes<4>(pairs)) * length);
    }
    if (num_pieces == 1) return;
    reflect(head, num_pieces, piece);
    reflect(head + half, num_pieces, piece);
}

void write_key(std::byte *keys, const CacheShape &shape, int kv_head, int64_t slot,
               const float *key) {
    write(keys + shape.head_at(kv_head, slot), shape, shape.key_at(slot), slot, key,
          [](auto *numbers, int count, auto *to) { spread_key(numbers, count, to); });
}

void write_value(std::byte *values, const CacheShape &shape, int kv_head, int64_t slot,
                 const float *value) {
    write(values + shape.head_at(kv_head, slot), shape, shape.value_at(slot), slot, value,
          [](auto *numbers, int count, auto *to) { spread_value(numbers, count, to); });
}

void expect_token(const std::byte *keys, const std::byte *values, const CacheShape &shape,
                  int64_t slot) {
    const size_t number = shape.is_quantized ? sizeof(int8_t) : sizeof(bf16);
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
        const std::byte *const key = keys + shape.head_at(kv_head, slot);
        const std::byte *const value = values + shape.head_at(kv_head, slot);
        expect(key + shape.key_at(slot) * number, 16 * shape.head_dim * number);
        expect(value + shape.value_at(slot) * number, 2 * shape.head_dim * number);
        if (!shape.is_quantized) continue;
        expect(key + shape.scale_at(slot), sizeof(float));
        expect(value + shape.scale_at(slot), sizeof(float));
    }
}

}  // namespace legato
