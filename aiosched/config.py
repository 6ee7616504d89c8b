"""EngineConfig: every setting of an engine, from arguments, the environment or a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from aiosched.errors import InvalidConfig

ENV_PREFIX = "AIOSCHED_"
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int4")
POLICIES = ("priority", "fifo")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an engine. ``None`` means: chosen for the machine and the model at ``open``.

    Attributes:
        model: a built-in name, Hub id, local folder, ``.gguf`` file or ``dummy:`` shape.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto`` (CUDA if there is a GPU).
        dtype: of weights and KV; ``auto`` is the checkpoint's own (of a GGUF file: bfloat16, or
            float32 on a CPU without dot products in bfloat16).
        quantization: ``none``; ``int8``: weights of linear layers in 8 bits, with a scale for each
            output; ``int4``: in 4 bits, with a scale and a minimum for 32 of them, as a GGUF file
            of type Q4_1 has them, and the head in 8; needs ``compile``. For models of the dense
            llama, qwen2 and qwen3 families on the CPU.
        compile: run decode steps in C++, built once with the machine's compiler; for the same
            models.
        overlap_depth: steps that may be in flight while the host works on an earlier result: 0 is
            the normal loop, 1 the overlap loop, 2 and more run ahead; at most 8. ``auto`` chooses
            0, 1 or 2 for each batch; on the CPU the one of 0 and 1 that measures faster.
        max_model_len: longest sequence (prompt and answer) in tokens; ``None``: the model's.
        kv_tokens: tokens that the KV cache holds; ``None``: what all running requests can use, but
            no more than memory allows. On the CPU that is a quarter of what is available, at most
            2 GiB; on CUDA 85 % of what the model and a reserve of 1.5 GiB leave.
        page_size: tokens in a KV page.
        prefix_cache: keep the KV of ended requests for prompts that begin alike.
        prefill_chunk_tokens: prompt tokens computed in one step, over all requests.
        max_batch_tokens: tokens in one step, decodes included; ``None``: chunk + running requests.
        max_running_requests: requests that decode or prefill at once.
        max_queued_requests: requests that may wait beyond those; more raise ``QueueFull``.
        max_unread_tokens: tokens that a stream holds before its own request is paused.
        reader_grace: seconds that a request outlives a cancelled read without a new reader.
        policy: ``priority`` (higher first, with ageing) or ``fifo`` (priorities are refused).
        priority_aging: seconds of waiting that weigh as much as one level of priority.
        step_timeout: seconds until a step that does not answer counts as stalled; after twice
            that, the engine has failed.
        disable_consecutive_prefill_overlap: collect a prefill's result before the next prefill is
            launched: better TTFT for the first, less throughput.
        compute_threads: threads of CPU device work; ``None``: one for each core.
        timeline: record when each of the latest steps was planned, run and committed, for
            ``Engine.timeline``.
        cache_dir: where built-in models are kept; ``None``: ``~/.cache/aiosched``.
        debug: poison and check the token relay and the page pool (slow).
    """

    model: str = "smollm2-135m-instruct"
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    compile: bool = False
    overlap_depth: int | Literal["auto"] = "auto"
    max_model_len: int | None = None
    kv_tokens: int | None = None
    page_size: int = 16
    prefix_cache: bool = True
    prefill_chunk_tokens: int = 512
    max_batch_tokens: int | None = None
    max_running_requests: int = 256
    max_queued_requests: int = 4096
    max_unread_tokens: int = 1024
    reader_grace: float = 1.0
    policy: str = "priority"
    priority_aging: float = 10.0
    step_timeout: float = 60.0
    disable_consecutive_prefill_overlap: bool = False
    compute_threads: int | None = None
    timeline: bool = False
    cache_dir: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        for field, hint in _hints().items():
            value = getattr(self, field)
            try:
                msgspec.convert(value, hint)
            except msgspec.ValidationError:
                shown = _shown(hint)
                raise InvalidConfig(field, value, f"of type {shown}") from None
        self._one_of("dtype", DTYPES)
        self._one_of("quantization", QUANTIZATIONS)
        if self.quantization == "int4" and not self.compile:
            raise InvalidConfig("quantization", self.quantization, "none or int8 without compile")
        self._one_of("policy", POLICIES)
        if self.device not in DEVICES and not (
            self.device.startswith("cuda:") and self.device[5:].isdecimal()
        ):
            raise InvalidConfig("device", self.device, "auto, cpu, cuda or cuda:N")
        if self.overlap_depth != "auto":
            self._between("overlap_depth", 0, 8)
        self._between("max_model_len", 2, 2**31 - 1)
        self._between("kv_tokens", 1, 2**40)
        self._between("page_size", 1, 1024)
        self._between("prefill_chunk_tokens", 1, 2**20)
        self._between("max_batch_tokens", 1, 2**20)
        self._between("max_running_requests", 1, 65536)
        self._between("max_queued_requests", 0, 2**31 - 1)
        self._between("max_unread_tokens", 1, 2**31 - 1)
        self._between("reader_grace", 0.0, 1e9)
        self._between("priority_aging", 1e-3, 1e9)
        self._between("step_timeout", 1e-3, 1e9)
        self._between("compute_threads", 1, 1024)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> EngineConfig:
        """Read ``AIOSCHED_<FIELD>`` variables; ``overrides`` win. Unknown names are refused.

        ``XDG_CACHE_HOME`` moves the default of ``cache_dir``, as for other programs.

        Raises:
            InvalidConfig: a variable is unknown or its value does not fit the field.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        if environ.get("XDG_CACHE_HOME"):
            values["cache_dir"] = str(Path(environ["XDG_CACHE_HOME"]) / "aiosched")
        return cls(**(values | cls.values_from_env(environ) | overrides))

    @classmethod
    def values_from_env(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        """The fields that ``AIOSCHED_<FIELD>`` variables set, each for itself: what they come to
        with others is for the constructor to say. Raises as ``from_env`` does."""
        hints = _hints()
        values: dict[str, Any] = {}
        for name, text in environ.items():
            if not name.startswith(ENV_PREFIX):
                continue
            field = name[len(ENV_PREFIX) :].lower()
            if field not in hints:
                raise InvalidConfig(name, text, f"one of {', '.join(sorted(hints))} in upper case")
            try:
                values[field] = msgspec.convert(text, hints[field], strict=False)
            except (msgspec.ValidationError, UnicodeError) as error:  # bytes that are no text
                raise InvalidConfig(name, text, f"readable as {field}: {error}") from None
        return values

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> EngineConfig:
        """Read a TOML file whose top level, or whose table ``[engine]``, holds the fields.

        Raises:
            InvalidConfig: the file is no TOML, or a field is unknown or does not fit.
            OSError: the file cannot be read.
        """
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidConfig("file", str(path), f"TOML: {error}") from None
        table = data.get("engine", data)
        if not isinstance(table, dict):
            raise InvalidConfig("engine", table, "a table of fields")
        for field in table:
            if field not in _hints():
                raise InvalidConfig(field, table[field], f"one of {', '.join(sorted(_hints()))}")
        return cls(**(table | overrides))

    def _one_of(self, field: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, field) not in allowed:
            raise InvalidConfig(field, getattr(self, field), f"one of {', '.join(allowed)}")

    def _between(self, field: str, low: float, high: float) -> None:
        value = getattr(self, field)
        if value is not None and not low <= value <= high:
            raise InvalidConfig(field, value, f"in [{low:g}, {high:g}]")


def _hints() -> dict[str, Any]:
    return {
        f: h for f, h in get_type_hints(EngineConfig).items() if f in EngineConfig.__struct_fields__
    }


def _shown(hint: Any) -> str:
    """A type as a user would write it."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if args := get_args(hint):
        return " or ".join(map(_shown, args))
    return getattr(hint, "__name__", None) or str(hint)
