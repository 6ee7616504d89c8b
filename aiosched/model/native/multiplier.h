// Products of a step's activations with weights of one kind, in the way that this machine has.

#pragma once

#include <cstdint>
#include <type_traits>

#include "int4.h"
#include "products.h"
#include "records.h"

namespace {

struct Range { int64_t first, last; };

// Of one thread. Up to kFew sequences weights of 4 bits go through vectors, beyond through tiles.
template <class T>
struct Multiplier {
    static constexpr bool kInt4 = std::is_same_v<T, int4>;
    static constexpr bool kTiles = !std::is_same_v<T, float>;
    static constexpr int64_t kFew = 4;

    int64_t batch;
    bool tiled;      // weights are laid out for tiles, and there are tiles
    float* packed;   // memory: operand_floats(...)
    float* sums;     // sum_floats(batch)

    // Floats for activations in another form, whatever T is, and for weights unpacked.
    static int64_t operand_floats(int64_t batch, int64_t k) {
        const int64_t bytes = 2 * (batch + 16) * (k + 64), factors = (batch + 16) * (k / kGroup + 1);
        return bytes / 4 + factors + panel_floats(k) + 64;
    }
    static int64_t panel_floats(int64_t k) { return k * W / 4 + k / kGroup * 2 * W; }
    static int64_t sum_floats(int64_t batch) { return (2 * batch + 128) * W; }

    // Before the products with ``x`` [batch, k].
    void prepare(const float* x, int64_t k) const {
#if HAS_AMX
        if (tiled) {
            if constexpr (kInt4) pack_groups(x, batch, k, grouped_in(panel_end(k), batch, k));
            else if constexpr (kTiles) pack(x, batch, k, packed_in<T>(packed, batch, k), T{});
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
                const Grouped g = grouped_in(panel_end(k), batch, k);
                if (batch > kFew)
                    multiply_many(m, g, batch, k, first, last, y, stride, packed,
                                  reinterpret_cast<int32_t*>(sums));
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
        if constexpr (kInt4) return tile_config(batch, kGroup);
        else return tile_config(std::is_same_v<T, int8_t> ? 2 * batch : batch, 64);
    }

private:
    float* panel_end(int64_t k) const { return packed + panel_floats(k); }
#endif
};

}  // namespace
