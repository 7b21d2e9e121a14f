#include "attention.hpp"

#include <cmath>
#include <limits>
#include <type_traits>

namespace legato {

namespace {

constexpr int kQueries = 32;  // query rows with scores at a time: two tiles
constexpr int kKeys = 256;    // keys with scores at a time: 64 KiB with values, for a task's rows
constexpr int kGroup = 32;    // keys in one product of weights and values
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kShortestPart = 512;  // keys
constexpr int kTasksAThread = 6;    // so that no thread is idle for long at the end
constexpr int kSharesAThread = 4;   // likewise, with many tasks
constexpr size_t kMostTasks = 8;    // in a share: a task prefetches the keys of the next one

int round_down(int value, int multiple) { return value / multiple * multiple; }
int round_up(int value, int multiple) { return round_down(value + multiple - 1, multiple); }

// The cost of a task: its rows of query tiles times its keys.
long cost(const AttentionTask &task) {
    const long num_tiles = (task.end - task.first + kTileRows - 1) / kTileRows;
    return num_tiles * (task.end_key - task.first_key);
}

// Memory of a task; small enough for the second-level cache.
struct Scratch {
    alignas(64) float scores[kQueries * kKeys];
    alignas(64) bf16 weights[kQueries * kKeys];
    alignas(64) bf16 last_values[kGroup * kLargestHead];
    alignas(64) CodeRow queries[kTaskRows * kLargestHead];  // [rows, D]
    alignas(64) float value_scales[kKeys];
    float query_scales[kTaskRows], weight_scales[kQueries];
    alignas(64) float sums[kTaskRows * kLargestHead];  // [rows, D]
    float maximum[kTaskRows], denominator[kTaskRows];
};

// Computes a task over keys and values of type `Number`. For 8-bit codes, queries are mixed as keys
// were, queries and weights are rounded to CodeRow, and the codes' scales are multiplied into the
// scores and the weights. The sums of values stay mixed.
template <typename Number>
class Task {
public:
    // `next` is the task after this one, or null.
    Task(const AttentionCall &call, const AttentionTask &task, const AttentionTask *next,
         Scratch &scratch, Arena memory)
        : call_(call),
          task_(task),
          next_(next),
          chunk_(call.chunks[task.chunk]),
          s_(scratch),
          memory_(memory),
          head_dim_(call.shape.head_dim),
          num_rows_(task.end - task.first) {
        const size_t row = static_cast<size_t>(chunk_.first_row) * call.group + task.first;
        queries_ = call.queries + (task.kv_head * call.query_rows + row) * head_dim_;
        if constexpr (kIsQuantized) round_queries();
    }

    void run() {
        std::fill_n(s_.sums, round_up(num_rows_, kTileRows) * head_dim_, 0.0f);
        std::fill_n(s_.maximum, num_rows_, kNone);
        std::fill_n(s_.denominator, num_rows_, 0.0f);
        for (int key = task_.first_key; key < task_.end_key; key += kKeys)
            for (int row = 0; row < num_rows_; row += kQueries) {
                const int count = std::min(kQueries, num_rows_ - row);
                const int end = std::min(task_.end_key, position(row + count - 1) + 1);
                if (key < end) attend(row, count, key, std::min(kKeys, end - key));
            }
    }

private:
    static constexpr bool kIsQuantized = std::is_same_v<Number, int8_t>;
    using Row = std::conditional_t<kIsQuantized, CodeRow, bf16>;

    int position(int row) const { return chunk_.start + (task_.first + row) / call_.group; }

    void round_queries() {
        alignas(64) float query[kLargestHead];
        for (int row = 0; row < num_rows_; ++row) {
            for (int dim = 0; dim < head_dim_; dim += 16)
                store(query + dim, load_bf16(queries_ + row * head_dim_ + dim));
            mix_head(query, head_dim_);
            s_.query_scales[row] = round_row(query, head_dim_, s_.queries + row * head_dim_);
        }
    }

    // Lets query rows [first, first + count) attend to keys [key, key + num_keys).
    void attend(int first, int count, int key, int num_keys) {
        score(first, count, key, num_keys);
        if (call_.softcap) cap(count, num_keys);
        if constexpr (kIsQuantized) gather_value_scales(key, num_keys);
        for (int i = 0; i < count; ++i) weigh(first + i, i, key, num_keys);
        add_values(s_.sums + first * head_dim_, count, key, num_keys);
    }

