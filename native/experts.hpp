// Mixtures of experts: a router picks a few gated MLPs for each row.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "matrix.hpp"
#include "thread_pool.hpp"

namespace legato {

// What a router's logits become: weights are a softmax, a softmax of the picked logits, or sigmoids.
enum class Score { kSoftmax, kSoftmaxOfActive, kSigmoid };

struct ExpertsShape {
    int hidden_size, size;           // E, and the width of an expert
    int count, num_active;           // experts, and those that compute a row
    int num_groups, num_active_groups;
    Score score;
    bool is_normalized;              // weights are divided by their sum
    float factor;                    // on weights
    bool is_gated;                   // else an expert's activation is a squared ReLU
    bool is_gelu;
    float gate_limit, gate_slope;    // 0 for gates without a limit

    int entry_size() const { return (is_gated ? 2 : 1) * size; }
};

// Weights of an expert as in a checkpoint; null biases if there are none.
struct ExpertWeights {
    Weight gate_up;  // [2I, E], or [I, E] without gates
    Weight down;     // [E, I]
    const bf16 *gate_up_bias, *down_bias;
};

// The router has one row for each expert, and perhaps as many more, which are added to these: what
// bfloat16 rounds off.
struct RouterWeights {
    Weight rows;
    int num_rows;
    const float *bias, *selection_bias, *shared_gate;  // [count], [count], [E]; or null
};

// Working memory, used by one layer after the other.
struct ExpertsSpace {
    void reserve(const ExpertsShape &shape, int num_rows);

    std::vector<float> logits;        // [rows, padded experts]
    std::vector<int> picked, places;  // [rows, active]: expert, and sorted row
    std::vector<float> weights;       // [rows, active]
    std::vector<float> shared;        // [rows], factors on what a shared expert adds
    TiledRows gathered, gated;                 // sorted rows
    std::unique_ptr<float[], Free> outputs;    // [sorted rows, E]

private:
    int num_rows_ = 0;
};

class Experts {
public:
    Experts(ExpertsShape shape, const RouterWeights &router,
            const std::vector<ExpertWeights> &experts);

    // Called by one thread before a step's experts.
    void reset();

    // The most bytes of memory that pick() and compute() take for up to so many rows, of each thread.
    size_t bytes(int num_rows, int num_threads);

    // Called by all threads: picks experts for rows, and computes the factors of the shared expert.
    void pick(ExpertsSpace &space, const TiledRows &rows, int num_rows, const Worker &worker);

    // Called by all threads, after pick(): computes the outputs of the picked experts, and calls
    // keep(row, column, 16 sums) for all of the rows' weighted sums.
    template <typename Keep>
    void compute(ExpertsSpace &space, const TiledRows &rows, int num_rows, const Worker &worker,
                 Keep keep) {
        compute_pairs(space, rows, num_rows, worker);
        RowShares(num_rows, worker).run(phases_[kSum], [&](int row) {
            const int first = row * shape.num_active;
            for (int column = 0; column < shape.hidden_size; column += 16) {
                Floats total = fill(0.0f);
                for (int i = first; i < first + shape.num_active; ++i) {
                    const size_t place = space.places[i];
                    total = fma(load(&space.outputs[place * shape.hidden_size] + column),
                                fill(space.weights[i]), total);
                }
                keep(row, column, total);
            }
        });
    }

    const ExpertsShape shape;

private:
    void pick_row(ExpertsSpace &space, const TiledRows &rows, int row, Arena memory) const;
    void limit_groups(std::span<float> choice, Arena memory) const;
    void compute_pairs(ExpertsSpace &space, const TiledRows &rows, int num_rows,
                       const Worker &worker);
    void sort(ExpertsSpace &space, int num_rows, Arena memory);
    template <typename Keep>
    void enter(ExpertsSpace &space, const Worker &worker, Keep keep);
    template <typename Activate>
    void gate(ExpertsSpace &space, const Worker &worker, Activate activate);
    void square(ExpertsSpace &space, const Worker &worker);
    void project(ExpertsSpace &space, const Worker &worker);
    template <typename Work>
    void for_each_share(const PackedMatrix &first, const Worker &worker, Phase &phase,
                        Work work) const;

    // Sorted rows of one expert, [first, first + count); `first` is a multiple of a tile's rows.
    struct Group {
        int expert, first, count;
    };

    struct Expert {
        PackedMatrix gate_up, down;
        std::vector<float> gate_up_bias, down_bias;
    };

    enum { kRouter, kPick, kSort, kGather, kGateUp, kDown, kSum, kPhases };
    Phase phases_[kPhases];
    PackedMatrix router_;
    std::vector<float> bias_, selection_bias_, shared_gate_;
    std::vector<Expert> experts_;
    int most_rows_ = 0;        // that panels_bytes_ is for
    size_t panels_bytes_ = 0;  // of products with the experts' panels
    // Of this step. Not in the space, which the next layers use: a thread that comes late to a phase
    // must see as many shares as the others did.
    std::vector<Group> groups_;
};

}  // namespace legato
