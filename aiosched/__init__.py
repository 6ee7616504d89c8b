"""An asyncio-native scheduler and engine for LLM inference.

::

    async with Engine("smollm2-135m-instruct") as engine:
        async for token in engine.generate("The capital of France is"):
            print(token.text, end="", flush=True)
"""

from __future__ import annotations

from aiosched.config import EngineConfig
from aiosched.engine import Engine
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
)
from aiosched.observe.records import StepRecord
from aiosched.observe.stats import EngineStats, Health, Status, StepTimes
from aiosched.observe.timeline import Timeline
from aiosched.params import SamplingParams
from aiosched.request import Choice, Completion, FinishReason, Logprob, Token, Usage
from aiosched.stream import TokenStream

__version__ = "0.1.0"

__all__ = [
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
