// Runs the kernels on random shapes, under the sanitizers of the compiler: `harness SEED TRIES`.
//
// Every operand is on the heap and has its exact size, so that a read beyond its end is seen. Results are
// compared with sums in double precision, or with those of the same rows in other cuts. No thread may allocate
// memory in a run. The case is printed before it runs; a wrong result ends the program with status 1.
#include <cstring>
#include <stdexcept>
#include <string>

#include "decoder.hpp"
#include "operators.hpp"
#include "recurrence.hpp"

using namespace legato;

// Of the sanitizers; not every compiler brings their headers.
extern "C" int __sanitizer_install_malloc_and_free_hooks(
    void (*malloc_hook)(const volatile void *, size_t), void (*free_hook)(const volatile void *));
extern "C" void __sanitizer_print_stack_trace();

namespace {

using Doubles = std::vector<double>;

// Allocations by any thread between the begin and the end of a run, and the runs seen.
struct Allocations {
    static inline std::atomic<bool> are_counted{false};
    static inline std::atomic<int> count{0};
    static inline int num_runs = 0;

    // For runs that fail: an exception is allocated.
    struct Unseen {
        Unseen() { count = 1; }
        ~Unseen() { count = 0; }
    };

    static void see(const volatile void *, size_t) {
        if (!are_counted || count++) return;
        are_counted = false;  // of the stack's printing
        __sanitizer_print_stack_trace();
        are_counted = true;
    }
};

void check_products(Case &own, ThreadPool &pool) {
    const int outputs = own.whole(1, 200), depth = 32 * own.whole(1, own.coin() ? 4 : 40);
    const int rows = own.coin() ? own.whole(1, 9) : own.whole(1, 140);
    const RandomWeight made(own, outputs, depth);
    const Weight &w = made.weight;
    own.begin("products: %d threads, %d rows, %d outputs, %d deep, %d bits, groups of %d%s%s%s%s",
              pool.size(), rows, outputs, depth, w.codes ? w.bits : 16, w.group,
              w.minima ? ", minima" : "", w.table ? ", a table" : "", w.order ? ", reordered" : "",
              w.is_rotated ? ", rotated" : w.rounds_rows ? ", rounding rows" : "");
    const PackedMatrix matrix(w, outputs, depth);
    const auto x = random_bf16(own, static_cast<size_t>(rows) * depth);
    const auto out = heap<float>(static_cast<size_t>(rows) * outputs);
    multiply_plain(pool, matrix, x.get(), rows, out.get());
    double error = 0.0, length = 1e-30;
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < outputs; ++i) {
            const float result = out[static_cast<size_t>(row) * outputs + i];
            if (w.is_rotated) {  // its codes are of rotated weights
                own.require(std::isfinite(result), "a product is not finite");
                continue;
            }
            double sum = 0.0;
            for (int j = 0; j < depth; ++j)
                sum += double(to_float(x[static_cast<size_t>(row) * depth + j])) *
                       made.plain[static_cast<size_t>(i) * depth + j];
            error += (sum - result) * (sum - result);
            length += sum * sum;
        }
    own.require(std::sqrt(error / length) < 0.08, "products are far off");
}

// A request's chunk, its keys and values [tokens, K, D], and its blocks.
struct Context {
    Chunk chunk;
    std::vector<float> keys, values;
};

