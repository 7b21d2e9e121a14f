#include "recurrence.hpp"

#include <cmath>
#include <type_traits>

namespace legato {

namespace {

Floats load_value(const float *from) { return load(from); }
Floats load_value(const bf16 *from) { return load_bf16(from); }
void store_value(float *to, Floats x) { store(to, x); }
void store_value(bf16 *to, Floats x) { store_bf16(to, x); }

// Rounds to what a state keeps: a row's input is the same for its own chunk and for a later one.
template <typename Value>
Floats rounded(Floats x) {
    if constexpr (std::is_same_v<Value, float>) return x;
    alignas(64) Value kept[16];
    store_value(kept, x);
    return load_value(kept);
}

// The run of each row.
std::vector<const Run *> run_of_row(const std::vector<Run> &runs) {
    std::vector<const Run *> found;
    for (const Run &run : runs) found.insert(found.end(), run.end - run.start, &run);
    return found;
}

// The convolution of one run's rows. InputAt(row, channel) returns 16 inputs.
template <typename Value, typename InputAt>
class RunConvolution {
public:
    RunConvolution(const Convolution &conv, const Run &run, const MixerCall &call, InputAt input)
        : conv_(conv),
          run_(run),
          kept_(static_cast<Value *>(call.inputs)),
          slot_size_(static_cast<size_t>(conv.num_taps - 1) * conv.num_channels),
          input_(input) {}

    // Returns a row's results for 16 channels.
    Floats at(int row, int channel) const {
        Floats total = fill(0.0f);
        const float *tap = &conv_.taps[channel];
        for (int from = row - (conv_.num_taps - 1); from <= row; ++from, tap += conv_.num_channels)
            total = fma(input(from, channel), load(tap), total);
        return conv_.bias.empty() ? total : total + load(&conv_.bias[channel]);
    }

    // Writes the last inputs up to a row to its slot, if the run keeps the state there.
    void keep(int last) const {
        if (!run_.keeps(last)) return;
        Value *to = kept_ + run_.slot(last) * slot_size_;
        for (int row = last - (conv_.num_taps - 2); row <= last; ++row)
            for (int channel = 0; channel < conv_.num_channels; channel += 16, to += 16)
                store_value(to, input(row, channel));
    }

private:
    Floats input(int row, int channel) const {
        if (row >= run_.start) return rounded<Value>(input_(row, channel));
        const int index = row - run_.start + conv_.num_taps - 1;
        return load_value(kept_ + run_.source * slot_size_ +
                          static_cast<size_t>(index) * conv_.num_channels + channel);
    }

    const Convolution &conv_;
    const Run &run_;
    Value *const kept_;
    const size_t slot_size_;
    const InputAt input_;
};

template <typename Value>
void convolve_gated(const Convolution &conv, ThreadPool &pool, const MixerCall &call) {
    const int size = conv.num_channels;
    const auto runs = run_of_row(call.runs);
    Phase phase;
    pool.run(0, [&](const Worker &worker) {
        RowShares(call.num_rows(), worker).run(phase, [&](int row) {
            const Run &run = *runs[row];
            const auto at = [&](int from) { return call.rows + static_cast<size_t>(from) * 3 * size; };
            const auto input = [&](int from, int channel) {
                return load(at(from) + channel) * load(at(from) + 2 * size + channel);
            };
            const RunConvolution<Value, decltype(input)> own(conv, run, call, input);
            Value *to = static_cast<Value *>(call.out) + static_cast<size_t>(row) * size;
            for (int channel = 0; channel < size; channel += 16)
                store_value(to + channel,
                            load(at(row) + size + channel) * own.at(row, channel));
            own.keep(row);
        });
    });
}

}  // namespace

float softplus(float x) {
    // Above 20 the rest is lost even in double precision's sum with x, rounded to float32.
    return x > 20.0f ? x : static_cast<float>(std::log1p(std::exp(static_cast<double>(x))));
}

float sigmoid(float x) {
    return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(x))));
}

void ShortConv::forward(ThreadPool &pool, const MixerCall &call) {
    if (call.is_bf16) convolve_gated<bf16>(conv, pool, call);
    else convolve_gated<float>(conv, pool, call);
}

