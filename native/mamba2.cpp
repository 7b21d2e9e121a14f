// Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060).
#include <cmath>

#include "recurrence.hpp"

namespace legato {

Mamba2::Mamba2(Mamba2Shape shape, Convolution conv, OutputGate gate, std::vector<float> rates,
               std::vector<float> dt_bias, std::vector<float> skips)
    : Recurrence(std::move(conv), std::move(gate), shape.num_heads, shape.head_dim,
                 shape.size() + shape.num_channels() + shape.num_heads, shape.size(), 0),
      shape(shape),
      rates_(std::move(rates)),
      dt_bias_(std::move(dt_bias)),
      skips_(std::move(skips)) {}

// Gates are [A dt, dt].
void Mamba2::prepare(const float *row, float *, float *gates) const {
    const float *steps = row + first_input + shape.num_channels();
    for (int head = 0; head < num_heads; ++head) {
        const float step = std::min(std::max(softplus(steps[head] + dt_bias_[head]),
                                             shape.shortest_step),
                                    shape.longest_step);
        gates[head] = rates_[head] * step;
        gates[num_heads + head] = step;
    }
}

void Mamba2::advance(int head, int first, int end, const float *from, float *to) const {
    if (end - first == 1) advance_token(head, first, from, to);
    else advance_rows(head, first, end - first, from, to);
}

// S <- exp(A dt) S + dt x B^T;  y = S C + D x
void Mamba2::advance_token(int head, int row, const float *from, float *to) const {
    const int size = shape.state_size;
    const float *x = mixed(row) + head * head_size;
    const float *b = mixed(row) + first_b(head), *c = mixed(row) + first_c(head);
    const float step = gates(row)[num_heads + head];
    const Floats decay = fill(std::exp(gates(row)[head]));
    float *const out = output(row, head);
    for (int i = 0; i < head_size; ++i, from += size, to += size) {
        const Floats input = fill(step * x[i]);
        Floats result = fill(0.0f);
        for (int j = 0; j < size; j += 16) {
            prefetch(from + j + kStateAhead);
            const Floats state = fma(input, load(b + j), decay * load(from + j));
            stream(to + j, state);
            result = fma(state, load(c + j), result);
        }
        out[i] = sum(result) + skips_[head] * x[i];
    }
}

// With c the sums of gates and L their decays, Y = (C B^T * L) (dt x) + exp(c) C S^T + D x.
void Mamba2::advance_rows(int head, int first, int num_rows, const float *from, float *to) const {
    const int size = shape.state_size;
    alignas(64) float x[kPiece * kLargestPart], b[kPiece * kLargestPart];
    alignas(64) float c[kPiece * kLargestPart], scores[kPiece * kPiece];
    const Decays decays(gates(first) + head, 2 * num_heads, num_rows);
    for (int row = 0; row < num_rows; ++row) {
        const float *own = mixed(first + row), step = gates(first + row)[num_heads + head];
        for (int i = 0; i < head_size; i += 16)
            store(x + row * head_size + i, fill(step) * load(own + head * head_size + i));
        std::copy_n(own + first_b(head), size, b + row * size);
        std::copy_n(own + first_c(head), size, c + row * size);
    }
    const auto out = [&](int row, int column) { return output(first + row, head) + column; };
    multiply({plain(c, size), transposed(b, size), num_rows, num_rows, size, false, true},
             [&](int row, int column, Floats products) {
                 store(scores + row * kPiece + column,
                       products * load(decays.between + row * kPiece + column));
             });
    multiply({plain(c, size), transposed(from, size), num_rows, head_size, size},
             [&](int row, int column, Floats read) {
                 store(out(row, column), fill(decays.until[row]) * read);
             });
    const Floats skip = fill(skips_[head]);
    multiply({plain(scores, kPiece), plain(x, head_size), num_rows, head_size, num_rows, true},
             [&](int row, int column) { return load(out(row, column)); },
             [&](int row, int column, Floats result) {
                 const Floats own = load(mixed(first + row) + head * head_size + column);
                 store(out(row, column), fma(skip, own, result));
             });
    const float *last = decays.between + (num_rows - 1) * kPiece;
    for (int row = 0; row < num_rows; ++row)
        for (int i = 0; i < head_size; i += 16)
            store(x + row * head_size + i, load(x + row * head_size + i) * fill(last[row]));
    const Floats kept = fill(decays.until[num_rows - 1]);
    multiply({transposed(x, head_size), plain(b, size), head_size, size, num_rows},
             [&](int row, int column) { return kept * load(from + row * size + column); },
             [&](int row, int column, Floats result) { store(to + row * size + column, result); });
}

}  // namespace legato
