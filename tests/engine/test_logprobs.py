"""Log-probabilities are those of the model's own distribution, one for each token, at any depth."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from engines import DEPTHS, greedy, prompt, settle, small_engine
from sampling_reference import SignedModel, answer, log_softmax, logits_of, retract_every

from aiosched import Completion, SamplingParams
from aiosched.device.sim import SimDevice
from aiosched.scheduler.results import ResultProcessor
from aiosched.testing.hash_model import HashModel


def check(logprob: Any, before: list[int], token: int, count: int, model: HashModel) -> None:
    """``logprob`` is that of ``token`` after ``before``, with ``count`` alternatives."""
    expected = log_softmax(logits_of(model, before))
    assert logprob.token_id == token
    assert logprob.logprob == pytest.approx(expected[token], abs=1e-5)
    best = np.argsort(-expected, kind="stable")[:count].tolist()
    assert list(logprob.top) == best  # the likeliest first, the lower id of equals
    assert list(logprob.top.values()) == pytest.approx(expected[best], abs=1e-5)


# Of the answer ------------------------------------------------------------------------------------

ASKS = [
    greedy(12, logprobs=0),
    greedy(12, logprobs=5),
    greedy(12, logprobs=20, logit_bias={5: 100}),
    greedy(12, logprobs=1, repetition_penalty=1.8, frequency_penalty=1.0),
    SamplingParams(temperature=2.0, top_k=9, seed=4, max_tokens=12, logprobs=3),
    greedy(12, logprobs=2, allowed_token_ids=[3, 4, 5]),
    greedy(12, logprobs=2, bad_words=[[9]], min_tokens=4),
    greedy(12),
]


@pytest.mark.parametrize("retracting", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
def test_they_are_taken_before_penalties_bias_filters_and_temperature(vrun, depth, retracting):
    """C55: with retractions too there are as many as tokens, and the same."""
    model = SignedModel(logit_scale=1 / 128)
    prompts = [prompt(i, 4 + 5 * i) for i in range(len(ASKS))]

    async def main() -> list[Completion]:
        async with small_engine(model, overlap_depth=depth, prefill_chunk_tokens=16) as engine:
            if retracting:
                retract_every(engine, 2)
            answers = await asyncio.gather(*map(engine.complete, prompts, ASKS))
            assert (engine.stats().retractions > 5) is retracting
            return answers

    for p, params, completion in zip(prompts, ASKS, vrun(main()), strict=True):
        tokens = list(completion.token_ids)
        assert tokens == answer(model, p, params).tokens
        if params.logprobs is None:
            assert completion.logprobs is None
            continue
        assert len(completion.logprobs) == len(tokens)
        for i, logprob in enumerate(completion.logprobs):
            check(logprob, p + tokens[:i], tokens[i], params.logprobs, model)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stream_carries_what_the_completion_does(vrun, depth):
    params = greedy(9, logprobs=3, prompt_logprobs=2, stream_interval=4)

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            stream = engine.generate(prompt(1, 6), params)
            tokens = [token async for token in stream]
            completion = await engine.complete(prompt(1, 6), params)
            assert [(t.id, t.logprob, t.top_logprobs) for t in tokens] == [
                (p.token_id, p.logprob, p.top) for p in completion.logprobs
            ]
            assert tokens[0].prompt_logprobs == completion.prompt_logprobs
            assert all(t.prompt_logprobs is None for t in tokens[1:])
            assert (await stream).choices == completion.choices
            bare = [token async for token in engine.generate(prompt(1, 6), greedy(3))]
            assert all(t.logprob is t.top_logprobs is t.prompt_logprobs is None for t in bare)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_rule_and_rows_run_too_many_leave_no_logprob_behind(vrun, depth):
    """As many log-probabilities as tokens, whatever was in flight when the answer ended."""
    p = prompt(3, 6)
    stop = answer(HashModel(), p, greedy(5)).tokens[4]

    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            completion = await engine.complete(p, greedy(50, logprobs=2, stop_token_ids=[stop]))
            assert completion.finish_reason == "stop"
            assert [x.token_id for x in completion.logprobs] == list(completion.token_ids)
            stream = engine.generate(p, greedy(None, logprobs=2))
            async for token in stream:
                if token.index == 3:
                    break
            stream.abort()
            await settle(engine)
            cut = (await stream).choices[0]
            assert [x.token_id for x in cut.logprobs] == list(cut.token_ids)

    vrun(main())


# Of the prompt ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [64, 16, 7])
@pytest.mark.parametrize("depth", DEPTHS)
def test_prompt_logprobs_do_not_depend_on_the_chunks(vrun, depth, chunk):
    """C65: 39 values for a prompt of 40, beside others, and though its KV is in the cache."""
    model, p = HashModel(), prompt(8, 40)
    params = greedy(3, prompt_logprobs=4)

    async def main():
        async with small_engine(
            model, overlap_depth=depth, prefill_chunk_tokens=chunk, page_size=16
        ) as engine:
            first = await engine.complete(p, params)
            assert len(first.prompt_logprobs) == 39
            for i, logprob in enumerate(first.prompt_logprobs, 1):
                check(logprob, p[:i], p[i], 4, model)
            retract_every(engine, 3)
            others = [engine.complete(prompt(i, 9), greedy(9, prompt_logprobs=i)) for i in range(3)]
            again, *rest = await asyncio.gather(engine.complete(p, params), *others)
            assert again.prompt_logprobs == first.prompt_logprobs
            for i, other in enumerate(rest):
                assert len(other.prompt_logprobs) == 8
                assert all(len(logprob.top) == i for logprob in other.prompt_logprobs)
                check(other.prompt_logprobs[3], prompt(i, 9)[:4], prompt(i, 9)[4], i, model)

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_of_one_token_has_none_and_choices_share_them(vrun, depth):
    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            assert (await engine.complete([5], greedy(2, prompt_logprobs=1))).prompt_logprobs == ()
            shared = await engine.complete(prompt(1, 9), greedy(2, prompt_logprobs=1, n=3))
            assert len(shared.prompt_logprobs) == 8

    vrun(main())


# Overlap ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_host_work_stays_hidden_with_logprobs(vrun, clock, monkeypatch, depth, logprobs):
    """C66, as far as time is simulated: neither a launch waits for log-probabilities, nor a copy.

    What making them costs the host is real time, and belongs to the benchmarks.
    """
    device = SimDevice(forward_time=0.010, copy_time=0.002)
    process = ResultProcessor.process_batch_result
    spent = 0.0

    def slowly(*args: Any) -> None:
        nonlocal spent
        process(*args)
        clock.spend(0.005)
        spent += 0.005

    monkeypatch.setattr(ResultProcessor, "process_batch_result", slowly)

    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            began = clock.time()
            asks = [(prompt(i, 6), greedy(30, logprobs=logprobs)) for i in range(8)]
            await asyncio.gather(*(engine.complete(*ask) for ask in asks))
            took, stats = clock.time() - began, engine.stats()
            hidden = 1 - (took - stats.device_seconds) / spent
            assert hidden >= 0.9
            assert stats.idle_gap_seconds == pytest.approx(0.0)
            assert stats.steps == 30 and not stats.not_overlapped

    vrun(main())
