"""What a request gives back: tokens, completions, usage and reasons."""

from __future__ import annotations

import json

import msgspec
import pytest

from aiosched import (
    Choice,
    Completion,
    DeadlineExceeded,
    FinishReason,
    Logprob,
    RequestAborted,
    Token,
    Usage,
)


def choice(reason=FinishReason.STOP, index=0, text="abc"):
    return Choice(index=index, text=text, token_ids=(1, 2), finish_reason=reason)


def completion(*choices):
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    return Completion(request_id="job-1", choices=choices, usage=usage)


def test_a_reason_is_its_string():
    assert FinishReason.LENGTH == "length"
    assert [str(reason) for reason in FinishReason] == [
        "stop",
        "length",
        "deadline",
        "abort",
        "error",
    ]
    assert json.dumps({"finish_reason": FinishReason.STOP}) == '{"finish_reason": "stop"}'


def test_total_tokens_is_prompt_and_completion_and_counts_cached_ones_once():
    assert Usage(prompt_tokens=20, completion_tokens=7, cached_tokens=16).total_tokens == 27


def test_the_plain_attributes_are_those_of_the_first_choice():
    logprobs = (Logprob(token_id=1, logprob=-0.5, top={1: -0.5}),)
    first = Choice(
        index=0, text="a", token_ids=(1,), finish_reason=FinishReason.STOP, logprobs=logprobs
    )
    whole = completion(first, choice(FinishReason.LENGTH, 1, "other"))
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("a", (1,), "stop")
    assert whole.logprobs is logprobs


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_whole_answer_passes_raise_for_finish(reason):
    whole = completion(choice(reason))
    assert whole.raise_for_finish() is whole


@pytest.mark.parametrize(
    ("reason", "error"),
    [(FinishReason.DEADLINE, DeadlineExceeded), (FinishReason.ABORT, RequestAborted)],
)
def test_an_answer_that_was_cut_raises_and_names_the_request(reason, error):
    with pytest.raises(error, match="job-1"):
        completion(choice(reason)).raise_for_finish()
    with pytest.raises(error, match="job-1"):
        completion(choice(), choice(reason, 1)).raise_for_finish()


def test_a_token_cannot_be_changed_and_compares_by_value():
    token = Token(id=5, text="x", index=0)
    assert token == Token(id=5, text="x", index=0, choice=0)
    with pytest.raises(AttributeError):
        token.text = "y"


def test_everything_that_comes_back_can_be_written_as_json():
    whole = completion(choice())
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Completion) == whole
    token = Token(id=5, text="é", index=3, finish_reason=FinishReason.LENGTH)
    assert msgspec.json.decode(msgspec.json.encode(token), type=Token) == token
