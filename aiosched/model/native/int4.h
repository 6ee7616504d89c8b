// Products with weights of 4 bits.
//
// Sixteen outputs lie together, and of these 32 inputs at a time: four times 64 bytes of numbers
// from 0 to 15, then 16 scales and 16 minima as halves. A weight is scale times number plus
// minimum. In each group of 32 inputs, byte 4 n + j of the i-th 64 holds inputs 8 i + j (low half)
// and 8 i + 4 + j (high half) of output n. Minima are multiplied with the sum of the inputs.

#pragma once

#include <cstdint>
#include <cstring>

#include "products.h"
#include "records.h"
#include "vectors.h"

namespace {

struct int4 {};

constexpr int64_t kGroup = 32, kGroupBytes = 16 * kGroup / 2 + 2 * 2 * 16;

inline const uint8_t* outputs_of(const Matrix& m, int64_t n, int64_t groups) {
    return static_cast<const uint8_t*>(m.weight) + n / W * groups * kGroupBytes;
}

// Sums of x[b, :] by group: [batch, k / 32].
void sum_groups(const float* x, int64_t batch, int64_t k, float* sums) {
    for (int64_t i = 0; i < batch * k / kGroup; ++i)
        sums[i] = sum(load(x + i * kGroup) + load(x + i * kGroup + W));
}

// R sequences, in float32. ``sums`` are those of sum_groups.
template <int R>
void multiply_groups(const Matrix& m, const float* x, const float* sums, int64_t k, int64_t first,
                     int64_t last, float* y, int64_t stride) {
    const int64_t groups = k / kGroup;
    for (int64_t n = first; n < last; n += W) {
        const uint8_t* w = outputs_of(m, n, groups);
        Floats total[R] = {};
        for (int64_t g = 0; g < groups; ++g, w += kGroupBytes) {
            Floats acc[R] = {};
            for (int i = 0; i < 4; ++i) {
                Words pairs;
                std::memcpy(&pairs, w + 64 * i, sizeof pairs);
                for (int j = 0; j < 8; ++j) {
                    const Words number = (pairs >> (j < 4 ? 8 * j : 8 * j - 28)) & 15;
                    const Floats v = __builtin_convertvector((Ints)number, Floats);
                    for (int r = 0; r < R; ++r) acc[r] += v * x[r * k + g * kGroup + 8 * i + j];
                }
            }
            const Floats scale = load_halves(w + 256), minimum = load_halves(w + 288);
            for (int r = 0; r < R; ++r)
                total[r] += scale * acc[r] + minimum * sums[r * groups + g];
        }
        const Floats bias = m.bias ? load(m.bias + n) : Floats{};
        for (int r = 0; r < R; ++r) store(y + r * stride + n, total[r] + bias);
    }
}

// As multiply.
void multiply_grouped(const Matrix& m, const float* x, const float* sums, int64_t batch, int64_t k,
                      int64_t first, int64_t last, float* y, int64_t stride) {
    for (int64_t b = 0; b < batch;) {
        const int64_t left = batch - b, some = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const auto block = some == 8   ? multiply_groups<8>
                           : some == 4 ? multiply_groups<4>
                           : some == 2 ? multiply_groups<2>
                                       : multiply_groups<1>;
        block(m, x + b * k, sums + b * (k / kGroup), k, first, last, y + b * stride, stride);
        b += some;
    }
}

#if HAS_AMX
// Activations as integers of sixteen bits, in a high and a low byte as for int8, and their sums.
struct Grouped {
    int8_t *high, *low;  // [sequences, k]
    float* scale;        // [sequences]
    float* sums;         // [sequences, k / 32]
};

// Tiles read whole blocks of 16 sequences, if there is more than one.
inline int64_t in_blocks(int64_t batch) { return batch <= 16 ? batch : (batch + 15) / 16 * 16; }

Grouped grouped_in(float* memory, int64_t batch, int64_t k) {
    const int64_t rows = in_blocks(batch);
    int8_t* high = reinterpret_cast<int8_t*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~63);
    float* scale = reinterpret_cast<float*>(high + 2 * rows * k);
    return {high, high + rows * k, scale, scale + rows};
}

void pack_groups(const float* x, int64_t batch, int64_t k, const Grouped& to) {
    for (int64_t b = 0; b < batch; ++b) {
        to.scale[b] = quantize(x + b * k, k, to.high + b * k, to.low + b * k);
        for (int64_t g = 0; g < k / kGroup; ++g) {
            // Bytes plus 128, summed in eights: vpsadbw knows unsigned ones only.
            const int64_t at = b * k + g * kGroup;
            const __m256i flip = _mm256_set1_epi8(-128), zero = _mm256_setzero_si256();
            const __m256i h = _mm256_loadu_si256(reinterpret_cast<__m256i*>(to.high + at));
            const __m256i l = _mm256_loadu_si256(reinterpret_cast<__m256i*>(to.low + at));
            const __m256i eights = _mm256_add_epi64(
                _mm256_slli_epi64(_mm256_sad_epu8(_mm256_xor_si256(h, flip), zero), 8),
                _mm256_sad_epu8(_mm256_xor_si256(l, flip), zero));
            const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(eights),
                                               _mm256_extracti128_si256(eights, 1));
            const int64_t total = _mm_extract_epi64(pair, 0) + _mm_extract_epi64(pair, 1);
            to.sums[b * (k / kGroup) + g] = total - 257 * 128 * kGroup;
        }
    }
}

inline __m512i broadcast(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}

