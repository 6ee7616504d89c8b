"""The public names of the package: exactly these, typed and documented."""

from __future__ import annotations

import enum
import inspect
import types
from importlib.resources import files

import pytest

import aiosched

PUBLIC = [
    "AioschedError",
    "Choice",
    "Completion",
    "DeadlineExceeded",
    "DeviceStalled",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineFailed",
    "EngineStats",
    "FinishReason",
    "Health",
    "InvalidConfig",
    "InvalidModelOutput",
    "InvalidRequest",
    "KVCacheExhausted",
    "Logprob",
    "ModelLoadError",
    "PromptTooLong",
    "QueueFull",
    "RequestAborted",
    "RequestFailed",
    "SamplingParams",
    "Status",
    "StepRecord",
    "StepTimes",
    "Timeline",
    "Token",
    "TokenStream",
    "Usage",
    "WrongEventLoop",
]
ENGINE = {"abort", "close", "complete", "drain", "generate", "health", "open", "stats"}
ENGINE |= {"model", "timeline", "tokenizer"}
STREAM = {"abort", "aclose", "finish_reason", "request_id"}


def public(namespace):
    return {name for name in namespace if not name.startswith("_")}


def test_the_public_names_are_exactly_these():
    assert sorted(aiosched.__all__) == sorted(PUBLIC)
    assert aiosched.__all__ == sorted(aiosched.__all__)


def test_the_package_holds_nothing_else_but_its_modules():
    others = public(vars(aiosched)) - {*PUBLIC, "annotations"}
    assert all(isinstance(getattr(aiosched, name), types.ModuleType) for name in others)


@pytest.mark.parametrize(
    ("thing", "names"),
    [(aiosched.Engine, ENGINE), (aiosched.TokenStream, STREAM)],
    ids=["Engine", "TokenStream"],
)
def test_the_methods_of_the_two_objects_that_people_hold_are_exactly_these(thing, names):
    assert public(vars(thing)) == names
    assert all(inspect.getdoc(getattr(thing, name)) for name in names - {"request_id"})


def test_every_public_class_has_a_docstring_of_its_own():
    for name in PUBLIC:
        assert vars(getattr(aiosched, name)).get("__doc__"), name


@pytest.mark.parametrize("name", PUBLIC)
def test_every_attribute_that_is_not_plain_is_named_in_the_docstring(name):
    thing = getattr(aiosched, name)
    documented = thing.__doc__
    if name in ("EngineConfig", "SamplingParams", "Token", "EngineStats"):
        assert not [f for f in thing.__struct_fields__ if f not in documented]
    elif isinstance(thing, type) and issubclass(thing, enum.Enum):
        assert all(str(member) == member.value for member in thing)


def test_the_package_is_marked_as_typed():
    assert files("aiosched").joinpath("py.typed").is_file()


def test_the_version_is_a_version():
    major, minor, patch = aiosched.__version__.split(".")
    assert (major + minor + patch).isdecimal()


def test_the_testing_package_exports_its_tools():
    import aiosched.testing

    exported = set(aiosched.testing.__all__)
    assert exported >= {"HashModel", "SimDevice", "VirtualClock", "oracle", "cancel_at"}
    assert all(getattr(aiosched.testing, name).__doc__ for name in exported)
