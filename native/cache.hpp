// Layout of one layer's keys and values in the cache, and writes to it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vector.hpp"

namespace legato {

constexpr int kLargestHead = 512;

// Keys and values are in blocks [num_kv_heads, head]. A head's part is [block_size, head_dim] numbers
// in an order that strips read directly: keys as [block_size / 16, head_dim / 2, 16, 2], so that 16
// keys are the columns of a tile, and values as [block_size / 2, head_dim, 2]. Numbers are bfloat16;
// quantized, they are int8 codes of mixed heads, followed by float scales [block_size], one per token.
struct CacheShape {
    int num_kv_heads, head_dim, block_size;
    bool is_quantized;

    size_t head_values() const { return static_cast<size_t>(block_size) * head_dim; }
    size_t head_bytes() const {
        return is_quantized ? head_values() + block_size * sizeof(float)
                            : head_values() * sizeof(bf16);
    }
    size_t block_bytes() const { return num_kv_heads * head_bytes(); }

    // Offset in bytes of the head's part of a token's block.
    size_t head_at(int kv_head, int64_t slot) const {
        return slot / block_size * block_bytes() + kv_head * head_bytes();
    }
    // Offsets in numbers of a token's key and value in the head's part. A key's pairs of numbers are
    // 16 pairs apart, and a value's numbers are 2 apart.
    size_t key_at(int64_t slot) const {
        const int64_t offset = slot % block_size;
        return offset / 16 * 16 * head_dim + offset % 16 * 2;
    }
    size_t value_at(int64_t slot) const {
        const int64_t offset = slot % block_size;
        return offset / 2 * 2 * head_dim + offset % 2;
    }
    // Offset in bytes of a token's scale in the head's part.
    size_t scale_at(int64_t slot) const { return head_values() + slot % block_size * sizeof(float); }
};

// Mixes the numbers of a head, as executor.attention.rounding.mix does. Mixing twice changes nothing.
void mix_head(float *head, int head_dim);

// Writes one token's key and value, float [head_dim] each, into the cache.
void write_key(std::byte *keys, const CacheShape &shape, int kv_head, int64_t slot,
               const float *key);
void write_value(std::byte *values, const CacheShape &shape, int kv_head, int64_t slot,
                 const float *value);

// Prefetches the memory that these two will write: a key is spread over many cache lines.
void expect_token(const std::byte *keys, const std::byte *values, const CacheShape &shape,
                  int64_t slot);

}  // namespace legato
