// A decoder of random shape, weights and caches.
#pragma once

#include <cstring>

#include "layer.hpp"
#include "random.hpp"

namespace legato {

struct Decoder {
    static constexpr int kMostLayers = 3;

    explicit Decoder(Case &own)
        : kv_heads(own.whole(1, 2)),
          group(own.one_of({1, 2, 3})),
          head_dim(32 * own.one_of({1, 2, 4})),
          hidden(32 * own.whole(1, 5)),
          input_size(own.coin() ? 0 : 32),
          num_layers(own.whole(1, kMostLayers)),
          cache_shape{kv_heads, head_dim, 32 * own.whole(1, 2), own.coin()},
          window(own.coin() ? 0 : own.whole(1, 60)) {
        const bool has_experts = own.coin(), has_whole_norms = own.coin(), is_gelu = own.coin();
        const bool has_sinks = own.coin(), after_rope = own.coin(), has_bias = own.coin();
        const int count = own.whole(2, 5);  // all are active: none is picked by a hair
        const ExpertsShape mixture{hidden, 32 * own.whole(1, 3), count, count, 1, 1, Score::kSoftmax,
                                   true, 1.0f, true, is_gelu, 0.0f, 0.0f};
        for (int i = 0; i < num_layers; ++i) {
            LayerShape shape{};
            shape.hidden_size = hidden;
            shape.num_heads = kv_heads * group;
            shape.num_kv_heads = kv_heads;
            shape.head_dim = head_dim;
            shape.input_size = input_size;
            shape.eps = 1e-6f;
            shape.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
            shape.softcap = own.coin() ? 0.0f : 20.0f;
            shape.residual_scale = 1.0f;
            shape.is_gelu = is_gelu;
            shape.has_whole_norms = has_whole_norms;
            shape.norm_after_rope = after_rope && !has_whole_norms;
            shape.has_own_keys = i == 0 || own.whole(0, 2) > 0;
            shape.value_is_key = own.whole(0, 3) == 0;
            shape.has_value_norm = own.coin();
            if (!has_experts || own.coin()) shape.intermediate_size = 32 * own.whole(1, 6);
            if (has_experts) shape.experts = mixture;
            LayerWeights w{};
            w.input_norm = norm(own, hidden);
            w.post_norm = norm(own, hidden);
            w.attention_output_norm = norm(own, hidden);
            if (own.coin()) w.mlp_output_norm = norm(own, hidden);
            w.query_norm = norm(own, has_whole_norms ? shape.query_size() : head_dim);
            w.key_norm = norm(own, has_whole_norms ? shape.kv_size() : head_dim);
            w.input_output_norm = norm(own, hidden);
            const int num_queries = shape.query_size();
            const int num_others = shape.qkv_size() - num_queries;
            if (num_others && own.coin())
                w.qkv = {{matrix(own, num_queries, hidden), matrix(own, num_others, hidden)},
                         {num_queries, num_others}};
            else
                w.qkv = {{matrix(own, shape.qkv_size(), hidden)}, {shape.qkv_size()}};
            w.output = matrix(own, hidden, shape.query_size());
            if (shape.intermediate_size) {
                w.gate_up = matrix(own, 2 * shape.intermediate_size, hidden);
                w.down = matrix(own, hidden, shape.intermediate_size);
            }
            if (input_size) {
                w.input_gate = matrix(own, input_size, hidden);
                w.input_output = matrix(own, hidden, input_size);
            }
            if (has_bias) {
                biases.push_back(random_bf16(own, shape.qkv_size()));
                w.qkv_bias = biases.back().get();
            }
            if (has_sinks) w.sinks = norm(own, shape.num_heads);
            if (has_experts) {
                biases.push_back(random_bf16(own, size_t(shape.experts.count) * hidden, 0.1f));
                w.router.rows.values = biases.back().get();
                w.router.num_rows = shape.experts.count;
                experts.push_back(std::make_unique<RandomExperts>(own, shape.experts));
                w.experts = experts.back()->weights;
            }
            layers.push_back(std::make_unique<Layer>(shape, w));
        }
    }

    const float *norm(Case &own, int count) {
        norms.push_back(random_floats(own, count, 0.1f, 1.0f));
        return norms.back().data();
    }
    Weight matrix(Case &own, int outputs, int depth) {
        matrices.push_back(std::make_unique<RandomWeight>(own, outputs, depth));
        return matrices.back()->weight;
    }

