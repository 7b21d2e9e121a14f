// A decoder layer over one step's packed rows, from one norm to the next residual sum.
#pragma once

#include <map>
#include <vector>

#include "attention.hpp"
#include "experts.hpp"
#include "matrix.hpp"
#include "thread_pool.hpp"

namespace legato {

// Sizes by the project's legend: E hidden, I intermediate, H heads, K key/value heads, D head, L the
// layer's own embedding of a token.
struct LayerShape {
    int hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    int input_size;        // L; 0 if the layer has no embeddings
    int rope;              // which of a step's turns
    float eps;             // of all norms
    float scale;           // factor on query-key products
    float softcap;         // largest scaled product; 0 for no limit
    float residual_scale;  // factor on what the layer adds
    bool is_gelu;          // gates have GELU's tanh form, not SiLU
    bool has_whole_norms;  // queries and keys are normalized as whole rows, not head by head
    bool norm_after_rope;  // heads are normalized after rope, not before
    bool has_own_keys;     // else it reads the keys and values of an earlier layer
    bool value_is_key;     // values are the keys before norm and rope, not a projection
    bool has_value_norm;   // values are normalized head by head, without weights
    ExpertsShape experts;  // of no experts, if the layer has an MLP; else I is of a shared expert

    int query_size() const { return num_heads * head_dim; }
    int kv_size() const { return num_kv_heads * head_dim; }
    int qkv_size() const {
        return query_size() + (has_own_keys ? (value_is_key ? 1 : 2) * kv_size() : 0);
    }
    int group() const { return num_heads / num_kv_heads; }
};

// Matrices with the same inputs, one after the other. If there are several, each has a multiple of 32
// outputs.
struct StackedWeights {
    std::vector<Weight> parts;
    std::vector<int> num_outputs;

    std::vector<PackedMatrix> pack(int depth) const {
        std::vector<PackedMatrix> packed;
        packed.reserve(parts.size());
        for (size_t i = 0; i < parts.size(); ++i)
            packed.emplace_back(parts[i], num_outputs[i], depth);
        return packed;
    }
};

// Weights of a layer as in a checkpoint; null for weights that the layer does not have.
struct LayerWeights {
    const float *input_norm, *post_norm;                   // [E], before attention and MLP
    const float *attention_output_norm, *mlp_output_norm;  // [E]
    const float *query_norm, *key_norm;                    // [D], or [H * D] and [K * D] as a whole
    const float *input_output_norm;                        // [E]
    const float *output_scale;                             // [1], on the rows after the layer
    StackedWeights qkv;                                    // [qkv_size, E]
    Weight output;                                         // [E, H * D]
    Weight gate_up;                                        // [2I, E]
    Weight down;                                           // [E, I]
    Weight input_gate;                                     // [L, E]
    Weight input_output;                                   // [E, L]
    const bf16 *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    const float *sinks;                  // [H], a further score of each head
    RouterWeights router;                // if there are experts
    std::vector<ExpertWeights> experts;  // gate_up and down are then of a shared expert
};

// Data that the layers of a step share; made once a step.
class Step {
public:
    Step(std::vector<Chunk> chunks, std::vector<int64_t> slots, CacheShape shape, int group,
         int num_threads);

    const AttentionPlan &plan(int window);
    int group() const { return group_; }  // query heads per key/value head

    const std::vector<Chunk> chunks;
    const std::vector<int64_t> slots;  // one for each row that is not padding
    const CacheShape shape;
    const int num_threads;

private:
    const int group_;
    std::map<int, AttentionPlan> plans_;  // key: window
};

class Layer;

// The largest of each size that a decoder's layers need working memory for.
struct LargestSizes {
    explicit LargestSizes(const std::vector<Layer *> &layers);

    int hidden = 0, query = 0, kv = 0, qkv = 0, gated = 0, head_dim = 0;
    ExpertsShape experts{};
};

// Working memory, used by one layer after the other.
struct Workspace {
    void reserve(const LargestSizes &sizes, int num_rows, int num_parts);

    TiledRows normed, context, gated;
    ExpertsSpace experts;
    std::unique_ptr<bf16[], Free> queries;
    std::unique_ptr<float[], Free> qkv, parts;
    std::unique_ptr<float[], Free> output;  // [rows, E], of a network before its norm

private:
    size_t num_rows_ = 0, num_parts_ = 0;
};

// One layer's keys and values, the window that its queries see, and the index of its cache group,
// which has a step of its own: layers of other groups have other blocks.
struct LayerCache {
    std::byte *keys, *values;
    int window, group;
};

// How the rows of a step rotate. cos, sin: [P, D], the first half of the sines negated. query_scale:
// [P], factors on rotated queries, or null.
struct Turns {
    const float *cos, *sin, *query_scale;
};

// All rows of a step. hidden: [P, E]; turns: one for each of the decoder's ropes. sums: [P, E], to
// which the layers add their outputs: the hidden states themselves, unless this rank has only a part
// of each layer. Then norms and the scale of outputs are left to the caller, which adds the parts up.
// inputs: [P, layers, L], each layer's embeddings of the tokens, or null.
struct Rows {
    float *hidden;
    int count;
    std::vector<Turns> turns;
    float *sums;
    const bf16 *inputs = nullptr;

