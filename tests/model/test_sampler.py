"""The sampler against numpy: every parameter, alone and beside rows that use others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from aiosched.model.draws import uniform_draws
from aiosched.model.inputs import SamplingInputs, TrackedReset
from aiosched.model.sampler import SampleOutput, Sampler
from aiosched.model.staging import stage_sampling
from aiosched.params import MAX_BAD_WORD_TOKENS

INF = math.inf


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def reset(row: int, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> TrackedReset:
    return TrackedReset(row, np.array(prompt, np.int32), np.array(output, np.int32))


def run(
    sampler: Sampler, logits: np.ndarray | torch.Tensor, rows: Sequence[int], **fields: object
) -> SampleOutput:
    logits = torch.as_tensor(logits)
    inputs = stage_sampling(SamplingInputs(**fields), logits.shape[1], torch.from_numpy)
    return sampler.sample(logits, torch.tensor(rows, dtype=torch.int64), inputs)


def choose(logits: np.ndarray | torch.Tensor, **fields: object) -> list[int]:
    """Tokens for rows 1, 2 … of a new sampler."""
    m, vocab = logits.shape
    return run(Sampler(vocab, m, "cpu"), logits, range(1, m + 1), **fields).tokens.tolist()


def random_logits(m: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (m, vocab)).astype(np.float32)


# Greedy, and logits that are no numbers


def test_greedy_takes_the_largest() -> None:
    logits = random_logits(9, 1000)
    assert choose(logits) == logits.argmax(1).tolist()


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = np.zeros((2, 300), np.float32)
    logits[0, [250, 17, 90]] = 5.0
    assert choose(logits) == [17, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_may_have_any_precision(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0], [0.5, 0.25, 0.125]], dtype=dtype)
    assert choose(logits) == [1, 0]
    drawn = choose(logits, temperature=f32(1e-4, 1.0), uniform=f32(0.9, 0.0))
    assert drawn == [1, 0]


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_value_that_is_no_number_gives_minus_one(
    bad: float, temperature: float
) -> None:
    logits = random_logits(3, 50)
    clean = choose(logits, temperature=f32(*[temperature] * 3), uniform=f32(0.3, 0.3, 0.3))
    logits[1, 49] = bad
    got = choose(logits, temperature=f32(*[temperature] * 3), uniform=f32(0.3, 0.3, 0.3))
    assert got == [clean[0], -1, clean[2]]


def test_a_row_of_minus_infinities_gives_minus_one() -> None:
    logits = random_logits(2, 50)
    logits[0] = -INF
    assert choose(logits) == [-1, int(logits[1].argmax())]
    assert choose(logits, temperature=f32(1, 1), uniform=f32(0.5, 0.5), top_p=f32(0.5, 1))[0] == -1


def test_bans_and_filters_do_not_hide_a_nan() -> None:
    logits = random_logits(1, 50)
    logits[0, 7] = math.nan
    assert choose(logits, allowed=((0, ids(1, 2)),)) == [-1]
    assert choose(logits, bias_index=ids(0), bias_ids=ids(7), bias_values=f32(-INF)) == [-1]


def test_a_row_with_everything_banned_gives_minus_one_and_its_neighbour_a_token() -> None:
    logits = random_logits(2, 3)
    banned = {"bias_index": ids(0, 0, 0), "bias_ids": ids(0, 1, 2), "bias_values": f32(*[-INF] * 3)}
    assert choose(logits, **banned) == [-1, int(logits[1].argmax())]


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.from_numpy(random_logits(2, 20))
    before = logits.clone()
    choose(
        logits,
        bias_index=ids(0), bias_ids=ids(3), bias_values=f32(9),
        temperature=f32(0.5, 0.0), uniform=f32(0.4, 0.0), top_p=f32(0.5, 1), min_p=f32(0.1, 0),
    )  # fmt: skip
    assert torch.equal(logits, before)


def test_a_step_in_which_nobody_samples_gives_no_tokens() -> None:
    assert run(Sampler(20, 4, "cpu"), np.zeros((0, 20), np.float32), []).tokens.tolist() == []


# Bias, allowed ids, bad words


def test_a_bias_of_plus_and_minus_100_decides() -> None:
    logits = random_logits(3, 100)
    best = logits.argmax(1)
    got = choose(
        logits,
        bias_index=ids(0, 1), bias_ids=ids(int(best[0]), 42), bias_values=f32(-100, 100),
    )  # fmt: skip
    assert got == [int(np.argsort(logits[0])[-2]), 42, int(best[2])]


def test_entries_for_one_id_add_up() -> None:
    logits = np.zeros((1, 4), np.float32)
    logits[0, 3] = 2.5
    double = {"bias_index": ids(0, 0), "bias_ids": ids(1, 1)}
    assert choose(logits, **double, bias_values=f32(1, 1)) == [3]
    assert choose(logits, **double, bias_values=f32(2, 1)) == [1]


def test_only_allowed_ids_are_chosen() -> None:
    logits = random_logits(3, 100)
    among = ids(5, 50, 95)
    assert choose(logits, allowed=((1, among),)) == [
        int(logits[0].argmax()),
        int(among[logits[1, among].argmax()]),
        int(logits[2].argmax()),
    ]
    rows = np.repeat(logits[:1], 500, 0)
    uniform = (np.arange(500, dtype=np.float32) + 0.5) / 500
    drawn = choose(
        rows,
        allowed=tuple((row, among) for row in range(500)),
        temperature=np.full(500, 5, np.float32),
        uniform=uniform,
    )
    assert set(drawn) == {5, 50, 95}


def test_a_bad_word_is_banned_as_soon_as_its_beginning_was_sampled() -> None:
    """The first token of the word is known on the device alone when the second is sampled."""
    sampler = Sampler(20, 4, "cpu")
    logits = np.zeros((2, 20), np.float32)
    logits[:, 7], logits[:, 8] = 2, 1
    words = {"tracked": ids(0), "bad_words": ((0, ((7, 7), (7, 8, 7))),)}
    taken = [run(sampler, logits, [3, 1], resets=(reset(3),), **words).tokens.tolist()]
    taken += [run(sampler, logits, [3, 1], **words).tokens.tolist() for _ in range(4)]
    assert [first for first, _ in taken] == [7, 8, 8, 7, 8]
    assert [second for _, second in taken] == [7] * 5


def test_a_bad_word_may_begin_in_the_output_before_a_reset_but_not_in_the_prompt() -> None:
    logits = np.zeros((1, 20), np.float32)
    logits[0, 7] = 1
    words = {"tracked": ids(0), "bad_words": ((0, ((5, 6, 7),)),)}
    assert choose(logits, resets=(reset(1, [1], [4, 5, 6]),), **words) == [0]
    assert choose(logits, resets=(reset(1, [4, 5, 6]),), **words) == [7]
    assert choose(logits, resets=(reset(1, [5], [6]),), **words) == [7]


def test_the_longest_bad_word_is_still_found() -> None:
    word = tuple(range(1, MAX_BAD_WORD_TOKENS + 1))
    logits = np.zeros((1, 40), np.float32)
    logits[0, word[-1]] = 1
    words = {"tracked": ids(0), "bad_words": ((0, (word,)),)}
    assert choose(logits, resets=(reset(1, (), (9, *word[:-1])),), **words) == [0]
    other = (word[0] + 1, *word[1:-1])
    assert choose(logits, resets=(reset(1, (), (9, *other)),), **words) == [word[-1]]


@pytest.mark.parametrize("word", [(3,), tuple(range(MAX_BAD_WORD_TOKENS + 1))])
def test_a_bad_word_of_a_wrong_length_is_refused(word: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"bad word of {len(word)} tokens"):
        stage_sampling(SamplingInputs(bad_words=((0, (word,)),)), 40, torch.from_numpy)


# Penalties


class PenaltyOracle:
    """One row's penalties, one token at a time, in numpy."""

    def __init__(self, prompt: Sequence[int], repetition: float, presence: float, frequency: float):
        self.prompt, self.output = set(prompt), list[int]()
        self.factors = [np.float32(x) for x in (repetition, presence, frequency)]

    def choose(self, logits: np.ndarray) -> int:
        repetition, presence, frequency = self.factors
        logits = logits.astype(np.float32).copy()
        for token in self.prompt | set(self.output):
            value = logits[token]
            logits[token] = value / repetition if value > 0 else value * repetition
        for token in set(self.output):
            logits[token] -= frequency * np.float32(self.output.count(token))
            logits[token] -= presence
        self.output.append(int(logits.argmax()))
        return self.output[-1]