    const Row *queries() const {
        if constexpr (kIsQuantized) return s_.queries;
        else return queries_;
    }
    // [count, kKeys]
    Row *weights() const { return reinterpret_cast<Row *>(s_.weights); }

    // 32 keys, or their values, and their scales if they are quantized.
    struct Tiles {
        const Number *numbers;
        const float *scales;
    };

    Tiles keys_at(int key) const { return at(call_.keys, task_, key); }
    Tiles values_at(int key) const { return at(call_.values, task_, key); }

    // Returns the tiles from `key` on: both layouts take head_dim numbers per key.
    Tiles at(const std::byte *cache, const AttentionTask &task, int key) const {
        const auto &shape = call_.shape;
        const size_t block = call_.chunks[task.chunk].blocks[key / shape.block_size];
        const auto *const head = reinterpret_cast<const Number *>(
            cache + block * shape.block_bytes() + task.kv_head * shape.head_bytes());
        const int offset = key % shape.block_size;
        return {head + static_cast<size_t>(offset) * head_dim_,
                reinterpret_cast<const float *>(head + shape.head_values()) + offset};
    }

    // How far ahead the memory lies that is read next. Blocks lie anywhere, so only the task knows:
    // after the scores of some keys come their values, then the following keys, or the next task's
    // first keys. The scales are prefetched at once.
    long ahead_of_keys(const Number *keys, int key) const { return expect(values_at(key)) - keys; }
    long ahead_of_values(const Number *values, int key) const {
        key += kKeys;
        if (key < task_.end_key) return expect(keys_at(key)) - values;
        if (next_ == nullptr) return 0;
        key += next_->first_key - round_up(task_.end_key, kGroup);
        return key < next_->end_key ? expect(at(call_.keys, *next_, key)) - values : 0;
    }
    static const Number *expect(const Tiles &tiles) {
        if constexpr (kIsQuantized)
            for (int key = 0; key < kGroup; key += 16) prefetch(tiles.scales + key);
        return tiles.numbers;
    }

    void score(int first, int count, int first_key, int num_keys) {
        const int head_dim = head_dim_;
        const Row *const queries = this->queries() + first * head_dim;
        const StripShape strip{count,
                               head_dim / kTileDepth,
                               static_cast<long>(head_dim * sizeof(Row)),
                               kTileDepth * static_cast<long>(sizeof(Number)),
                               kKeys * sizeof(float),
                               s_.query_scales + first};
        for (int key = 0; key < num_keys; key += kGroup) {
            const Tiles tiles = keys_at(first_key + key);
            const Number *const keys = tiles.numbers;
            const long ahead = ahead_of_keys(keys, first_key + key);
            const auto operands = [=](int step) {
                const Row *const rows = queries + step * kTileDepth;
                const Number *const columns = keys + step * kTileValues;
                return Operands<Row, Number>{rows, rows + kTileRows * head_dim, columns,
                                             columns + 16 * head_dim, ahead};
            };
            multiply_strip<false>(strip, operands, s_.scores + key, memory_);
            if constexpr (kIsQuantized) scale_scores(count, tiles.scales, s_.scores + key);
        }
    }

    // Multiplies the scores of 32 keys by the keys' scales, in each of `count` rows.
    static void scale_scores(int count, const float *key_scales, float *scores) {
        const Floats left = load(key_scales), right = load(key_scales + 16);
        for (int i = 0; i < count; ++i, scores += kKeys) {
            store(scores, load(scores) * left);
            store(scores + 16, load(scores + 16) * right);
        }
    }

    // Limits scores: c * tanh(score / c). tanh(y) is (1 - e^-2|y|) / (1 + e^-2|y|), with y's sign.
    void cap(int count, int num_keys) const {
        constexpr float kLog2E = 1.4426950408889634f;
        const Floats one = fill(1.0f), most = fill(call_.softcap), least = fill(-call_.softcap);
        const Floats steep = fill(-2.0f * kLog2E / call_.softcap);
        for (int i = 0; i < count; ++i)
            for (int key = 0; key < round_up(num_keys, kGroup); key += 16) {
                float *const at = s_.scores + i * kKeys + key;
                const Floats score = load(at), e = exp2_fast(abs(score) * steep);
                store(at, where_negative(score, least, most) * ((one - e) / (one + e)));
            }
    }

