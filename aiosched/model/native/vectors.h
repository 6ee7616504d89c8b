// Vectors of 16 floats, in the words that GCC and Clang share; narrower CPUs split them.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int W = 16;  // floats in a vector
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct bf16 { uint16_t bits; };

inline int64_t in_whole_vectors(int64_t floats) { return (floats + W - 1) / W * W; }

inline Floats load(const float* p) { Floats v; std::memcpy(&v, p, sizeof v); return v; }
inline Floats load(const bf16* p) {
    Halves h;
    std::memcpy(&h, p, sizeof h);
    return (Floats)(__builtin_convertvector(h, Words) << 16);
}
inline Floats load(const int8_t* p) {
#if defined(__AVX512F__)
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b));
#elif defined(__AVX2__)
    Floats v;
    for (int half = 0; half < 2; ++half) {
        const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * half));
        const __m256 part = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
        std::memcpy(reinterpret_cast<char*>(&v) + 32 * half, &part, 32);
    }
    return v;
#else
    Floats v;
    for (int i = 0; i < W; ++i) v[i] = p[i];
    return v;
#endif
}
// Of 16-bit IEEE floats.
inline Floats load_halves(const void* p) {
    Halves h;
    std::memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)h);
#else
    const Words u = __builtin_convertvector(h, Words);
    // The exponent's bias is 112 lower; a product with 2^112 mends that for tiny numbers too.
    const Floats magnitude = (Floats)((u & 0x7fff) << 13) * 5192296858534827628530496329220096.0f;
    const Words finite = (Words)magnitude, beyond = finite | 0x7f800000;
    return (Floats)(((u & 0x7c00) == 0x7c00 ? beyond : finite) | (u & 0x8000) << 16);
#endif
}
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, Floats v) {
    Words u = (Words)v;  // to the nearest, ties to even
    const Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    u = v == v ? rounded : Words{} + 0x7fc0;
    Halves h = __builtin_convertvector(u, Halves);
    std::memcpy(p, &h, sizeof h);
}
inline Floats all(float x) { return Floats{} + x; }
inline float sum(Floats v) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight e[2]; std::memcpy(e, &v, sizeof v);
    Eight a = e[0] + e[1];
    Four f[2]; std::memcpy(f, &a, sizeof a);
    Four b = f[0] + f[1];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// e^x to about 2 ulp for x <= 0; e^-87 below -87. NaN stays NaN.
inline Floats exponential(Floats x) {
    x = x < all(-87.0f) ? all(-87.0f) : x;
    Floats t = x * 1.44269504f;
    Floats k = (t + 12582912.0f) - 12582912.0f;  // rounds to an integer
    Floats r = x - k * 0.693359375f + k * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints power = (__builtin_convertvector(k, Ints) + 127) << 23;
    return p * (Floats)power;
}

}  // namespace
