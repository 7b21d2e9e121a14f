// Products of rows with a weight matrix, computed by all threads of a pool.
#pragma once

#include <optional>
#include <vector>

#include "byte_panels.hpp"
#include "quantized.hpp"
#include "rows.hpp"
#include "thread_pool.hpp"
#include "weights.hpp"

namespace legato {

constexpr size_t kShareBytes = 512 << 10;  // panels that stay in the second-level cache
// Bytes of a share if all rows are multiplied at once: small enough that no thread waits long for one
// that lost its core, and large enough that reading ahead beyond its end does not matter.
constexpr size_t kSmallShareBytes = 128 << 10;

// sums [32, 32] = up to 32 rows from `row` on, times a panel of tiles.
inline void multiply_rows(const RowTiles &rows, int row, int count, const bf16 *panel,
                          int num_steps, float *sums, Arena memory) {
    constexpr long kSumBytes = kPanel * sizeof(float);
    const bf16 *const upper = rows.tiles(row), *const lower = rows.tiles(row + kTileRows);
    const auto operands = [=](int step) {
        const bf16 *const columns = panel + 2 * step * kTileValues;
        return Operands{upper + step * kTileValues, lower + step * kTileValues, columns,
                        columns + kTileValues, kAheadBytes / static_cast<long>(sizeof(bf16))};
    };
    const StripShape strip{count, num_steps, kTileRowBytes, kTileRowBytes, kSumBytes};
    multiply_strip<false>(strip, operands, sums, memory);
}

// How many times as large a panel is that rows are multiplied with.
inline float unpacked_factor(const PackedMatrix &matrix, int num_rows) {
    if (are_multiplied_in_bytes(matrix, num_rows)) return 8.0f / matrix.bits;
    return are_rounded(matrix, num_rows) ? 1.0f : 16.0f / matrix.bits;
}

// Returns the panels that a thread takes at a time: few enough to stay in its cache while all rows are
// multiplied, and in so many shares that all threads are busy.
inline int panels_a_share(const PackedMatrix &matrix, int num_rows, int num_threads) {
    const size_t share_bytes = num_rows <= kRowPair ? kSmallShareBytes : kShareBytes;
    const auto bytes =
        static_cast<size_t>(unpacked_factor(matrix, num_rows) * matrix.num_bytes());
    const size_t rounds = (bytes - 1) / (num_threads * share_bytes) + 1;
    const int num_shares = static_cast<int>(rounds * num_threads);
    return (matrix.num_panels + num_shares - 1) / num_shares;
}

// Calls work(row, count) for each 32 of the rows.
template <typename Work>
void each_row_pair(int num_rows, Work work) {
    for (int row = 0; row < num_rows; row += kRowPair)
        work(row, std::min(kRowPair, num_rows - row));
}

// Multiplies rows [first, first + num_rows) with panels [begin, end) in bfloat16, by one thread.
//
// tiles: of these panels, one after the other. finish: as for multiply(), of rows counted from `first`.
template <typename Finish>
void multiply_tiles(const RowTiles &rows, int first, int num_rows, const PackedMatrix &matrix,
                    const bf16 *tiles, int begin, int end, Arena memory, Finish finish) {
    alignas(64) float sums[kRowPair * kPanel];
    const size_t panel_size = static_cast<size_t>(kPanel) * matrix.depth;
    each_row_pair(num_rows, [&](int row, int count) {
        for (int panel = begin; panel < end; ++panel) {
            multiply_rows(rows, first + row, count, tiles + (panel - begin) * panel_size,
                          matrix.num_steps, sums, memory);
            finish(row, count, panel, sums);
        }
    });
}

// Products of the same rows, [first, first + num_rows), with panels of a quantized matrix, by one thread.
class QuantizedProducts {
public:
    QuantizedProducts(const RowTiles &rows, int first, int num_rows, const PackedMatrix &matrix,
                      Arena memory)
        : matrix_(matrix),
          memory_(memory),
          rows_(matrix.order.empty() ? rows : ordered(rows, first, num_rows)),
          first_(matrix.order.empty() ? first : 0),
          num_rows_(num_rows),
          are_rounded_(are_rounded(matrix, num_rows)) {
        if (are_rounded_) rounded_ = RoundedRows(rows_, first_, num_rows, matrix.depth, memory_);
    }

