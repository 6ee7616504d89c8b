"""TokenStream: what its reader may do, and what becomes of the request then."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect

import pytest
from engines import (
    DEPTHS,
    PieceTokenizer,
    assert_baseline,
    greedy,
    prompt,
    settle,
    small_engine,
    tokens_of,
)

from aiosched import AioschedError, InvalidRequest
from aiosched.device.sim import SimDevice
from aiosched.testing.cancel import count_suspensions
from aiosched.testing.hash_model import HashModel, oracle

PROMPT = prompt(1, 9)
ANSWER = oracle(PROMPT, 20)


@pytest.fixture
def device():
    return SimDevice(forward_time=0.1)


async def gone(engine):
    """The one request of this engine was aborted and has left nothing behind."""
    await asyncio.sleep(0.5)  # a step in flight
    await settle(engine)
    assert engine.stats().finished == {"abort": 1}
    assert_baseline(engine)


def test_iterating_gives_the_tokens_and_then_ends_for_good(run):
    async def main():
        async with small_engine() as engine:
            stream = engine.generate(PROMPT, greedy(20))
            tokens = [token async for token in stream]
            assert [token.id for token in tokens] == ANSWER
            assert [token.index for token in tokens] == list(range(20))
            assert [token.finish_reason for token in tokens] == [None] * 19 + ["length"]
            assert stream.finish_reason == "length"
            for _ in range(2):
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)

    run(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_leaving_the_block_aborts_what_is_not_finished(vrun, device, depth):
    async def main():
        async with small_engine(device=device, overlap_depth=depth) as engine:
            async with engine.generate(PROMPT, greedy(20)) as stream:
                async for token in stream:
                    if token.index == 2:
                        break
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await gone(engine)

    vrun(main())


def test_leaving_the_block_by_an_exception_passes_it_on(vrun, device):
    async def main():
        async with small_engine(device=device) as engine:
            with pytest.raises(ZeroDivisionError):
                async with engine.generate(PROMPT, greedy(20)):
                    raise ZeroDivisionError
            await gone(engine)

    vrun(main())


def test_leaving_the_block_after_the_end_changes_nothing(vrun):
    async def main():
        async with small_engine() as engine:
            async with engine.generate(PROMPT, greedy(20)) as stream:
                assert await tokens_of(stream) == ANSWER
            assert stream.finish_reason == "length"
            assert engine.stats().finished == {"length": 1}

    vrun(main())


def test_closing_is_aborting_and_may_be_repeated(vrun, device):
    async def main():
        async with small_engine(device=device) as engine:
            async with contextlib.aclosing(engine.generate(PROMPT, greedy(20))) as stream:
                await anext(stream)
            await stream.aclose()
            stream.abort()
            await gone(engine)

    vrun(main())


def test_dropping_the_stream_aborts_at_once(vrun, device):
    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            await anext(stream)
            steps = engine.stats().steps
            del stream
            gc.collect()
            await gone(engine)
            assert engine.stats().steps <= steps + 2  # what was in flight

    vrun(main())


@pytest.mark.parametrize("read_first", [0, 3, 20])
def test_awaiting_gives_the_whole_also_after_some_of_it_was_read(vrun, read_first):
    async def main():
        async with small_engine() as engine:
            stream = engine.generate(PROMPT, greedy(20), request_id="job")
            for _ in range(read_first):
                await anext(stream)
            whole = await stream
            assert (list(whole.token_ids), whole.finish_reason) == (ANSWER, "length")
            assert whole.request_id == stream.request_id == "job"
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, 20)
            assert await stream == whole

    vrun(main())


def test_text_that_was_held_back_is_in_every_whole(vrun):
    """The last token's text begins a stop string that never comes."""

    async def main():
        model = HashModel()
        model.tokenizer = PieceTokenizer({ANSWER[4]: "z"})
        async with small_engine(model) as engine:
            stream = engine.generate(PROMPT, greedy(5, stop="zzz"))
            text = "".join([token.text async for token in stream])
            assert text.endswith("z")
            assert (await stream).text == (await stream).text == text

    vrun(main())


def test_an_aborted_stream_ends_its_reader_and_gives_what_there_was(vrun, device):
    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            reader = asyncio.ensure_future(tokens_of(stream))
            await asyncio.sleep(0.45)
            stream.abort()
            assert await reader == ANSWER[:4]
            whole = await stream
            assert whole.finish_reason == "abort"
            assert list(whole.token_ids) == ANSWER[: len(whole.token_ids)]

    vrun(main())


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_choices_come_in_one_stream_and_say_which_they_are(vrun, depth):
    async def main():
        async with small_engine(overlap_depth=depth) as engine:
            stream = engine.generate(PROMPT, greedy(20, n=3))
            tokens = [token async for token in stream]
            for choice in range(3):
                own = [token for token in tokens if token.choice == choice]
                assert [token.id for token in own] == ANSWER
                assert [token.index for token in own] == list(range(20))
                assert [t.finish_reason for t in own] == [None] * 19 + ["length"]
            whole = await stream
            assert [choice.index for choice in whole.choices] == [0, 1, 2]
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, 60)

    vrun(main())


