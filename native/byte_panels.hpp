// Panels of weights as products with ByteRows take them.
#pragma once

#include "bytes.hpp"
#include "weights.hpp"

namespace legato {

// Panels [first, end) of a rotated matrix; or of one whose codes of 4 bits are unpacked to codes of 8 that
// stand for the rotated weights, with a scale for each output, as if they had been rounded so at first.
//
// Sums of whole rows of such products need no scales in between, unlike those of groups of 32 values. For
// many rows, that is worth the unpacking, a thread's own: it has one such object at a time.
class BytePanels {
public:
    BytePanels(const PackedMatrix &matrix, int first, int end);

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
    uint8_t *codes_ = nullptr;
    float *scales_;
};

}  // namespace legato
