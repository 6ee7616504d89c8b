// Threads that work on one step together, and wait for each other without getting in the way.
//
// Not OpenMP: its team would be torch's too, and waits either asleep, which costs more than a
// phase of a step takes, or spinning for long, on a core that the event loop may need.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Team {
public:
    // Throws std::system_error if the machine gives no such number of threads.
    explicit Team(int64_t size) : size_(size) {
        try {
            for (int64_t index = 1; index < size; ++index)
                threads_.emplace_back([this, index] { serve(index); });
        } catch (...) {
            close();
            throw;
        }
    }

    ~Team() { close(); }

    int64_t size() const { return size_; }

    // Calls work(index) in each thread, in this one as 0, and returns when all are done.
    void run(const std::function<void(int64_t)>& work) {
        work_ = &work;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        work(0);
        barrier();
    }

    // Returns when every thread of the team has called it.
    void barrier() {
        if (size_ == 1) return;
        const uint64_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int64_t spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
            pause(spins);
    }

private:
    // The next step mostly comes sooner; a thread that sleeps takes a tenth of a step to wake.
    static constexpr std::chrono::milliseconds kPatience{2};

    // Some ten microseconds of spinning, and then whoever else wants this core has it.
    static void pause(int64_t spins) {
        if (spins > 200) std::this_thread::yield();
#if defined(__x86_64__)
        else _mm_pause();
#endif
    }

    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    void serve(int64_t index) {
        for (uint64_t job = 1;; ++job) {
            const auto patience = std::chrono::steady_clock::now() + kPatience;
            for (int64_t spins = 0; job_.load(std::memory_order_acquire) < job; ++spins) {
                pause(spins);
                if (spins % 64 == 63 && std::chrono::steady_clock::now() > patience) break;
            }
            if (job_.load(std::memory_order_acquire) < job) {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return closing_ || job_.load() >= job; });
                if (job_.load() < job) return;
            }
            (*work_)(index);
            barrier();
        }
    }

    const int64_t size_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool closing_ = false;
    const std::function<void(int64_t)>* work_ = nullptr;
    std::atomic<uint64_t> job_{0};
    std::atomic<int64_t> arrived_{0};
    std::atomic<uint64_t> phase_{0};
};