Recurrence::Recurrence(Convolution conv, OutputGate gate, int num_heads, int head_size, int width,
                       int first_input, int first_z)
    : Mixer(std::move(conv)),
      gate(std::move(gate)),
      num_heads(num_heads),
      head_size(head_size),
      width(width),
      first_input(first_input),
      first_z(first_z) {}

void Recurrence::forward(ThreadPool &pool, const MixerCall &call) {
    if (call.is_bf16) run<bf16>(pool, call);
    else run<float>(pool, call);
}

template <typename Value>
void Recurrence::run(ThreadPool &pool, const MixerCall &call) {
    const size_t num_rows = call.num_rows();
    mixed_.reserve(num_rows * conv.num_channels);
    gates_.reserve(num_rows * 2 * num_heads);
    outputs_.reserve(num_rows * size());
    const auto runs = run_of_row(call.runs);
    // Long runs first, so that none is left to one thread at the end.
    std::vector<const Run *> by_length;
    for (const Run &run : call.runs) by_length.push_back(&run);
    std::stable_sort(by_length.begin(), by_length.end(), [](const Run *a, const Run *b) {
        return a->end - a->start > b->end - b->start;
    });
    const auto row_at = [&](int row) { return call.rows + static_cast<size_t>(row) * width; };
    const auto input = [&](int row, int channel) { return load(row_at(row) + first_input + channel); };
    Phase preparing, advancing, gating;
    pool.run(0, [&](const Worker &worker) {
        const RowShares shares(call.num_rows(), worker);
        shares.run(preparing, [&](int row) {
            const Run &run = *runs[row];
            const RunConvolution<Value, decltype(input)> own(conv, run, call, input);
            float *mixed = mixed_.get() + static_cast<size_t>(row) * conv.num_channels;
            for (int channel = 0; channel < conv.num_channels; channel += 16)
                store(mixed + channel, silu_exact(own.at(row, channel)));
            own.keep(row);
            prepare(row_at(row), mixed, gates_.get() + static_cast<size_t>(row) * 2 * num_heads);
        });
        const int num_tasks = static_cast<int>(by_length.size()) * num_heads;
        advancing.run(worker, num_tasks, [&](int task) {
            advance_run(*by_length[task / num_heads], task % num_heads, call.recurrent);
        });
        shares.run(gating, [&](int row) {
            const size_t place = static_cast<size_t>(row) * size();
            if (gate.order == GateOrder::kUngated)
                std::copy_n(output(row, 0), size(), static_cast<float *>(call.out) + place);
            else
                gate_row(row, row_at(row) + first_z, static_cast<Value *>(call.out) + place);
        });
    });
}

// In pieces that end at multiples of `kPiece`, so that a request's states are bitwise the same if it is cut
// there.
void Recurrence::advance_run(const Run &run, int head, float *states) const {
    const size_t head_floats = state_size(), slot_floats = head_floats * num_heads;
    const float *from = states + run.source * slot_floats + head * head_floats;
    for (int first = run.start, end; first < run.end; first = end) {
        const int position = run.position + first - run.start;
        end = run.keeps(first) ? first + 1 : std::min(run.end, first + kPiece - position % kPiece);
        float *const to = states + run.slot(end - 1) * slot_floats + head * head_floats;
        advance(head, first, end, from, to);
        from = to;
    }
}

template <typename Value>
void Recurrence::gate_row(int row, const float *z, Value *out) const {
    float *const values = output(row, 0);
    const int group = gate.order == GateOrder::kUnnormed ? size() : gate.group_size;
    for (int first = 0; first < size(); first += group) {
        if (gate.order == GateOrder::kGateFirst)
            for (int i = first; i < first + group; i += 16)
                store(values + i, load(values + i) * silu_exact(load(z + i)));
        const float by = gate.order == GateOrder::kUnnormed
                             ? 1.0f
                             : 1.0f / std::sqrt(mean_square(values + first, group) + gate.eps);
        for (int i = first; i < first + group; i += 16) {
            Floats value = load(values + i) * fill(by);
            if (gate.order != GateOrder::kUnnormed) value = value * load(&gate.norm[i]);
            if (gate.order != GateOrder::kGateFirst) value = value * silu_exact(load(z + i));
            store_value(out + i, value);
        }
    }
}

}  // namespace legato
