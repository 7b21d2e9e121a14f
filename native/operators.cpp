#include "operators.hpp"

#include <cmath>

#include "activations.hpp"

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

const float *as_floats(const float *values, int, Arena) { return values; }
const float *as_floats(const bf16 *values, int count, Arena memory) {
    float *const wide = memory.take<float>(count);
    widen(values, count, wide);
    return wide;
}

// Lays plain rows out as tiles.
void tile(const bf16 *rows, int num_rows, int depth, const TiledRows &tiled, const Worker &worker,
          Phase &phase) {
    RowShares(num_rows, worker).run(phase, [&](int row) {
        const bf16 *from = rows + static_cast<size_t>(row) * depth;
        each_piece(depth, [&](int column) {
            std::copy_n(from + column, kTileDepth, tiled.at(row, column));
        });
    });
}

// Multiplies, and calls keep(row, output, 16 results) for all of the results.
template <typename Keep>
void multiply_and(const TiledRows &rows, int num_rows, const Projection &projection,
                  const Worker &worker, Phase &phase, Keep keep) {
    const float *const bias = projection.bias;
    multiply(rows, num_rows, projection.matrix, worker, phase,
             [&](int row, int count, int panel, const float *sums) {
                 for (int i = 0; i < count; ++i, sums += kPanel)
                     for (int j = 0; j < kPanel; j += 16) {
                         const int output = panel * kPanel + j;
                         const Floats result = load(sums + j);
                         keep(row + i, output, bias ? result + load(bias + output) : result);
                     }
             });
}

}  // namespace

const TiledRows &Operators::tiled(Use use, int num_rows, int depth) {
    Scratch &scratch = tiled_[{use, depth}];
    if (num_rows > scratch.num_rows) scratch = {num_rows, TiledRows(num_rows, depth)};
    return scratch.rows;
}

void Operators::reserve_queries(size_t count) {
    if (count <= num_queries_) return;
    queries_.reserve(count);
    std::fill_n(queries_.get(), count, bf16{0});  // tiles are read beyond the last row
    num_queries_ = count;
}

void Operators::project(const Projection &projection, const bf16 *rows, int num_rows, bf16 *out) {
    const int depth = projection.matrix.depth;
    const size_t width = projection.matrix.num_outputs;
    const TiledRows &inputs = tiled(kInputs, num_rows, depth);
    Phase tiling, product;
    pool_.run(product_bytes(projection.matrix, num_rows, pool_.size()), [&](const Worker &worker) {
        tile(rows, num_rows, depth, inputs, worker, tiling);
        multiply_and(inputs, num_rows, projection, worker, product,
                     [&](int row, int output, Floats result) {
                         store_bf16(out + row * width + output, result);
                     });
    });
}

void Operators::run_mlp(const Projection &gate, const Projection &up, const Projection &down,
                        bool is_gelu, const bf16 *rows, int num_rows, bf16 *out) {
    const int depth = gate.matrix.depth;
    const size_t size = gate.matrix.num_outputs, width = down.matrix.num_outputs;
    const TiledRows &inputs = tiled(kInputs, num_rows, depth);
    const TiledRows &gated = tiled(kGated, num_rows, down.matrix.depth);
    gates_.reserve(num_rows * size);
    bf16 *const gates = gates_.get();
    Phase tiling, first, second, third;
    const auto bytes = [&](const Projection &projection) {
        return product_bytes(projection.matrix, num_rows, pool_.size());
    };
    pool_.run(std::max({bytes(gate), bytes(up), bytes(down)}), [&](const Worker &worker) {
        tile(rows, num_rows, depth, inputs, worker, tiling);
        // As transformers rounds: gates to bfloat16 first.
        multiply_and(inputs, num_rows, gate, worker, first,
                     [&](int row, int output, Floats result) {
                         store_bf16(gates + row * size + output, result);
                     });
        multiply_and(inputs, num_rows, up, worker, second,
                     [&](int row, int output, Floats result) {
                         const Floats own = load_bf16(gates + row * size + output);
                         store_bf16(gated.at(row, output), (is_gelu ? gelu(own) : silu(own)) * result);
                     });
        multiply_and(gated, num_rows, down, worker, third,
                     [&](int row, int output, Floats result) {
                         store_bf16(out + row * width + output, result);
                     });
    });
}