    // The most bytes of memory that products of up to `num_rows` rows with up to `num_panels` panels take.
    static size_t bytes(const PackedMatrix &matrix, int num_rows, int num_panels) {
        const int num_rounded = most_rounded(matrix, num_rows);
        const size_t ordered = matrix.order.empty() ? 0 : ordered_values(matrix, num_rows);
        const size_t rounded = RoundedRows::bytes(num_rounded, matrix.depth);
        const size_t unpacked = Arena::bytes<bf16>(num_panels * panel_values(matrix)) +
                                strip_bytes(matrix.num_steps);
        return Arena::bytes<bf16>(ordered) +
               (num_rounded == num_rows ? rounded : std::max(rounded, unpacked));
    }

    // For panels [begin, end). finish(row, count, panel, sums): as for multiply(), of rows counted from
    // `first`.
    template <typename Finish>
    void multiply(int begin, int end, Finish finish) const {
        if (are_rounded_) multiply_rounded(begin, end, finish);
        else multiply_unpacked(begin, end, finish);
    }

private:
    static size_t panel_values(const PackedMatrix &matrix) {
        return static_cast<size_t>(kPanel) * matrix.depth;
    }
    static size_t ordered_values(const PackedMatrix &matrix, int num_rows) {
        return RowTiles::size(num_rows, matrix.depth);
    }
    RowTiles ordered(const RowTiles &rows, int first, int num_rows) {
        return reordered(rows, first, num_rows, matrix_.order,
                         memory_.take<bf16>(ordered_values(matrix_, num_rows)));
    }

    // Each panel is read once.
    template <typename Finish>
    void multiply_rounded(int begin, int end, Finish finish) const {
        alignas(64) float sums[kRowPair * kPanel];
        for (int panel = begin; panel < end; ++panel)
            each_row_pair(num_rows_, [&](int row, int count) {
                rounded_.multiply(row, count, matrix_, panel, sums);
                finish(row, count, panel, sums);
            });
    }

    template <typename Finish>
    void multiply_unpacked(int begin, int end, Finish finish) const {
        const size_t size = panel_values(matrix_);
        // Many rows are read once for all panels, and not for each.
        const int at_once = num_rows_ <= kRowPair ? 1 : end - begin;
        Arena memory = memory_;
        bf16 *const unpacked = memory.take<bf16>(at_once * size);
        for (int first = begin; first < end; first += at_once) {
            for (int i = 0; i < at_once; ++i) unpack(matrix_, first + i, unpacked + i * size);
            multiply_tiles(rows_, first_, num_rows_, matrix_, unpacked, first, first + at_once,
                           memory, finish);
        }
    }

