// Products of activations with weights.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "records.h"
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && \
    defined(__AVX512VNNI__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

namespace {

// y[b, n] = scale[n] * (weight[n, :] . x[b, :]) + bias[n] for n in [first, last).
template <class T, int R>
void multiply_rows(const T* weight, const Matrix& m, const float* x, int64_t k, int64_t first,
                   int64_t last, float* y, int64_t stride) {
    constexpr int N = R == 1 ? 4 : 2;
    int64_t n = first;
    for (; n + N <= last; n += N) {
        Floats acc[N][R] = {};
        const T* w = weight + n * k;
        for (int64_t i = 0; i < k; i += W) {
            Floats rows[N];
            for (int j = 0; j < N; ++j) rows[j] = load(w + j * k + i);
            for (int r = 0; r < R; ++r) {
                Floats v = load(x + r * k + i);
                for (int j = 0; j < N; ++j) acc[j][r] += rows[j] * v;
            }
        }
        for (int j = 0; j < N; ++j)
            for (int r = 0; r < R; ++r) {
                float value = sum(acc[j][r]);
                if (m.scale) value *= m.scale[n + j];
                y[r * stride + n + j] = m.bias ? value + m.bias[n + j] : value;
            }
    }
}

template <class T>
void multiply(const Matrix& m, const float* x, int64_t batch, int64_t k, int64_t first,
              int64_t last, float* y, int64_t stride) {
    const T* weight = static_cast<const T*>(m.weight);
    int64_t b = 0;
    for (; b + 8 <= batch; b += 8)
        multiply_rows<T, 8>(weight, m, x + b * k, k, first, last, y + b * stride, stride);
    for (; b + 4 <= batch; b += 4)
        multiply_rows<T, 4>(weight, m, x + b * k, k, first, last, y + b * stride, stride);
    for (; b + 2 <= batch; b += 2)
        multiply_rows<T, 2>(weight, m, x + b * k, k, first, last, y + b * stride, stride);
    for (; b < batch; ++b)
        multiply_rows<T, 1>(weight, m, x + b * k, k, first, last, y + b * stride, stride);
}

#if HAS_AMX
struct TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
} __attribute__((packed));

// Stores above this are done before tile instructions below it, whose reads compilers do not see.
inline void stored() { asm volatile("" : : : "memory"); }

// Tiles 0 to 3 are sums, 4 and 5 rows of activations, 6 weights. A product takes as long as it has
// rows of activations.
TileConfig tile_config(int64_t rows) {
    TileConfig config;
    for (int i = 0; i < 7; ++i) {
        config.bytes[i] = 64;
        config.rows[i] = i == 6 || rows > 16 ? 16 : rows;
    }
    return config;
}

// The tile registers of this thread, for as long as this lives.
struct Tiles {
    alignas(64) uint8_t before[64];
    explicit Tiles(const TileConfig& config) {
        _tile_storeconfig(before);
        asm volatile("" : : "r"(&config), "r"(before) : "memory");
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_loadconfig(before); }
};

// Activations as left operands of tile products: rows of 64 bytes times columns, zero beyond k.
// As bfloat16 there is one row for each sequence. As integers there are two: x is scale times
// 256 high + low, sixteen bits of it, so that products with int8 weights are exact.
struct Packed { char* rows; float* scale; int64_t stride, count, padded; };

template <class T>
Packed packed_in(float* memory, int64_t batch, int64_t k) {
    const int64_t count = std::is_same_v<T, int8_t> ? 2 * batch : batch;
    const int64_t stride = (k * (int64_t)sizeof(T) + 63) / 64 * 64;
    char* rows = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory + batch) + 63) & ~63);
    return {rows, memory, stride, count, count <= 16 ? count : (count + 15) / 16 * 16};
}

void pack(const float* x, int64_t batch, int64_t k, const Packed& to, bf16) {
    for (int64_t b = 0; b < batch; ++b) {
        char* row = to.rows + b * to.stride;
        int64_t i = 0;
        for (; i < k; i += 32) {
            const float* p = x + b * k + i;
            const __m512bh pair =
                _mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + 16), _mm512_loadu_ps(p));
            std::memcpy(row + i * 2, &pair, 64);
        }
    }
}

constexpr float kFaint = 1e-30f;  // what all of a row lies below becomes 0

// k numbers as integers, 256 high + low; returns what to multiply these with. NaN and infinity, of
// which there are no integers, make that NaN.
float quantize(const float* x, int64_t k, int8_t* high, int8_t* low) {
    // As integers, which order magnitudes as floats do, and NaN above them all.
    __m512i most = _mm512_setzero_si512();
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t i = 0; i < k; i += W)
        most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float peak;
    std::memcpy(&peak, &bits, sizeof peak);
    const __m512 inverse = _mm512_set1_ps(peak > kFaint ? 32512.0f / peak : 0.0f);
    for (int64_t i = 0; i < k; i += W) {
        const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
        const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
        const __m512i l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 8));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(h));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(l));
    }
    return peak - peak == 0.0f ? peak / 32512.0f : NAN;
}