void check_attention(Case &own, ThreadPool &pool) {
    const int kv_heads = own.whole(1, 3), group = own.one_of({1, 2, 3, 7, 20});
    const int head_dim = 32 * own.one_of({1, 2, 3, 4, 8, 16}), block = 32 * own.whole(1, 3);
    const int window = own.coin() ? 0 : own.whole(1, 400), num_padded = own.whole(0, 3);
    const float cap = own.coin() ? 0.0f : 5.0f;
    const CacheShape shape{kv_heads, head_dim, block, own.coin()};
    const size_t token = static_cast<size_t>(kv_heads) * head_dim;
    std::vector<Context> contexts(own.whole(1, 4));
    int total = 0, num_blocks = 0;
    for (auto &[chunk, keys, values] : contexts) {
        chunk.first_row = total;
        chunk.num_rows = own.coin() ? own.whole(1, 4) : own.whole(1, 50);
        chunk.start = own.coin() ? own.whole(0, 70) : own.whole(0, 1300);
        const int count = chunk.start + chunk.num_rows;
        total += chunk.num_rows;
        for (int i = 0; i < (count + block - 1) / block; ++i) chunk.blocks.push_back(num_blocks++);
        keys = random_floats(own, count * token, 1.0f);
        values = random_floats(own, count * token, 1.0f);
        for (auto *numbers : {&keys, &values})
            for (auto &number : *numbers) number = to_float(to_bf16(number));
    }
    own.begin("attention: %d threads, %d requests, %d rows, %d x %d heads of %d, blocks of %d, "
              "window %d, cap %g%s", pool.size(), int(contexts.size()), total, kv_heads, group,
              head_dim, block, window, cap, shape.is_quantized ? ", 8 bits" : "");
    std::vector<int> places(num_blocks);
    for (int i = 0; i < num_blocks; ++i) places[i] = i;
    std::shuffle(places.begin(), places.end(), own.engine());
    const auto keys = heap<std::byte>(num_blocks * shape.block_bytes());
    const auto values = heap<std::byte>(num_blocks * shape.block_bytes());
    for (auto *cache : {keys.get(), values.get()})  // others' numbers may be NaN
        std::memset(cache, 0xff, num_blocks * shape.block_bytes());
    const int heads = kv_heads * group, padded = total + num_padded;
    const auto q = random_bf16(own, static_cast<size_t>(padded) * heads * head_dim);
    const auto k = heap<bf16>(padded * token), v = heap<bf16>(padded * token);
    const auto out = heap<bf16>(static_cast<size_t>(padded) * heads * head_dim);
    std::vector<Chunk> chunks;
    std::vector<int64_t> slots;
    for (auto &context : contexts) {
        Chunk &chunk = context.chunk;
        for (auto &id : chunk.blocks) id = places[id];
        for (int i = 0; i < chunk.start + chunk.num_rows; ++i) {
            const int64_t slot = int64_t(chunk.blocks[i / block]) * block + i % block;
            const float *key = &context.keys[i * token], *value = &context.values[i * token];
            const int row = chunk.first_row + i - chunk.start;
            if (i >= chunk.start) slots.push_back(slot);
            for (size_t j = 0; i >= chunk.start && j < token; ++j) {
                k[row * token + j] = to_bf16(key[j]);
                v[row * token + j] = to_bf16(value[j]);
            }
            for (int head = 0; i < chunk.start && head < kv_heads; ++head) {
                write_key(keys.get(), shape, head, slot, key + head * head_dim);
                write_value(values.get(), shape, head, slot, value + head * head_dim);
            }
        }
        chunks.push_back(chunk);
    }
    Step step(chunks, slots, shape, group, pool.size());
    Operators operators(pool);
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    operators.attend(step, {keys.get(), values.get(), window, 0}, padded,
                     {q.get(), heads * head_dim, head_dim}, {k.get(), int64_t(token), head_dim},
                     {v.get(), int64_t(token), head_dim}, scale, cap, out.get());
    double worst = 0.0;
    for (const auto &[chunk, own_keys, own_values] : contexts)
        for (int at = 0; at < chunk.num_rows * heads; ++at) {
            const int head = at % heads, position = chunk.start + at / heads;
            const size_t place = (static_cast<size_t>(chunk.first_row) * heads + at) * head_dim;
            const int first = Visibility{window}.first_key(position);
            Doubles weights, sums(head_dim);
            double most = -1e300, denominator = 0.0, error = 0.0, length = 1e-30;
            for (int j = first; j <= position; ++j) {
                const float *key = &own_keys[j * token + head / group * head_dim];
                double score = 0.0;
                for (int i = 0; i < head_dim; ++i) score += double(to_float(q[place + i])) * key[i];
                score *= scale;
                if (cap) score = cap * std::tanh(score / cap);
                weights.push_back(score);
                most = std::max(most, score);
            }
            for (auto &weight : weights) denominator += weight = std::exp(weight - most);
            for (int j = first; j <= position; ++j)
                for (int i = 0; i < head_dim; ++i)
                    sums[i] += weights[j - first] / denominator *
                               own_values[j * token + head / group * head_dim + i];
            for (int i = 0; i < head_dim; ++i) {
                const double difference = sums[i] - to_float(out[place + i]);
                error += difference * difference;
                length += sums[i] * sums[i];
            }
            const double relative = std::sqrt(error / length);
            if (!(relative <= worst)) worst = relative;
        }
    own.require(worst < 0.08, "attention is far off");
}

