// Products with quantized weights: unpacked to bfloat16 for many rows, as 8-bit integers for few.
#pragma once

#include "rows.hpp"
#include "weights.hpp"

namespace legato {

// Up to this many rows are themselves rounded to 8 bits, with a scale per 32 values, as llama.cpp
// does: unpacking the weights would take longer than reading them.
constexpr int kFewRows = 8;

constexpr int kSets = 8;  // sets of 4 values by 16 outputs in a block

// Unpacks a panel's weights to tiles of bfloat16 [num_steps, 2, 512].
void unpack(const PackedMatrix &matrix, int panel, bf16 *tiles);

// Whether so many rows are multiplied without unpacking.
bool can_multiply_few(const PackedMatrix &matrix, int num_rows);

// Returns rows [first, first + num_rows), whose value i is value order[i] of the given ones.
TiledRows reordered(const TiledRows &rows, int first, int num_rows,
                    const std::vector<int32_t> &order);

class FewRows {
public:
    // Takes rows [first, first + num_rows).
    void assign(const TiledRows &rows, int first, int num_rows, int depth);

    // sums [num_rows, 32] = the rows times a panel.
    void multiply(const PackedMatrix &matrix, int panel, float *sums) const;

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

    int num_rows_ = 0, num_steps_ = 0;
    Buffer<int32_t> codes_;  // four codes in each
    Buffer<float> scales_, sums_, half_sums_;
};

}  // namespace legato
