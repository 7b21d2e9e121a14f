// Products with quantized weights: unpacked to bfloat16, or as 8-bit integers with rounded rows.
#pragma once

#include "rows.hpp"
#include "weights.hpp"

namespace legato {

// Up to this many rows are themselves rounded to 8 bits, with a scale per 32 values, as llama.cpp
// does: unpacking the weights would take longer than reading them.
constexpr int kFewRows = 8;
#ifdef LEGATO_AMX
constexpr bool kRoundsMany = false;  // tiles multiply bfloat16 faster than scales of small groups allow
#else
constexpr bool kRoundsMany = true;
#endif
#ifdef LEGATO_AVX512
constexpr int kRowsAtOnce = 8;  // whose sums fit into registers
#else
constexpr int kRowsAtOnce = 5;
#endif

constexpr int kSets = 8;  // sets of 4 values by 16 outputs in a block

// Unpacks a panel's weights to tiles of bfloat16 [num_steps, 2, 512].
void unpack(const PackedMatrix &matrix, int panel, bf16 *tiles);

// Whether so many rows are rounded, and the weights are not unpacked.
bool are_rounded(const PackedMatrix &matrix, int num_rows);

// Returns rows [first, first + num_rows), whose value i is value order[i] of the given ones.
TiledRows reordered(const TiledRows &rows, int first, int num_rows,
                    const std::vector<int32_t> &order);

class RoundedRows {
public:
    // Rounds rows [first, first + num_rows).
    void assign(const TiledRows &rows, int first, int num_rows, int depth);

    // sums [count, 32] = rows [first, first + count) times a panel.
    void multiply(int first, int count, const PackedMatrix &matrix, int panel, float *sums) const;

    // A row's codes; and for each 32 of them, their scale and the sum of their values, or with two groups
    // the sums of 16 values each.
    const int32_t *codes(int row) const { return codes_.get() + row * num_steps_ * kSets; }
    const float *scales(int row) const { return scales_.get() + row * num_steps_; }
    template <int num_groups>
    const float *sums(int row) const {
        if constexpr (num_groups == 1) return sums_.get() + row * num_steps_;
        return half_sums_.get() + row * num_steps_ * 2;
    }

private:
    void round(const bf16 *values, int8_t *codes, int at);

    int num_steps_ = 0;
    Buffer<int32_t> codes_;  // four codes in each
    Buffer<float> scales_, sums_, half_sums_;
};

}  // namespace legato