void Operators::run_experts(Experts &experts, const bf16 *rows, int num_rows, const bf16 *shared,
                            bf16 *out) {
    const ExpertsShape &shape = experts.shape;
    const int size = shape.hidden_size;
    ExpertsSpace &space = experts_[{size, shape.size, shape.count, shape.num_active}];
    space.reserve(shape, num_rows);
    const TiledRows &inputs = tiled(kInputs, num_rows, size);
    experts.reset();
    Phase tiling;
    pool_.run(experts.bytes(num_rows, pool_.size()), [&](const Worker &worker) {
        tile(rows, num_rows, size, inputs, worker, tiling);
        experts.pick(space, inputs, num_rows, worker);
        experts.compute(space, inputs, num_rows, worker, [&](int row, int column, Floats total) {
            const size_t at = static_cast<size_t>(row) * size + column;
            if (shared) total = fma(load_bf16(shared + at), fill(space.shared[row]), total);
            store_bf16(out + at, total);
        });
    });
}

template <typename Value>
void Operators::normalize(const Value *rows, int num_rows, int size, const float *weight, float eps,
                          bf16 *out) {
    Phase phase;
    pool_.run(Arena::bytes<float>(size), [&](const Worker &worker) {
        RowShares(num_rows, worker).run(phase, [&](int row) {
            const size_t first = static_cast<size_t>(row) * size;
            const float *const wide = as_floats(rows + first, size, worker.memory);
            const Floats by = fill(1.0f / std::sqrt(mean_square(wide, size) + eps));
            for (int i = 0; i < size; i += 16)
                store_bf16(out + first + i, load(wide + i) * by * load(weight + i));
        });
    });
}

template void Operators::normalize(const bf16 *, int, int, const float *, float, bf16 *);
template void Operators::normalize(const float *, int, int, const float *, float, bf16 *);

void Operators::rotate(const Heads &query, int num_heads, const Heads &key, int num_kv_heads,
                       int num_rows, int head_dim, const bf16 *cos, const bf16 *sin, bf16 *out) {
    const int half = head_dim / 2;
    const auto turn = [=](const bf16 *head, const bf16 *own_cos, const bf16 *own_sin, bf16 *to) {
        for (int dim = 0; dim < half; dim += 16) {
            const int other = half + dim;
            const Floats low = load_bf16(head + dim), high = load_bf16(head + other);
            store_bf16(to + dim,
                       low * load_bf16(own_cos + dim) - high * load_bf16(own_sin + dim));
            store_bf16(to + other,
                       high * load_bf16(own_cos + other) + low * load_bf16(own_sin + other));
        }
    };
    Phase phase;
    pool_.run(0, [&](const Worker &worker) {
        RowShares(num_rows, worker).run(phase, [&](int row) {
            const size_t angle = static_cast<size_t>(row) * head_dim;
            bf16 *to = out + angle * (num_heads + num_kv_heads);
            for (int i = 0; i < num_heads; ++i, to += head_dim)
                turn(query.at(row, i), cos + angle, sin + angle, to);
            for (int i = 0; i < num_kv_heads; ++i, to += head_dim)
                turn(key.at(row, i), cos + angle, sin + angle, to);
        });
    });
}

void Operators::attend(Step &step, const LayerCache &cache, int num_padded, const Heads &query,
                       const Heads &key, const Heads &value, float scale, float softcap,
                       bf16 *out) {
    const CacheShape &shape = step.shape;
    const int group = step.group();
    const int head_dim = shape.head_dim, num_heads = group * shape.num_kv_heads;
    const int num_rows = static_cast<int>(step.slots.size()), width = num_heads * head_dim;
    std::fill_n(out + static_cast<size_t>(num_rows) * width,
                static_cast<size_t>(num_padded - num_rows) * width, bf16{0});
    const AttentionPlan &plan = step.plan(cache.window);
    const size_t query_rows = static_cast<size_t>(num_rows) * group + kPanel;
    reserve_queries(query_rows * shape.num_kv_heads * head_dim);
    parts_.reserve(plan.num_parts * part_floats(head_dim));
    const TiledRows &context = tiled(kInputs, num_rows, width);
    const AttentionCall call{step.chunks, plan,       shape,        group,
                             queries_.get(), query_rows, cache.keys, cache.values,
                             softcap * kLog2E, nullptr, context, parts_.get()};
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
    pool_.run(attention_bytes(head_dim), [&](const Worker &worker) {
        const RowShares shares(num_rows, worker);
        shares.run(spreading, spread);
        legato::attend(call, worker, attending);
        merge(call, worker, merging);
        shares.run(copying, [&](int row) {
            bf16 *to = out + static_cast<size_t>(row) * width;
            each_piece(width, [&](int column) {
                std::copy_n(context.at(row, column), kTileDepth, to + column);
            });
        });
    });
}

}  // namespace legato
