// Aligned memory for vectors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include <sys/mman.h>

namespace legato {

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};

constexpr size_t kLargePageBytes = 2 << 20;

// Allocates uninitialized memory that begins at a cache line, or at a large page if it is large. Reading
// gigabytes of weights in pages of 4 KiB took a tenth longer on a Zen 4, to look up the pages.
template <typename T>
std::unique_ptr<T[], Free> aligned_array(size_t count) {
    const size_t bytes = std::max<size_t>((count * sizeof(T) + 63) / 64 * 64, 64);
    const bool is_large = bytes >= kLargePageBytes;
    void *memory;
    if (posix_memalign(&memory, is_large ? kLargePageBytes : 64, bytes)) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (is_large) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return std::unique_ptr<T[], Free>(static_cast<T *>(memory));
}

// Uninitialized memory that grows.
template <typename T>
class Buffer {
public:
    void reserve(size_t count) {
        if (count <= count_) return;
        values_ = aligned_array<T>(count);
        count_ = count;
    }
    T *get() const { return values_.get(); }
    T &operator[](size_t i) const { return values_[i]; }

private:
    size_t count_ = 0;
    std::unique_ptr<T[], Free> values_;
};

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_take() {
    throw std::logic_error("a kernel takes more memory than it has stated");
}

// Memory of one thread, uninitialized, that is taken piece by piece. A copy has what the original has left:
// what a function takes from its copy is free again when the function returns.
class Arena {
public:
    Arena(std::byte *memory, size_t num_bytes) : next_(memory), end_(memory + num_bytes) {}

    // Returns the bytes that so many values take: pieces begin at cache lines.
    template <typename T>
    static constexpr size_t bytes(size_t count) {
        return (count * sizeof(T) + 63) / 64 * 64;
    }

    // Throws std::logic_error if there is less left.
    template <typename T>
    T *take(size_t count) {
        const size_t size = bytes<T>(count);
        if (size > static_cast<size_t>(end_ - next_)) refuse_take();
        return reinterpret_cast<T *>(std::exchange(next_, next_ + size));
    }

private:
    std::byte *next_, *end_;
};

}  // namespace legato
