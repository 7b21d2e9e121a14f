// Panels of weights as products with ByteRows take them.
#pragma once

#include "bytes.hpp"
#include "weights.hpp"

namespace legato {

// Panels [first, end) of a rotated matrix; or of one whose codes of 4 bits are unpacked to codes of 8 that
// stand for the rotated weights, with a scale for each output, as if they had been rounded so at first.
//
// Sums of whole rows of such products need no scales in between, unlike those of groups of 32 values. For
// many rows, that is worth the unpacking, by each thread for itself.
class BytePanels {
public:
    BytePanels(const PackedMatrix &matrix, int first, int end, Arena memory);

    // Bytes of memory that so many panels take.
    static size_t bytes(const PackedMatrix &matrix, int num_panels);

    // As ByteStrip takes them.
    const uint8_t *columns(int panel, int half) const {
        return matrix_.is_rotated ? matrix_.blocks(panel, half) : unpacked(panel, half);
    }
    // [32], of the outputs.
    const float *scales(int panel) const { return scales_ + (panel - first_) * kPanel; }
    // The code of weight 0.
    int zero() const { return zero_; }

private:
    uint8_t *unpacked(int panel, int half) const {
        return codes_ + (2 * (panel - first_) + half) * half_bytes_;
    }

    const PackedMatrix &matrix_;
    const int first_, zero_;
    const size_t half_bytes_;
    float *const scales_;
    uint8_t *const codes_;
};

}  // namespace legato