    // Clears the scales after the last key, which were another request's: a weight of zero would
    // not undo their NaN.
    void gather_value_scales(int first_key, int num_keys) {
        for (int key = 0; key < num_keys; key += kGroup) {
            const float *const from = values_at(first_key + key).scales;
            for (int i = 0; i < kGroup; i += 16)
                store(s_.value_scales + key + i,
                      keep_seen(load(from + i), key + i, 0, num_keys, 0.0f));
        }
    }

    // Softmax over these keys, continued from those before them (Milakov and Gimelshein, 2018).
    void weigh(int row, int index, int first_key, int num_keys) {
        float *const scores = s_.scores + index * kKeys;
        Row *const weights = this->weights() + index * kKeys;
        const int last = position(row);
        const int low = std::max(call_.plan.visibility.first_key(last) - first_key, 0);
        const int high = std::min(last + 1 - first_key, num_keys);
        if (low >= high) {
            std::fill_n(weights, round_up(num_keys, kGroup), Row{0});
            s_.weight_scales[index] = 0.0f;
            return;
        }
        const bool is_all = low == 0 && high == kKeys;
        const float maximum = std::max(
            s_.maximum[row], is_all ? max_of_all(scores) : max_of(scores, low, high));
        rescale(row, maximum);
        s_.denominator[row] += is_all ? weigh_all(scores, maximum, weights)
                                      : weigh_seen(scores, maximum, low, high, num_keys, weights);
        if constexpr (kIsQuantized)
            s_.weight_scales[index] = round_row(scores, round_up(num_keys, kGroup), weights);
    }

    // Stores the weights of 32 keys for the product with values: rounded to bfloat16, or, for codes,
    // in place of the scores and multiplied by the values' scales.
    void keep_weights(float *scores, Row *weights, int key, Floats left, Floats right) const {
        if constexpr (kIsQuantized) {
            store(scores + key, left * load(s_.value_scales + key));
            store(scores + key + 16, right * load(s_.value_scales + key + 16));
        } else {
            store_bf16(weights + key, left, right);
        }
    }

    static float max_of_all(const float *scores) {
        Floats maximum[4];
        for (int i = 0; i < 4; ++i) maximum[i] = load(scores + 16 * i);
        for (int key = 64; key < kKeys; key += 64)
            for (int i = 0; i < 4; ++i) maximum[i] = max(maximum[i], load(scores + key + 16 * i));
        return largest(max(max(maximum[0], maximum[1]), max(maximum[2], maximum[3])));
    }

    static float max_of(const float *scores, int low, int high) {
        Floats maximum = fill(kNone);
        for (int key = round_down(low, 16); key < high; key += 16)
            maximum = max(maximum, keep_seen(load(scores + key), key, low, high, kNone));
        return largest(maximum);
    }

    // Stores the weights, 2^(score - maximum), and returns their sum.
    float weigh_all(float *scores, float maximum, Row *weights) const {
        const Floats shift = fill(maximum);
        Floats total[4];
        for (auto &part : total) part = fill(0.0f);
        for (int key = 0; key < kKeys; key += 64)
            for (int i = 0; i < 4; i += 2) {
                const float *const from = scores + key + 16 * i;
                const Floats left = exp2_fast(load(from) - shift);
                const Floats right = exp2_fast(load(from + 16) - shift);
                total[i] = total[i] + left;
                total[i + 1] = total[i + 1] + right;
                keep_weights(scores, weights, key + 16 * i, left, right);
            }
        return sum((total[0] + total[1]) + (total[2] + total[3]));
    }

    float weigh_seen(float *scores, float maximum, int low, int high, int num_keys,
                     Row *weights) const {
        const Floats shift = fill(maximum);
        Floats total = fill(0.0f);
        const auto seen = [=](int key) {
            const Floats all = exp2_fast(load(scores + key) - shift);
            return keep_seen(all, key, low, high, 0.0f);
        };
        for (int key = 0; key < round_up(num_keys, kGroup); key += kGroup) {
            const Floats left = seen(key), right = seen(key + 16);
            total = total + left;
            total = total + right;
            keep_weights(scores, weights, key, left, right);
        }
        return sum(total);
    }

    // Keeps the lanes of 16 keys from `key` on that are in [low, high); the rest become `other`.
    static Floats keep_seen(Floats x, int key, int low, int high, float other) {
        if (key >= low && key + 16 <= high) return x;
        const int from = std::clamp(low - key, 0, 16), end = std::clamp(high - key, 0, 16);
        return keep(x, std::min(from, end), end, other);
    }

