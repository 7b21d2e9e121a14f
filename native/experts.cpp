#include "experts.hpp"

#include <cmath>
#include <limits>

#include "activations.hpp"

namespace legato {

namespace {

constexpr int kFewestShares = 4;
constexpr int kBestOfGroup = 2;  // scores that count for a group
constexpr float kRuledOut = -std::numeric_limits<float>::infinity();

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Softmax of `count` values, in place.
void soften(float *values, int count) {
    const float most = *std::max_element(values, values + count);
    float total = 0.0f;
    for (int i = 0; i < count; ++i) total += values[i] = std::exp(values[i] - most);
    for (int i = 0; i < count; ++i) values[i] /= total;
}

// Whether a score is larger than another. NaN is the largest, so that an expert with such a score is picked,
// and its row becomes NaN.
bool is_larger(float score, float other) {
    return score > other || (std::isnan(score) && !std::isnan(other));
}

// Returns the index of the largest value, the first one of equal values, and takes it out.
int take_largest(std::span<const float> values, std::span<char> is_taken) {
    int best = -1;
    for (int i = 0; i < static_cast<int>(values.size()); ++i)
        if (!is_taken[i] && (best < 0 || is_larger(values[i], values[best]))) best = i;
    is_taken[best] = true;
    return best;
}

// Takes uninitialized values.
template <typename T>
std::span<T> take(Arena &memory, int count) {
    return {memory.take<T>(count), static_cast<size_t>(count)};
}

// The most panels of a matrix that a thread multiplies at a time with an expert's rows.
int most_panels(const PackedMatrix &matrix) {
    return std::clamp<size_t>(kSmallShareBytes / matrix.panel_bytes(), 1, matrix.num_panels);
}

int padded(int count) { return (count + kTileRows - 1) / kTileRows * kTileRows; }

// The most sorted rows: each picked expert's rows begin at a multiple of a tile's rows.
int most_sorted(const ExpertsShape &shape, int num_rows) {
    const int pairs = num_rows * shape.num_active;
    return pairs + std::min(shape.count, pairs) * (kTileRows - 1);
}

}  // namespace

void ExpertsSpace::reserve(const ExpertsShape &shape, int num_rows) {
    if (num_rows <= num_rows_) return;
    const size_t rows = num_rows, pairs = rows * shape.num_active;
    // A strip may read a tile after the last one.
    const int sorted = most_sorted(shape, num_rows) + kTileRows;
    logits.resize(rows * (2 * shape.count + kPanel));
    picked.resize(pairs);
    places.resize(pairs);
    weights.resize(pairs);
    shared.resize(rows);
    gathered = TiledRows(sorted, shape.hidden_size);
    gated = TiledRows(sorted, shape.size);
    outputs = aligned_array<float>(static_cast<size_t>(sorted) * shape.hidden_size);
    num_rows_ = num_rows;
}

Experts::Experts(ExpertsShape shape, const RouterWeights &router,
                 const std::vector<ExpertWeights> &experts)
    : shape(shape),
      router_(router.rows, router.num_rows, shape.hidden_size),
      bias_(copied(router.bias, shape.count)),
      selection_bias_(copied(router.selection_bias, shape.count)),
      shared_gate_(copied(router.shared_gate, shape.hidden_size)) {
    experts_.reserve(experts.size());
    for (const auto &own : experts)
        experts_.push_back({shape.is_gated
                                ? pack_gate_up(own.gate_up, shape.size, shape.hidden_size)
                                : PackedMatrix(own.gate_up, shape.size, shape.hidden_size),
                            PackedMatrix(own.down, shape.hidden_size, shape.size),
                            widened(own.gate_up_bias, shape.entry_size()),
                            widened(own.down_bias, shape.hidden_size)});
    groups_.reserve(shape.count);
}

void Experts::reset() {
    for (auto &phase : phases_) phase.reset();
}

size_t Experts::bytes(int num_rows, int num_threads) {
    if (num_rows > most_rows_) {
        for (const auto part : {&Expert::gate_up, &Expert::down})
            for (const auto &own : experts_)
                panels_bytes_ = std::max(panels_bytes_,
                                         legato::panels_bytes(own.*part, num_rows,
                                                              most_panels(experts_.front().*part)));
        most_rows_ = num_rows;
    }
    // Scores, those that count, and which are taken, of a row's experts and of its groups.
    const int count = shape.count, groups = shape.num_groups;
    const size_t picking = 2 * Arena::bytes<float>(count) + 2 * Arena::bytes<char>(count) +
                           Arena::bytes<float>(groups) + Arena::bytes<char>(groups);
    const size_t sorting = 2 * Arena::bytes<int>(count);
    return std::max({product_bytes(router_, num_rows, num_threads), picking, sorting, panels_bytes_});
}

void Experts::pick(ExpertsSpace &space, const TiledRows &rows, int num_rows, const Worker &worker) {
    const size_t width = router_.num_panels * kPanel;
    multiply(rows, num_rows, router_, worker, phases_[kRouter],
             [&](int row, int count, int panel, const float *sums) {
                 for (int i = 0; i < count; ++i)
                     std::copy_n(sums + i * kPanel, kPanel,
                                 &space.logits[(row + i) * width + panel * kPanel]);
             });
    RowShares(num_rows, worker).run(phases_[kPick], [&](int row) {
        pick_row(space, rows, row, worker.memory);
    });
}

void Experts::pick_row(ExpertsSpace &space, const TiledRows &rows, int row, Arena memory) const {
    const auto scores = take<float>(memory, shape.count), choice = take<float>(memory, shape.count);
    const auto is_taken = take<char>(memory, shape.count);
    const float *logits = &space.logits[static_cast<size_t>(row) * router_.num_panels * kPanel];
    std::copy_n(logits, shape.count, scores.begin());
    for (int i = shape.count; i < router_.num_outputs; ++i) scores[i - shape.count] += logits[i];
    for (size_t i = 0; i < bias_.size(); ++i) scores[i] += bias_[i];
    if (shape.score == Score::kSoftmax) soften(scores.data(), shape.count);
    if (shape.score == Score::kSigmoid)
        for (auto &score : scores) score = sigmoid(score);
    std::copy(scores.begin(), scores.end(), choice.begin());
    for (size_t i = 0; i < selection_bias_.size(); ++i) choice[i] += selection_bias_[i];
    if (shape.num_groups > 1) limit_groups(choice, memory);

    int *picked = &space.picked[static_cast<size_t>(row) * shape.num_active];
    float *weights = &space.weights[static_cast<size_t>(row) * shape.num_active];
    float total = 1e-20f;
    std::fill(is_taken.begin(), is_taken.end(), false);
    for (int i = 0; i < shape.num_active; ++i) {
        picked[i] = take_largest(choice, is_taken);
        total += weights[i] = scores[picked[i]];
    }
    if (shape.score == Score::kSoftmaxOfActive) soften(weights, shape.num_active);
    const bool is_divided = shape.is_normalized && shape.score != Score::kSoftmaxOfActive;
    const float by = shape.factor / (is_divided ? total : 1.0f);
    for (int i = 0; i < shape.num_active; ++i) weights[i] *= by;

    space.shared[row] = 1.0f;
    if (shared_gate_.empty()) return;
    Floats product = fill(0.0f);
    for (int i = 0; i < shape.hidden_size; i += 16)
        product = fma(load_bf16(rows.at(row, i)), load(&shared_gate_[i]), product);
    space.shared[row] = sigmoid(sum(product));
}

// Leaves only the experts of the groups with the largest sums of their best scores.
void Experts::limit_groups(std::span<float> choice, Arena memory) const {
    const int size = shape.count / shape.num_groups;
    const auto sums = take<float>(memory, shape.num_groups);
    const auto is_kept = take<char>(memory, shape.num_groups), is_taken = take<char>(memory, size);
    for (int group = 0; group < shape.num_groups; ++group) {
        const auto own = choice.subspan(group * size, size);
        std::fill(is_taken.begin(), is_taken.end(), false);
        sums[group] = 0.0f;
        for (int i = 0; i < kBestOfGroup; ++i) sums[group] += own[take_largest(own, is_taken)];
    }
    std::fill(is_kept.begin(), is_kept.end(), false);
    for (int i = 0; i < shape.num_active_groups; ++i) take_largest(sums, is_kept);
    for (int i = 0; i < shape.count; ++i)
        if (!is_kept[i / size]) choice[i] = kRuledOut;
}

// Finds the place of each pair of a row and an expert among the rows that are sorted by expert.
void Experts::sort(ExpertsSpace &space, int num_rows, Arena memory) {
    const int pairs = num_rows * shape.num_active;
    const auto counts = take<int>(memory, shape.count), next = take<int>(memory, shape.count);
    std::fill(counts.begin(), counts.end(), 0);
    for (int i = 0; i < pairs; ++i) ++counts[space.picked[i]];
    groups_.clear();
    int first = 0;
    for (int expert = 0; expert < shape.count; ++expert) {
        if (!counts[expert]) continue;
        groups_.push_back({expert, first, counts[expert]});
        next[expert] = first;
        first += padded(counts[expert]);
    }
    for (int i = 0; i < pairs; ++i) space.places[i] = next[space.picked[i]]++;
}

// Computes the output of each pair of a row and an expert.
void Experts::compute_pairs(ExpertsSpace &space, const TiledRows &rows, int num_rows,
                            const Worker &worker) {
    const int size = shape.hidden_size, num_active = shape.num_active;
    phases_[kSort].run(worker, 1, [&](int) { sort(space, num_rows, worker.memory); });
    RowShares(num_rows, worker).run(phases_[kGather], [&](int row) {
        for (int i = row * num_active; i < (row + 1) * num_active; ++i)
            for (int column = 0; column < size; column += kTileDepth)
                std::copy_n(rows.at(row, column), kTileDepth,
                            space.gathered.at(space.places[i], column));
    });
    // One loop for each, so that a choice costs nothing a number.
    if (!shape.is_gated) {
        square(space, worker);
    } else if (shape.gate_limit > 0.0f) {
        const Floats most = fill(shape.gate_limit), least = fill(-shape.gate_limit);
        const Floats one = fill(1.0f), slope = fill(shape.gate_slope);
        gate(space, worker, [=](Floats gate, Floats up) {
            gate = at_most(gate, most);
            return gated(gate, gate * slope) * (at_least(at_most(up, most), least) + one);
        });
    } else if (shape.is_gelu) {
        gate(space, worker, [](Floats gate, Floats up) { return gelu(gate) * up; });
    } else {
        gate(space, worker, [](Floats gate, Floats up) { return silu(gate) * up; });
    }
    project(space, worker);
}

// Calls work(group, first_panel, end_panel) for all panels of a matrix of each group's expert.
template <typename Work>
void Experts::for_each_share(const PackedMatrix &first, const Worker &worker, Phase &phase,
                             Work work) const {
    const int num_groups = static_cast<int>(groups_.size()), num_panels = first.num_panels;
    const int fair = num_groups * num_panels / (kFewestShares * worker.num_threads);
    const int panels = std::clamp(fair, 1, most_panels(first));
    const int shares_a_group = (num_panels + panels - 1) / panels;
    const TileScope scope;
    phase.run(worker, num_groups * shares_a_group, [&](int share) {
        const int begin = share % shares_a_group * panels;
        work(groups_[share / shares_a_group], begin, std::min(begin + panels, num_panels));
    });
}

// Calls keep(biases, row, panel, 32 sums) for all products of sorted rows with their experts' first
// matrices.
template <typename Keep>
void Experts::enter(ExpertsSpace &space, const Worker &worker, Keep keep) {
    for_each_share(experts_.front().gate_up, worker, phases_[kGateUp],
                   [&](const Group &group, int begin, int end) {
        const Expert &own = experts_[group.expert];
        multiply_panels(space.gathered, group.first, group.count, own.gate_up, begin, end,
                        worker.memory, [&](int row, int count, int panel, const float *sums) {
            for (int i = 0; i < count; ++i, sums += kPanel)
                keep(own.gate_up_bias, row + i, panel, sums);
        });
    });
}

template <typename Activate>
void Experts::gate(ExpertsSpace &space, const Worker &worker, Activate activate) {
    enter(space, worker,
          [&](const std::vector<float> &biases, int row, int panel, const float *sums) {
        const int column = panel * 16;
        const Floats gates = biased(sums, biases, column);
        const Floats ups = biased(sums + 16, biases, shape.size + column);
        store_bf16(space.gated.at(row, column), activate(gates, ups));
    });
}

void Experts::square(ExpertsSpace &space, const Worker &worker) {
    enter(space, worker,
          [&](const std::vector<float> &biases, int row, int panel, const float *sums) {
        for (int i = 0; i < kPanel; i += 16) {
            const int column = panel * kPanel + i;
            const Floats positive = at_least(biased(sums + i, biases, column), fill(0.0f));
            store_bf16(space.gated.at(row, column), positive * positive);
        }
    });
}

void Experts::project(ExpertsSpace &space, const Worker &worker) {
    for_each_share(experts_.front().down, worker, phases_[kDown],
                   [&](const Group &group, int begin, int end) {
        const Expert &own = experts_[group.expert];
        multiply_panels(space.gated, group.first, group.count, own.down, begin, end,
                        worker.memory, [&](int row, int count, int panel, const float *sums) {
            const int column = panel * kPanel;
            for (int i = 0; i < count; ++i, sums += kPanel) {
                float *to = &space.outputs[static_cast<size_t>(row + i) * shape.hidden_size];
                for (int j = 0; j < kPanel; j += 16)
                    store(to + column + j, biased(sums + j, own.down_bias, column + j));
            }
        });
    });
}

}  // namespace legato
