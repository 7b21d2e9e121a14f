// Attention of one step's packed batch over a paged cache, read in place.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.hpp"
#include "thread_pool.hpp"

namespace legato {

// Keys and values of one layer lie in blocks [num_kv_heads, block_size, head_dim], which strips
// read without rearranging: keys as [block_size / 16, head_dim / 2, 16, 2], so that 16 keys are the
// columns of a tile, and values as [block_size / 2, head_dim, 2].
struct CacheShape {
    int num_kv_heads, head_dim, block_size;

    size_t head_values() const { return static_cast<size_t>(block_size) * head_dim; }
    size_t block_values() const { return num_kv_heads * head_values(); }

    // Where the head's part of a token's block begins.
    size_t head_at(int kv_head, int64_t slot) const {
        return slot / block_size * block_values() + kv_head * head_values();
    }
    // Where a token's key and value begin in that: a key's pairs of values lie 16 pairs apart, and
    // a value's values lie 2 apart.
    size_t key_at(int64_t slot) const {
        const int64_t offset = slot % block_size;
        return offset / 16 * 16 * head_dim + offset % 16 * 2;
    }
    size_t value_at(int64_t slot) const {
        const int64_t offset = slot % block_size;
        return offset / 2 * 2 * head_dim + offset % 2;
    }
};

// One request's rows [first_row, first_row + num_rows) of the batch, at positions from `start` on.
struct Chunk {
    int first_row, num_rows, start;
    std::vector<int32_t> blocks;
};

// Which keys a query at position p sees: (p - window, p], or [0, p] where the window is 0.
struct Visibility {
    int window;
    int first_key(int position) const { return window ? std::max(0, position + 1 - window) : 0; }
};

// Query rows [first, end) of a chunk's, for one key/value head, over keys [first_key, end_key).
// Query row r is head r % group of token r / group. Parts of the same rows over other keys are
// merged afterwards: `part` is its place among all parts of the step, or -1 for the only one.
struct AttentionTask {
    int chunk, kv_head, first, end, first_key, end_key, part;
};

// Parts [first, end) that make up the same rows.
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
    size_t tasks_a_share = 1;  // that a thread takes at a time
    int num_parts = 0;
    Visibility visibility;
};

struct AttentionCall {
    const std::vector<Chunk> &chunks;
    const AttentionPlan &plan;
    CacheShape shape;
    int group;            // query heads a key/value head
    const bf16 *queries;  // [K, query_rows, D], in units of log2(e) / sqrt(D)
    size_t query_rows;    // of each key/value head, with room for a tile more
    const bf16 *keys, *values;
    const TiledRows &output;  // [T, K * group * D]
    float *parts;             // [num_parts, part_floats]
};

constexpr int kTaskRows = 256;  // query rows that read keys and values together
constexpr int kLargestHead = 256;

// Floats that a part takes: for each of its query rows a sum, a maximum and a denominator.
inline size_t part_floats(int head_dim) { return kTaskRows * (static_cast<size_t>(head_dim) + 2); }

// Writes one token's key and value, float [D] each, into the cache.
void write_key(bf16 *keys, const CacheShape &shape, int kv_head, int64_t slot, const float *key);
void write_value(bf16 *values, const CacheShape &shape, int kv_head, int64_t slot,
                 const float *value);

// Brings what the two will write near: a key is spread over many lines.
void expect_token(const bf16 *keys, const bf16 *values, const CacheShape &shape, int64_t slot);

// By all threads: all tasks, and then the merges.
void attend(const AttentionCall &call, Phase &phase);
void merge(const AttentionCall &call, Phase &phase);

}  // namespace legato