void check_experts(Case &own, ThreadPool &pool) {
    const int size = 32 * own.whole(1, 4), inner = 32 * own.whole(1, 3);
    const int groups = own.whole(0, 2) ? 1 : 4;
    const int count = groups * own.whole(2, 9), active = own.whole(1, groups == 1 ? count : 2);
    const auto score = static_cast<Score>(own.whole(0, 2));
    const int rows = own.whole(1, 80);
    ExpertsShape shape{size, inner, count, active, groups, groups == 1 ? 1 : 2, score, true, 1.5f,
                       own.coin(), own.coin(), own.coin() ? 7.0f : 0.0f, 1.7f};
    own.begin("experts: %d threads, %d rows of %d, %d of %d experts of %d, %d groups, score %d%s",
              pool.size(), rows, size, active, count, inner, groups, int(score),
              shape.is_gated ? "" : ", squares");
    const auto router = random_bf16(own, static_cast<size_t>(count) * size, own.coin() ? 0.1f : 0.0f);
    RouterWeights read{};
    read.rows.values = router.get();
    read.num_rows = count;
    const RandomExperts made(own, shape);
    Experts experts(shape, read, made.weights);
    Operators operators(pool);
    const size_t total = static_cast<size_t>(rows) * size;
    const auto x = random_bf16(own, total), shared = random_bf16(own, total);
    const auto out = heap<bf16>(total), beside_nan = heap<bf16>(total);
    operators.run_experts(experts, x.get(), rows, shared.get(), out.get());
    for (size_t i = 0; i < total; ++i)
        own.require(std::isfinite(to_float(out[i])), "an expert's result is not finite");
    if (!made.are_plain) return;  // codes of NaN overflow in a sum that is multiplied by NaN
    const size_t broken = static_cast<size_t>(own.whole(0, rows - 1)) * size;
    x[broken + own.whole(0, size - 1)] = 0x7fc0;
    operators.run_experts(experts, x.get(), rows, shared.get(), beside_nan.get());
    for (size_t i = 0; i < total; ++i)
        if (i >= broken && i < broken + size)
            own.require(std::isnan(to_float(beside_nan[i])), "experts drop NaN");
        else
            own.require(beside_nan[i] == out[i], "a row of NaN changes others");
}

// Computes rows [T, width] in cuts of some lengths; returns the outputs [T, size], and the last state.
struct Driven {
    Driven(Mixer &mixer, ThreadPool &pool, const std::vector<float> &rows, int width, int size,
           size_t input_size, size_t state_size, const std::vector<int> &cuts)
        : state(state_size) {
        constexpr int kSlots = 3;
        const auto inputs = heap<float>(kSlots * input_size);
        const auto states = aligned_array<float>(kSlots * state_size + kStateAhead);
        std::fill_n(states.get(), kSlots * state_size, 0.0f);
        const int num_rows = static_cast<int>(rows.size()) / width;
        int from = 0;
        for (size_t at = 0, cut = 0; static_cast<int>(at) < num_rows; ++cut) {
            const int count = std::min<int>(cuts[cut % cuts.size()], num_rows - at);
            const int to = 1 + cut % 2;
            const auto own = heap<float>(static_cast<size_t>(count) * width);
            const auto out = heap<float>(static_cast<size_t>(count) * size);
            std::copy_n(&rows[at * width], static_cast<size_t>(count) * width, own.get());
            mixer.forward(pool, {{Run{0, count, static_cast<int>(at), from, to, {}}}, inputs.get(),
                                 states.get(), own.get(), out.get(), false});
            outputs.insert(outputs.end(), out.get(), out.get() + static_cast<size_t>(count) * size);
            at += count;
            from = to;
        }
        std::copy_n(states.get() + from * state_size, state_size, state.begin());
    }

    std::vector<float> outputs, state;
};

double distance(const std::vector<float> &a, const std::vector<float> &b) {
    double error = 0.0, length = 1e-30;
    for (size_t i = 0; i < a.size(); ++i) {
        error += (a[i] - b[i]) * (a[i] - b[i]);
        length += a[i] * a[i];
    }
    return std::sqrt(error / length);
}

