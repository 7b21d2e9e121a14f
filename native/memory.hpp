// Aligned memory for vectors.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

namespace legato {

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};

// Allocates uninitialized memory that begins at a cache line.
template <typename T>
std::unique_ptr<T[], Free> aligned_array(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    void *memory = std::aligned_alloc(64, std::max<size_t>(bytes, 64));
    if (memory == nullptr) throw std::bad_alloc();
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

}  // namespace legato
