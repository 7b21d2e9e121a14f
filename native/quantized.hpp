// Products with quantized weights: unpacked to bfloat16 for many rows, as 8-bit integers for few.
#pragma once

#include "rows.hpp"
#include "weights.hpp"

namespace legato {

// Up to this many rows are themselves rounded to 8 bits, with a scale per 32 values, as llama.cpp
// does: unpacking the weights would take longer than reading them.
constexpr int kFewRows = 8;

constexpr int kGroups = 8;  // groups of 4 values by 16 outputs in a block

// Unpacks a panel's weights to tiles of bfloat16 [num_steps, 2, 512].
void unpack(const PackedMatrix &matrix, int panel, bf16 *tiles);

class FewRows {
public:
    void assign(const TiledRows &rows, int num_rows, int depth);

    // sums [num_rows, 32] = the rows times a panel.
    void multiply(const PackedMatrix &matrix, int panel, float *sums) const;

    // A row's codes; and for each 32 of them, their scale and the sum of their values.
    const int32_t *codes(int row) const { return codes_.get() + row * num_steps_ * kGroups; }
    const float *scales(int row) const { return scales_.get() + row * num_steps_; }
    const float *sums(int row) const { return sums_.get() + row * num_steps_; }

private:
    void round(const bf16 *values, int8_t *codes, float &scale, float &sum) const;

    int num_rows_ = 0, num_steps_ = 0;
    Buffer<int32_t> codes_;  // four codes in each
    Buffer<float> scales_, sums_;
};

}  // namespace legato