void check_recurrences(Case &own, ThreadPool &pool) {
    const int key_heads = own.whole(1, 2), heads = key_heads * own.whole(1, 2);
    const int inner = 16 * own.whole(1, 16), outer = 16 * own.whole(1, 16), taps = own.whole(2, 4);
    const int num_rows = own.whole(1, 200);
    const bool is_delta = own.coin();
    auto rates = random_floats(own, heads, 0.3f, -1.0f);
    for (auto &rate : rates) rate = -std::abs(rate);
    const DeltaNetShape delta{heads, key_heads, inner, outer};
    const Mamba2Shape mamba{heads, key_heads, outer, inner, 0.0f, 1e30f};
    const int channels = is_delta ? delta.num_channels() : mamba.num_channels();
    const int size = heads * outer, width = channels + size + heads * (is_delta ? 2 : 1);
    Convolution conv{taps, channels, random_floats(own, static_cast<size_t>(taps) * channels, 0.5f),
                     own.coin() ? random_floats(own, channels, 1.0f) : std::vector<float>()};
    const OutputGate gate{is_delta ? GateOrder::kNormFirst : GateOrder::kGateFirst,
                          is_delta ? outer : size / key_heads, 1e-6f,
                          random_floats(own, size, 0.1f, 1.0f)};
    const std::vector<int> cuts{own.whole(1, 70), own.whole(1, 5)};
    own.begin("%s: %d threads, %d rows in cuts of %d and %d, %d heads, %d key heads, %d x %d",
              is_delta ? "delta net" : "mamba 2", pool.size(), num_rows, cuts[0], cuts[1], heads,
              key_heads, inner, outer);
    std::unique_ptr<Mixer> mixer;
    if (is_delta)
        mixer = std::make_unique<DeltaNet>(delta, conv, gate, rates, random_floats(own, heads, 1.0f));
    else
        mixer = std::make_unique<Mamba2>(mamba, conv, gate, rates, random_floats(own, heads, 1.0f),
                                         random_floats(own, heads, 1.0f));
    const auto rows = random_floats(own, static_cast<size_t>(num_rows) * width, 1.0f);
    const size_t inputs = static_cast<size_t>(taps - 1) * channels;
    const size_t state = static_cast<size_t>(heads) * inner * outer;
    const Driven whole(*mixer, pool, rows, width, size, inputs, state, {num_rows});
    const Driven cut(*mixer, pool, rows, width, size, inputs, state, cuts);
    own.require(distance(whole.outputs, cut.outputs) < 1e-4, "outputs depend on the cuts");
    own.require(distance(whole.state, cut.state) < 1e-4, "the state depends on the cuts");
}

// Any thread fails in any phase: the caller gets the exception, no thread stays, and the pool runs again.
void check_failures(Case &own, ThreadPool &pool) {
    const Allocations::Unseen unseen;
    const int num_phases = own.whole(1, 5), shares = own.whole(1, 40);
    const int bad_phase = own.whole(0, num_phases), bad_share = own.whole(0, shares - 1);
    own.begin("failures: %d threads, share %d of phase %d fails, of %d in %d", pool.size(), bad_share,
              bad_phase, shares, num_phases);
    for (const bool fails : {true, false, true}) {
        std::vector<Phase> phases(num_phases);
        std::atomic<int> num_arrived{0}, num_inside{0}, num_done{0};
        bool is_thrown = false;
        try {
            pool.run(0, [&](const Worker &worker) {
                struct Inside {
                    explicit Inside(std::atomic<int> &count) : count(count) { ++count; }
                    ~Inside() { --count; }
                    std::atomic<int> &count;
                };
                const Inside inside(num_inside);
                for (++num_arrived; num_arrived < pool.size();) std::this_thread::yield();
                for (int phase = 0; phase < num_phases; ++phase) {
                    const auto work = [&](int share) {
                        if (fails && phase == bad_phase && share == bad_share) throw std::bad_alloc();
                        ++num_done;
                    };
                    if (phase % 2) phases[phase].run(worker, shares, work);
                    else phases[phase].run(worker, shares / 2, work, shares - shares / 2,
                                           [&](int share) { work(share + shares / 2); });
                }
                if (fails && bad_phase == num_phases) throw std::runtime_error("between phases");
            });
        } catch (const std::bad_alloc &) {
            is_thrown = bad_phase < num_phases;
        } catch (const std::runtime_error &) {
            is_thrown = bad_phase == num_phases;
        }
        own.require(is_thrown == fails, "the caller does not get the exception");
        own.require(num_inside == 0, "a thread is still in the work");
        own.require(fails || num_done == num_phases * shares, "not all shares are done");
    }
}