    void rescale(int row, float maximum) {
        if (maximum == s_.maximum[row]) return;
        const float factor = std::exp2(s_.maximum[row] - maximum);
        s_.maximum[row] = maximum;
        s_.denominator[row] *= factor;
        float *const sums = s_.sums + row * head_dim_;
        for (int dim = 0; dim < head_dim_; dim += 16)
            store(sums + dim, load(sums + dim) * fill(factor));
    }

    void add_values(float *sums, int count, int first_key, int num_keys) {
        const int num_whole = kIsQuantized ? num_keys : round_down(num_keys, kGroup);
        if (num_whole < num_keys) copy_last_values(first_key + num_whole, num_keys - num_whole);
        const StripShape strip{count,
                               (num_keys + kGroup - 1) / kGroup,
                               kKeys * sizeof(Row),
                               static_cast<long>(head_dim_ * 2 * sizeof(Number)),
                               static_cast<long>(head_dim_ * sizeof(float)),
                               s_.weight_scales};
        for (int dim = 0; dim < head_dim_; dim += 32) {
            const auto operands = [=, this](int step) {
                const int key = step * kGroup;
                const Number *const whole = values_at(first_key + key).numbers;
                const Number *const values = (key < num_whole ? whole : last_values()) + dim * 2;
                const Row *const weights = this->weights() + key;
                const long ahead = ahead_of_values(values - dim * 2, first_key + key);
                return Operands<Row, Number>{weights, weights + kTileRows * kKeys, values,
                                             values + 32, ahead};
            };
            multiply_strip<true>(strip, operands, sums + dim, memory_);
        }
    }

    const Number *last_values() const { return reinterpret_cast<const Number *>(s_.last_values); }

    // Copies the last values with zeros after them. The values there were another request's: a
    // weight of zero would not undo their NaN. Codes have no NaN.
    void copy_last_values(int key, int count) {
        const Number *const values = values_at(key).numbers;
        const int num_whole = count / 2 * 2 * head_dim_;
        std::copy_n(values, num_whole, s_.last_values);
        std::fill(s_.last_values + num_whole, s_.last_values + kGroup * head_dim_, bf16{0});
        if (count % 2)
            for (int dim = 0; dim < head_dim_; ++dim)
                s_.last_values[num_whole + 2 * dim] = values[num_whole + 2 * dim];
    }