// R sequences, in vectors.
template <int R>
void multiply_few(const Matrix& m, const Grouped& x, int64_t k, int64_t first, int64_t last,
                  float* y, int64_t stride) {
    const int64_t groups = k / kGroup;
    const __m512i mask = _mm512_set1_epi8(15);
    for (int64_t n = first; n < last; n += W) {
        const uint8_t* w = outputs_of(m, n, groups);
        Floats total[R] = {};
        for (int64_t g = 0; g < groups; ++g, w += kGroupBytes) {
            __m512i h[R] = {}, l[R] = {};
            for (int i = 0; i < 4; ++i) {
                const __m512i pairs = _mm512_loadu_si512(w + 64 * i);
                const __m512i even = _mm512_and_si512(pairs, mask);
                const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask);
                for (int r = 0; r < R; ++r) {
                    const int64_t at = r * k + g * kGroup + 8 * i;
                    h[r] = _mm512_dpbusd_epi32(h[r], even, broadcast(x.high + at));
                    l[r] = _mm512_dpbusd_epi32(l[r], even, broadcast(x.low + at));
                    h[r] = _mm512_dpbusd_epi32(h[r], odd, broadcast(x.high + at + 4));
                    l[r] = _mm512_dpbusd_epi32(l[r], odd, broadcast(x.low + at + 4));
                }
            }
            const Floats scale = load_halves(w + 256), minimum = load_halves(w + 288);
            for (int r = 0; r < R; ++r) {
                const Ints number = (Ints)_mm512_add_epi32(_mm512_slli_epi32(h[r], 8), l[r]);
                total[r] += scale * __builtin_convertvector(number, Floats);
                total[r] += minimum * x.sums[r * groups + g];
            }
        }
        const Floats bias = m.bias ? load(m.bias + n) : Floats{};
        for (int r = 0; r < R; ++r)
            store(y + r * stride + n, total[r] * x.scale[r] + bias);
    }
}

// The weights of 16 outputs with a number in each byte, as tiles want them, and in float32 the
// scale and minimum of each group.
void unpack_outputs(const uint8_t* w, int64_t groups, uint8_t* numbers, float* factors) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int64_t g = 0; g < groups; ++g, w += kGroupBytes, numbers += 512, factors += 2 * W) {
        for (int i = 0; i < 4; ++i) {
            const __m512i pairs = _mm512_loadu_si512(w + 64 * i);
            _mm512_storeu_si512(numbers + 128 * i, _mm512_and_si512(pairs, mask));
            _mm512_storeu_si512(numbers + 128 * i + 64,
                                _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask));
        }
        store(factors, load_halves(w + 256));
        store(factors + W, load_halves(w + 288));
    }
}

// Sequences from b on, R at most, ``some`` of them stored. ``next`` is what will be unpacked next.
template <int R>
void multiply_block(const Grouped& x, int64_t b, int64_t some, int64_t k, const uint8_t* numbers,
                    const float* factors, const uint8_t* next, int32_t* products, Floats bias,
                    float* y, int64_t stride) {
    const int64_t groups = k / kGroup;
    const int8_t *high = x.high + b * k, *low = x.low + b * k;
    const float* sums = x.sums + b * groups;
    Floats total[R] = {};
    for (int64_t g = 0; g < groups; ++g, next += kGroupBytes) {
        for (int i = 0; i < kGroupBytes; i += 64) __builtin_prefetch(next + i);
        int32_t* of_group = products + g % 4 * 512;  // so that groups can overlap
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(6, numbers + g * 512, 64);
        _tile_loadd(4, high + g * kGroup, k);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(5, low + g * kGroup, k);
        _tile_dpbsud(1, 5, 6);
        _tile_stored(0, of_group, 64);
        _tile_stored(1, of_group + 256, 64);
        const Floats scale = load(factors + g * 2 * W), minimum = load(factors + g * 2 * W + W);
        for (int r = 0; r < R; ++r) {
            Ints h, l;
            std::memcpy(&h, of_group + r * W, sizeof h);
            std::memcpy(&l, of_group + 256 + r * W, sizeof l);
            total[r] += scale * __builtin_convertvector((h << 8) + l, Floats);
            total[r] += minimum * sums[r * groups + g];
        }
    }
    for (int r = 0; r < some; ++r) store(y + r * stride, total[r] * x.scale[b + r] + bias);
}

// Many sequences, sixteen at a time, in tiles. ``panel`` is memory for unpack_outputs,
// ``products`` for eight tiles.
void multiply_many(const Matrix& m, const Grouped& x, int64_t batch, int64_t k, int64_t first,
                   int64_t last, float* y, int64_t stride, float* panel, int32_t* products) {
    const int64_t groups = k / kGroup;
    uint8_t* numbers = reinterpret_cast<uint8_t*>(panel);
    float* factors = panel + k * W / sizeof(float);
    for (int64_t n = first; n < last; n += W) {
        unpack_outputs(outputs_of(m, n, groups), groups, numbers, factors);
        stored();
        const uint8_t* next = outputs_of(m, n + W, groups);
        const Floats bias = m.bias ? load(m.bias + n) : Floats{};
        for (int64_t b = 0; b < batch; b += 16) {
            const int64_t some = batch - b < 16 ? batch - b : 16;
            const auto block = some <= 4    ? multiply_block<4>
                               : some <= 8  ? multiply_block<8>
                               : some <= 12 ? multiply_block<12>
                                            : multiply_block<16>;
            block(x, b, some, k, numbers, factors, next, products, bias, y + b * stride + n,
                  stride);
        }
    }
}
#endif

}  // namespace