// A kernel that takes more memory than it has stated fails, and writes nothing.
void check_arenas(Case &own, ThreadPool &pool) {
    const Allocations::Unseen unseen;
    const int count = own.whole(0, 300);
    own.begin("arenas: %d threads, %d values", pool.size(), count);
    for (const int more : {0, 1}) {
        bool is_refused = false;
        try {
            pool.run(Arena::bytes<float>(count), [&](const Worker &worker) {
                Arena memory = worker.memory;
                std::fill_n(memory.take<float>(count), count, 1.0f);
                if (more) memory.take<std::byte>(1);
            });
        } catch (const std::logic_error &) {
            is_refused = true;
        }
        own.require(is_refused == more, "an arena has not what was stated");
    }
}

void check_layers(Case &own, ThreadPool &pool) {
    Decoder decoder(own);
    std::vector<int> lengths(own.whole(1, 3));
    for (auto &length : lengths) length = own.whole(1, own.coin() ? 6 : 90);
    int total = 0;
    for (const int length : lengths) total += length;
    const int cut = own.whole(1, 40), num_padded = own.whole(0, 2);
    own.begin("layers: %d threads, %d layers of %d, %d requests, %d rows in cuts of %d, %d x %d heads of "
              "%d%s%s", pool.size(), decoder.num_layers, decoder.hidden, int(lengths.size()), total, cut,
              decoder.kv_heads, decoder.group, decoder.head_dim, decoder.experts.empty() ? "" : ", experts",
              decoder.cache_shape.is_quantized ? ", 8 bits" : "");
    const auto rows = random_floats(own, size_t(total) * decoder.hidden, 1.0f);
    const auto inputs =
        random_bf16(own, size_t(total) * decoder.num_layers * decoder.input_size + 1);
    const auto whole = decoder.forward(pool, lengths, rows, inputs.get(), total, num_padded);
    const auto cuts = decoder.forward(pool, lengths, rows, inputs.get(), cut, 0);
    own.require(distance(whole, cuts) < 0.1, "hidden states depend on the cuts");
}

}  // namespace

// Each run goes through here: the program is linked so.
extern "C" {
void __real__ZN6legato10ThreadPool12run_reservedERKSt8functionIFvRKNS_6WorkerEEE(
    ThreadPool *, const ThreadPool::Work &);
void __wrap__ZN6legato10ThreadPool12run_reservedERKSt8functionIFvRKNS_6WorkerEEE(
    ThreadPool *pool, const ThreadPool::Work &work) {
    struct Counting {
        Counting() { Allocations::are_counted = true; }
        ~Counting() { Allocations::are_counted = false; }
    };
    const Counting counting;
    ++Allocations::num_runs;
    __real__ZN6legato10ThreadPool12run_reservedERKSt8functionIFvRKNS_6WorkerEEE(pool, work);
}
}

int main(int count, char **arguments) {
    const int first = count > 1 ? std::stoi(arguments[1]) : 0;
    const int tries = count > 2 ? std::stoi(arguments[2]) : 100;
    ThreadPool alone(1), together(3);
    std::atomic<int> num_started{0};  // a thread's own start allocates under the sanitizer
    together.run(0, [&](const Worker &worker) {
        for (++num_started; num_started < worker.num_threads;) std::this_thread::yield();
    });
    constexpr void (*checks[])(Case &, ThreadPool &) = {
        check_products,    check_attention, check_experts, check_recurrences,
        check_failures, check_arenas,    check_layers};
    __sanitizer_install_malloc_and_free_hooks(Allocations::see, [](const volatile void *) {});
    for (int seed = first; seed < first + tries; ++seed) {
        Case own(seed);
        Allocations::num_runs = Allocations::count = 0;
        checks[seed % std::size(checks)](own, own.coin() ? alone : together);
        own.require(Allocations::num_runs > 0, "no run was seen");
        own.require(Allocations::count == 0, "a kernel allocates memory in a run");
    }
    return Case::has_failed ? 1 : 0;
}
