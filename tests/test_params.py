"""SamplingParams: what each field takes, and how it refuses the rest."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from aiosched import InvalidRequest, SamplingParams
from aiosched.params import MAX_CHOICES, MAX_LOGPROBS, MAX_SEED, MAX_STOP_STRINGS

NOT_NUMBERS = [None, True, "1", math.nan, math.inf, -math.inf, [1], 10**400]
NOT_INTEGERS = [True, "1", 1.5, 1.0, [1]]
NOT_IDS = [5, "5", [-1], [1.0], [True], ["5"], {5: 1}]

# field: (values that are taken, values that are refused)
FIELDS = {
    "temperature": ([0, 0.0, 0.5, 1, 100.0], [-0.1, 100.5, *NOT_NUMBERS]),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.01, *NOT_NUMBERS]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, None, *NOT_INTEGERS]),
    "min_p": ([0, 0.0, 1.0], [-0.1, 1.01, *NOT_NUMBERS]),
    "repetition_penalty": ([0.01, 1, 100.0], [0, 0.009, -1, 100.5, *NOT_NUMBERS]),
    "presence_penalty": ([-2, -2.0, 0, 2.0], [-2.1, 2.1, *NOT_NUMBERS]),
    "frequency_penalty": ([-2, -2.0, 0, 2.0], [-2.1, 2.1, *NOT_NUMBERS]),
    "logit_bias": (
        [None, {}, {0: -100}, {5: 100.0, 6: 0}],
        [5, [(5, 1.0)], {-1: 0}, {"5": 1}, {True: 1}, {5: 100.1}, {5: math.nan}, {5: "1"}],
    ),
    "seed": ([None, 0, MAX_SEED], [-1, MAX_SEED + 1, *NOT_INTEGERS]),
    "stop": (
        ["x", (), [], ["a", "bc"], ("a",), ["x"] * MAX_STOP_STRINGS],
        [None, 5, [""], ["a", 5], ["x"] * (MAX_STOP_STRINGS + 1), {"a"}, b"x", ""],
    ),
    "stop_token_ids": ([(), [0], (5, 6), {5}, range(3)], [None, *NOT_IDS]),
    "include_stop": ([True, False], [None, 0, 1, "yes"]),
    "min_tokens": ([0, 1, 256], [-1, 257, None, *NOT_INTEGERS]),
    "max_tokens": ([None, 1, 2**31 - 1], [0, -1, 2**31, *NOT_INTEGERS]),
    "ignore_eos": ([True, False], [None, 0, 1, "yes"]),
    "logprobs": ([None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1, *NOT_INTEGERS]),
    "prompt_logprobs": ([None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1, *NOT_INTEGERS]),
    "n": ([1, MAX_CHOICES], [0, -1, MAX_CHOICES + 1, None, *NOT_INTEGERS]),
    "allowed_token_ids": ([None, [0], (5,), {5, 6}], [[], (), *NOT_IDS]),
    "bad_words": (
        [(), [], ["word"], [[5]], ["word", (5, 6)], [list(range(16))]],
        [None, "word", [""], [[]], [list(range(17))], [5], [[-1]], [["x"]], {"word"}],
    ),
    "stream_interval": ([1, 2**31 - 1], [0, -1, None, *NOT_INTEGERS]),
    "skip_special_tokens": ([True, False], [None, 0, 1, "yes"]),
}

TAKEN = [(field, value) for field, (taken, _) in FIELDS.items() for value in taken]
REFUSED = [(field, value) for field, (_, refused) in FIELDS.items() for value in refused]


def test_every_field_is_in_the_table():
    assert FIELDS.keys() == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(("field", "value"), TAKEN, ids=lambda value: str(value)[:24])
def test_the_value_is_taken_as_it_is(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: str(value)[:24])
def test_the_value_is_refused_with_field_value_and_bound(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    error = caught.value
    assert error.field == field
    assert error.bound and str(error).startswith(f"{field}=")
    assert str(error).endswith(f"must be {error.bound}")
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    assert error.value is value or _holds(inside, error.value)


def _holds(value, part):
    """Whether the error names the part of a collection that is wrong."""
    if not isinstance(value, (list, tuple, set)):
        return False
    return any(item is part or item == part or _holds(item, part) for item in value)


def test_min_tokens_is_at_most_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=5000, max_tokens=None).min_tokens == 5000
    with pytest.raises(InvalidRequest, match="at most max_tokens=4") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.field == "min_tokens"


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.0)
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 0}', type=SamplingParams)


def test_params_cannot_be_changed_so_requests_may_share_them():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.0


def test_params_decode_from_json_and_are_checked_there_too():
    decoded = msgspec.json.decode(
        b'{"temperature": 0, "stop": ["a"], "logit_bias": {"5": 1}, "n": 2}', type=SamplingParams
    )
    assert decoded == SamplingParams(temperature=0, stop=["a"], logit_bias={5: 1}, n=2)
    with pytest.raises(msgspec.ValidationError, match=r"top_p=2.*must be"):
        msgspec.json.decode(b'{"top_p": 2}', type=SamplingParams)


def test_floats_of_numpy_are_numbers():
    assert SamplingParams(temperature=np.float64(0.5)).temperature == 0.5


def test_stop_strings_is_stop_as_a_tuple():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1)],
)
def test_each_penalty_alone_makes_a_request_penalised(field, value):
    assert not SamplingParams().penalised
    assert SamplingParams(**{field: value}).penalised
