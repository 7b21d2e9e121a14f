// Products with quantized weights: unpacked to bfloat16, or as 8-bit integers with rounded rows.
#pragma once

#include <limits>

#include "rows.hpp"
#include "weights.hpp"

namespace legato {

// Rows may themselves be rounded to 8 bits, with a scale per 32 values, as llama.cpp does: for a few
// rows, unpacking the weights would take longer than reading them, and for several still longer than
// multiplying with their codes.
constexpr int kFewRows = 8, kSeveralRows = 64;
constexpr int kAnyNumber = std::numeric_limits<int>::max();
#ifdef LEGATO_AMX
constexpr bool kRoundsMany = false;  // tiles multiply bfloat16 faster than scales of small groups allow
#else
constexpr bool kRoundsMany = true;
#endif
// Most rows that are multiplied in blocks with a scale each, where any number of rows is rounded. For more,
// codes of 4 bits become codes of 8 with a scale an output: BytePanels. AVX2 gains nothing by that.
#ifdef LEGATO_AVX512
constexpr int kMostInBlocks = kRoundsMany ? kSeveralRows : kFewRows;
#else
constexpr int kMostInBlocks = kAnyNumber;
#endif
#ifdef LEGATO_AVX512
constexpr int kRowsAtOnce = 8;  // whose sums fit into registers
#else
constexpr int kRowsAtOnce = 5;
#endif

// Unpacks a panel's weights to tiles of bfloat16 [num_steps, 2, 512].
void unpack(const PackedMatrix &matrix, int panel, bf16 *tiles);

// Most rows that are multiplied with codes of so many bits as they are.
int most_packed(int bits, bool rounds_rows);

// Whether so many rows are rotated and rounded with one scale each, and multiplied with BytePanels.
bool are_multiplied_in_bytes(const PackedMatrix &matrix, int num_rows);

// Whether so many rows are rounded, and the weights are not unpacked. 8-bit floats always are.
bool are_rounded(const PackedMatrix &matrix, int num_rows);

// The most of up to `num_rows` rows that are rounded.
int most_rounded(const PackedMatrix &matrix, int num_rows);

// Returns rows [first, first + num_rows), whose value i is value order[i] of the given ones, in memory of
// RowTiles::size() values.
RowTiles reordered(const RowTiles &rows, int first, int num_rows, const std::vector<int32_t> &order,
                   bf16 *memory);

class RoundedRows {
public:
    RoundedRows() = default;
    // Rounds rows [first, first + num_rows).
    RoundedRows(const RowTiles &rows, int first, int num_rows, int depth, Arena &memory);

    // Bytes of memory that so many rows take.
    static size_t bytes(int num_rows, int depth);

    // sums [count, 32] = rows [first, first + count) times a panel.
    void multiply(int first, int count, const PackedMatrix &matrix, int panel, float *sums) const;

    // The codes of a step [rows, kSets] from a row on, their scales [rows], and the sums of their values
    // [rows, num_groups]: the rows that are multiplied at once lie together.
    const int32_t *codes(int step, int row) const { return codes_ + at(step, row) * kSets; }
    const float *scales(int step, int row) const { return scales_ + at(step, row); }
    template <int num_groups>
    const float *sums(int step, int row) const {
        if constexpr (num_groups == 1) return sums_ + at(step, row);
        return half_sums_ + at(step, row) * 2;
    }

private:
    void round(const bf16 *values, long at);

    long at(int step, int row) const { return static_cast<long>(step) * num_rows_ + row; }

    int num_rows_ = 0;
    int32_t *codes_ = nullptr;  // four codes in each
    float *scales_ = nullptr, *sums_ = nullptr, *half_sums_ = nullptr;
};

}  // namespace legato
