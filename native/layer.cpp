#include "layer.hpp"

#include <cmath>
#include <initializer_list>

#include "activations.hpp"

namespace legato {

namespace {

std::unique_ptr<bf16[], Free> zeros(size_t count) {
    auto values = aligned_array<bf16>(count);
    std::fill_n(values.get(), count, bf16{0});
    return values;
}

// Query rows per key/value head, with room for a tile that begins at the last row.
size_t query_rows(const LayerShape &shape, const Rows &rows) {
    return static_cast<size_t>(rows.count) * shape.group() + kPanel;
}

// Stores past the caches if possible: rows of a vocabulary's logits are a multiple of a page apart
// and would evict each other.
void store_once(const float *values, int count, float *to) {
    if (count == kPanel && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        stream(to, load(values));
        stream(to + 16, load(values + 16));
    } else {
        std::copy_n(values, count, to);
    }
}

}  // namespace

Step::Step(std::vector<Chunk> chunks, std::vector<int64_t> slots, CacheShape shape, int group,
           int num_threads)
    : chunks(std::move(chunks)),
      slots(std::move(slots)),
      shape(shape),
      num_threads(num_threads),
      group_(group) {}

const AttentionPlan &Step::plan(int window) {
    auto found = plans_.find(window);
    if (found == plans_.end())
        found = plans_.try_emplace(window, chunks, shape, group_, Visibility{window}, num_threads)
                    .first;
    return found->second;
}

LargestSizes::LargestSizes(const std::vector<Layer *> &layers) {
    for (const auto *layer : layers) {
        const LayerShape &shape = layer->shape;
        hidden = std::max(hidden, shape.hidden_size);
        query = std::max(query, shape.query_size());
        kv = std::max(kv, shape.kv_size());
        qkv = std::max(qkv, shape.qkv_size());
        gated = std::max({gated, shape.intermediate_size, shape.input_size, kTileDepth});
        head_dim = std::max(head_dim, shape.head_dim);
        if (shape.experts.count) experts = shape.experts;
    }
}

void Workspace::reserve(const LargestSizes &sizes, int num_rows, int num_parts) {
    const size_t rows = num_rows;
    if (rows > num_rows_) {
        normed = TiledRows(num_rows, sizes.hidden);
        queries = zeros(rows * sizes.query + kPanel * sizes.kv);  // see query_rows()
        context = TiledRows(num_rows, sizes.query);
        gated = TiledRows(num_rows, sizes.gated);
        qkv = aligned_array<float>(rows * sizes.qkv);
        output = aligned_array<float>(rows * sizes.hidden);
        if (sizes.experts.count) experts.reserve(sizes.experts, num_rows);
        num_rows_ = rows;
    }
    if (static_cast<size_t>(num_parts) > num_parts_) {
        parts = aligned_array<float>(num_parts * part_floats(sizes.head_dim));
        num_parts_ = num_parts;
    }
}

Layer::Layer(LayerShape shape, const LayerWeights &w)
    : shape(shape),
      input_norm_(copied(w.input_norm, shape.hidden_size)),
      post_norm_(copied(w.post_norm, shape.hidden_size)),
      query_norm_(copied(w.query_norm, shape.has_whole_norms ? shape.query_size() : shape.head_dim)),
      key_norm_(copied(w.key_norm, shape.has_whole_norms ? shape.kv_size() : shape.head_dim)),
      sinks_(copied(w.sinks, shape.num_heads)),
      qkv_bias_(widened(w.qkv_bias, shape.qkv_size())),
      gate_up_bias_(widened(w.gate_up_bias, 2 * shape.intermediate_size)),
      qkv_(w.qkv.pack(shape.hidden_size)),
      gate_up_(pack_gate_up(w.gate_up, shape.intermediate_size, shape.hidden_size)),
      input_gate_(w.input_gate, shape.input_size, shape.hidden_size),
      attention_output_{PackedMatrix(w.output, shape.hidden_size, shape.query_size()),
                        widened(w.output_bias, shape.hidden_size),
                        copied(w.attention_output_norm, shape.hidden_size), shape.residual_scale},
      mlp_output_{PackedMatrix(w.down, shape.hidden_size, shape.intermediate_size),
                  widened(w.down_bias, shape.hidden_size),
                  copied(w.mlp_output_norm, shape.hidden_size), shape.residual_scale},
      input_output_{PackedMatrix(w.input_output, shape.hidden_size, shape.input_size),
                    {},
                    copied(w.input_output_norm, shape.hidden_size),
                    1.0f},
      output_scale_(w.output_scale ? *w.output_scale : 1.0f) {
    if (shape.experts.count)
        experts_ = std::make_unique<Experts>(shape.experts, w.router, w.experts);
    for (auto &sink : sinks_) sink *= kLog2E;
}

namespace {

size_t most_bytes(std::initializer_list<const PackedMatrix *> matrices, int num_rows,
                  int num_threads) {
    size_t most = 0;
    for (const auto *matrix : matrices)
        if (matrix->num_bytes())
            most = std::max(most, product_bytes(*matrix, num_rows, num_threads));
    return most;
}

}  // namespace

size_t Layer::attention_bytes(const Rows &rows, int num_threads) const {
    size_t most = std::max(legato::attention_bytes(shape.head_dim),
                           most_bytes({&attention_output_.matrix}, rows.count, num_threads));
    for (const auto &part : qkv_)
        most = std::max(most, most_bytes({&part}, rows.count, num_threads));
    return most;
}

size_t Layer::mlp_bytes(const Step &step, const Rows &rows, int num_threads) const {
    const int num_rows = mlp_rows(step, rows);
    const size_t bytes = most_bytes({&gate_up_, &mlp_output_.matrix}, num_rows, num_threads);
    return experts_ ? std::max(bytes, experts_->bytes(num_rows, num_threads)) : bytes;
}

size_t Layer::finish_bytes(const Rows &rows, int num_threads) const {
    return most_bytes({&input_gate_, &input_output_.matrix}, rows.count, num_threads);
}

void Layer::reset() {
    for (auto &phase : phases_) phase.reset();
    if (experts_) experts_->reset();
}

void Layer::add_attention(Workspace &space, const Step &step, const AttentionPlan &plan,
                          const LayerCache &cache, const Rows &rows, const Worker &worker) {
    const AttentionCall call{step.chunks,
                             plan,
                             step.shape,
                             shape.group(),
                             space.queries.get(),
                             query_rows(shape, rows),
                             cache.keys,
                             cache.values,
                             shape.softcap * kLog2E,
                             sinks_.empty() ? nullptr : sinks_.data(),
                             space.context,
                             space.parts.get()};
    normalize(rows, input_norm_, space.normed, worker, phases_[kInputNorm]);
    project(space, rows.count, worker);
    spread(space, step, cache, rows, worker);
    attend(call, worker, phases_[kAttend]);
    merge(call, worker, phases_[kMerge]);
    add(space, rows, space.context, attention_output_, worker, phases_[kOutput],
        phases_[kOutputNorm]);
}

void Layer::add_mlp(Workspace &space, const Step &step, const Rows &rows, const Worker &worker) {
    normalize(rows, post_norm_, space.normed, worker, phases_[kPostNorm]);
    if (!experts_) {
        gate(space, rows.count, worker);
        add(space, rows, space.gated, mlp_output_, worker, phases_[kDown], phases_[kDownNorm]);
        return;
    }
    const int num_rows = mlp_rows(step, rows);
    experts_->pick(space.experts, space.normed, num_rows, worker);
    if (shape.intermediate_size) {
        gate(space, num_rows, worker);
        add_shared(space, rows, num_rows, worker);
    }
    const Floats scale = fill(residual_scale(rows));
    experts_->compute(space.experts, space.normed, num_rows, worker,
                      [&](int row, int column, Floats total) {
        float *to = rows.sums + static_cast<size_t>(row) * shape.hidden_size + column;
        store(to, fma(total, scale, load(to)));
    });
}

void Layer::finish(Workspace &space, const Rows &rows, const LayerInputs &inputs,
                   const Worker &worker) {
    if (shape.input_size) {
        normalize(rows, {}, space.normed, worker, phases_[kInputRows]);
        gate_inputs(space, rows, inputs, worker);
        add(space, rows, space.gated, input_output_, worker, phases_[kInputOutput],
            phases_[kInputOutputNorm]);
    }
    if (output_scale_ == 1.0f) return;
    const int size = shape.hidden_size;
    const Floats scale = fill(output_scale_);
    RowShares(rows.count, worker).run(phases_[kScale], [&](int row) {
        float *values = rows.hidden + static_cast<size_t>(row) * size;
        for (int i = 0; i < size; i += 16) store(values + i, load(values + i) * scale);
    });
}

// Adds the output of the expert that computes all rows.
void Layer::add_shared(Workspace &space, const Rows &rows, int num_rows, const Worker &worker) {
    const int size = shape.hidden_size;
    const float scale = residual_scale(rows);
    multiply(space.gated, num_rows, mlp_output_.matrix, worker, phases_[kDown],
             [&](int row, int count, int panel, const float *sums) {
                 for (int i = 0; i < count; ++i) {
                     const Floats by = fill(scale * space.experts.shared[row + i]);
                     float *to = rows.sums + static_cast<size_t>(row + i) * size + panel * kPanel;
                     for (int j = 0; j < kPanel; j += 16)
                         store(to + j, fma(load(sums + i * kPanel + j), by, load(to + j)));
                 }
             });
}

// RMS norm of rows [P, E], or the rows themselves if the layer has no norm there.
void Layer::normalize(const Rows &rows, const std::vector<float> &weight, const TiledRows &normed,
                      const Worker &worker, Phase &phase) const {
    const int size = shape.hidden_size;
    RowShares(rows.count, worker).run(phase, [&](int row) {
        const float *from = rows.hidden + static_cast<size_t>(row) * size;
        if (weight.empty()) {
            for (int i = 0; i < size; i += 16) store_bf16(normed.at(row, i), load(from + i));
            return;
        }
        const Floats by = fill(1.0f / std::sqrt(mean_square(from, size) + shape.eps));
        for (int i = 0; i < size; i += 16)
            store_bf16(normed.at(row, i), load(from + i) * by * load(&weight[i]));
    });
}

void Layer::project(Workspace &space, int num_rows, const Worker &worker) {
    const auto keep_sums = [&](int row, int count, int panel, const float *sums) {
        const int width = shape.qkv_size(), column = panel * kPanel;
        for (int i = 0; i < count; ++i) {
            float *to = space.qkv.get() + static_cast<size_t>(row + i) * width + column;
            for (int j = 0; j < kPanel; j += 16)
                store(to + j, biased(sums + i * kPanel + j, qkv_bias_, column + j));
        }
    };
    multiply(space.normed, num_rows, qkv_, worker, phases_[kQkv], keep_sums);
}

void Layer::gate(Workspace &space, int num_rows, const Worker &worker) {
    const auto multiply_and = [&](auto activate) {
        const auto keep_sums = [&](int row, int count, int panel, const float *sums) {
            const int size = shape.intermediate_size, column = panel * 16;
            for (int i = 0; i < count; ++i, sums += kPanel) {
                const Floats gate = biased(sums, gate_up_bias_, column);
                const Floats up = biased(sums + 16, gate_up_bias_, size + column);
                store_bf16(space.gated.at(row + i, column), activate(gate) * up);
            }
        };
        multiply(space.normed, num_rows, gate_up_, worker, phases_[kGateUp], keep_sums);
    };
    // One loop for each, so that a choice costs nothing a number.
    if (shape.is_gelu) multiply_and(gelu);
    else multiply_and(silu);
}

// Multiplies the layer's embeddings by gates that the rows make.
void Layer::gate_inputs(Workspace &space, const Rows &rows, const LayerInputs &inputs,
                        const Worker &worker) {
    const auto multiply_and = [&](auto activate) {
        const auto keep_sums = [&](int row, int count, int panel, const float *sums) {
            const int column = panel * kPanel;
            for (int i = 0; i < count; ++i, sums += kPanel) {
                const bf16 *own = inputs.values + (row + i) * inputs.stride + column;
                for (int j = 0; j < kPanel; j += 16)
                    store_bf16(space.gated.at(row + i, column + j),
                               activate(load(sums + j)) * load_bf16(own + j));
            }
        };
        multiply(space.normed, rows.count, input_gate_, worker, phases_[kInputGate], keep_sums);
    };
    if (shape.is_gelu) multiply_and(gelu);
    else multiply_and(silu);
}

// Adds a network's output to the rows, after its norm if it has one.
void Layer::add(Workspace &space, const Rows &rows, const TiledRows &from, const Output &output,
                const Worker &worker, Phase &phase, Phase &norm_phase) const {
    const int size = shape.hidden_size;
    const std::vector<float> &norm = output.norm;
    const Floats scale = fill(rows.has_parts() ? 1.0f : output.scale);
    // Calls keep(place in [P, E], 16 outputs) for all outputs.
    const auto multiply_and = [&](auto keep) {
        multiply(from, rows.count, output.matrix, worker, phase,
                 [&](int row, int count, int panel, const float *sums) {
                     const int column = panel * kPanel;
                     for (int i = 0; i < count; ++i) {
                         const size_t at = static_cast<size_t>(row + i) * size + column;
                         for (int j = 0; j < kPanel; j += 16)
                             keep(at + j, biased(sums + i * kPanel + j, output.bias, column + j));
                     }
                 });
    };
    if (norm.empty() || rows.has_parts())
        return multiply_and([&](size_t at, Floats sums) {
            store(rows.sums + at, fma(sums, scale, load(rows.sums + at)));
        });
    multiply_and([&](size_t at, Floats sums) { store(space.output.get() + at, sums); });
    RowShares(rows.count, worker).run(norm_phase, [&](int row) {
        const float *sums = space.output.get() + static_cast<size_t>(row) * size;
        float *to = rows.sums + static_cast<size_t>(row) * size;
        const Floats by = fill(1.0f / std::sqrt(mean_square(sums, size) + shape.eps)) * scale;
        for (int i = 0; i < size; i += 16)
            store(to + i, fma(load(sums + i) * by, load(&norm[i]), load(to + i)));
    });
}

void Layer::spread(Workspace &space, const Step &step, const LayerCache &cache,
                   const Rows &rows, const Worker &worker) {
    const int num_rows = static_cast<int>(step.slots.size());
    RowShares(num_rows, worker).run(phases_[kSpread], [&](int row) {
        if (shape.has_own_keys && row + 1 < num_rows)
            expect_token(cache.keys, cache.values, step.shape, step.slots[row + 1]);
        spread_row(row, space, step, cache, rows);
    });
}

// Rotates queries and keys, and writes them and the values where attention reads them.
void Layer::spread_row(int row, Workspace &space, const Step &step, const LayerCache &cache,
                       const Rows &rows) const {
    const int head_dim = shape.head_dim, group = shape.group();
    const Turns &turns = rows.turns[shape.rope];
    const float growth = turns.query_scale ? turns.query_scale[row] : 1.0f;
    const Floats unit = fill(kLog2E * shape.scale * growth);
    alignas(64) float turned[kLargestHead];
    float *head = space.qkv.get() + static_cast<size_t>(row) * shape.qkv_size();
    const float *cos = turns.cos + static_cast<size_t>(row) * head_dim;
    const float *sin = turns.sin + static_cast<size_t>(row) * head_dim;
    const int norm_step = shape.has_whole_norms ? head_dim : 0;
    HeadNorm norm = head_norm(query_norm_, head);
    for (int i = 0; i < shape.num_heads; ++i, head += head_dim) {
        turn(head, norm, cos, sin, turned);
        if (norm.weight) norm.weight += norm_step;
        const size_t query = static_cast<size_t>(row) * group + i % group;
        bf16 *to = space.queries.get() + (i / group * query_rows(shape, rows) + query) * head_dim;
        for (int dim = 0; dim < head_dim; dim += 16)
            store_bf16(to + dim, load(turned + dim) * unit);
    }
    if (!shape.has_own_keys) return;
    // Before the keys are normalized in place.
    write_values(shape.value_is_key ? head : head + shape.kv_size(), step.slots[row], step, cache);
    norm = head_norm(key_norm_, head);
    for (int i = 0; i < shape.num_kv_heads; ++i, head += head_dim) {
        turn(head, norm, cos, sin, turned);
        if (norm.weight) norm.weight += norm_step;
        write_key(cache.keys, step.shape, i, step.slots[row], turned);
    }
}

// Writes a row's values [K, D] to the cache, each head after its norm if it has one.
void Layer::write_values(const float *values, int64_t slot, const Step &step,
                         const LayerCache &cache) const {
    const int head_dim = shape.head_dim;
    alignas(64) float normed[kLargestHead];
    for (int i = 0; i < shape.num_kv_heads; ++i, values += head_dim) {
        if (shape.has_value_norm) {
            const Floats by = fill(1.0f / std::sqrt(mean_square(values, head_dim) + shape.eps));
            for (int dim = 0; dim < head_dim; dim += 16)
                store(normed + dim, load(values + dim) * by);
        }
        write_value(cache.values, step.shape, i, slot, shape.has_value_norm ? normed : values);
    }
}

HeadNorm Layer::head_norm(const std::vector<float> &weight, const float *heads) const {
    if (weight.empty()) return {nullptr, 0.0f};
    if (!shape.has_whole_norms) return {weight.data(), 0.0f};
    const float mean = mean_square(heads, static_cast<int>(weight.size()));
    return {weight.data(), 1.0f / std::sqrt(mean + shape.eps)};
}

void Layer::normalize_head(float *head, const HeadNorm &norm) const {
    const int head_dim = shape.head_dim;
    const float by =
        norm.by ? norm.by : 1.0f / std::sqrt(mean_square(head, head_dim) + shape.eps);
    for (int dim = 0; dim < head_dim; ++dim) head[dim] *= by * norm.weight[dim];
}

// Rotates a head by its row's angles, and normalizes it if the model does that.
void Layer::turn(float *head, const HeadNorm &norm, const float *cos, const float *sin,
                 float *turned) const {
    const int head_dim = shape.head_dim, half = head_dim / 2;
    if (norm.weight && !shape.norm_after_rope) normalize_head(head, norm);
    for (int dim = 0; dim < head_dim; dim += 16) {
        const Floats other = load(head + (dim < half ? dim + half : dim - half));
        store(turned + dim, fma(other, load(sin + dim), load(head + dim) * load(cos + dim)));
    }
    if (norm.weight && shape.norm_after_rope) normalize_head(turned, norm);
}

Layers::Layers(std::vector<Layer *> layers) : layers_(std::move(layers)), largest_(layers_) {}

void Layers::forward(ThreadPool &pool, const std::vector<Step *> &steps,
                     const std::vector<LayerCache> &caches, const Rows &rows, int first, int end) {
    std::vector<const AttentionPlan *> plans;
    for (const auto &cache : caches)
        plans.push_back(&steps[cache.group]->plan(cache.window));
    for (const auto *plan : plans) space_.reserve(largest_, rows.count, plan->num_parts);
    size_t bytes = 0;
    for (int i = first; i < end; ++i) {
        const Layer &layer = *layers_[i];
        bytes = std::max({bytes, layer.attention_bytes(rows, pool.size()),
                          layer.mlp_bytes(*steps[caches[i].group], rows, pool.size()),
                          layer.finish_bytes(rows, pool.size())});
        layers_[i]->reset();
    }
    pool.run(bytes, [&](const Worker &worker) {
        for (int i = first; i < end; ++i) {
            const Step &step = *steps[caches[i].group];
            layers_[i]->add_attention(space_, step, *plans[i], caches[i], rows, worker);
            layers_[i]->add_mlp(space_, step, rows, worker);
            layers_[i]->finish(space_, rows, inputs_of(i, rows), worker);
        }
    });
}

void Layers::add_attention(ThreadPool &pool, Step &step, int layer, const LayerCache &cache,
                           const Rows &rows) {
    const AttentionPlan &plan = step.plan(cache.window);
    space_.reserve(largest_, rows.count, plan.num_parts);
    Layer &own = *layers_[layer];
    own.reset();
    pool.run(own.attention_bytes(rows, pool.size()), [&](const Worker &worker) {
        own.add_attention(space_, step, plan, cache, rows, worker);
    });
}

void Layers::add_mlp(ThreadPool &pool, Step &step, int layer, const Rows &rows) {
    Layer &own = *layers_[layer];
    pool.run(own.mlp_bytes(step, rows, pool.size()),
             [&](const Worker &worker) { own.add_mlp(space_, step, rows, worker); });
}

void Layers::finish(ThreadPool &pool, int layer, const Rows &rows) {
    Layer &own = *layers_[layer];
    const LayerInputs inputs = inputs_of(layer, rows);
    pool.run(own.finish_bytes(rows, pool.size()),
             [&](const Worker &worker) { own.finish(space_, rows, inputs, worker); });
}

LayerInputs Layers::inputs_of(int layer, const Rows &rows) const {
    const size_t size = layers_[layer]->shape.input_size;
    return {rows.inputs + layer * size, layers_.size() * size};
}

void multiply_plain(ThreadPool &pool, const PackedMatrix &matrix, const bf16 *rows, int num_rows,
                    float *out) {
    const TiledRows tiled(num_rows, matrix.depth);
    for (int row = 0; row < num_rows; ++row)
        for (int i = 0; i < matrix.depth; i += kTileDepth)
            std::copy_n(rows + static_cast<size_t>(row) * matrix.depth + i, kTileDepth,
                        tiled.at(row, i));
    const auto keep_sums = [&](int row, int count, int panel, const float *sums) {
        const int column = panel * kPanel;
        float *to = out + static_cast<size_t>(row) * matrix.num_outputs + column;
        for (int i = 0; i < count; ++i, sums += kPanel, to += matrix.num_outputs)
            store_once(sums, std::min(kPanel, matrix.num_outputs - column), to);
    };
    Phase phase;
    pool.run(product_bytes(matrix, num_rows, pool.size()), [&](const Worker &worker) {
        multiply(tiled, num_rows, matrix, worker, phase, keep_sums);
    });
}

}  // namespace legato