void pack(const float* x, int64_t batch, int64_t k, const Packed& to, int8_t) {
    for (int64_t b = 0; b < batch; ++b) {
        int8_t* high = reinterpret_cast<int8_t*>(to.rows + b * to.stride);
        int8_t* low = reinterpret_cast<int8_t*>(to.rows + (batch + b) * to.stride);
        to.scale[b] = quantize(x + b * k, k, high, low);
        for (int64_t i = k; i < to.stride; i += W) {
            std::memset(high + i, 0, W);
            std::memset(low + i, 0, W);
        }
    }
}

template <int SOME>
void zero_sums() {
    _tile_zero(0);
    if constexpr (SOME > 1) _tile_zero(1);
    if constexpr (SOME > 2) _tile_zero(2);
    if constexpr (SOME > 3) _tile_zero(3);
}

// Adds products of a tile of weights with SOME tiles of activations, 16 rows apart.
template <class T, int SOME>
void add_tile_products(const char* weight, const char* a, int64_t stride) {
    _tile_loadd(6, weight, 64);
    _tile_loadd(4, a, stride);
    if constexpr (std::is_same_v<T, int8_t>) _tile_dpbssd(0, 4, 6);
    else _tile_dpbf16ps(0, 4, 6);
    if constexpr (SOME > 1) {
        _tile_loadd(5, a + 16 * stride, stride);
        if constexpr (std::is_same_v<T, int8_t>) _tile_dpbssd(1, 5, 6);
        else _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (SOME > 2) {
        _tile_loadd(4, a + 32 * stride, stride);
        if constexpr (std::is_same_v<T, int8_t>) _tile_dpbssd(2, 4, 6);
        else _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (SOME > 3) {
        _tile_loadd(5, a + 48 * stride, stride);
        if constexpr (std::is_same_v<T, int8_t>) _tile_dpbssd(3, 5, 6);
        else _tile_dpbf16ps(3, 5, 6);
    }
}

// For each 16 outputs, from ``first`` to ``last``: lets sum(some, n, rows) add up products with
// up to four tiles of activations at a time, puts these in ``sums``, then calls use(n).
template <class Sum, class Use>
void for_tiles(const Packed& x, int64_t first, int64_t last, float* sums, Sum sum, Use use) {
    const int64_t blocks = (x.count + 15) / 16;
    for (int64_t n = first; n < last; n += W) {
        for (int64_t block = 0; block < blocks; block += 4) {
            const char* rows = x.rows + block * 16 * x.stride;
            float* out = sums + block * 256;
            const int64_t left = blocks - block;
            if (left == 1) sum(std::integral_constant<int, 1>{}, n, rows);
            else if (left == 2) sum(std::integral_constant<int, 2>{}, n, rows);
            else if (left == 3) sum(std::integral_constant<int, 3>{}, n, rows);
            else sum(std::integral_constant<int, 4>{}, n, rows);
            _tile_stored(0, out, 64);
            if (left > 1) _tile_stored(1, out + 256, 64);
            if (left > 2) _tile_stored(2, out + 512, 64);
            if (left > 3) _tile_stored(3, out + 768, 64);
        }
        use(n);
    }
}

// As multiply. Weights are [n / 16][k / 32 or 64] tiles of 16 rows: two bfloat16 or four int8 of
// each of 16 outputs. ``first`` and ``last`` are multiples of 16.
template <class T>
void multiply_tiles(const Matrix& m, const Packed& x, int64_t batch, int64_t first, int64_t last,
                    float* y, int64_t stride, float* sums) {
    const int64_t steps = x.stride / 64;
    auto sum = [&](auto some, int64_t n, const char* rows) {
        const char* column = static_cast<const char*>(m.weight) + n / W * steps * 1024;
        zero_sums<some.value>();
        for (int64_t c = 0; c < steps; ++c)
            add_tile_products<T, some.value>(column + c * 1024, rows + c * 64, x.stride);
    };
    for_tiles(x, first, last, sums, sum, [&](int64_t n) {
        const Floats bias = m.bias ? load(m.bias + n) : Floats{};
        if constexpr (std::is_same_v<T, int8_t>) {
            const Floats scale = load(m.scale + n);
            for (int64_t b = 0; b < batch; ++b) {
                Ints high, low;
                std::memcpy(&high, sums + b * W, sizeof high);
                std::memcpy(&low, sums + (batch + b) * W, sizeof low);
                const Floats product = __builtin_convertvector(high, Floats) * 256.0f +
                                       __builtin_convertvector(low, Floats);
                store(y + b * stride + n, product * x.scale[b] * scale + bias);
            }
        } else {
            for (int64_t b = 0; b < batch; ++b)
                store(y + b * stride + n, load(sums + b * W) + bias);
        }
    });
}
#endif

}  // namespace