def test_no_choice_is_starved_by_another(vrun, device):
    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20, n=2))
            await asyncio.sleep(1.0)  # several tokens of each are there
            choices = [(await anext(stream)).choice for _ in range(6)]
            assert choices.count(0) == choices.count(1) == 3

    vrun(main())


def test_a_second_reader_is_refused_and_the_first_goes_on(vrun, device):
    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            first = asyncio.ensure_future(tokens_of(stream))
            await asyncio.sleep(0.05)
            with pytest.raises(AioschedError, match="another task"):
                await anext(stream)
            with pytest.raises(AioschedError, match="another task"):
                await stream
            assert await first == ANSWER

    vrun(main())


@pytest.mark.parametrize("first", ["token", "whole"])
@pytest.mark.parametrize("second", ["token", "whole"])
def test_a_read_that_was_cancelled_keeps_others_out_until_it_has_run(vrun, device, first, second):
    """Or its cancellation could reach the other, or the other's end be that of its grace."""

    def read(stream, what):
        async def main():
            return await (anext(stream) if what == "token" else stream)

        return main()

    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            task = asyncio.create_task(read(stream, first))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(AioschedError, match="another task"):
                await read(stream, second)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await tokens_of(stream) == ANSWER

    vrun(main())


def test_a_token_that_another_read_took_is_not_given_again(vrun, device):
    """Two may not read at once, but only waiting is refused: the token was there for the second."""

    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            for _ in range(2):
                await anext(stream)
            first = anext(stream)
            first.send(None)  # it waits
            await asyncio.sleep(0.15)
            assert (await anext(stream)).index == 2
            first.send(None)  # and is woken: there is nothing for it yet
            await asyncio.sleep(0.15)
            with pytest.raises(StopIteration) as end:
                first.send(None)
            assert end.value.value.index == 3
            assert await tokens_of(stream) == ANSWER[4:]

    vrun(main())


def test_a_read_is_a_coroutine_that_a_task_can_run(vrun, device):
    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            for expected in ANSWER:
                reading = anext(stream)
                assert asyncio.iscoroutine(reading)
                assert inspect.iscoroutine(reading)
                assert (await asyncio.create_task(reading)).id == expected
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    vrun(main())


@pytest.mark.parametrize("tokens_before", [0, 2])
def test_closing_a_read_that_waits_is_silent_and_loses_nothing(vrun, device, tokens_before):
    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            seen = [(await anext(stream)).id for _ in range(tokens_before)]
            reading = anext(stream)
            reading.send(None)
            reading.close()
            assert seen + await tokens_of(stream) == ANSWER

    vrun(main())


def test_closing_a_read_after_its_loop_has_ended_is_silent():
    """As the garbage collector does with a task that was left behind."""
    left = []

    async def main():
        async with small_engine(device=SimDevice()) as engine:
            await engine.generate(PROMPT, greedy(20))
            other = engine.generate(PROMPT, greedy(20))
            left.append(anext(other))
            left[0].send(None)

    asyncio.run(main())
    left[0].close()


def test_an_abort_while_the_reader_is_away_leaves_no_token_to_read(vrun, device):
    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20))
            for _ in range(2):
                await anext(stream)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            await asyncio.sleep(0.15)
            stream.abort()
            assert await tokens_of(stream) == []

    vrun(main())


@pytest.mark.parametrize("interval", [1, 4, 7, 100])
def test_the_reader_is_woken_every_stream_interval_tokens(vrun, device, interval):
    """The first token comes at once, the end at once, and none is late or lost."""

    async def main():
        async with small_engine(device=device) as engine:
            stream = engine.generate(PROMPT, greedy(20, stream_interval=interval))

            async def reader():
                assert await tokens_of(stream) == ANSWER

            wakes = await count_suspensions(reader())
            assert wakes == 1 + -(-19 // interval)

    vrun(main())


def test_an_id_is_free_again_when_its_request_has_ended(vrun, device):
    async def main():
        async with small_engine(device=device) as engine:
            first = engine.generate(PROMPT, greedy(20), request_id="job")
            with pytest.raises(InvalidRequest, match="in use") as caught:
                engine.generate(PROMPT, greedy(20), request_id="job")
            assert caught.value.field == "request_id"
            assert await tokens_of(first) == ANSWER
            second = engine.generate(PROMPT, greedy(20), request_id="job")
            await anext(second)
            assert engine.abort("job")
            third = engine.generate(PROMPT, greedy(20), request_id="job")
            assert not first._answer.aborted
            assert await tokens_of(third) == ANSWER
            assert not engine.abort("job")

    vrun(main())


def test_without_an_id_each_request_gets_its_own(vrun):
    async def main():
        async with small_engine() as engine:
            streams = [engine.generate(PROMPT, greedy(2)) for _ in range(20)]
            assert len({stream.request_id for stream in streams}) == 20

    vrun(main())


@pytest.mark.parametrize("wrong", ["", "x" * 257, 5, b"job"])
def test_an_id_is_a_string_of_1_to_256_characters(vrun, wrong):
    async def main():
        async with small_engine() as engine:
            with pytest.raises(InvalidRequest, match="1 to 256"):
                engine.generate(PROMPT, greedy(2), request_id=wrong)
            assert engine.stats().waiting == 0

    vrun(main())
