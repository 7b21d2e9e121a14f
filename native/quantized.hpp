// Products with quantized weights: unpacked to bfloat16 for many rows, as 8-bit integers for few.
#pragma once

#include "rows.hpp"
#include "weights.hpp"

namespace legato {

// So few rows are themselves rounded to 8 bits, 32 values to a scale, as llama.cpp does: unpacking
// the weights would take longer than reading them.
constexpr int kFewRows = 8;

constexpr int kGroups = 8;  // of 4 values by 16 outputs, in a block

// Weights of a panel as tiles of bfloat16 [num_steps, 2, 512].
void unpack(const PackedMatrix &matrix, int panel, bf16 *tiles);

class FewRows {
public:
    void assign(const TiledRows &rows, int num_rows, int depth);

    // sums [num_rows, 32] of a panel.
    void multiply(const PackedMatrix &matrix, int panel, float *sums) const;

    // Of a row: its codes, and of each 32 the scale and the sum that they stand for.
    const int32_t *codes(int row) const { return codes_.get() + row * num_steps_ * kGroups; }
    const float *scales(int row) const { return scales_.get() + row * num_steps_; }
    const float *sums(int row) const { return sums_.get() + row * num_steps_; }

private:
    void round(const bf16 *values, int8_t *codes, float &scale, float &sum) const;

    int num_rows_ = 0, num_steps_ = 0;
    Buffer<int32_t> codes_;  // four to each
    Buffer<float> scales_, sums_;
};

}  // namespace legato
