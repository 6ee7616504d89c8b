// What Python hands over, field by field as in structs.py.

#pragma once

#include <cstdint>

extern "C" {

struct Matrix { const void* weight; const float* scale; const float* bias; };

struct Layer {
    const float *attention_norm, *query_norm, *key_norm, *mlp_norm;
    Matrix qkv, output, gate_up, down;
};

struct Model {
    int64_t layers, hidden, width, heads, kv_heads, dim, vocab, positions;
    int64_t weight_kind;     // of layers: 0 float32, 1 bfloat16, 2 int8, 3 int4 and the head int8
    int64_t kv_kind;         // 0 float32, 1 bfloat16: of KV and of the embedding
    int64_t tiled;           // weights are tiles, for AMX; else rows
    double eps;
    const void* embedding;
    const float *norm, *cosine, *sine;  // tables [positions, dim], the sine signed
    const Layer* layer;
    Matrix head;
};

struct Step {
    int64_t batch, page_size, table_stride;
    const int64_t *ids, *positions, *slots;
    const int32_t *tables, *lengths;
    void *const *keys, *const *values;  // of each layer [slots, kv_heads, dim]
    float* scratch;                     // aiosched_scratch_floats(...) of them
    float* logits;                      // [batch, vocab]
};

}  // extern "C"
