// The Python modules legato._kernels_amx and the like. Tensors are passed as addresses:
// the callers in legato.model.native_* keep them alive and check their shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "layer.hpp"
#include "operators.hpp"
#include "recurrence.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace legato;

namespace {

template <typename T>
T *at(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

using PlainChunk = std::tuple<int, int, int, std::vector<int32_t>>;

std::vector<Chunk> chunks_of(std::vector<PlainChunk> plain) {
    std::vector<Chunk> chunks;
    for (auto &[first_row, num_rows, start, blocks] : plain)
        chunks.push_back({first_row, num_rows, start, std::move(blocks)});
    return chunks;
}

using PlainCache = std::tuple<uintptr_t, uintptr_t, int, int>;

LayerCache cache_of(const PlainCache &plain) {
    const auto [keys, values, window, group] = plain;
    return {at<std::byte>(keys), at<std::byte>(values), window, group};
}

using PlainTurns = std::tuple<uintptr_t, uintptr_t, uintptr_t>;

std::vector<Turns> turns_of(const std::vector<PlainTurns> &plain) {
    std::vector<Turns> turns;
    for (const auto &[cos, sin, scale] : plain)
        turns.push_back({at<float>(cos), at<float>(sin), at<float>(scale)});
    return turns;
}

std::vector<LayerCache> caches_of(const std::vector<PlainCache> &plain) {
    std::vector<LayerCache> caches;
    for (const auto &cache : plain) caches.push_back(cache_of(cache));
    return caches;
}

using PlainHeads = std::tuple<uintptr_t, int64_t, int64_t>;

Heads heads_of(const PlainHeads &plain) {
    const auto [values, row_stride, head_stride] = plain;
    return {at<bf16>(values), row_stride, head_stride};
}

// Returns an address or a number; 0 if there is none of the name.
int64_t find(const nb::dict &addresses, const std::string &name) {
    return addresses.contains(name.c_str()) ? nb::cast<int64_t>(addresses[name.c_str()]) : 0;
}

// Reads a weight: bfloat16 values as `name`; or the parts of a quantized one as `name`.codes and the like.
Weight weight_of(const nb::dict &addresses, const std::string &name) {
    const auto part = [&](const char *of) { return find(addresses, name + of); };
    const auto number = [&](const char *of) { return static_cast<int>(part(of)); };
    Weight weight{at<bf16>(find(addresses, name))};
    weight.codes = at<uint8_t>(part(".codes"));
    weight.blocks = at<uint8_t>(part(".blocks"));
    weight.type = static_cast<BlockType>(part(".type"));
    if (!weight.codes && !weight.blocks) return weight;
    weight.scales = at<uint16_t>(part(".scales"));
    weight.minima = at<uint16_t>(part(".minima"));
    weight.table = at<uint8_t>(part(".table"));
    weight.order = at<int32_t>(part(".order"));
    weight.bits = number(".bits");
    weight.group = number(".group");
    weight.zero = number(".zero");
    weight.exponent = number(".exponent");
    weight.is_float = number(".is_float") != 0;
    weight.rounds_rows = number(".rounds_rows") != 0;
    weight.is_rotated = number(".is_rotated") != 0;
    return weight;
}

// Reads the weights of experts 0, 1, ..., as far as there are any.
std::vector<ExpertWeights> experts_of(const nb::dict &addresses) {
    std::vector<ExpertWeights> experts;
    const auto count = static_cast<int>(find(addresses, "num_experts"));
    for (int i = 0; i < count; ++i) {
        const std::string name = "expert" + std::to_string(i) + ".";
        experts.push_back({weight_of(addresses, name + "gate_up"),
                           weight_of(addresses, name + "down"),
                           at<bf16>(find(addresses, name + "gate_up_bias")),
                           at<bf16>(find(addresses, name + "down_bias"))});
    }
    return experts;
}

RouterWeights router_of(const nb::dict &addresses) {
    const auto floats = [&](const char *name) { return at<float>(find(addresses, name)); };
    return {weight_of(addresses, "router"), static_cast<int>(find(addresses, "router.num_rows")),
            floats("router_bias"), floats("selection_bias"), floats("shared_gate")};
}

// Reads a weight of `num_outputs`, or several with names that end in 0, 1, ...
StackedWeights stack_of(const nb::dict &addresses, const std::string &name, int num_outputs) {
    StackedWeights stack;
    const auto outputs = [&](size_t i) {
        return static_cast<int>(find(addresses, name + std::to_string(i) + ".num_outputs"));
    };
    for (size_t i = 0; outputs(i); ++i) {
        stack.parts.push_back(weight_of(addresses, name + std::to_string(i)));
        stack.num_outputs.push_back(outputs(i));
    }
    if (stack.parts.empty()) stack = {{weight_of(addresses, name)}, {num_outputs}};
    return stack;
}

LayerWeights weights_of(const nb::dict &addresses, int qkv_size) {
    const auto floats = [&](const char *name) { return at<float>(find(addresses, name)); };
    const auto bias = [&](const char *name) { return at<bf16>(find(addresses, name)); };
    return {floats("input_norm"),
            floats("post_norm"),
            floats("attention_output_norm"),
            floats("mlp_output_norm"),
            floats("query_norm"),
            floats("key_norm"),
            floats("input_output_norm"),
            floats("output_scale"),
            stack_of(addresses, "qkv", qkv_size),
            weight_of(addresses, "output"),
            weight_of(addresses, "gate_up"),
            weight_of(addresses, "down"),
            weight_of(addresses, "input_gate"),
            weight_of(addresses, "input_output"),
            bias("qkv_bias"),
            bias("output_bias"),
            bias("gate_up_bias"),
            bias("down_bias"),
            floats("sinks"),
            router_of(addresses),
            experts_of(addresses)};
}

ExpertsShape experts_shape_of(const nb::dict &numbers) {
    if (!numbers.contains("num_experts")) return {};
    const auto whole = [&](const char *name) { return nb::cast<int>(numbers[name]); };
    const auto real = [&](const char *name) { return nb::cast<float>(numbers[name]); };
    return {whole("hidden_size"), whole("expert_size"), whole("num_experts"), whole("num_active"),
            whole("num_groups"), whole("num_active_groups"),
            static_cast<Score>(whole("score")), whole("is_normalized") != 0, real("factor"),
            whole("is_gated") != 0, whole("is_gelu") != 0, real("gate_limit"), real("gate_slope")};
}

LayerShape shape_of(const nb::dict &numbers) {
    const auto whole = [&](const char *name) { return nb::cast<int>(numbers[name]); };
    const auto real = [&](const char *name) { return nb::cast<float>(numbers[name]); };
    const auto is = [&](const char *name) { return nb::cast<bool>(numbers[name]); };
    return {whole("hidden_size"),  whole("mlp_size"),     whole("num_heads"),
            whole("num_kv_heads"), whole("head_dim"),     whole("input_size"),
            whole("rope"),         real("eps"),           real("scale"),
            real("softcap"),       real("residual_scale"), is("is_gelu"),
            is("has_whole_norms"), is("norm_after_rope"), is("has_own_keys"),
            is("value_is_key"),    is("has_value_norm"),  experts_shape_of(numbers)};
}

using PlainRun = std::tuple<int, int, int, int, int, std::vector<int>>;

// Numbers and float32 vectors of a recurrent mixer, by their names.
class MixerParts {
public:
    MixerParts(const nb::dict &numbers, const nb::dict &weights)
        : numbers_(numbers), weights_(weights) {}

    int whole(const char *name) const { return nb::cast<int>(numbers_[name]); }
    float real(const char *name) const { return nb::cast<float>(numbers_[name]); }
    // Empty if there is none of the name.
    std::vector<float> vector(const char *name, int count) const {
        return copied(at<float>(find(weights_, name)), count);
    }
    Convolution convolution(int num_channels) const {
        const int num_taps = whole("num_taps");
        return {num_taps, num_channels, vector("taps", num_taps * num_channels),
                vector("conv_bias", num_channels)};
    }
    OutputGate gate(int size) const {
        return {static_cast<GateOrder>(whole("gate_order")), whole("norm_group"), real("eps"),
                vector("norm", size)};
    }

private:
    const nb::dict &numbers_, &weights_;
};

void make_delta_net(DeltaNet *self, const nb::dict &numbers, const nb::dict &weights) {
    const MixerParts parts(numbers, weights);
    const DeltaNetShape shape{parts.whole("num_heads"), parts.whole("num_key_heads"),
                              parts.whole("key_dim"), parts.whole("value_dim")};
    new (self) DeltaNet(shape, parts.convolution(shape.num_channels()),
                        parts.gate(shape.num_heads * shape.value_dim),
                        parts.vector("rates", shape.num_heads),
                        parts.vector("dt_bias", shape.num_heads));
}

void make_mamba2(Mamba2 *self, const nb::dict &numbers, const nb::dict &weights) {
    const MixerParts parts(numbers, weights);
    const Mamba2Shape shape{parts.whole("num_heads"),    parts.whole("num_groups"),
                            parts.whole("head_dim"),     parts.whole("state_size"),
                            parts.real("shortest_step"), parts.real("longest_step")};
    new (self) Mamba2(shape, parts.convolution(shape.num_channels()), parts.gate(shape.size()),
                      parts.vector("rates", shape.num_heads),
                      parts.vector("dt_bias", shape.num_heads),
                      parts.vector("skips", shape.num_heads));
}

}  // namespace

NB_MODULE(LEGATO_MODULE, m) {
    // A model lives until its process ends, which is no leak.
    nb::set_leak_warnings(false);
    m.def(
        "most_packed",
        [](int bits, bool rounds_rows) {
            const int most = most_packed(bits, rounds_rows);
            return most == kAnyNumber ? 0 : most;
        },
        "bits"_a, "rounds_rows"_a);
    nb::class_<ThreadPool>(m, "ThreadPool").def(nb::init<int>(), "num_threads"_a);

    nb::class_<Step>(m, "Step").def(
        "__init__",
        [](Step *self, std::vector<PlainChunk> chunks, std::vector<int64_t> slots,
           std::tuple<int, int, int, bool> shape, int group, int num_threads) {
            const auto [num_kv_heads, head_dim, block_size, is_quantized] = shape;
            new (self) Step(chunks_of(std::move(chunks)), std::move(slots),
                            CacheShape{num_kv_heads, head_dim, block_size, is_quantized},
                            group, num_threads);
        },
        "chunks"_a, "slots"_a, "shape"_a, "group"_a, "num_threads"_a);

    nb::class_<Layer>(m, "Layer")
        .def(
            "__init__",
            [](Layer *self, const nb::dict &numbers, const nb::dict &weights) {
                const LayerShape shape = shape_of(numbers);
                const LayerWeights found = weights_of(weights, shape.qkv_size());
                const nb::gil_scoped_release release;  // so that several layers are packed at a time
                new (self) Layer(shape, found);
            },
            "numbers"_a, "weights"_a);

    nb::class_<Layers>(m, "Layers")
        .def(nb::init<std::vector<Layer *>>(), "layers"_a)
        .def(
            "forward",
            [](Layers &self, ThreadPool &pool, const std::vector<Step *> &steps,
               const std::vector<PlainCache> &caches, uintptr_t hidden, int num_rows,
               const std::vector<PlainTurns> &turns, uintptr_t inputs, int first, int end) {
                const nb::gil_scoped_release release;
                self.forward(pool, steps, caches_of(caches),
                             Rows{at<float>(hidden), num_rows, turns_of(turns), at<float>(hidden),
                                  at<bf16>(inputs)},
                             first, end);
            },
            "pool"_a, "steps"_a, "caches"_a, "hidden"_a, "num_rows"_a, "turns"_a, "inputs"_a,
            "first"_a, "end"_a)
        .def(
            "add_attention",
            [](Layers &self, ThreadPool &pool, Step &step, int layer, const PlainCache &cache,
               uintptr_t hidden, int num_rows, const std::vector<PlainTurns> &turns,
               uintptr_t sums) {
                const nb::gil_scoped_release release;
                self.add_attention(
                    pool, step, layer, cache_of(cache),
                    Rows{at<float>(hidden), num_rows, turns_of(turns), at<float>(sums)});
            },
            "pool"_a, "step"_a, "layer"_a, "cache"_a, "hidden"_a, "num_rows"_a, "turns"_a,
            "sums"_a)
        .def(
            "add_mlp",
            [](Layers &self, ThreadPool &pool, Step &step, int layer, uintptr_t hidden,
               int num_rows, uintptr_t sums) {
                const nb::gil_scoped_release release;
                self.add_mlp(pool, step, layer,
                             Rows{at<float>(hidden), num_rows, {}, at<float>(sums)});
            },
            "pool"_a, "step"_a, "layer"_a, "hidden"_a, "num_rows"_a, "sums"_a)
        .def(
            "finish",
            [](Layers &self, ThreadPool &pool, int layer, uintptr_t hidden, int num_rows,
               uintptr_t inputs) {
                const nb::gil_scoped_release release;
                self.finish(pool, layer,
                            Rows{at<float>(hidden), num_rows, {}, at<float>(hidden),
                                 at<bf16>(inputs)});
            },
            "pool"_a, "layer"_a, "hidden"_a, "num_rows"_a, "inputs"_a);

    nb::class_<PackedMatrix>(m, "Matrix")
        .def(
            "__init__",
            [](PackedMatrix *self, const nb::dict &weight, int num_outputs, int depth) {
                const Weight found = weight_of(weight, "weight");
                const nb::gil_scoped_release release;
                new (self) PackedMatrix(found, num_outputs, depth);
            },
            "weight"_a, "num_outputs"_a, "depth"_a)
        .def_prop_ro("num_bytes", &PackedMatrix::num_bytes)
        .def(
            "multiply",
            [](const PackedMatrix &self, ThreadPool &pool, uintptr_t rows, int num_rows,
               uintptr_t out) {
                const nb::gil_scoped_release release;
                multiply_plain(pool, self, at<bf16>(rows), num_rows, at<float>(out));
            },
            "pool"_a, "rows"_a, "num_rows"_a, "out"_a);

    nb::class_<Experts>(m, "Experts")
        .def(
            "__init__",
            [](Experts *self, const nb::dict &numbers, const nb::dict &weights) {
                const ExpertsShape shape = experts_shape_of(numbers);
                const RouterWeights router = router_of(weights);
                const std::vector<ExpertWeights> experts = experts_of(weights);
                const nb::gil_scoped_release release;
                new (self) Experts(shape, router, experts);
            },
            "numbers"_a, "weights"_a);

    nb::class_<Mixer>(m, "Mixer").def(
        "forward",
        [](Mixer &self, ThreadPool &pool, const std::vector<PlainRun> &runs, uintptr_t inputs,
           uintptr_t recurrent, uintptr_t rows, uintptr_t out, bool is_bf16) {
            const nb::gil_scoped_release release;
            MixerCall call{{}, at<void>(inputs), at<float>(recurrent),
                           at<float>(rows), at<void>(out), is_bf16};
            for (const auto &[start, end, position, source, destination, earlier] : runs)
                call.runs.push_back({start, end, position, source, destination, earlier});
            self.forward(pool, call);
        },
        "pool"_a, "runs"_a, "inputs"_a, "recurrent"_a, "rows"_a, "out"_a, "is_bf16"_a);
    nb::class_<ShortConv, Mixer>(m, "ShortConv")
        .def(
            "__init__",
            [](ShortConv *self, const nb::dict &numbers, const nb::dict &weights) {
                const MixerParts parts(numbers, weights);
                new (self) ShortConv(parts.convolution(parts.whole("num_channels")));
            },
            "numbers"_a, "weights"_a);
    nb::class_<DeltaNet, Mixer>(m, "DeltaNet")
        .def("__init__", make_delta_net, "numbers"_a, "weights"_a);
    nb::class_<Mamba2, Mixer>(m, "Mamba2")
        .def("__init__", make_mamba2, "numbers"_a, "weights"_a);

    nb::class_<Operators>(m, "Operators")
        .def(nb::init<ThreadPool &>(), "pool"_a, nb::keep_alive<1, 2>())
        .def(
            "project",
            [](Operators &self, const PackedMatrix &matrix, uintptr_t bias, uintptr_t rows,
               int num_rows, uintptr_t out) {
                const nb::gil_scoped_release release;
                self.project({matrix, at<float>(bias)}, at<bf16>(rows), num_rows, at<bf16>(out));
            },
            "matrix"_a, "bias"_a, "rows"_a, "num_rows"_a, "out"_a)
        .def(
            "run_mlp",
            [](Operators &self, const PackedMatrix &gate, uintptr_t gate_bias,
               const PackedMatrix &up, uintptr_t up_bias, const PackedMatrix &down,
               uintptr_t down_bias, bool is_gelu, uintptr_t rows, int num_rows, uintptr_t out) {
                const nb::gil_scoped_release release;
                self.run_mlp({gate, at<float>(gate_bias)}, {up, at<float>(up_bias)},
                             {down, at<float>(down_bias)}, is_gelu, at<bf16>(rows), num_rows,
                             at<bf16>(out));
            },
            "gate"_a, "gate_bias"_a, "up"_a, "up_bias"_a, "down"_a, "down_bias"_a, "is_gelu"_a,
            "rows"_a, "num_rows"_a, "out"_a)
        .def(
            "run_experts",
            [](Operators &self, Experts &experts, uintptr_t rows, int num_rows, uintptr_t shared,
               uintptr_t out) {
                const nb::gil_scoped_release release;
                self.run_experts(experts, at<bf16>(rows), num_rows, at<bf16>(shared),
                                 at<bf16>(out));
            },
            "experts"_a, "rows"_a, "num_rows"_a, "shared"_a, "out"_a)
        .def(
            "normalize",
            [](Operators &self, uintptr_t rows, bool is_bf16, int num_rows, int size,
               uintptr_t weight, float eps, uintptr_t out) {
                const nb::gil_scoped_release release;
                const auto normalize = [&](const auto *values) {
                    self.normalize(values, num_rows, size, at<float>(weight), eps, at<bf16>(out));
                };
                if (is_bf16) normalize(at<bf16>(rows));
                else normalize(at<float>(rows));
            },
            "rows"_a, "is_bf16"_a, "num_rows"_a, "size"_a, "weight"_a, "eps"_a, "out"_a)
        .def(
            "rotate",
            [](Operators &self, const PlainHeads &query, int num_heads, const PlainHeads &key,
               int num_kv_heads, int num_rows, int head_dim, uintptr_t cos, uintptr_t sin,
               uintptr_t out) {
                const nb::gil_scoped_release release;
                self.rotate(heads_of(query), num_heads, heads_of(key), num_kv_heads, num_rows,
                            head_dim, at<bf16>(cos), at<bf16>(sin), at<bf16>(out));
            },
            "query"_a, "num_heads"_a, "key"_a, "num_kv_heads"_a, "num_rows"_a, "head_dim"_a,
            "cos"_a, "sin"_a, "out"_a)
        .def(
            "attend",
            [](Operators &self, Step &step, const PlainCache &cache, int num_rows,
               const PlainHeads &query, const PlainHeads &key, const PlainHeads &value, float scale,
               float softcap, uintptr_t out) {
                const nb::gil_scoped_release release;
                self.attend(step, cache_of(cache), num_rows, heads_of(query), heads_of(key),
                            heads_of(value), scale, softcap, at<bf16>(out));
            },
            "step"_a, "cache"_a, "num_rows"_a, "query"_a, "key"_a, "value"_a, "scale"_a, "softcap"_a,
            "out"_a);
}
