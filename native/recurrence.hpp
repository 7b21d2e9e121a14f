// Recurrent mixers of decoder layers, between their projections: they keep a state of each request.
//
// All of it is float32. Results of a row depend on its request alone, bit for bit: not on other rows, on the
// row's place or on the number of threads.
#pragma once

#include <cstddef>
#include <vector>

#include "memory.hpp"
#include "products.hpp"
#include "thread_pool.hpp"

namespace legato {

// How far ahead, in values, a token's step prefetches a state. The next state is written past the caches:
// states do not stay there until the next step, and a cache would read each line before it is written.
constexpr int kStateAhead = 1024;

// One request's rows [start, end) of a step, the first at `position`. Its state is read from one slot and
// written to others, which no other run reads or writes.
struct Run {
    int start, end, position, source, destination;
    std::vector<int> earlier;  // slots of the state after each row but the last, or empty

    bool keeps(int row) const { return row + 1 == end || !earlier.empty(); }
    // Of the state after a row that is kept, or is to be overwritten by the rows after it.
    int slot(int row) const {
        return row + 1 == end || earlier.empty() ? destination : earlier[row - start];
    }
};

// A layer's states, and its rows of a step.
struct MixerCall {
    std::vector<Run> runs;  // adjacent, from row 0 on
    void *inputs;           // [slots, taps - 1, channels], what a convolution keeps of a request
    float *recurrent;       // [slots, ...]
    const float *rows;      // [T, ...], projected
    void *out;              // [T, ...]
    bool is_bf16;           // inputs and gated outputs are bfloat16, not float32

    int num_rows() const { return runs.back().end; }
};

// A causal convolution of each channel over its last inputs, in the same order for every row.
struct Convolution {
    int num_taps, num_channels;
    std::vector<float> taps;  // [num_taps, channels], the last for a row itself
    std::vector<float> bias;  // [channels], or empty
};

class Mixer {
public:
    explicit Mixer(Convolution conv) : conv(std::move(conv)) {}
    virtual ~Mixer() = default;

    // Advances all runs.
    virtual void forward(ThreadPool &pool, const MixerCall &call) = 0;

protected:
    const Convolution conv;
};

// LFM2's gated convolution. Rows are [before, after, inputs], E each, and out is
// after * conv(before * inputs).
class ShortConv : public Mixer {
public:
    using Mixer::Mixer;
    void forward(ThreadPool &pool, const MixerCall &call) override;
};

enum class GateOrder { kUngated, kUnnormed, kNormFirst, kGateFirst };

// How outputs are gated: out * silu(z), with an RMS norm of each group before or after it, or without. Or
// not at all: they stay float32, and the caller gates them.
struct OutputGate {
    GateOrder order;
    int group_size;
    float eps;
    std::vector<float> norm;  // [size]
};

// A mixer with heads, whose states are matrices.
//
// Its phases: the convolution and SiLU of each row, and its gates; the recurrence, in tasks of a run and a
// head; the gated norm of each row's outputs.
class Recurrence : public Mixer {
public:
    void forward(ThreadPool &pool, const MixerCall &call) override;

protected:
    // width: of a projected row, whose convolved channels begin at `first_input`, and its z at `first_z`.
    Recurrence(Convolution conv, OutputGate gate, int num_heads, int head_size, int width,
               int first_input, int first_z);

    // Prepares a row: `mixed` [channels] is convolved, and `gates` [2, H] are its own.
    virtual void prepare(const float *row, float *mixed, float *gates) const = 0;
    // Advances a head's state by rows [first, end), from one place to another, perhaps the same.
    virtual void advance(int head, int first, int end, const float *from, float *to) const = 0;
    virtual size_t state_size() const = 0;  // of a head

    const float *mixed(int row) const { return mixed_.get() + row * size_t(conv.num_channels); }
    const float *gates(int row) const { return gates_.get() + row * size_t(2 * num_heads); }
    float *output(int row, int head) const {
        return outputs_.get() + row * size_t(size()) + head * head_size;
    }
    int size() const { return num_heads * head_size; }

    const OutputGate gate;
    const int num_heads, head_size, width, first_input, first_z;

private:
    template <typename Value>
    void run(ThreadPool &pool, const MixerCall &call);
    template <typename Value>
    void gate_row(int row, const float *z, Value *out) const;
    void advance_run(const Run &run, int head, float *states) const;

    Buffer<float> mixed_, gates_, outputs_;
};

struct DeltaNetShape {
    int num_heads, num_key_heads, key_dim, value_dim;

    int key_size() const { return num_key_heads * key_dim; }
    int num_channels() const { return 2 * key_size() + num_heads * value_dim; }
};

// The gated delta rule. Rows are [queries, keys, values, z, b, a], and a head's state is [K, V].
class DeltaNet : public Recurrence {
public:
    // rates, dt_bias: [H]; gates are rates * softplus(a + dt_bias), none above 0.
    DeltaNet(DeltaNetShape shape, Convolution conv, OutputGate gate, std::vector<float> rates,
             std::vector<float> dt_bias);

private:
    void prepare(const float *row, float *mixed, float *gates) const override;
    void advance(int head, int first, int end, const float *from, float *to) const override;
    void advance_token(int head, int row, const float *from, float *to) const;
    void advance_rows(int head, int first, int num_rows, const float *from, float *to) const;
    size_t state_size() const override { return size_t(shape.key_dim) * shape.value_dim; }
    int first_key(int head) const {
        return head / (shape.num_heads / shape.num_key_heads) * shape.key_dim;
    }
    int first_value(int head) const { return 2 * shape.key_size() + head * shape.value_dim; }

    const DeltaNetShape shape;
    const std::vector<float> rates_, dt_bias_;
};

struct Mamba2Shape {
    int num_heads, num_groups, head_dim, state_size;
    float shortest_step, longest_step;

    int size() const { return num_heads * head_dim; }
    int num_channels() const { return size() + 2 * num_groups * state_size; }
};

// Mamba-2. Rows are [z, x, B, C, dt], and a head's state is [P, N].
class Mamba2 : public Recurrence {
public:
    // rates, dt_bias, skips: [H]; outputs have skips * x added.
    Mamba2(Mamba2Shape shape, Convolution conv, OutputGate gate, std::vector<float> rates,
           std::vector<float> dt_bias, std::vector<float> skips);

private:
    void prepare(const float *row, float *mixed, float *gates) const override;
    void advance(int head, int first, int end, const float *from, float *to) const override;
    void advance_token(int head, int row, const float *from, float *to) const;
    void advance_rows(int head, int first, int num_rows, const float *from, float *to) const;
    size_t state_size() const override { return size_t(shape.head_dim) * shape.state_size; }
    int first_b(int head) const {
        return shape.size() + head / (shape.num_heads / shape.num_groups) * shape.state_size;
    }
    int first_c(int head) const { return first_b(head) + shape.num_groups * shape.state_size; }

    const Mamba2Shape shape;
    const std::vector<float> rates_, dt_bias_, skips_;
};

// ln(1 + e^x) and 1 / (1 + e^-x), in double precision.
float softplus(float x);
float sigmoid(float x);

}  // namespace legato
