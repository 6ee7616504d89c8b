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

Grouped grouped_in(float* memory, int64_t batch, int64_t k) {
    int8_t* high = reinterpret_cast<int8_t*>(memory);
    float* scale = reinterpret_cast<float*>(high + 2 * batch * k);
    return {high, high + batch * k, scale, scale + batch};
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

// R sequences, in vectors: exact but for the rounding of activations to sixteen bits.
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

// A group of 16 outputs as a tile of bfloat16, [16, 16, 2]: rows are pairs of inputs.
//
// A number that is put into the mantissa of 1.0, at any bit p that suits, makes 1 + number 2^(p -
// 23), and one fused product of that is the weight. From the lowest p used, 8, what this loses is
// 2^-9 of a step. The upper half of a float32 is a bfloat16 rounded towards zero, by half of its
// last bit on average: between 2^-9 and 2^-8 of the weight, which kUp makes up for.
inline __attribute__((always_inline)) void unpack_group(const uint8_t* w, bf16* tile) {
    constexpr float kUp = 1.0f + 0.0028f;
    const Floats scale = load_halves(w + 256) * kUp, minimum = load_halves(w + 288) * kUp;
    const Floats at8 = scale * 32768.0f, at12 = scale * 2048.0f, at16 = scale * 128.0f;
    const Floats from8 = minimum - at8, from12 = minimum - at12, from16 = minimum - at16;
    const __m512i one = _mm512_set1_epi32(0x3f800000);
    // Of each four bytes the upper two, moved to the lower two.
    const __m512i shuffle = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    constexpr __mmask64 kLower = 0x3333333333333333;
    const __m512i bits8 = _mm512_set1_epi32(15 << 8), bits12 = _mm512_set1_epi32(15 << 12);
    const __m512i bits16 = _mm512_set1_epi32(15 << 16);
    auto weight = [&](__m512i word, __m512i bits, Floats factor, Floats from) {
        const Floats v = (Floats)_mm512_ternarylogic_epi32(word, bits, one, 0xea);  // and, or
        return (__m512i)(v * factor + from);
    };
    auto put = [&](int row, __m512i even, __m512i odd) {
        _mm512_storeu_si512(tile + row * 32, _mm512_mask_shuffle_epi8(odd, kLower, even, shuffle));
    };
    for (int i = 0; i < 4; ++i) {
        const __m512i word = _mm512_loadu_si512(w + 64 * i);
        const __m512i left = _mm512_slli_epi32(word, 8), right = _mm512_srli_epi32(word, 12);
        put(4 * i, weight(left, bits8, at8, from8), weight(word, bits8, at8, from8));
        put(4 * i + 1, weight(word, bits16, at16, from16), weight(right, bits12, at12, from12));
        put(4 * i + 2, weight(left, bits12, at12, from12), weight(word, bits12, at12, from12));
        put(4 * i + 3, weight(right, bits8, at8, from8), weight(right, bits16, at16, from16));
    }
}

constexpr int64_t kAhead = 3;   // groups that are unpacked before they are multiplied
constexpr int64_t kKept = 8;    // unpacked ones that there is memory for
constexpr int64_t kTile = 512;  // numbers in one

// Adds up the products with SOME tiles of activations. Unpacking goes ahead of them: the two use
// different parts of the core, and a tile whose stores are still on the way would have to wait.
template <int SOME>
void sum_groups_in_tiles(const uint8_t* w, const char* rows, int64_t stride, int64_t groups,
                         bf16* tiles) {
    zero_sums<SOME>();
    for (int64_t g = 0; g < groups + kAhead; ++g) {
        if (g < groups) unpack_group(w + g * kGroupBytes, tiles + g % kKept * kTile);
        stored();
        const int64_t c = g - kAhead;
        if (c >= 0)
            add_tile_products<bf16, SOME>(
                reinterpret_cast<const char*>(tiles + c % kKept * kTile), rows + c * 64, stride);
    }
}

// Many sequences, in tiles: x are their activations in bfloat16, ``tiles`` memory for kKept.
void multiply_many(const Matrix& m, const Packed& x, int64_t batch, int64_t k, int64_t first,
                   int64_t last, float* y, int64_t stride, float* sums, bf16* tiles) {
    const int64_t groups = k / kGroup;
    for_tiles(x, first, last, sums, [&](auto some, int64_t n, const char* rows) {
        sum_groups_in_tiles<some.value>(outputs_of(m, n, groups), rows, x.stride, groups, tiles);
    }, [&](int64_t n) {
        const Floats bias = m.bias ? load(m.bias + n) : Floats{};
        for (int64_t b = 0; b < batch; ++b) store(y + b * stride + n, load(sums + b * W) + bias);
    });
}
#endif

}  // namespace
