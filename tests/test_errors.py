"""The tree of errors: what catches what, what each one carries and says."""

from __future__ import annotations

import pickle
import traceback

import pytest

import aiosched
from aiosched import errors
from aiosched.errors import (
    AioschedError,
    DeadlineExceeded,
    DeviceStalled,
    EngineClosed,
    EngineFailed,
    InvalidConfig,
    InvalidModelOutput,
    InvalidRequest,
    KVCacheExhausted,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    RequestFailed,
    WrongEventLoop,
    twin,
)

TREE = {
    AioschedError: (Exception,),
    InvalidRequest: (AioschedError, ValueError),
    PromptTooLong: (InvalidRequest,),
    InvalidConfig: (AioschedError, ValueError),
    ModelLoadError: (AioschedError,),
    QueueFull: (AioschedError,),
    RequestFailed: (AioschedError,),
    KVCacheExhausted: (RequestFailed,),
    InvalidModelOutput: (RequestFailed,),
    RequestAborted: (AioschedError,),
    DeadlineExceeded: (AioschedError,),
    EngineClosed: (AioschedError,),
    EngineFailed: (AioschedError,),
    DeviceStalled: (EngineFailed,),
    WrongEventLoop: (AioschedError, RuntimeError),
}
EXAMPLES = [
    (InvalidRequest("top_p", 2, "a number in (0, 1]"), {"field": "top_p", "value": 2}),
    (PromptTooLong(70, 64, "the KV cache"), {"field": "prompt", "tokens": 70, "limit": 64}),
    (InvalidConfig("page_size", 0, "in [1, 1024]"), {"field": "page_size", "value": 0}),
    (QueueFull(4, 4), {"waiting": 4, "limit": 4}),
    (KVCacheExhausted("job", 64, 64), {"tokens": 64, "capacity": 64}),
    (InvalidModelOutput("job", 3, 9, 99), {"step": 3, "position": 9}),
    (DeviceStalled(7, "copy", 2, 20.0), {"step": 7, "fence": "copy", "rank": 2}),
]


def ids(value):
    return type(value).__name__ if isinstance(value, Exception) else ""


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_the_tree_is_as_drawn(error):
    assert error.__bases__ == TREE[error]
    assert error.__name__ in errors.__doc__
    assert error.__doc__
    assert getattr(aiosched, error.__name__) is error


def test_the_tree_is_whole():
    defined = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)}
    assert defined == set(TREE)


@pytest.mark.parametrize(("error", "attributes"), EXAMPLES, ids=ids)
def test_an_error_carries_its_facts_and_says_them(error, attributes):
    for name, value in attributes.items():
        assert getattr(error, name) == value
        assert str(value) in str(error)


def test_a_refusal_says_field_value_and_bound():
    error = InvalidRequest("stop", ["", "x"], "a string that is not empty")
    assert str(error) == "stop=['', 'x']: must be a string that is not empty"


def test_a_long_value_is_cut_in_the_message_and_kept_in_the_attribute():
    value = "x" * 10_000
    error = InvalidRequest("prompt", value, "shorter")
    assert len(str(error)) < 300
    assert "10002 characters" in str(error)
    assert error.value is value


def test_logits_that_are_not_numbers_are_named_as_that():
    assert "not numbers" in str(InvalidModelOutput("job", 3, 9, -1))
    assert "token 99" in str(InvalidModelOutput("job", 3, 9, 99))


@pytest.mark.parametrize(("error", "attributes"), EXAMPLES, ids=ids)
def test_a_twin_is_the_same_error_as_another_object(error, attributes):
    cause = RuntimeError("the first cause")
    error.__cause__ = cause
    other = twin(error)
    assert other is not error
    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
    assert other.__cause__ is cause


def test_a_twin_has_a_traceback_of_its_own():
    error = EngineFailed("dead")
    try:
        raise twin(error)
    except EngineFailed as raised:
        assert traceback.extract_tb(raised.__traceback__)
    assert error.__traceback__ is None


def test_a_plain_error_survives_pickling():
    error = pickle.loads(pickle.dumps(EngineFailed("dead")))
    assert (type(error), str(error)) == (EngineFailed, "dead")
