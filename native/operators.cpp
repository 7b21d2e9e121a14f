#include "operators.hpp"

#include <cmath>

#include "row_shares.hpp"
#include "vector_math.hpp"

namespace legato {

namespace {

// Calls copy(column) for each run of 32 values, which tiles have side by side.
template <typename Copy>
void each_piece(int depth, Copy copy) {
    for (int column = 0; column < depth; column += kTileDepth) copy(column);
}

void widen(const bf16 *from, int count, float *to) {
    for (int i = 0; i < count; i += 16) store(to + i, load_bf16(from + i));
}

// Finishes 16 sums of a row from `output` on, which is at `place` of the whole result.
Floats finished(const float *sums, const Finish &finish, int output, size_t place) {
    Floats result = load(sums);
    if (finish.bias) result = result + load(finish.bias + output);
    if (!finish.gates) return result;
    const Floats gate = load_bf16(finish.gates + place);
    return (finish.is_gelu ? gelu(gate) : silu(gate)) * result;
}

}  // namespace

TiledRows &Operators::tiled(int num_rows, int depth) {
    Scratch &scratch = tiled_[depth];
    if (num_rows > scratch.num_rows) scratch = {num_rows, TiledRows(num_rows, depth)};
    return scratch.rows;
}

void Operators::reserve_queries(size_t count) {
    if (count <= num_queries_) return;
    queries_.reserve(count);
    std::fill_n(queries_.get(), count, bf16{0});  // tiles are read beyond the last row
    num_queries_ = count;
}

void Operators::multiply(const PackedMatrix &matrix, const bf16 *rows, int num_rows,
                         Finish finish, bf16 *out) {
    const int depth = matrix.depth, width = matrix.num_outputs;
    const TiledRows &inputs = tiled(num_rows, depth);
    const auto keep_sums = [&](int row, int count, int panel, const float *sums) {
        const int column = panel * kPanel;
        for (int i = 0; i < count; ++i, sums += kPanel) {
            const size_t place = static_cast<size_t>(row + i) * width + column;
            for (int j = 0; j < kPanel; j += 16)
                store_bf16(out + place + j, finished(sums + j, finish, column + j, place + j));
        }
    };
    Phase tile, product;
    pool_.run([&] {
        RowShares(num_rows, pool_.size()).run(tile, [&](int row) {
            const bf16 *from = rows + static_cast<size_t>(row) * depth;
            each_piece(depth, [&](int column) {
                std::copy_n(from + column, kTileDepth, inputs.at(row, column));
            });
        });
        legato::multiply(inputs, num_rows, matrix, pool_.size(), product, keep_sums);
    });
}

void Operators::normalize(const bf16 *rows, int num_rows, int size, const float *weight, float eps,
                          bf16 *out) {
    Phase phase;
    pool_.run([&] {
        static thread_local Buffer<float> wide;
        wide.reserve(size);
        RowShares(num_rows, pool_.size()).run(phase, [&](int row) {
            const size_t first = static_cast<size_t>(row) * size;
            widen(rows + first, size, wide.get());
            const Floats by = fill(1.0f / std::sqrt(mean_square(wide.get(), size) + eps));
            for (int i = 0; i < size; i += 16)
                store_bf16(out + first + i, load(wide.get() + i) * by * load(weight + i));
        });
    });
}

void Operators::rotate(const Heads &heads, int num_rows, int num_heads, int head_dim,
                       const bf16 *cos, const bf16 *sin, bf16 *out) {
    const int half = head_dim / 2;
    Phase phase;
    pool_.run([&] {
        RowShares(num_rows, pool_.size()).run(phase, [&](int row) {
            const bf16 *own_cos = cos + static_cast<size_t>(row) * head_dim;
            const bf16 *own_sin = sin + static_cast<size_t>(row) * head_dim;
            bf16 *to = out + static_cast<size_t>(row) * num_heads * head_dim;
            for (int i = 0; i < num_heads; ++i, to += head_dim)
                for (int dim = 0; dim < half; dim += 16) {
                    const int other = half + dim;
                    const Floats low = load_bf16(heads.at(row, i) + dim);
                    const Floats high = load_bf16(heads.at(row, i) + other);
                    store_bf16(to + dim, low * load_bf16(own_cos + dim) -
                                             high * load_bf16(own_sin + dim));
                    store_bf16(to + other, high * load_bf16(own_cos + other) +
                                               low * load_bf16(own_sin + other));
                }
        });
    });
}

void Operators::attend(Step &step, const LayerCache &cache, int group, const Heads &query,
                       const Heads &key, const Heads &value, float scale, float softcap,
                       bf16 *out) {
    const CacheShape &shape = step.shape;
    const int head_dim = shape.head_dim, num_heads = group * shape.num_kv_heads;
    const int num_rows = static_cast<int>(step.slots.size()), width = num_heads * head_dim;
    const AttentionPlan &plan = step.plan(cache.window);
    const size_t query_rows = static_cast<size_t>(num_rows) * group + kPanel;
    reserve_queries(query_rows * shape.num_kv_heads * head_dim);
    parts_.reserve(plan.num_parts * part_floats(head_dim));
    const TiledRows &context = tiled(num_rows, width);
    const AttentionCall call{step.chunks, plan,       shape,        group,
                             queries_.get(), query_rows, cache.keys, cache.values,
                             softcap * kLog2E, context, parts_.get()};
    const Floats unit = fill(scale * kLog2E);
    const auto spread = [&](int row) {
        alignas(64) float wide[kLargestHead];
        if (row + 1 < num_rows) expect_token(cache.keys, cache.values, shape, step.slots[row + 1]);
        for (int i = 0; i < num_heads; ++i) {
            const size_t place = i / group * query_rows + row * group + i % group;
            for (int dim = 0; dim < head_dim; dim += 16)
                store_bf16(&queries_[place * head_dim + dim],
                           load_bf16(query.at(row, i) + dim) * unit);
        }
        for (int i = 0; i < shape.num_kv_heads; ++i) {
            widen(key.at(row, i), head_dim, wide);
            write_key(cache.keys, shape, i, step.slots[row], wide);
            widen(value.at(row, i), head_dim, wide);
            write_value(cache.values, shape, i, step.slots[row], wide);
        }
    };
    Phase spreading, attending, merging, copying;
    pool_.run([&] {
        const RowShares shares(num_rows, pool_.size());
        shares.run(spreading, spread);
        legato::attend(call, attending);
        merge(call, merging);
        shares.run(copying, [&](int row) {
            bf16 *to = out + static_cast<size_t>(row) * width;
            each_piece(width, [&](int column) {
                std::copy_n(context.at(row, column), kTileDepth, to + column);
            });
        });
    });
}

}  // namespace legato
