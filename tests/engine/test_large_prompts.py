"""Prompts that are tokenized in a thread: until then there is an answer, but no request."""

from __future__ import annotations

import threading

import pytest
from conftest import Run
from engines import PieceTokenizer, assert_baseline, greedy, small_engine

from aiosched import FinishReason, QueueFull, RequestFailed
from aiosched.testing import HashModel
from aiosched.text.tokenizer import LARGE_TEXT_CHARS

LARGE = "a" * LARGE_TEXT_CHARS


class HeldTokenizer(PieceTokenizer):
    """Tokenizes a large text to one token, when the test opens the gate."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__({1: "a"})
        self.gate = threading.Event()
        self._error = error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert self.gate.wait(20)
        if self._error is not None:
            raise self._error
        return [1]


def speaking(tokenizer: PieceTokenizer) -> HashModel:
    model = HashModel()
    model.tokenizer = tokenizer  # type: ignore[assignment]
    return model


def test_an_error_of_a_plugged_tokenizer_reaches_the_reader(run: Run) -> None:
    async def main() -> None:
        tokenizer = HeldTokenizer(KeyError("piece"))
        tokenizer.gate.set()
        async with small_engine(speaking(tokenizer)) as engine:
            with pytest.raises(RequestFailed) as caught:
                await engine.complete(LARGE, greedy())
            assert isinstance(caught.value.__cause__, KeyError)
            assert len((await engine.complete([1, 2], greedy(3))).token_ids) == 3

    run(main())


def test_large_prompts_that_were_dropped_take_no_place_in_the_queue(run: Run) -> None:
    async def main() -> None:
        tokenizer = HeldTokenizer()
        async with small_engine(
            speaking(tokenizer), max_running_requests=1, max_queued_requests=2
        ) as engine:
            kept = [engine.generate(LARGE, greedy(2)) for _ in range(3)]
            with pytest.raises(QueueFull):
                engine.generate(LARGE, greedy(2))
            kept.clear()
            answer = await engine.complete([1, 2], greedy(2))
            assert answer.finish_reason is FinishReason.LENGTH
            tokenizer.gate.set()
            assert_baseline(engine)

    run(main())


def test_choices_of_a_large_prompt_count_in_the_queue_before_they_exist(run: Run) -> None:
    async def main() -> None:
        tokenizer = HeldTokenizer()
        async with small_engine(
            speaking(tokenizer), max_running_requests=1, max_queued_requests=3
        ) as engine:
            stream = engine.generate(LARGE, greedy(2, n=4))
            with pytest.raises(QueueFull):
                engine.generate([1], greedy(2))
            tokenizer.gate.set()
            assert len((await stream).choices) == 4

    run(main())


def test_an_answer_cut_while_its_prompt_is_tokenized_has_one_last_event(run: Run) -> None:
    async def main() -> None:
        tokenizer = HeldTokenizer()
        async with small_engine(speaking(tokenizer)) as engine:
            stream = engine.generate(LARGE, greedy(), request_id="long")
            assert engine.abort("long")
            events = [token async for token in stream]
            assert [(e.id, e.text, e.finish_reason) for e in events] == [
                (None, "", FinishReason.ABORT)
            ]
            assert not engine.abort("long")
            tokenizer.gate.set()

    run(main())