    bool has_parts() const { return sums != hidden; }
};

// A norm of heads. by: the factor of a whole row, or 0 if each head has its own.
struct HeadNorm {
    const float *weight;  // null for none
    float by;
};

// A layer's embeddings of the tokens: L numbers of each row, `stride` apart.
struct LayerInputs {
    const bf16 *values;
    size_t stride;
};

// How a network's output is made and added to the rows: a projection, its norm if it has one, a scale.
struct Output {
    PackedMatrix matrix;
    std::vector<float> bias, norm;
    float scale;
};

class Layer {
public:
    Layer(LayerShape shape, const LayerWeights &weights);

    // Called by one thread before a step's attention.
    void reset();

    // Bytes of memory that the next three take, of each thread.
    size_t attention_bytes(const Rows &rows, int num_threads) const;
    size_t mlp_bytes(const Step &step, const Rows &rows, int num_threads) const;
    size_t finish_bytes(const Rows &rows, int num_threads) const;

    // Called by all threads.
    void add_attention(Workspace &space, const Step &step, const AttentionPlan &plan,
                       const LayerCache &cache, const Rows &rows, const Worker &worker);
    void add_mlp(Workspace &space, const Step &step, const Rows &rows, const Worker &worker);

    // Called by all threads: adds the output of the layer's embeddings, and scales the rows. Every rank
    // computes this as a whole.
    void finish(Workspace &space, const Rows &rows, const LayerInputs &inputs,
                const Worker &worker);

    const LayerShape shape;

private:
    void normalize(const Rows &rows, const std::vector<float> &weight, const TiledRows &normed,
                   const Worker &worker, Phase &phase) const;
    void project(Workspace &space, int num_rows, const Worker &worker);
    void spread(Workspace &space, const Step &step, const LayerCache &cache, const Rows &rows,
                const Worker &worker);
    void spread_row(int row, Workspace &space, const Step &step, const LayerCache &cache,
                    const Rows &rows) const;
    void write_values(const float *values, int64_t slot, const Step &step,
                      const LayerCache &cache) const;
    HeadNorm head_norm(const std::vector<float> &weight, const float *heads) const;
    void normalize_head(float *head, const HeadNorm &norm) const;
    void turn(float *head, const HeadNorm &norm, const float *cos, const float *sin,
              float *turned) const;
    void gate(Workspace &space, int num_rows, const Worker &worker);
    void gate_inputs(Workspace &space, const Rows &rows, const LayerInputs &inputs,
                     const Worker &worker);
    void add_shared(Workspace &space, const Rows &rows, int num_rows, const Worker &worker);
    // Padding needs no experts.
    int mlp_rows(const Step &step, const Rows &rows) const {
        return experts_ ? static_cast<int>(step.slots.size()) : rows.count;
    }
    float residual_scale(const Rows &rows) const {
        return rows.has_parts() ? 1.0f : shape.residual_scale;
    }
    void add(Workspace &space, const Rows &rows, const TiledRows &from, const Output &output,
             const Worker &worker, Phase &phase, Phase &norm_phase) const;

    enum {
        kInputNorm, kQkv, kSpread, kAttend, kMerge, kOutput, kOutputNorm,
        kPostNorm, kGateUp, kDown, kDownNorm,
        kInputRows, kInputGate, kInputOutput, kInputOutputNorm, kScale, kPhases
    };
    Phase phases_[kPhases];
    std::vector<float> input_norm_, post_norm_, query_norm_, key_norm_, sinks_;
    std::vector<float> qkv_bias_, gate_up_bias_;
    std::vector<PackedMatrix> qkv_;  // queries, keys and values apart, if their forms differ
    PackedMatrix gate_up_, input_gate_;
    Output attention_output_, mlp_output_, input_output_;
    const float output_scale_;
    std::unique_ptr<Experts> experts_;
};

// The layers of a decoder. Layers [first, end) run in one call; or, if other ranks have other parts of
// the layers, a layer's attention, its MLP and its end, so that the parts can be added up in between.
class Layers {
public:
    explicit Layers(std::vector<Layer *> layers);

    void forward(ThreadPool &pool, const std::vector<Step *> &steps,
                 const std::vector<LayerCache> &caches, const Rows &rows, int first, int end);
    void add_attention(ThreadPool &pool, Step &step, int layer, const LayerCache &cache,
                       const Rows &rows);
    void add_mlp(ThreadPool &pool, Step &step, int layer, const Rows &rows);
    void finish(ThreadPool &pool, int layer, const Rows &rows);

private:
    LayerInputs inputs_of(int layer, const Rows &rows) const;

    const std::vector<Layer *> layers_;
    const LargestSizes largest_;
    Workspace space_;
};

// out [num_rows, outputs] = rows [num_rows, depth] times the matrix.
void multiply_plain(ThreadPool &pool, const PackedMatrix &matrix, const bf16 *rows, int num_rows,
                    float *out);

}  // namespace legato