    const AttentionCall &call_;
    const AttentionTask &task_, *const next_;
    const Chunk &chunk_;
    Scratch &s_;
    const Arena memory_;
    const int head_dim_, num_rows_;
    const bf16 *queries_;
};

void run(const AttentionCall &call, const AttentionTask &task, const AttentionTask *next,
         Scratch &scratch, Arena memory) {
    if (call.shape.is_quantized) Task<int8_t>(call, task, next, scratch, memory).run();
    else Task<bf16>(call, task, next, scratch, memory).run();
}

void write_output(const AttentionCall &call, const AttentionTask &task, int row,
                  const float *sums, float maximum, float denominator) {
    const int head_dim = call.shape.head_dim, index = task.first + row;
    const int token = call.chunks[task.chunk].first_row + index / call.group;
    const int head = task.kv_head * call.group + index % call.group;
    if (call.sinks) denominator += std::exp2(call.sinks[head] - maximum);
    const Floats by = fill(1.0f / denominator);
    alignas(64) float plain[kLargestHead];
    if (call.shape.is_quantized) {
        std::copy_n(sums, head_dim, plain);
        mix_head(plain, head_dim);
        sums = plain;
    }
    for (int dim = 0; dim < head_dim; dim += 16)
        store_bf16(call.output.at(token, head * head_dim + dim), load(sums + dim) * by);
}

void keep_part(const AttentionCall &call, const AttentionTask &task, const Scratch &scratch) {
    const int head_dim = call.shape.head_dim, num_rows = task.end - task.first;
    float *const sums = call.parts + task.part * part_floats(head_dim);
    float *const maxima = sums + kTaskRows * head_dim;
    std::copy_n(scratch.sums, num_rows * head_dim, sums);
    std::copy_n(scratch.maximum, num_rows, maxima);
    std::copy_n(scratch.denominator, num_rows, maxima + kTaskRows);
}

void finish(const AttentionCall &call, const AttentionTask &task, const Scratch &scratch) {
    if (task.part >= 0) {
        keep_part(call, task, scratch);
        return;
    }
    for (int row = 0; row < task.end - task.first; ++row)
        write_output(call, task, row, scratch.sums + row * call.shape.head_dim,
                     scratch.maximum[row], scratch.denominator[row]);
}

void merge_parts(const AttentionCall &call, const AttentionMerge &merge) {
    const int head_dim = call.shape.head_dim;
    const size_t stride = part_floats(head_dim), maxima = kTaskRows * head_dim;
    alignas(64) float sums[kLargestHead];
    for (int row = 0; row < merge.task.end - merge.task.first; ++row) {
        float maximum = kNone, denominator = 0.0f;
        for (int part = merge.first; part < merge.end; ++part)
            maximum = std::max(maximum, call.parts[part * stride + maxima + row]);
        std::fill_n(sums, head_dim, 0.0f);
        for (int part = merge.first; part < merge.end; ++part) {
            const float *const from = call.parts + part * stride;
            const float factor = std::exp2(from[maxima + row] - maximum);
            denominator += factor * from[maxima + kTaskRows + row];
            for (int dim = 0; dim < head_dim; ++dim)
                sums[dim] += factor * from[row * head_dim + dim];
        }
        write_output(call, merge.task, row, sums, maximum, denominator);
    }
}

}  // namespace

AttentionPlan::AttentionPlan(const std::vector<Chunk> &chunks, const CacheShape &shape, int group,
                             Visibility visibility, int num_threads)
    : visibility(visibility) {
    std::vector<AttentionTask> whole;
    for (int index = 0; index < static_cast<int>(chunks.size()); ++index) {
        const Chunk &chunk = chunks[index];
        for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head)
            for (int first = 0; first < chunk.num_rows * group; first += kTaskRows) {
                const int end = std::min(first + kTaskRows, chunk.num_rows * group);
                const int first_key = visibility.first_key(chunk.start + first / group);
                const int end_key = chunk.start + (end - 1) / group + 1;
                whole.push_back({index, kv_head, first, end, round_down(first_key, kGroup),
                                 end_key, -1});
            }
    }
    long total = 0;
    for (const auto &task : whole) total += cost(task);
    for (auto &task : whole) {
        // If few tasks are most of the step, threads divide the keys of each.
        const long num_keys = task.end_key - task.first_key;
        const long fair = total / (kTasksAThread * num_threads) * num_keys / cost(task);
        const int longest = std::max<int>(kShortestPart, round_up(fair, kKeys));
        if (num_threads == 1 || num_keys <= longest + kShortestPart) {
            tasks.push_back(task);
            continue;
        }
        merges.push_back({num_parts, num_parts, task});
        for (int key = task.first_key; key < task.end_key; key += longest) {
            auto part = task;
            part.first_key = key;
            part.end_key = std::min(key + longest, task.end_key);
            part.part = num_parts++;
            tasks.push_back(part);
        }
        merges.back().end = num_parts;
    }
    std::stable_sort(tasks.begin(), tasks.end(), [](const auto &a, const auto &b) {
        return cost(a) > cost(b);
    });
    tasks_a_share = std::clamp<size_t>(tasks.size() / (kSharesAThread * num_threads), 1, kMostTasks);
}

size_t attention_bytes(int head_dim) {
    return Arena::bytes<Scratch>(1) +
           strip_bytes(std::max(head_dim / kTileDepth, kKeys / kGroup));
}

void attend(const AttentionCall &call, const Worker &worker, Phase &phase) {
    Arena memory = worker.memory;
    Scratch &scratch = *memory.take<Scratch>(1);
    const TileScope tiles;
    const auto &tasks = call.plan.tasks;
    const size_t share_size = call.plan.tasks_a_share;
    const size_t num_shares = (tasks.size() + share_size - 1) / share_size;
    phase.run(worker, static_cast<int>(num_shares), [&](int share) {
        const size_t first = share * share_size, end = std::min(first + share_size, tasks.size());
        for (size_t index = first; index < end; ++index) {
            const AttentionTask *const next = index + 1 < end ? &tasks[index + 1] : nullptr;
            run(call, tasks[index], next, scratch, memory);
            finish(call, tasks[index], scratch);
        }
    });
}

void merge(const AttentionCall &call, const Worker &worker, Phase &phase) {
    const auto &merges = call.plan.merges;
    phase.run(worker, static_cast<int>(merges.size()),
              [&](int share) { merge_parts(call, merges[share]); });
}

}  // namespace legato
