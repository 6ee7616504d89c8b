// Attention of sequences that decode, over the pages of their keys and values.

#pragma once

#include <cmath>
#include <cstdint>

#include "records.h"
#include "vectors.h"

namespace {

void norm(const float* x, const float* weight, int64_t size, float eps, float* y) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += W) { Floats v = load(x + i); squares += v * v; }
    const float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += W) store(y + i, load(x + i) * factor * load(weight + i));
}

// Norm and rotation of one head, in place.
void rotate(float* head, const float* weight, const float* cosine, const float* sine, int64_t dim,
            float eps) {
    if (weight) norm(head, weight, dim, eps, head);
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosine[i] + b * sine[i];
        head[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

// Scores of G query heads [G, dim] with every key of a sequence, ``padded`` apart.
//
// Pages lie anywhere, which no prefetcher of the CPU foresees: the keys of the next page and the
// values of this one are asked for here, before they are needed.
template <class T, int G>
void score(const Step& s, const int32_t* table, int64_t length, const T* keys, const T* values,
           int64_t row, int64_t dim, const float* queries, float* scores, int64_t padded) {
    for (int64_t start = 0, page = 0; start < length; start += s.page_size, ++page) {
        const int64_t here = table[page] * s.page_size * row;
        const T* k = keys + here;
        const T* v = values + here;
        const T* ahead =
            start + s.page_size < length ? keys + table[page + 1] * s.page_size * row : k;
        const int64_t count = length - start < s.page_size ? length - start : s.page_size;
        for (int64_t t = 0; t < count; ++t, k += row, v += row, ahead += row) {
            for (int64_t i = 0; i < dim; i += 64 / sizeof(T)) {
                __builtin_prefetch(ahead + i);
                __builtin_prefetch(v + i);
            }
            Floats acc[G] = {};
            for (int64_t i = 0; i < dim; i += W) {
                const Floats key = load(k + i);
                for (int g = 0; g < G; ++g) acc[g] += load(queries + g * dim + i) * key;
            }
            for (int g = 0; g < G; ++g) scores[g * padded + start + t] = sum(acc[g]);
        }
    }
}

// Values of a sequence under the weights of G query heads, ``padded`` apart.
template <class T, int G>
void mix(const Step& s, const int32_t* table, int64_t length, const T* values, int64_t row,
         int64_t dim, const float* weights, int64_t padded, float* out) {
    for (int64_t i = 0; i < dim; i += W) {
        Floats acc[G] = {};
        for (int64_t start = 0, page = 0; start < length; start += s.page_size, ++page) {
            const T* v = values + table[page] * s.page_size * row + i;
            const int64_t count = length - start < s.page_size ? length - start : s.page_size;
            for (int64_t t = 0; t < count; ++t) {
                const Floats value = load(v + t * row);
                for (int g = 0; g < G; ++g) acc[g] += weights[g * padded + start + t] * value;
            }
        }
        for (int g = 0; g < G; ++g) store(out + g * dim + i, acc[g]);
    }
}

// Scores to weights, in place; what lies between length and padded becomes 0.
void softmax(float* p, int64_t length, int64_t padded) {
    for (int64_t t = length; t < padded; ++t) p[t] = p[0];
    Floats high = load(p);
    for (int64_t t = W; t < padded; t += W) {
        const Floats v = load(p + t);
        high = v > high ? v : high;
    }
    float peak = high[0];
    for (int i = 1; i < W; ++i) peak = high[i] > peak ? high[i] : peak;
    for (int64_t t = 0; t < padded; t += W) store(p + t, exponential(load(p + t) - peak));
    for (int64_t t = length; t < padded; ++t) p[t] = 0.0f;
    Floats total = {};
    for (int64_t t = 0; t < padded; t += W) total += load(p + t);
    const float inverse = 1.0f / sum(total);
    for (int64_t t = 0; t < padded; t += W) store(p + t, load(p + t) * inverse);
}

// One KV head of one sequence: writes its new key and value, then attends with its query heads.
template <class T>
void attend(const Model& m, const Step& s, const Layer& layer, int64_t index, int64_t b, int64_t h,
            float* qkv, float* attended, float* scores) {
    const int64_t dim = m.dim, share = m.heads / m.kv_heads, row = m.kv_heads * dim;
    const int64_t length = s.lengths[b], padded = (length + W - 1) / W * W;
    const float *cosine = m.cosine + s.positions[b] * dim, *sine = m.sine + s.positions[b] * dim;
    const float eps = m.eps, scale = 1.0f / std::sqrt((float)dim);
    float* of_row = qkv + b * (m.heads + 2 * m.kv_heads) * dim;
    float* queries = of_row + h * share * dim;
    float* key = of_row + (m.heads + h) * dim;
    const float* value = of_row + (m.heads + m.kv_heads + h) * dim;
    for (int64_t g = 0; g < share; ++g) {
        rotate(queries + g * dim, layer.query_norm, cosine, sine, dim, eps);
        for (int64_t i = 0; i < dim; ++i) queries[g * dim + i] *= scale;
    }
    rotate(key, layer.key_norm, cosine, sine, dim, eps);
    T* keys = static_cast<T*>(s.keys[index]) + h * dim;
    T* values = static_cast<T*>(s.values[index]) + h * dim;
    for (int64_t i = 0; i < dim; i += W) {
        store(keys + s.slots[b] * row + i, load(key + i));
        store(values + s.slots[b] * row + i, load(value + i));
    }
    const int32_t* table = s.tables + b * s.table_stride;
    float* out = attended + b * m.heads * dim + h * share * dim;
    for (int64_t g = 0; g < share;) {
        const float* q = queries + g * dim;
        float* p = scores;
        const int64_t some = share - g < 4 ? share - g : 4;
        if (some == 4) score<T, 4>(s, table, length, keys, values, row, dim, q, p, padded);
        else if (some == 3) score<T, 3>(s, table, length, keys, values, row, dim, q, p, padded);
        else if (some == 2) score<T, 2>(s, table, length, keys, values, row, dim, q, p, padded);
        else score<T, 1>(s, table, length, keys, values, row, dim, q, p, padded);
        for (int64_t i = 0; i < some; ++i) softmax(p + i * padded, length, padded);
        float* o = out + g * dim;
        if (some == 4) mix<T, 4>(s, table, length, values, row, dim, p, padded, o);
        else if (some == 3) mix<T, 3>(s, table, length, values, row, dim, p, padded, o);
        else if (some == 2) mix<T, 2>(s, table, length, values, row, dim, p, padded, o);
        else mix<T, 1>(s, table, length, values, row, dim, p, padded, o);
        g += some;
    }
}

}  // namespace
