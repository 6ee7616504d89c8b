"""Who takes part in ``aiosched bench offline``, and how each is set up to do its best on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import msgspec

from aiosched.bench.peers.checkpoint import Checkpoint

OWN = ("aiosched", "transformers")
"""Engines that run in aiosched's own environment."""
PEERS = ("vllm", "llama.cpp")
"""Engines that need an interpreter of their own."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What all engines are sized for.

    Attributes:
        model: as the user named it; peers get the checkpoint's folder.
        dtype: of weights and KV.
        threads: compute threads; ``None``: aiosched's own choice, and for others one for each core.
        cores: that this process may use.
        max_batch: largest number of prompts at once.
        prompt_tokens, new_tokens: of each prompt and each answer.
        cache_dir: where built-in models are kept.
    """

    model: str
    dtype: str
    threads: int | None
    cores: int
    max_batch: int
    prompt_tokens: int
    new_tokens: int
    cache_dir: str | None = None

    def settings(self, model: str, **more: Any) -> dict[str, Any]:
        """What every driver is told, and ``more``."""
        return {
            "model": model,
            "dtype": self.dtype,
            "threads": self.threads or self.cores,
            "max_batch": self.max_batch,
            # One to spare: some engines refuse a sequence that fills them to the last token.
            "max_model_len": self.prompt_tokens + self.new_tokens + 1,
            "max_prompt_tokens": self.max_batch * self.prompt_tokens,
            **more,
        }


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one setting: a row for each batch size.

    Attributes:
        engine, dtype: as the row shows them.
        package: whose version it runs.
        python, driver, settings, environ: as ``EngineProcess`` takes them.
    """

    engine: str
    dtype: str
    package: str
    driver: str
    settings: dict[str, Any]
    python: str = sys.executable
    environ: dict[str, str] = {}


def aiosched_engines(
    work: Workload, quantizations: Sequence[str], compiled: bool
) -> Iterator[Contestant]:
    """Overlap and normal loop in ``work.dtype``; the overlap loop in further settings.

    Raises:
        ValueError: int4 is asked for without a compiled step, the only one that has it.
    """
    if "int4" in quantizations and not compiled:
        raise ValueError("--quantization int4 needs --compile")
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("overlap", work.dtype, {"overlap_depth": 1}),
        ("normal", work.dtype, {"overlap_depth": 0}),
    ]
    variants += [
        ("overlap", kind, {"overlap_depth": 1, "quantization": kind}) for kind in quantizations
    ]
    if compiled:
        variants += [
            (f"{name}, compiled", dtype, {**engine, "compile": True})
            for name, dtype, engine in variants
            if name == "overlap"
        ]
    variants = [
        variant for variant in variants if variant[1] != "int4" or variant[2].get("compile")
    ]
    for name, dtype, engine in variants:
        yield Contestant(
            engine=f"aiosched {name}",
            dtype=dtype,
            package="aiosched",
            driver="aiosched",
            settings=work.settings(
                work.model,
                engine=engine
                | {
                    "compute_threads": work.threads,
                    "cache_dir": work.cache_dir,
                    "max_running_requests": work.max_batch,
                },
            ),
        )


def transformers_engines(work: Workload, checkpoint: Checkpoint) -> Iterator[Contestant]:
    """``generate``, and continuous batching (``generate_batch``)."""
    for engine, batching in (("transformers generate", False), ("transformers batching", True)):
        yield Contestant(
            engine=engine,
            dtype=work.dtype,
            package="transformers",
            driver="transformers",
            settings=work.settings(checkpoint.folder, batching=batching),
        )


def vllm_engines(python: str, work: Workload, checkpoint: Checkpoint) -> Iterator[Contestant]:
    """Compiled, its default, and eager, which starts sooner."""
    for engine, eager in (("vllm compiled", False), ("vllm eager", True)):
        yield Contestant(
            engine=engine,
            dtype=work.dtype,
            package="vllm",
            driver="vllm",
            python=python,
            settings=work.settings(checkpoint.folder, eager=eager),
            environ=_preload(python),
        )


def llama_cpp_engines(python: str, work: Workload, checkpoint: Checkpoint) -> Iterator[Contestant]:
    """The weights in ``work.dtype``, and packed as their GGUF file has them.

    Raises:
        ValueError: the model is no GGUF file, so there is nothing that llama.cpp could read.
    """
    if checkpoint.gguf is None:
        raise ValueError("llama.cpp reads GGUF files: name one with --model")
    packed, kind = checkpoint.gguf
    for path, dtype in ((checkpoint.unpacked, work.dtype), (packed, kind)):
        yield Contestant(
            engine="llama.cpp",
            dtype=dtype,
            package="llama.cpp",
            driver="llama_cpp",
            python=python,
            settings=work.settings(checkpoint.folder, gguf=str(path)),
        )


def _preload(python: str) -> dict[str, str]:
    """The allocator and the OpenMP runtime that vLLM's manual asks for, as far as they are there.

    The path of ``python`` is not resolved: in a virtual environment it is a link out of it.
    """
    openmp = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    found = [find_library("tcmalloc_minimal"), str(openmp) if openmp.is_file() else None]
    libraries = [library for library in found if library]
    return {"LD_PRELOAD": ":".join(libraries)} if libraries else {}
