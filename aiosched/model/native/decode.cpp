// One decode step of a dense llama, qwen2 or qwen3 model, from token ids to logits, in one call.
//
// Everything is float32 except where it is stored: weights as float32, bfloat16, int8 with a scale
// per row or 4 bits with a scale and a minimum for 32, keys and values as float32 or bfloat16. A step of few sequences is bound by the
// reading of the weights, so these are streamed once and multiplied with all sequences on the way:
// row by row as they lie, or with AMX as tiles that were laid out for it when they were loaded.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <optional>
#include <type_traits>

#include "attention.h"
#include "multiplier.h"
#include "records.h"
#include "team.h"
#include "vectors.h"

#if HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// The part of [0, n) that is this thread's, in multiples of 16.
Range part(int64_t n, int64_t thread, int64_t threads) {
    const int64_t tiles = n / W;
    return {tiles * thread / threads * W, tiles * (thread + 1) / threads * W};
}

// Floats of scratch memory: what all threads share, and what each has for itself.
struct Scratch {
    int64_t x, qkv, attended, gate_up, result;                // [batch, …], shared
    int64_t normed, scores, packed, sums;  // of each thread

    Scratch(const Model& m, int64_t batch, int64_t longest) {
        const int64_t wide = (m.heads + 2 * m.kv_heads) * m.dim, inner = m.heads * m.dim;
        int64_t k = m.hidden > inner ? m.hidden : inner;
        if (m.width > k) k = m.width;
        x = result = normed = batch * m.hidden;
        qkv = batch * (wide > m.width ? wide : m.width);  // also holds gated values
        attended = batch * inner;
        gate_up = batch * 2 * m.width;
        scores = 4 * in_whole_vectors(longest);
        packed = Multiplier<float>::operand_floats(batch, k);
        sums = Multiplier<float>::sum_floats(batch);
    }
    int64_t shared() const { return x + qkv + attended + gate_up + result; }
    int64_t own() const { return normed + scores + packed + sums; }
};