    const PackedMatrix &matrix_;
    Arena memory_;
    const RowTiles rows_;
    const int first_, num_rows_;
    const bool are_rounded_;
    RoundedRows rounded_;
};

// Multiplies rows [first, first + num_rows) with panels [begin, end), by one thread. `first` is a
// multiple of a tile's rows. finish: as for multiply(), of rows counted from 0.
template <typename Finish>
void multiply_panels(const RowTiles &rows, int first, int num_rows, const PackedMatrix &matrix,
                     int begin, int end, Arena memory, Finish finish) {
    const auto keep = [&](int row, int count, int panel, const float *sums) {
        finish(first + row, count, panel, sums);
    };
    if (!matrix.is_quantized())
        return multiply_tiles(rows, first, num_rows, matrix, matrix.tiles(begin), begin, end, memory,
                              keep);
    QuantizedProducts(rows, first, num_rows, matrix, memory).multiply(begin, end, keep);
}

// The most bytes of memory that multiply_panels() takes, of up to `num_rows` rows and `num_panels` panels.
inline size_t panels_bytes(const PackedMatrix &matrix, int num_rows, int num_panels) {
    return matrix.is_quantized() ? QuantizedProducts::bytes(matrix, num_rows, num_panels)
                                 : strip_bytes(matrix.num_steps);
}

constexpr int kRowsRounded = 4;  // rows that a thread rounds to 8 bits at a time

// multiply() for weights and rows of 8 bits: first the rows are rounded, each by one thread.
template <typename Finish>
void multiply_in_bytes(const TiledRows &rows, int num_rows, const PackedMatrix &matrix,
                       int panels_a_share, int num_shares, const Worker &worker, Phase &phase,
                       Finish finish) {
    alignas(64) int32_t products[kRowPair * kPanel];
    alignas(64) float sums[kRowPair * kPanel];
    const auto round = [&](int share) {
        const int end = std::min((share + 1) * kRowsRounded, num_rows);
        for (int row = share * kRowsRounded; row < end; ++row)
            rows.bytes.assign(row, rows.tiles(row), matrix.depth, worker.memory);
    };
    const auto multiply_share = [&](int share) {
        const int first = share * panels_a_share;
        const int end = std::min(first + panels_a_share, matrix.num_panels);
        const BytePanels panels(matrix, first, end, worker.memory);
        each_row_pair(num_rows, [&](int row, int count) {
            for (int panel = first; panel < end; ++panel) {
                multiply_bytes({count, ByteRows::num_tiles(matrix.depth), rows.bytes.tiles(row),
                                rows.bytes.tiles(row + kTileRows), panels.columns(panel, 0),
                                panels.columns(panel, 1), kAheadBytes},
                               products);
                rows.bytes.scale(products, row, count, panels.scales(panel), panels.zero(), sums);
                finish(row, count, panel, sums);
            }
        });
    };
    const TileScope scope;
    phase.run(worker, (num_rows + kRowsRounded - 1) / kRowsRounded, round, num_shares,
              multiply_share);
}

// Multiplies the rows with the matrix; called by all threads.
//
// finish(first_row, num_rows, panel, sums): takes sums [num_rows, 32] of outputs [32 * panel, ...).
template <typename Finish>
void multiply(const TiledRows &rows, int num_rows, const PackedMatrix &matrix, const Worker &worker,
              Phase &phase, Finish finish) {
    const int panels = panels_a_share(matrix, num_rows, worker.num_threads);
    const int num_shares = (matrix.num_panels + panels - 1) / panels;
    if (are_multiplied_in_bytes(matrix, num_rows))
        return multiply_in_bytes(rows, num_rows, matrix, panels, num_shares, worker, phase,
                                 finish);
    const TileScope scope;
    std::optional<QuantizedProducts> products;  // a thread without a share need not round rows
    phase.run(worker, num_shares, [&](int share) {
        const int first = share * panels, end = std::min(first + panels, matrix.num_panels);
        if (!matrix.is_quantized())
            return multiply_tiles(rows, 0, num_rows, matrix, matrix.tiles(first), first, end,
                                  worker.memory, finish);
        if (!products) products.emplace(rows, 0, num_rows, matrix, worker.memory);
        products->multiply(first, end, finish);
    });
}

// The same with quantized matrices side by side, whose rows of outputs follow each other. None of them is
// multiplied in bytes.
template <typename Finish>
void multiply(const TiledRows &rows, int num_rows, const std::vector<PackedMatrix> &matrices,
              const Worker &worker, Phase &phase, Finish finish) {
    if (matrices.size() == 1)
        return multiply(rows, num_rows, matrices.front(), worker, phase, finish);
    const auto shares_of = [&](const PackedMatrix &matrix) {
        const int panels = panels_a_share(matrix, num_rows, worker.num_threads);
        return (matrix.num_panels + panels - 1) / panels;
    };
    int num_shares = 0;
    for (const auto &matrix : matrices) num_shares += shares_of(matrix);
    const TileScope scope;
    std::optional<QuantizedProducts> products;
    const PackedMatrix *multiplied = nullptr;  // by `products`
    phase.run(worker, num_shares, [&](int share) {
        const PackedMatrix *matrix = matrices.data();
        int before = 0;  // panels of earlier matrices
        for (int count; share >= (count = shares_of(*matrix)); ++matrix) {
            share -= count;
            before += matrix->num_panels;
        }
        if (multiplied != matrix) products.emplace(rows, 0, num_rows, *matrix, worker.memory);
        multiplied = matrix;
        const int panels = panels_a_share(*matrix, num_rows, worker.num_threads);
        products->multiply(share * panels, std::min((share + 1) * panels, matrix->num_panels),
                           [&](int row, int count, int panel, const float *sums) {
                               finish(row, count, before + panel, sums);
                           });
    });
}

// Bytes of memory that multiply() takes, of each thread.
inline size_t product_bytes(const PackedMatrix &matrix, int num_rows, int num_threads) {
    const int panels = panels_a_share(matrix, num_rows, num_threads);
    if (are_multiplied_in_bytes(matrix, num_rows))
        return std::max(ByteRows::assign_bytes(matrix.depth), BytePanels::bytes(matrix, panels));
    return panels_bytes(matrix, num_rows, panels);
}

}  // namespace legato
