// The gated delta rule (Yang et al., 2024, arXiv:2412.06464).
#include <cmath>

#include "recurrence.hpp"

namespace legato {

namespace {

constexpr float kSmallestSquare = 1e-6f;  // added to the square of a query's or a key's length

void scale(float *values, int count, float by) {
    for (int i = 0; i < count; i += 16) store(values + i, load(values + i) * fill(by));
}

float inverse_length(const float *values, int count) {
    Floats total = fill(0.0f);
    for (int i = 0; i < count; i += 16) total = fma(load(values + i), load(values + i), total);
    return 1.0f / std::sqrt(sum(total) + kSmallestSquare);
}

}  // namespace

DeltaNet::DeltaNet(DeltaNetShape shape, Convolution conv, OutputGate gate, std::vector<float> rates,
                   std::vector<float> dt_bias)
    : Recurrence(std::move(conv), std::move(gate), shape.num_heads, shape.value_dim,
                 shape.num_channels() + shape.num_heads * (shape.value_dim + 2), 0,
                 shape.num_channels()),
      shape(shape),
      rates_(std::move(rates)),
      dt_bias_(std::move(dt_bias)) {}

// Queries and keys get length 1, and queries a scale. Gates are [g, beta].
void DeltaNet::prepare(const float *row, float *mixed, float *gates) const {
    const int dim = shape.key_dim;
    const float query_scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int i = 0; i < 2 * shape.num_key_heads; ++i) {
        const float by = inverse_length(mixed + i * dim, dim);
        scale(mixed + i * dim, dim, i < shape.num_key_heads ? by * query_scale : by);
    }
    const float *b = row + first_z + size(), *a = b + num_heads;
    for (int head = 0; head < num_heads; ++head) {
        gates[head] = rates_[head] * softplus(a[head] + dt_bias_[head]);
        gates[num_heads + head] = sigmoid(b[head]);
    }
}

void DeltaNet::advance(int head, int first, int end, const float *from, float *to) const {
    if (end - first == 1) advance_token(head, first, from, to);
    else advance_rows(head, first, end - first, from, to);
}

// S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
//
// The state comes from memory once: its second reading finds it in the cache.
void DeltaNet::advance_token(int head, int row, const float *from, float *to) const {
    const int keys = shape.key_dim, values = shape.value_dim;
    const float *query = mixed(row) + first_key(head), *key = query + shape.key_size();
    const float *value = mixed(row) + first_value(head);
    const float decay = std::exp(gates(row)[head]), beta = gates(row)[num_heads + head];
    alignas(64) float correction[kLargestPart];
    float *const out = output(row, head);
    for (int j = 0; j < values; j += 16) store(out + j, fill(0.0f));
    for (int i = 0; i < keys; i += 4)
        for (int j = 0; j < values; j += 16) {
            Floats held = load(out + j);
            for (int k = i; k < i + 4; ++k) {
                prefetch(from + k * values + j + kStateAhead);
                held = fma(fill(key[k]), load(from + k * values + j), held);
            }
            store(out + j, held);
        }
    for (int j = 0; j < values; j += 16) {
        const Floats wanted = load(value + j) - fill(decay) * load(out + j);
        store(correction + j, fill(beta) * wanted);
        store(out + j, fill(0.0f));
    }
    for (int i = 0; i < keys; i += 4)
        for (int j = 0; j < values; j += 16) {
            const Floats change = load(correction + j);
            Floats result = load(out + j);
            for (int k = i; k < i + 4; ++k) {
                const Floats state =
                    fma(fill(key[k]), change, fill(decay) * load(from + k * values + j));
                stream(to + k * values + j, state);
                result = fma(fill(query[k]), state, result);
            }
            store(out + j, result);
        }
}

// With G the sums of gates and D their decays, the corrections U of all rows solve
// (I + tril(beta_i k_i . k_j D_ij, -1)) U = beta (V - exp(G) K S).
void DeltaNet::advance_rows(int head, int first, int num_rows, const float *from, float *to) const {
    const int keys = shape.key_dim, values = shape.value_dim;
    alignas(64) float query[kPiece * kLargestPart], key[kPiece * kLargestPart];
    alignas(64) float corrections[kPiece * kLargestPart];
    alignas(64) float system[kPiece * kPiece], scores[kPiece * kPiece];
    const Decays decays(gates(first) + head, 2 * num_heads, num_rows);
    for (int row = 0; row < num_rows; ++row) {
        const float *own = mixed(first + row) + first_key(head);
        std::copy_n(own, keys, query + row * keys);
        std::copy_n(own + shape.key_size(), keys, key + row * keys);
    }
    const auto beta = [&](int row) { return gates(first + row)[num_heads + head]; };
    const auto between = [&](int row, int column) {
        return load(decays.between + row * kPiece + column);
    };
    const Matrix all_keys = plain(key, keys), keys_down = transposed(key, keys);
    const Matrix all_queries = plain(query, keys), state = plain(from, values);
    multiply({all_keys, keys_down, num_rows, num_rows, keys, false, true},
             [&](int row, int column, Floats products) {
                 store(system + row * kPiece + column,
                       fill(-beta(row)) * products * between(row, column));
             });
    multiply({all_queries, keys_down, num_rows, num_rows, keys, false, true},
             [&](int row, int column, Floats products) {
                 store(scores + row * kPiece + column, products * between(row, column));
             });
    multiply({all_keys, state, num_rows, values, keys}, [&](int row, int column, Floats held) {
        const Floats value = load(mixed(first + row) + first_value(head) + column);
        store(corrections + row * values + column,
              fill(beta(row)) * (value - fill(decays.until[row]) * held));
    });
    solve(plain(system, kPiece), num_rows, values, corrections, values);
    const auto out = [&](int row, int column) { return output(first + row, head) + column; };
    multiply({all_queries, state, num_rows, values, keys}, [&](int row, int column, Floats read) {
        store(out(row, column), fill(decays.until[row]) * read);
    });
    const Matrix all_corrections = plain(corrections, values);
    multiply({plain(scores, kPiece), all_corrections, num_rows, values, num_rows, true},
             [&](int row, int column) { return load(out(row, column)); },
             [&](int row, int column, Floats result) { store(out(row, column), result); });
    const float *last = decays.between + (num_rows - 1) * kPiece;
    for (int row = 0; row < num_rows; ++row) scale(corrections + row * values, values, last[row]);
    const Floats kept = fill(decays.until[num_rows - 1]);
    multiply({keys_down, all_corrections, keys, values, num_rows},
             [&](int row, int column) { return kept * load(from + row * values + column); },
             [&](int row, int column, Floats result) { store(to + row * values + column, result); });
}

}  // namespace legato
