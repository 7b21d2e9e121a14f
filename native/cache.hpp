// Where keys and values of one layer lie, and writing them there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vector.hpp"

namespace legato {

constexpr int kLargestHead = 256;

// They lie in blocks [num_kv_heads, head]. A head's part is [block_size, head_dim] numbers, which
// strips read without rearranging: keys as [block_size / 16, head_dim / 2, 16, 2], so that 16 keys
// are the columns of a tile, and values as [block_size / 2, head_dim, 2]. They are bfloat16, or where
// they are quantized int8, with float scales [block_size] of the tokens behind them.
struct CacheShape {
    int num_kv_heads, head_dim, block_size;
    bool is_quantized;

    size_t head_values() const { return static_cast<size_t>(block_size) * head_dim; }
    size_t head_bytes() const {
        return is_quantized ? head_values() + block_size * sizeof(float)
                            : head_values() * sizeof(bf16);
    }
    size_t block_bytes() const { return num_kv_heads * head_bytes(); }

    // Where the head's part of a token's block begins.
    size_t head_at(int kv_head, int64_t slot) const {
        return slot / block_size * block_bytes() + kv_head * head_bytes();
    }
    // Where a token's key and value begin in that, in numbers: a key's pairs of numbers lie 16 pairs
    // apart, and a value's numbers lie 2 apart.
    size_t key_at(int64_t slot) const {
        const int64_t offset = slot % block_size;
        return offset / 16 * 16 * head_dim + offset % 16 * 2;
    }
    size_t value_at(int64_t slot) const {
        const int64_t offset = slot % block_size;
        return offset / 2 * 2 * head_dim + offset % 2;
    }
    // Where its scale is in that.
    size_t scale_at(int64_t slot) const { return head_values() + slot % block_size * sizeof(float); }
};

// Writes one token's key and value, float [head_dim] each, into the cache.
void write_key(std::byte *keys, const CacheShape &shape, int kv_head, int64_t slot,
               const float *key);
void write_value(std::byte *values, const CacheShape &shape, int kv_head, int64_t slot,
                 const float *value);

// Brings what the two will write near: a key is spread over many lines.
void expect_token(const std::byte *keys, const std::byte *values, const CacheShape &shape,
                  int64_t slot);

}  // namespace legato
