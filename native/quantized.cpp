#include "quantized.hpp"

#include <array>
#include <utility>

namespace legato {

namespace {

template <int bits>
void load_codes(const uint8_t *block, __m512i *groups) {
    if constexpr (bits == 8) {
        for (int i = 0; i < kGroups; ++i) groups[i] = _mm512_load_si512(block + 64 * i);
    } else {
        const __m512i lower = _mm512_set1_epi8(0x0f);
        for (int i = 0; i < kGroups / 2; ++i) {
            const __m512i both = _mm512_load_si512(block + 64 * i);
            groups[i] = _mm512_and_si512(both, lower);
            groups[i + kGroups / 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), lower);
        }
    }
}

__m512 load_halves(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(from)));
}

// One of the 4 values of each output in a group.
__m512 value(__m512i group, int index) {
    const __m512i code =
        _mm512_and_si512(_mm512_srlv_epi32(group, _mm512_set1_epi32(8 * index)),
                         _mm512_set1_epi32(0xff));
    return _mm512_cvtepi32_ps(code);
}

// Words 0, 16, 1, 17, ...
__m512i interleaved() {
    alignas(64) uint16_t words[32];
    for (int i = 0; i < 32; ++i) words[i] = i / 2 + i % 2 * 16;
    return _mm512_load_si512(words);
}

template <int bits>
void unpack_block(const uint8_t *block, bf16 *tile) {
    const __m512i order = interleaved();
    const __m512 scale = load_halves(block + 64 * bits);
    const __m512 minimum = load_halves(block + 64 * bits + 32);
    __m512i groups[kGroups];
    load_codes<bits>(block, groups);
    for (int row = 0; row < kTileRows; ++row) {
        const __m512i group = groups[row / 2];
        const __m512 first = _mm512_fmadd_ps(value(group, row % 2 * 2), scale, minimum);
        const __m512 second = _mm512_fmadd_ps(value(group, row % 2 * 2 + 1), scale, minimum);
        const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
        const __m512i pairs =
            _mm512_permutexvar_epi16(order, reinterpret_cast<const __m512i &>(both));
        _mm512_store_si512(tile + row * kTileDepth, pairs);
    }
}

template <int bits, int num_rows>
void multiply_few(const FewRows &rows, const PackedMatrix &matrix, int panel, float *sums) {
    const uint8_t *block = matrix.panel(panel);
    for (int half = 0; half < 2; ++half) {
        __m512 totals[num_rows];
        for (auto &total : totals) total = _mm512_setzero_ps();
        for (int step = 0; step < matrix.num_steps; ++step, block += 64 * bits + 64) {
            __m512i groups[kGroups];
            load_codes<bits>(block, groups);
            const __m512 scale = load_halves(block + 64 * bits);
            const __m512 minimum = load_halves(block + 64 * bits + 32);
            for (int row = 0; row < num_rows; ++row) {
                const int32_t *codes = rows.codes(row) + step * kGroups;
                __m512i total = _mm512_setzero_si512();
                for (int i = 0; i < kGroups; ++i)
                    total = _mm512_dpbusd_epi32(total, groups[i], _mm512_set1_epi32(codes[i]));
                const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales(row)[step]));
                totals[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), by, totals[row]);
                totals[row] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows.sums(row)[step]),
                                              totals[row]);
            }
        }
        for (int row = 0; row < num_rows; ++row)
            _mm512_store_ps(sums + row * kPanel + 16 * half, totals[row]);
    }
}

using MultiplyFew = void (*)(const FewRows &, const PackedMatrix &, int, float *);

template <int bits, int... counts>
constexpr std::array<MultiplyFew, kFewRows> few(std::integer_sequence<int, counts...>) {
    return {multiply_few<bits, counts + 1>...};
}

constexpr auto kFew4 = few<4>(std::make_integer_sequence<int, kFewRows>());
constexpr auto kFew8 = few<8>(std::make_integer_sequence<int, kFewRows>());

}  // namespace

void unpack(const PackedMatrix &matrix, int panel, bf16 *tiles) {
    const uint8_t *block = matrix.panel(panel);
    const auto unpack_one = matrix.bits == 4 ? unpack_block<4> : unpack_block<8>;
    for (int half = 0; half < 2; ++half)
        for (int step = 0; step < matrix.num_steps; ++step, block += matrix.block_bytes())
            unpack_one(block, tiles + (2 * step + half) * kTileValues);
}

void FewRows::assign(const TiledRows &rows, int num_rows, int depth) {
    num_rows_ = num_rows;
    num_steps_ = depth / kTileDepth;
    codes_.reserve(kFewRows * num_steps_ * kGroups);
    scales_.reserve(kFewRows * num_steps_);
    sums_.reserve(kFewRows * num_steps_);
    for (int row = 0; row < num_rows; ++row)
        for (int step = 0; step < num_steps_; ++step) {
            const int at = row * num_steps_ + step;
            round(rows.at(row, step * kTileDepth),
                  reinterpret_cast<int8_t *>(codes_.get() + at * kGroups), scales_[at], sums_[at]);
        }
}

void FewRows::round(const bf16 *values, int8_t *codes, float &scale, float &sum) const {
    const __m512i all = _mm512_load_si512(values);
    const __m512 halves[] = {widen(_mm512_castsi512_si256(all)),
                             widen(_mm512_extracti64x4_epi64(all, 1))};
    const float largest = _mm512_reduce_max_ps(
        _mm512_max_ps(_mm512_abs_ps(halves[0]), _mm512_abs_ps(halves[1])));
    scale = largest / 127.0f;
    const __m512 by = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < 2; ++i) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(halves[i], by));
        total = _mm512_add_epi32(total, rounded);
        _mm_store_si128(reinterpret_cast<__m128i *>(codes + 16 * i),
                        _mm512_cvtsepi32_epi8(rounded));
    }
    sum = scale * static_cast<float>(_mm512_reduce_add_epi32(total));
}

void FewRows::multiply(const PackedMatrix &matrix, int panel, float *sums) const {
    const auto &kernels = matrix.bits == 4 ? kFew4 : kFew8;
    kernels[num_rows_ - 1](*this, matrix, panel, sums);
}

}  // namespace legato
