// Compares each function of native/vector_plain.hpp with that of native/vector256.hpp, on random numbers.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#define legato avx
#include "vector256.hpp"
#undef legato
#define legato plain
#include "vector_plain.hpp"
#undef legato

namespace {

bool is_wrong = false;

template <typename One, typename Other>
void compare(const char *what, const One &one, const Other &other) {
    static_assert(sizeof(One) == sizeof(Other));
    if (std::memcmp(&one, &other, sizeof(One)) == 0) return;
    is_wrong = true;
    std::printf("%s\n", what);
}

constexpr float kOdd[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, 3e38f, 2.5f, 3.5f, -2.5f};

}  // namespace

// What both headers have: an expression with V for the namespace.
#define SAME(...) SAME_OF(#__VA_ARGS__, __VA_ARGS__)
#define SAME_OF(what, ...) compare(what, IN(avx, __VA_ARGS__), IN(plain, __VA_ARGS__))
#define IN(space, ...) [&] { namespace V = space; return __VA_ARGS__; }()
// The same of what is stored: `count` numbers of a type, at `to`.
#define SAME_STORED(Number, count, ...)                                          \
    SAME([&] { std::array<Number, count> kept; auto *to = kept.data(); __VA_ARGS__; return kept; }())

int main() {
    std::mt19937 random(1);
    for (int round = 0; round < 5000; ++round) {
        uint32_t bits[3][16];
        float any[3][16], whole[16], positive[16], exponents[16];
        int32_t numbers[16];
        uint8_t places[64];
        int8_t factors[4];
        int16_t pair[2];
        for (auto &row : bits) for (auto &value : row) value = random();
        for (auto &row : any)
            for (auto &value : row) {
                const uint32_t drawn = random();
                std::memcpy(&value, &drawn, 4);
                if (random() % 4 == 0) value = kOdd[random() % std::size(kOdd)];
            }
        for (int i = 0; i < 16; ++i) {
            whole[i] = (static_cast<int>(random() % 2000001) - 1000000) / 16.0f;
            positive[i] = 0.5f + random() % 1000 / 1000.0f;
            exponents[i] = random() % 50 ? -static_cast<float>(random() % 400000) / 1000.0f
                                         : (random() % 2 ? -INFINITY : NAN);
            numbers[i] = static_cast<int>(random() % 200000) - 100000;
            if (round % 2) numbers[i] /= 500;
        }
        for (auto &place : places) place = random() % 5 ? random() % 16 : 0x80;
        for (auto &factor : factors) factor = static_cast<int>(random() % 255) - 127;
        for (auto &value : pair) value = static_cast<int>(random() % 255) - 127;
        int32_t four;
        std::memcpy(&four, factors, 4);
        const int from = random() % 17, end = random() % 17, count = random() % 32;
        const auto *narrow = reinterpret_cast<const uint16_t *>(bits[0]);
        const auto *codes = reinterpret_cast<const int8_t *>(bits[0]);
        const auto *set = reinterpret_cast<const uint8_t *>(bits[0]);

        SAME(V::load_halves(narrow));
        SAME(V::from_halves(V::load_ints(bits[0])));
        SAME(V::from_half(narrow[0]));
        SAME(V::load_bf16(narrow));
        SAME(V::load(whole) + V::load(positive));
        SAME(V::load(whole) - V::load(positive));
        SAME(V::load(whole) * V::load(positive));
        SAME(V::load(whole) / V::load(positive));
        SAME(V::fma(V::load(whole), V::load(positive), V::load(whole)));
        SAME(V::max(V::load(any[0]), V::load(any[1])));
        SAME(V::min(V::load(any[0]), V::load(any[1])));
        SAME(V::abs(V::load(any[0])));
        SAME(V::sum(V::load(whole)));
        SAME(V::largest(V::load(whole)));
        SAME(V::keep(V::load(any[0]), from, end, 7.0f));
        SAME(V::swapped<1>(V::load(any[0])));
        SAME(V::swapped<2>(V::load(any[0])));
        SAME(V::swapped<4>(V::load(any[0])));
        SAME(V::swapped<8>(V::load(any[0])));
        SAME(V::where_negative(V::load(any[0]), V::load(any[1]), V::load(any[2])));
        SAME(V::fraction(V::load(exponents)));
        SAME(V::scale_by_whole(V::load(positive), V::load(exponents)));
        SAME(V::to_ints(V::load(whole)));
        SAME(V::to_floats(V::load_ints(bits[0])));
        SAME(V::load_ints(bits[0]) & V::load_ints(bits[1]));
        SAME(V::load_ints(bits[0]) | V::load_ints(bits[1]));
        SAME(V::load_ints(bits[0]) + V::load_ints(bits[1]));
        SAME(V::load_ints(bits[0]) >> count);
        SAME(V::load_ints(bits[0]) << count);
        SAME(V::max(V::load_ints(bits[0]), V::load_ints(bits[1])));
        SAME(V::sum(V::load_ints(bits[0])));
        SAME(V::largest(V::load_ints(bits[0])));
        SAME(V::look_up(V::load_ints(bits[0]), V::load_ints(places)));
        SAME(V::lowest_4_bits(V::load_ints(bits[0])));
        SAME(V::add_products<8>(V::load_ints(numbers), V::load_ints(bits[0]), &four));
        SAME(V::add_products<4>(V::load_ints(numbers),
                                V::load_ints(bits[0]) & V::fill(int32_t{0x0f0f0f0f}), &four));
        SAME(V::interleave_bf16(V::load(any[0]), V::load(any[1])));
        SAME(V::load_pairs<0>(narrow));
        SAME(V::load_pairs<1>(narrow));
        SAME(V::load_pairs<0>(codes));
        SAME(V::add_products(V::load_ints(numbers), V::load_pairs<0>(codes), V::fill_pairs<0>(pair)));
        SAME(V::load_set<0>(set));
        SAME(V::load_set<1>(set));
        SAME_STORED(uint16_t, 32, V::store_bf16(to, V::load(any[0]), V::load(any[1])));
        SAME_STORED(int8_t, 16, V::store_bytes(to, V::load_ints(numbers)));
        SAME_STORED(int16_t, 16, V::store_shorts(to, V::load_ints(numbers)));
        SAME_STORED(int16_t, 16, V::store_row(to, V::load_ints(numbers)));
    }
    return is_wrong;
}
