// Products of a step's activations with weights of one kind, in the way that this machine has.

#pragma once

#include <cstdint>
#include <type_traits>

#include "int4.h"
#include "products.h"
#include "records.h"

namespace {

struct Range { int64_t first, last; };

// Of one thread. With AMX up to kFew sequences meet weights of 4 bits in vectors, more in tiles:
// vectors take 9 ns for the weights of a group and 16 outputs and 4 for each further sequence, tiles
// 27 for up to 8, 29 for 16 and 40 for 32 (in cache, on a Xeon of the Sapphire Rapids generation).
template <class T>
struct Multiplier {
    static constexpr bool kInt4 = std::is_same_v<T, int4>;
    static constexpr bool kTiles = !std::is_same_v<T, float>;
    static constexpr int64_t kFew = 4;
#if HAS_AMX
    static constexpr int64_t kUnpacked = kKept * kTile / 2;  // floats that unpacked tiles take
#else
    static constexpr int64_t kUnpacked = 0;
#endif

    int64_t batch;
    bool tiled;      // weights are laid out for tiles, and there are tiles
    float* packed;   // memory: operand_floats(...)
    float* sums;     // sum_floats(batch)

    // Floats for activations in another form, whatever T is: 2 bytes for each, and for each group a
    // sum. Multiples of W, so that what comes after lies in whole cache lines.
    static int64_t operand_floats(int64_t batch, int64_t k) {
        return (batch + 16) * (k + 64) / 2 + in_whole_vectors(batch * (k / kGroup + 1) + 64);
    }
    static int64_t sum_floats(int64_t batch) { return (2 * batch + 64) * W + kUnpacked; }

    // Before the products with ``x`` [batch, k].
    void prepare(const float* x, int64_t k) const {
#if HAS_AMX
        if (tiled) {
            if constexpr (kInt4) {
                if (batch > kFew) pack(x, batch, k, packed_in<bf16>(packed, batch, k), bf16{});
                else pack_groups(x, batch, k, grouped_in(packed, batch, k));
            } else if constexpr (kTiles) {
                pack(x, batch, k, packed_in<T>(packed, batch, k), T{});
            }
            stored();
            return;
        }
#endif
        if constexpr (kInt4) sum_groups(x, batch, k, packed);
    }

    // y[b, n] for n in rows, which are multiples of 16.
    void operator()(const Matrix& m, const float* x, int64_t k, Range rows, float* y,
                    int64_t stride) const {
        const int64_t first = rows.first, last = rows.last;
#if HAS_AMX
        if (tiled) {
            if constexpr (kInt4) {
                const Grouped g = grouped_in(packed, batch, k);
                if (batch > kFew)
                    multiply_many(m, packed_in<bf16>(packed, batch, k), batch, k, first, last, y,
                                  stride, sums + kUnpacked, reinterpret_cast<bf16*>(sums));
                else if (batch == 1) multiply_few<1>(m, g, k, first, last, y, stride);
                else if (batch == 2) multiply_few<2>(m, g, k, first, last, y, stride);
                else if (batch == 3) multiply_few<3>(m, g, k, first, last, y, stride);
                else multiply_few<4>(m, g, k, first, last, y, stride);
            } else if constexpr (kTiles) {
                multiply_tiles<T>(m, packed_in<T>(packed, batch, k), batch, first, last, y, stride,
                                  sums);
            }
            return;
        }
#endif
        if constexpr (kInt4) multiply_grouped(m, x, packed, batch, k, first, last, y, stride);
        else multiply<T>(m, x, batch, k, first, last, y, stride);
    }

#if HAS_AMX
    // What the tile registers hold while this multiplies.
    TileConfig tiles() const {
        return tile_config(std::is_same_v<T, int8_t> ? 2 * batch : batch);
    }
#endif
};

}  // namespace
