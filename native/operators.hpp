// The products, norms and attention of layers that run outside the extension, one at a time.
#pragma once

#include <array>
#include <map>
#include <utility>

#include "layer.hpp"

namespace legato {

// Heads [T, heads, D] of bfloat16, with any strides of rows and heads.
struct Heads {
    const bf16 *values;
    int64_t row_stride, head_stride;

    const bf16 *at(int row, int head) const {
        return values + row * row_stride + head * head_stride;
    }
};

// A matrix whose outputs are a multiple of 32, and what is added to them, or null.
struct Projection {
    const PackedMatrix &matrix;
    const float *bias;
};

// Computes plain bfloat16 rows of plain bfloat16 rows, with all threads of a pool.
class Operators {
public:
    explicit Operators(ThreadPool &pool) : pool_(pool) {}

    // out [num_rows, outputs] = rows [num_rows, depth] times the matrix, plus the biases.
    void project(const Projection &projection, const bf16 *rows, int num_rows, bf16 *out);

    // out [num_rows, E] = down(act(gate(rows)) * up(rows)), rows [num_rows, E]. The activation is SiLU,
    // or GELU's tanh form.
    void run_mlp(const Projection &gate, const Projection &up, const Projection &down, bool is_gelu,
                 const bf16 *rows, int num_rows, bf16 *out);

    // out [num_rows, E] = the weighted sums of the experts that are picked for rows [num_rows, E]. With
    // `shared` [num_rows, E], the output of an expert for all rows, times its factor, is added.
    void run_experts(Experts &experts, const bf16 *rows, int num_rows, const bf16 *shared, bf16 *out);

    // out = RMS norm of rows [num_rows, size], bfloat16 or float32.
    template <typename Value>
    void normalize(const Value *rows, int num_rows, int size, const float *weight, float eps,
                   bf16 *out);

    // Turns queries and keys by their row's angles, cos and sin [num_rows, head_dim]: dimension i with
    // i + head_dim / 2, which is a multiple of 16.
    //
    // out [num_rows, num_heads + num_kv_heads, head_dim]: the queries, then the keys of each row.
    void rotate(const Heads &query, int num_heads, const Heads &key, int num_kv_heads, int num_rows,
                int head_dim, const bf16 *cos, const bf16 *sin, bf16 *out);

    // Writes keys and values of the step's rows to the cache, and attends.
    //
    // out: [num_rows, H * D]. Rows after the step's are padding, and become zero.
    void attend(Step &step, const LayerCache &cache, int num_rows, const Heads &query,
                const Heads &key, const Heads &value, float scale, float softcap, bf16 *out);

private:
    enum Use { kInputs, kGated };
    const TiledRows &tiled(Use use, int num_rows, int depth);
    void reserve_queries(size_t count);

    struct Scratch {
        int num_rows = 0;
        TiledRows rows;
    };

    ThreadPool &pool_;
    std::map<std::pair<Use, int>, Scratch> tiled_;  // key: use, depth
    std::map<std::array<int, 4>, ExpertsSpace> experts_;  // key: the sizes that it depends on
    Buffer<bf16> gates_;                            // [num_rows, I]
    Buffer<bf16> queries_;
    size_t num_queries_ = 0;
    Buffer<float> parts_;
};

}  // namespace legato
