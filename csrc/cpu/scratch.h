// Working memory that a calling thread keeps between calls, so that a step allocates nothing.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data_); }

    // At least `bytes`, aligned to a cache line; contents undefined, earlier pointers dead.
    void* reserve(size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = 0;
            const size_t rounded = (bytes + 4095) / 4096 * 4096;
            data_ = std::aligned_alloc(4096, rounded);
            if (!data_) throw std::bad_alloc();
            size_ = rounded;
        }
        return data_;
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};