// With weights T in the layers and Head at the end.
template <class T, class Head>
void step(const Model& m, const Step& s, Team& team) {
    const int64_t batch = s.batch, hidden = m.hidden, width = m.width;
    const int64_t inner = m.heads * m.dim, wide = (m.heads + 2 * m.kv_heads) * m.dim;
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; ++b) longest = s.lengths[b] > longest ? s.lengths[b] : longest;
    const Scratch sizes(m, batch, longest);
    float* x = s.scratch;
    float* qkv = x + sizes.x;
    float* attended = qkv + sizes.qkv;
    float* gate_up = attended + sizes.attended;
    float* result = gate_up + sizes.gate_up;

    std::atomic<int64_t> next{0};  // of the tasks of attention, over all layers
    const int64_t tasks = batch * m.kv_heads, threads = team.size();

    team.run([&](int64_t thread) {
        float* normed = s.scratch + sizes.shared() + thread * sizes.own();
        float* scores = normed + sizes.normed;
        float* packed = scores + sizes.scores;
        const Multiplier<T> product{batch, m.tiled != 0, packed, packed + sizes.packed};
        const Multiplier<Head> of_head{batch, m.tiled != 0, packed, packed + sizes.packed};
#if HAS_AMX
        std::optional<Tiles> tiles;
        if (m.tiled) tiles.emplace(product.tiles());
#endif
        auto normalize = [&](const float* weight, const auto& before) {
            for (int64_t b = 0; b < batch; ++b)
                norm(x + b * hidden, weight, hidden, m.eps, normed + b * hidden);
            before.prepare(normed, hidden);
        };
        auto add = [&](Range columns, const float* y) {
            for (int64_t b = 0; b < batch; ++b)
                for (int64_t i = columns.first; i < columns.last; i += W)
                    store(x + b * hidden + i, load(x + b * hidden + i) + load(y + b * hidden + i));
        };
        for (int64_t b = thread; b < batch; b += threads)
            for (int64_t i = 0; i < hidden; i += W) {
                const int64_t at = s.ids[b] * hidden + i;
                const Floats v = m.kv_kind ? load(static_cast<const bf16*>(m.embedding) + at)
                                           : load(static_cast<const float*>(m.embedding) + at);
                store(x + b * hidden + i, v);
            }
        team.barrier();
        for (int64_t index = 0; index < m.layers; ++index) {
            const Layer& layer = m.layer[index];
            normalize(layer.attention_norm, product);
            product(layer.qkv, normed, hidden, part(wide, thread, threads), qkv, wide);
            team.barrier();
            // Each thread draws one number too many in each layer.
            const int64_t begin = index * (tasks + threads);
            for (int64_t task; (task = next.fetch_add(1) - begin) < tasks;) {
                const int64_t b = task / m.kv_heads, h = task % m.kv_heads;
                if (m.kv_kind) attend<bf16>(m, s, layer, index, b, h, qkv, attended, scores);
                else attend<float>(m, s, layer, index, b, h, qkv, attended, scores);
            }
            team.barrier();
            const Range mine = part(hidden, thread, threads);
            product.prepare(attended, inner);
            product(layer.output, attended, inner, mine, result, hidden);
            add(mine, result);
            team.barrier();
            normalize(layer.mlp_norm, product);
            const Range rows = part(width, thread, threads);
            product(layer.gate_up, normed, hidden, rows, gate_up, 2 * width);
            product(layer.gate_up, normed, hidden, {width + rows.first, width + rows.last}, gate_up,
                    2 * width);
            float* gated = qkv;  // free since attention
            for (int64_t b = 0; b < batch; ++b) {
                const float* row = gate_up + b * 2 * width;
                for (int64_t i = rows.first; i < rows.last; i += W) {
                    const Floats g = load(row + i), minus = g < Floats{} ? g : -g;
                    const Floats e = exponential(minus);  // of -|g|
                    const Floats gate = (g < Floats{} ? e : all(1.0f)) / (1.0f + e);
                    store(gated + b * width + i, g * gate * load(row + width + i));
                }
            }
            team.barrier();
            product.prepare(gated, width);
            product(layer.down, gated, width, mine, result, hidden);
            add(mine, result);
            team.barrier();
        }
#if HAS_AMX
        if (m.tiled) tiles.reset(), tiles.emplace(of_head.tiles());
#endif
        normalize(m.norm, of_head);
        of_head(m.head, normed, hidden, part(m.vocab, thread, threads), s.logits, m.vocab);
    });
}

}  // namespace

extern "C" {

// Whether tile products work here, and may be used: Linux gives their registers on request only.
int64_t aiosched_amx(void) {
#if HAS_AMX
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 0;
#endif
}

int64_t aiosched_scratch_floats(const Model* m, int64_t batch, int64_t longest, int64_t threads) {
    const Scratch sizes(*m, batch, longest);
    return sizes.shared() + threads * sizes.own();
}

// Null: there are no such threads.
void* aiosched_team(int64_t threads) {
    try {
        return new Team(threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void aiosched_team_end(void* team) { delete static_cast<Team*>(team); }

// -1, or the first sequence whose token or position the model does not have; then nothing is done.
int64_t aiosched_decode(const Model* m, const Step* s, void* of_threads) {
    for (int64_t b = 0; b < s->batch; ++b)
        if (s->ids[b] < 0 || s->ids[b] >= m->vocab || s->positions[b] < 0 ||
            s->positions[b] >= m->positions)
            return b;
    Team& team = *static_cast<Team*>(of_threads);
    if (m->weight_kind == 0) step<float, float>(*m, *s, team);
    else if (m->weight_kind == 1) step<bf16, bf16>(*m, *s, team);
    else if (m->weight_kind == 2) step<int8_t, int8_t>(*m, *s, team);
    else step<int4, int8_t>(*m, *s, team);
    return -1;
}

}  // extern "C"
