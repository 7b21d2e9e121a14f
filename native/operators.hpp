// The products, norms and attention of layers that run outside the extension, one at a time.
#pragma once

#include <map>

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

// What becomes of a product's sums. bias: added, or null. gates: [rows, outputs], activated and
// multiplied with the sums, or null.
struct Finish {
    const float *bias;
    const bf16 *gates;
    bool is_gelu;  // the activation is GELU's tanh form, not SiLU
};

// Computes plain bfloat16 rows of plain bfloat16 rows, with all threads of a pool.
class Operators {
public:
    explicit Operators(ThreadPool &pool) : pool_(pool) {}

    // out [num_rows, outputs] = rows [num_rows, depth] times the matrix, whose outputs are a multiple
    // of 32.
    void multiply(const PackedMatrix &matrix, const bf16 *rows, int num_rows, Finish finish,
                  bf16 *out);

    // out = RMS norm of rows [num_rows, size].
    void normalize(const bf16 *rows, int num_rows, int size, const float *weight, float eps,
                   bf16 *out);

    // out [num_rows, num_heads, head_dim] = heads turned by their row's angles, cos and sin
    // [num_rows, head_dim]: dimension i with i + head_dim / 2, which is a multiple of 16.
    void rotate(const Heads &heads, int num_rows, int num_heads, int head_dim, const bf16 *cos,
                const bf16 *sin, bf16 *out);

    // Writes keys and values of the step's rows [T] to the cache, and attends.
    //
    // group: query heads per key/value head. out: [T, K * group * D].
    void attend(Step &step, const LayerCache &cache, int group, const Heads &query,
                const Heads &key, const Heads &value, float scale, float softcap, bf16 *out);

private:
    TiledRows &tiled(int num_rows, int depth);
    void reserve_queries(size_t count);

    struct Scratch {
        int num_rows = 0;
        TiledRows rows;
    };

    ThreadPool &pool_;
    std::map<int, Scratch> tiled_;  // key: depth
    Buffer<bf16> queries_;
    size_t num_queries_ = 0;
    Buffer<float> parts_;
};

}  // namespace legato
