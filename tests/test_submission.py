"""RequestFactory: what depends on the model and the engine, and the requests that come of it."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest

from aiosched import InvalidRequest, SamplingParams
from aiosched.answer import Answer
from aiosched.scheduler.inbox import Inbox
from aiosched.submission import RequestFactory

EOS = 3


class Words:
    """Spells a word by its letters; with a blank before it, as one token."""

    def encode(self, text, *, add_special_tokens=True):
        assert not add_special_tokens
        return [40 + ord(text[1]) % 20] if text[0] == " " else [ord(c) % 40 for c in text]

    def __getattr__(self, name):
        raise AssertionError(f"a request without stop strings needs no {name}")


def factory(tokenizer=None, **settings):
    defaults = {
        "vocab_size": 64,
        "eos_token_ids": (EOS,),
        "max_model_len": 32,
        "max_unread_tokens": 8,
        "priority_aging": 10.0,
        "priorities": True,
    }
    return RequestFactory(tokenizer=tokenizer, **(defaults | settings))


@pytest.fixture
def make():
    """Requests of a prompt of 20 tokens, arrived at 100.0."""
    loop = asyncio.new_event_loop()
    answer = Answer("job", Inbox(loop), n=1, unread_limit=8)

    def maker(maker=None, *, priority=0, answer=answer, **params):
        prompt = np.arange(20, dtype=np.int32)
        maker, params = maker or factory(), SamplingParams(**params)
        return maker.make(
            answer,
            prompt,
            params,
            maker.check(params, priority, None),
            priority=priority,
            now=100.0,
            deadline_at=None,
        )

    maker.answer = answer
    yield maker
    loop.close()


def refused(params=None, *, priority=0, deadline=None, tokenizer=None, **settings):
    with pytest.raises(InvalidRequest) as caught:
        factory(tokenizer, **settings).check(params or SamplingParams(), priority, deadline)
    return caught.value


@pytest.mark.parametrize("priority", [0, 1, -1, 10**6, -(10**6)])
def test_a_priority_is_an_integer_within_a_million(priority):
    factory().check(SamplingParams(), priority, None)


@pytest.mark.parametrize("priority", [10**6 + 1, -(10**6) - 1, 1.0, True, "1", None])
def test_any_other_priority_is_refused(priority):
    error = refused(priority=priority)
    assert (error.field, error.value) == ("priority", priority)


def test_with_the_policy_fifo_priorities_are_refused_and_not_ignored():
    factory(priorities=False).check(SamplingParams(), 0, None)
    assert "fifo" in str(refused(priority=1, priorities=False))


@pytest.mark.parametrize("deadline", [None, 0, 0.0, 1.5, 999_999_999])
def test_a_deadline_is_seconds_from_now(deadline):
    factory().check(SamplingParams(), 0, deadline)


@pytest.mark.parametrize("deadline", [-1, -1e-9, 1e9, float("nan"), float("inf"), True, "5"])
def test_any_other_deadline_is_refused(deadline):
    assert refused(deadline=deadline).field == "deadline"


@pytest.mark.parametrize(
    ("field", "good", "wrong"),
    [
        ("logit_bias", {63: 1.0}, {64: 1.0}),
        ("stop_token_ids", [63], [5, 64]),
        ("allowed_token_ids", [63], [64]),
        ("bad_words", [[63, 5]], [[5, 64]]),
    ],
)
def test_token_ids_are_held_to_the_vocabulary(field, good, wrong):
    allowed = {} if field == "allowed_token_ids" else {"allowed_token_ids": [1]}
    factory().check(SamplingParams(**{field: good}, **allowed), 0, None)
    error = refused(SamplingParams(**{field: wrong}, **allowed))
    assert (error.field, error.value) == (field, 64)


@pytest.mark.parametrize(("field", "value"), [("stop", "x"), ("bad_words", ["x"])])
def test_text_in_the_params_needs_a_tokenizer(field, value):
    error = refused(SamplingParams(**{field: value}))
    assert error.field == field
    assert "no tokenizer" in str(error)


def test_a_combination_that_leaves_no_token_is_refused():
    banned = SamplingParams(allowed_token_ids=[5, 6], bad_words=[[5], [6]])
    assert refused(banned).field == "allowed_token_ids"
    only_ends = SamplingParams(allowed_token_ids=[EOS, 5], stop_token_ids=[5], min_tokens=1)
    assert refused(only_ends).field == "min_tokens"
    factory().check(SamplingParams(allowed_token_ids=[EOS, 5], stop_token_ids=[5]), 0, None)


@pytest.mark.parametrize(("max_tokens", "expected"), [(5, 5), (12, 12), (13, 12), (None, 12)])
def test_an_answer_ends_where_the_models_length_does(make, max_tokens, expected):
    (request,) = make(max_tokens=max_tokens)
    assert request.max_new == expected


def test_the_choices_share_prompt_family_and_reader_and_differ_in_their_seeds(make):
    requests = make(n=4, seed=7)
    assert [r.choice for r in requests] == [0, 1, 2, 3]
    assert len({r.seed for r in requests}) == 4
    assert {r.family for r in requests} == {requests[0].family}
    assert {r.reader for r in requests} == {make.answer.reader}
    assert requests[0].family.leader is requests[0]
    assert [r.seed for r in make(n=4, seed=7)] == [r.seed for r in requests]


def test_without_a_seed_each_request_gets_its_own(make):
    assert len({make()[0].seed for _ in range(50)}) == 50


def test_end_tokens_are_the_models_and_those_asked_for(make):
    assert make()[0].stop_ids == {EOS}
    assert make(stop_token_ids=[9])[0].stop_ids == {EOS, 9}
    assert make(stop_token_ids=[9], ignore_eos=True)[0].stop_ids == {9}


def test_the_order_is_by_arrival_and_priority_with_ageing(make):
    one = factory()
    first, urgent, second = (make(one, priority=p)[0] for p in (0, 3, 0))
    assert urgent.key < first.key < second.key
    assert urgent.key[0] == 100.0 - 3 * 10.0


def test_a_reader_that_wants_the_whole_is_never_paused(make):
    assert make()[0].unread_limit == 8
    whole = Answer("whole", make.answer.inbox, n=1, unread_limit=8)
    whole.read_without_limit()
    assert make(answer=whole)[0].unread_limit > 2**31


def test_a_banned_word_of_one_token_is_a_bias_and_a_longer_one_is_tracked(make):
    (request,) = make(bad_words=[[5], [6, 7], [6, 7]], logit_bias={5: 10, 9: 2})
    assert dict(zip(request.bias_ids, request.bias_values, strict=True)) == {
        5: float("-inf"),
        9: 2,
    }
    assert request.bad_words == ((6, 7),)


def test_a_banned_word_is_banned_in_both_its_spellings(make):
    (request,) = make(factory(Words()), bad_words=["ab"])
    assert request.bad_words == ((ord("a") % 40, ord("b") % 40),)
    assert request.bias_ids == (40 + ord("a") % 20,)


def test_a_word_of_too_many_tokens_is_refused(make):
    with pytest.raises(InvalidRequest, match="at most 16 tokens"):
        make(factory(Words()), bad_words=["a" * 17])


def test_a_combination_of_many_long_words_is_checked_in_an_instant():
    """1,024 words over two ids that may be chosen, each beginning without a word in it."""
    beginnings = [tuple(5 + (i >> bit & 1) for bit in range(14)) for i in range(512)]
    words = [[*beginning, last] for beginning in beginnings for last in (5, 6)]
    open_ended = SamplingParams(allowed_token_ids=[5, 6], bad_words=[*words[2:], [7, 5]])
    dead = SamplingParams(allowed_token_ids=[5, 6], bad_words=words)
    begun = time.thread_time()
    assert refused(dead).field == "allowed_token_ids"
    factory().check(SamplingParams(allowed_token_ids=[5, 6, 7], bad_words=words), 0, None)
    assert refused(open_ended).field == "allowed_token_ids"
    assert time.thread_time() - begun < 2.0  # and not the years of trying all answers


def test_words_are_spelled_once_for_a_request(make):
    tokenizer, spelled = Words(), []
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **kw: spelled.append(text) or encode(text, **kw)
    make(factory(tokenizer), bad_words=["ab"], n=2)
    assert spelled == ["ab", " ab"]


def test_serial_numbers_order_requests_of_the_same_instant(make):
    one = factory()
    keys = [make(one)[0].key for _ in range(5)]
    assert all(a < b for a, b in itertools.pairwise(keys))