    // Returns the hidden states [T, E] of requests whose rows are computed at most `cut` at a time.
    std::vector<float> forward(ThreadPool &pool, const std::vector<int> &lengths,
                               const std::vector<float> &rows, const bf16 *inputs, int cut,
                               int num_padded) {
        std::vector<Layer *> all;
        for (auto &layer : layers) all.push_back(layer.get());
        Layers decoder(all);
        std::vector<std::vector<int32_t>> blocks;
        int num_blocks = 0;
        for (const int length : lengths) {
            blocks.emplace_back();
            for (int i = 0; i < length; i += cache_shape.block_size)
                blocks.back().push_back(num_blocks++);
        }
        std::vector<std::unique_ptr<std::byte[]>> memory;
        std::vector<LayerCache> caches;
        for (int i = 0; i < num_layers; ++i) {
            if (layers[i]->shape.has_own_keys)
                for (int j = 0; j < 2; ++j) {
                    const size_t size = num_blocks * cache_shape.block_bytes();
                    memory.push_back(heap<std::byte>(size));
                    std::memset(memory.back().get(), 0xff, size);
                }
            const size_t last = memory.size();
            caches.push_back({memory[last - 2].get(), memory[last - 1].get(), window, 0});
        }
        std::vector<float> outputs(rows.size());
        const int longest = *std::max_element(lengths.begin(), lengths.end());
        for (int start = 0; start < longest; start += cut) {
            std::vector<Chunk> chunks;
            std::vector<int64_t> slots;
            std::vector<int> sources, positions;
            for (size_t i = 0, first = 0; i < lengths.size(); first += lengths[i++]) {
                const int count = std::min(cut, lengths[i] - start);
                if (count <= 0) continue;
                chunks.push_back({static_cast<int>(slots.size()), count, start, blocks[i]});
                for (int position = start; position < start + count; ++position) {
                    const int block = blocks[i][position / cache_shape.block_size];
                    slots.push_back(int64_t(block) * cache_shape.block_size +
                                    position % cache_shape.block_size);
                    sources.push_back(first + position);
                    positions.push_back(position);
                }
            }
            const int count = static_cast<int>(slots.size()) + num_padded;
            const auto hidden_rows = heap<float>(size_t(count) * hidden);
            const auto cos = heap<float>(size_t(count) * head_dim);
            const auto sin = heap<float>(size_t(count) * head_dim);
            const size_t own_inputs = size_t(num_layers) * input_size;
            const auto input_rows = heap<bf16>(count * own_inputs);
            for (size_t row = 0; row < sources.size(); ++row) {
                std::copy_n(&rows[size_t(sources[row]) * hidden], hidden, &hidden_rows[row * hidden]);
                if (input_size)
                    std::copy_n(inputs + sources[row] * own_inputs, own_inputs,
                                &input_rows[row * own_inputs]);
                for (int i = 0; i < head_dim; ++i) {
                    const int half = head_dim / 2;
                    const float angle = positions[row] * std::pow(1e4f, -float(i % half) / half);
                    cos[row * head_dim + i] = std::cos(angle);
                    sin[row * head_dim + i] = i < half ? -std::sin(angle) : std::sin(angle);
                }
            }
            Step step(chunks, slots, cache_shape, group, pool.size());
            decoder.forward(pool, {&step}, caches,
                            {hidden_rows.get(), count, {{cos.get(), sin.get(), nullptr}},
                             hidden_rows.get(), input_rows.get()},
                            0, num_layers);
            for (size_t row = 0; row < sources.size(); ++row)
                std::copy_n(&hidden_rows[row * hidden], hidden,
                            &outputs[size_t(sources[row]) * hidden]);
        }
        return outputs;
    }

    const int kv_heads, group, head_dim, hidden, input_size, num_layers;
    const CacheShape cache_shape;
    const int window;
    std::vector<std::unique_ptr<Layer>> layers;
    std::vector<std::vector<float>> norms;
    std::vector<std::unique_ptr<bf16[]>> biases;
    std::vector<std::unique_ptr<RandomWeight>> matrices;
    std::vector<std::unique_ptr<RandomExperts>> experts;
};

}  // namespace legato
