// Attention of one step's packed batch over a paged cache, read in place.
#pragma once

#include <cstdint>
#include <vector>

#include "cache.hpp"
#include "matrix.hpp"
#include "thread_pool.hpp"

namespace legato {

// One request's rows [first_row, first_row + num_rows) of the batch, at positions from `start` on.
struct Chunk {
    int first_row, num_rows, start;
    std::vector<int32_t> blocks;
};

// The keys that a query at position p sees: (p - window, p], or [0, p] if the window is 0.
struct Visibility {
    int window;
    int first_key(int position) const { return window ? std::max(0, position + 1 - window) : 0; }
};

// A chunk's query rows [first, end), for one key/value head, over keys [first_key, end_key).
// Query row r is head r % group of token r / group. Parts, which have the same rows and other keys,
// are merged afterwards: `part` is the index among all parts of the step, or -1 for a whole task.
struct AttentionTask {
    int chunk, kv_head, first, end, first_key, end_key, part;
};

// Parts [first, end) of the same rows.
struct AttentionMerge {
    int first, end;
    AttentionTask task;
};

// The tasks of one step for one kind of layer, longest first.
struct AttentionPlan {
    AttentionPlan(const std::vector<Chunk> &chunks, const CacheShape &shape, int group,
                  Visibility visibility, int num_threads);

    std::vector<AttentionTask> tasks;
    std::vector<AttentionMerge> merges;
    size_t tasks_a_share = 1;  // tasks that a thread takes at a time
    int num_parts = 0;
    Visibility visibility;
};

struct AttentionCall {
    const std::vector<Chunk> &chunks;
    const AttentionPlan &plan;
    CacheShape shape;
    int group;            // query heads per key/value head
    const bf16 *queries;  // [K, query_rows, D], in units of log2(e) times the layer's scale
    size_t query_rows;    // per key/value head, with room for one more tile
    const std::byte *keys, *values;
    float softcap;  // of scores in these units; 0 for no limit
    const float *sinks;  // [K * group], a further score of each head in these units; null for none
    const TiledRows &output;  // [T, K * group * D]
    float *parts;             // [num_parts, part_floats]
};

constexpr int kTaskRows = 256;  // most query rows of a task, which share its keys and values

// Floats of a part: for each of its query rows a sum [D], a maximum and a denominator.
inline size_t part_floats(int head_dim) { return kTaskRows * (static_cast<size_t>(head_dim) + 2); }

// Called by all threads: attend() computes all tasks, then merge() merges their parts.
void attend(const AttentionCall &call, const Worker &worker, Phase &phase);
void merge(const AttentionCall &call, const Worker &worker, Phase &phase);

// Bytes of memory that attend() takes, of each thread.
size_t attention_bytes(int head_dim);

}  // namespace legato