PENALTIES = {
    "repetition": (1.3, 0.0, 0.0),
    "presence": (1.0, 0.7, 0.0),
    "frequency": (1.0, 0.0, 0.4),
    "a reward": (0.9, -0.1, -0.01),
    "all": (1.2, 0.3, 0.2),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_follow_every_token_without_lag(name: str) -> None:
    """Logits lie close together, so one missing or extra count turns the choice (C58)."""
    rng = np.random.default_rng(5)
    vocab, prompt = 12, [0, 3, 3, 7]
    repetition, presence, frequency = PENALTIES[name]
    oracle = PenaltyOracle(prompt, *PENALTIES[name])
    sampler = Sampler(vocab, 8, "cpu")
    resets: tuple[TrackedReset, ...] = (reset(5, prompt),)
    for _ in range(60):
        row = rng.normal(0, 0.4, vocab).astype(np.float32)
        got = run(
            sampler, row[None], [5], resets=resets, tracked=ids(0),
            repetition=f32(repetition), presence=f32(presence), frequency=f32(frequency),
        )  # fmt: skip
        assert got.tokens.item() == oracle.choose(row)
        resets = ()
    assert len(set(oracle.output)) > 1


def test_only_repetition_counts_the_prompt() -> None:
    logits = f32(1.0, 0.9, -2.0)[None]
    kinds = {"repetition": f32(2.0), "presence": f32(1.0), "frequency": f32(1.0)}
    taken = {
        name: choose(logits, resets=(reset(1, [0]),), tracked=ids(0), **{name: value})
        for name, value in kinds.items()
    }
    assert taken == {"repetition": [1], "presence": [0], "frequency": [0]}


def test_a_reset_after_a_retraction_continues_as_if_nothing_had_happened() -> None:
    rng = np.random.default_rng(6)
    steps = rng.normal(0, 0.4, (30, 10)).astype(np.float32)
    fields = {"tracked": ids(0), "frequency": f32(0.3), "repetition": f32(1.1)}

    def answer(retract_at: int | None) -> list[int]:
        sampler, row, output = Sampler(10, 9, "cpu"), 2, list[int]()
        resets: tuple[TrackedReset, ...] = (reset(row, [1, 2]),)
        for step, logits in enumerate(steps):
            if step == retract_at:
                row = 7
                resets = (reset(row, [1, 2], output),)
            output.append(run(sampler, logits[None], [row], resets=resets, **fields).tokens.item())
            resets = ()
        return output

    assert answer(11) == answer(None)


def test_a_new_owner_of_a_row_does_not_inherit_counts() -> None:
    sampler = Sampler(3, 4, "cpu")
    logits = f32(1.0, 0.5, 0.0)[None]
    fields = {"tracked": ids(0), "presence": f32(0.8)}
    assert run(sampler, logits, [2], resets=(reset(2),), **fields).tokens.tolist() == [0]
    assert run(sampler, logits, [2], **fields).tokens.tolist() == [1]
    assert run(sampler, logits, [2], resets=(reset(2),), **fields).tokens.tolist() == [0]


def test_many_rows_are_tracked_apart() -> None:
    sampler = Sampler(4, 40, "cpu")
    logits = np.tile(f32(1.0, 0.9, 0.8, 0.0), (40, 1))
    rows = list(range(40, 0, -1))
    every = np.arange(40)
    presence = np.full(40, 0.15, np.float32)
    for row in rows:  # slots grow while other rows are in use
        run(sampler, logits[:1], [row], resets=(reset(row, (), [row % 3]),), tracked=ids(0))
    # Each has seen its first choice (0) and the token of its reset.
    taken = run(sampler, logits, rows, tracked=every, presence=presence).tokens.tolist()
    seen = [{0, row % 3} for row in rows]
    oracle = [
        int(np.argmax([x - 0.15 * (token in one) for token, x in enumerate(logits[0])]))
        for one in seen
    ]
    assert taken == oracle


def test_rows_that_join_and_leave_do_not_change_a_neighbour() -> None:
    """C59, to the bit: a row with a frequency penalty comes and goes."""
    steps = random_logits(20, 60, seed=9).reshape(20, 1, 60)
    uniform = uniform_draws(np.full(20, 3, np.uint64), np.arange(20))
    alone = [
        choose(step, temperature=f32(0.8), uniform=uniform[i : i + 1])
        for i, step in enumerate(steps)
    ]
    sampler = Sampler(60, 4, "cpu")
    for i, step in enumerate(steps):
        joined = 5 <= i < 15
        m = 2 if joined else 1
        fields: dict[str, object] = {
            "temperature": f32(0.8, 0.0)[:m],
            "uniform": np.array([uniform[i], 0], np.float32)[:m],
        }
        if joined:
            fields |= {"tracked": ids(1), "frequency": f32(0, 2), "repetition": f32(1, 1.5)}
            fields["resets"] = (reset(2, [1]),) if i == 5 else ()
        got = run(sampler, np.repeat(step, m, 0), [1, 2][:m], **fields).tokens.tolist()
        assert got[:1] == alone[i]


def test_penalties_need_tracked_rows() -> None:
    with pytest.raises(ValueError, match="must be tracked"):
        stage_sampling(SamplingInputs(presence=f32(1)), 10, torch.from_numpy)


def test_rows_that_were_never_reset_share_nothing() -> None:
    sampler = Sampler(3, 4, "cpu")
    fields = {"tracked": ids(0), "presence": f32(5)}
    logits = f32(1, 0, 0)[None]
    assert [run(sampler, logits, [row], **fields).tokens.item() for row in (1, 2, 1)] == [0, 0, 0]


# Drawing

LOGITS = np.log(np.random.default_rng(1).dirichlet(np.full(24, 0.7))).astype(np.float32)


def kept_probabilities(
    logits: np.ndarray, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> np.ndarray:
    """The distribution that has to be drawn from, in float64 and by the definitions."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    if top_k:
        p[p < np.sort(p)[-min(top_k, len(p))]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


FILTERS: dict[str, dict[str, float]] = {
    "plain": {},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 0.01},
    "top_k": {"top_k": 3},
    "wide top_k": {"top_k": 10},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05},
}


def fields_for(m: int, temperature: float, filters: dict[str, float]) -> dict[str, np.ndarray]:
    types = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    fields = {name: np.full(m, value, types[name]) for name, value in filters.items()}
    return fields | {"temperature": np.full(m, temperature, np.float32)}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name: str, temperature: float) -> None:
    """C68: 20,000 draws, chi-square, and nothing outside the set."""
    m = 20_000
    uniform = uniform_draws(np.full(m, 11, np.uint64), np.arange(m))
    fields = fields_for(m, temperature, FILTERS[name])
    drawn = choose(np.tile(LOGITS, (m, 1)), **fields, uniform=uniform)
    expected = kept_probabilities(LOGITS, temperature, **FILTERS[name]) * m  # type: ignore[arg-type]
    counts = np.bincount(drawn, minlength=len(LOGITS))
    inside = expected > 0
    assert counts[~inside].sum() == 0
    if inside.sum() > 1:
        assert stats.chisquare(*pool_rare(counts[inside], expected[inside])).pvalue > 1e-4


def pool_rare(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells expected fewer than 5 times, put together: chi-square needs that."""
    rare = expected < 5
    if not rare.any():
        return counts, expected
    rest = np.append(counts[~rare], counts[rare].sum())
    return rest, np.append(expected[~rare], expected[rare].sum())


def test_a_draw_is_the_inverse_of_the_distribution_function() -> None:
    p = kept_probabilities(LOGITS)
    uniform = ((np.arange(4000) + 0.5) / 4000).astype(np.float32)
    drawn = choose(np.tile(LOGITS, (4000, 1)), **fields_for(4000, 1, {}), uniform=uniform)
    assert drawn == np.searchsorted(np.cumsum(p), uniform.astype(np.float64), "right").tolist()


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    logits = np.full((1, 50_000), -INF, np.float32)
    logits[0, [7, 30_000]] = 0
    for filters in FILTERS.values():
        drawn = choose(logits, **fields_for(1, 1, filters), uniform=f32(u))
        assert drawn == [7] if u < 0.5 or filters == {"top_p": 0.01} else drawn == [30_000]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    logits = random_logits(1, 16)
    uniform = ((np.arange(64) + 0.5) / 64).astype(np.float32)
    tile = np.tile(logits, (64, 1))
    cold = choose(tile, **fields_for(64, 1e-30, {}), uniform=uniform)
    assert set(cold) == {int(logits.argmax())}
    hot = choose(tile, **fields_for(64, 1e30, {}), uniform=uniform)
    assert np.bincount(hot, minlength=16).tolist() == [4] * 16


def test_top_k_keeps_what_equals_the_kth() -> None:
    logits = np.tile(f32(3, 1, 2, 2, 2, 0), (600, 1))
    uniform = ((np.arange(600) + 0.5) / 600).astype(np.float32)
    assert set(choose(logits, **fields_for(600, 1, {"top_k": 2}), uniform=uniform)) == {0, 2, 3, 4}
    assert set(choose(logits, **fields_for(600, 1, {"top_k": 1}), uniform=uniform)) == {0}
    assert len(set(choose(logits, **fields_for(600, 1, {"top_k": 99}), uniform=uniform))) == 6


@pytest.mark.parametrize("vocab", [10, 1000])
def test_top_p_keeps_the_smallest_set_and_of_equals_the_lower_ids(vocab: int) -> None:
    logits = np.full((600, vocab), -INF, np.float32)
    logits[:, :10] = 1.0
    uniform = ((np.arange(600) + 0.5) / 600).astype(np.float32)
    for filters in ({"top_p": 0.45}, {"top_p": 0.45, "top_k": 2}):
        # top_k 2 keeps all ten equals, also where only two values were put in order.
        assert set(choose(logits, **fields_for(600, 1, filters), uniform=uniform)) == set(range(5))


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_top_p_finds_its_edge_in_a_large_vocabulary(spread: float) -> None:
    """Narrow nuclei are found among the leading values, wide ones need a sort: same set."""
    logits = np.random.default_rng(4).normal(0, spread, 5000).astype(np.float32)
    kept = kept_probabilities(logits, top_p=0.7)
    edge_up, edge_down = np.flatnonzero(kept)[[0, -1]]
    uniform = uniform_draws(np.full(300, 1, np.uint64), np.arange(300))
    uniform[:2] = 0, 1 - 2**-24
    drawn = choose(np.tile(logits, (300, 1)), **fields_for(300, 1, {"top_p": 0.7}), uniform=uniform)
    assert drawn[:2] == [edge_up, edge_down]
    assert (kept[drawn] > 0).all()
    oracle = np.searchsorted(np.cumsum(kept), uniform.astype(np.float64), "right")
    assert np.mean(drawn == oracle) > 0.99  # float32 and float64 differ at the seams


def test_top_p_zero_and_min_p_one_leave_the_likeliest() -> None:
    logits = random_logits(1, 50)
    for filters in ({"top_p": 0.0}, {"min_p": 1.0}):
        for u in (0.0, 0.999):
            drawn = choose(logits, **fields_for(1, 1, filters), uniform=f32(u))
            assert drawn == [int(logits.argmax())]


def test_min_p_measures_against_the_likeliest_after_temperature() -> None:
    logits = np.tile(np.log(f32(0.6, 0.3, 0.1)), (300, 1))
    uniform = ((np.arange(300) + 0.5) / 300).astype(np.float32)
    at = {t: set(choose(logits, **fields_for(300, t, {"min_p": 0.3}), uniform=uniform))
          for t in (0.5, 1.0, 2.0)}  # fmt: skip
    assert at == {0.5: {0}, 1.0: {0, 1}, 2.0: {0, 1, 2}}


def test_rows_with_a_temperature_need_a_draw() -> None:
    with pytest.raises(ValueError, match="uniform draw"):
        stage_sampling(SamplingInputs(temperature=f32(1)), 10, torch.from_numpy)


# Independence of the batch


def mixed_batch(m: int, vocab: int) -> tuple[np.ndarray, SamplingInputs]:
    rng = np.random.default_rng(m * vocab)
    # Coarse logits are often equal, as those of a bfloat16 model are.
    logits = (rng.normal(0, 3, (m, vocab)) * 4).round().astype(np.float32) / 4
    pick = rng.choice
    tracked = np.arange(0, m, 3)
    inputs = SamplingInputs(
        temperature=pick(f32(0, 0.7, 1, 1.5), m),
        top_k=pick(np.array([0, 1, 5, 40], np.int32), m),
        top_p=pick(f32(1, 1, 0.9, 0.3), m),
        min_p=pick(f32(0, 0, 0.05), m),
        uniform=uniform_draws(np.arange(m, dtype=np.uint64), np.full(m, 8)),
        repetition=pick(f32(1, 1.2), m),
        presence=pick(f32(0, 0.5), m),
        frequency=pick(f32(0, 0.3), m),
        resets=tuple(
            reset(int(i) + 1, rng.integers(0, vocab, 30), rng.integers(0, vocab, 20))
            for i in tracked
        ),
        tracked=tracked,
        bias_index=rng.integers(0, m, 2 * m),
        bias_ids=rng.integers(0, vocab, 2 * m),
        bias_values=rng.normal(0, 2, 2 * m).astype(np.float32),
        allowed=((2, rng.integers(0, vocab, 20)),),
        bad_words=((0, ((3, 4),)),),
        logprob_index=np.arange(m),
        num_top=7,
    )
    return logits, inputs


def part_of(inputs: SamplingInputs, rows: list[int]) -> SamplingInputs:
    """The same parameters for some of the rows, in another order."""
    new = {old: i for i, old in enumerate(rows)}
    names = ["temperature", "top_k", "top_p", "min_p", "uniform"]
    names += ["repetition", "presence", "frequency"]
    bias = [i for i, row in enumerate(inputs.bias_index.tolist()) if row in new]
    return replace(
        inputs,
        **{name: getattr(inputs, name)[rows] for name in names},
        resets=tuple(one for one in inputs.resets if one.row - 1 in new),
        tracked=ids(*(new[row] for row in inputs.tracked.tolist() if row in new)),
        bias_index=ids(*(new[inputs.bias_index[i]] for i in bias)),
        bias_ids=inputs.bias_ids[bias],
        bias_values=inputs.bias_values[bias],
        allowed=tuple((new[row], among) for row, among in inputs.allowed if row in new),
        bad_words=tuple((new[row], words) for row, words in inputs.bad_words if row in new),
        logprob_index=np.arange(len(rows)),
    )


def outcome(
    logits: np.ndarray, rows: list[int], inputs: SamplingInputs
) -> list[tuple[object, ...]]:
    vocab = logits.shape[1]
    staged = stage_sampling(part_of(inputs, rows), vocab, torch.from_numpy)
    sampler = Sampler(vocab, len(logits), "cpu")
    output = sampler.sample(torch.from_numpy(logits[rows]), torch.tensor(rows) + 1, staged)
    assert output.logprobs is not None
    columns = (output.tokens, output.logprobs.chosen, output.logprobs.top_ids, output.logprobs.top)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("vocab", [50, 997, 4096, 20_000])
def test_a_row_is_the_same_to_the_bit_in_every_batch(vocab: int) -> None:
    m = 24
    logits, inputs = mixed_batch(m, vocab)
    whole = outcome(logits, list(range(m)), inputs)
    assert len({token for token, *_ in whole}) > 5
    backwards = outcome(logits, list(range(m))[::-1], inputs)[::-1]
    assert whole == backwards
    for row in range(m):
        assert outcome(logits, [row], inputs) == [whole[row]]
        other = (row + 7) % m
        assert outcome(logits, [other, row], inputs) == [whole[other], whole[row]]


# Log-probabilities


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    logits = random_logits(3, 40)
    output = run(
        Sampler(40, 3, "cpu"), logits, [1, 2, 3],
        bias_index=ids(2), bias_ids=ids(4), bias_values=f32(100),
        logprob_index=ids(0, 2), num_top=5, temperature=f32(0, 1, 0), uniform=f32(0, 0.2, 0),
    )  # fmt: skip
    got = output.logprobs
    assert got is not None
    wide = logits.astype(np.float64)
    oracle = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    taken = output.tokens.numpy()[[0, 2]]
    assert taken[1] == 4
    np.testing.assert_allclose(got.chosen.numpy(), oracle[[0, 2], taken], atol=1e-5)
    best = np.argsort(-oracle[[0, 2]], axis=1)[:, :5]
    assert got.top_ids.tolist() == best.tolist()
    np.testing.assert_allclose(
        got.top.numpy(), np.take_along_axis(oracle[[0, 2]], best, 1), atol=1e-5
    )
    assert (got.chosen.dtype, got.top_ids.dtype, got.top.dtype) == (
        torch.float32, torch.int32, torch.float32,
    )  # fmt: skip


def test_equal_alternatives_come_in_order_of_ids() -> None:
    logits = np.zeros((1, 5000), np.float32)
    logits[0, 4999] = 1
    output = run(Sampler(5000, 1, "cpu"), logits, [1], logprob_index=ids(0), num_top=4)
    assert output.logprobs is not None
    assert output.logprobs.top_ids.tolist() == [[4999, 0, 1, 2]]


def test_no_alternatives_wanted_and_more_than_there_are() -> None:
    logits = random_logits(1, 6)
    for num_top, columns in ((0, 0), (20, 6)):
        output = run(Sampler(6, 1, "cpu"), logits, [1], logprob_index=ids(0), num_top=num_top)
        assert output.logprobs is not None
        assert output.logprobs.top.shape == (1, columns)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls through which a tensor's value gets to the host, each of which stalls CUDA."""
    logits, inputs = mixed_batch(12, 64)
    staged = stage_sampling(inputs, 64, torch.from_numpy)
    sampler, rows = Sampler(64, 12, "cpu"), torch.arange(1, 13)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a value of the device was read on the host")

    for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    output = sampler.sample(torch.from_numpy(logits), rows, staged)
    monkeypatch.undo()
    assert len(output.tokens) == 12
