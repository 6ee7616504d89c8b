"""From a model's name to a model that runs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from aiosched.errors import ModelLoadError
from aiosched.model.attention_interface import NAME
from aiosched.model.builtin import BUILTIN_MODELS, builtin_file
from aiosched.model.dummy import load_dummy
from aiosched.model.flashinfer_attention import FlashInferModel, usable_for
from aiosched.model.gguf_file import GGUFFile
from aiosched.model.gguf_model import load_gguf_model
from aiosched.model.gguf_tokenizer import load_gguf_tokenizer
from aiosched.model.progress import Progress
from aiosched.model.quiet import quiet_transformers
from aiosched.model.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

# transformers builds models under switches of the whole process (no initialization, the meta
# device, what it prints): two loads at once would see each other's.
_one_at_a_time = threading.Lock()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    cache_dir: str | Path | None = None,
) -> TransformersModel:
    """Load a model and its tokenizer. Blocks, for seconds or longer: not for the event loop.

    Several threads may load at once; they take turns.

    Code that comes with a checkpoint is never run.

    Args:
        name: one of

            - a built-in model: ``smollm2-135m-instruct``
            - a folder with a transformers checkpoint
            - a ``.gguf`` file
            - ``dummy:…``: random weights, see ``aiosched.model.dummy``
            - anything else: a repository of the Hugging Face Hub, ``owner/name``
        dtype: ``float32``, ``bfloat16`` or ``float16``; ``auto`` is the checkpoint's own, and for a
            GGUF file float32 on the CPU and bfloat16 elsewhere.
        device: of torch: ``cpu``, ``cuda``, ``cuda:1`` …
        progress: called with (stage, done, total), in this thread.
        cache_dir: where built-in models are kept; ``~/.cache/aiosched`` by default. The Hub client
            has a cache of its own.

    Returns:
        The model, with its transformers tokenizer as ``tokenizer`` (``None`` if it has none).

    Raises:
        ModelLoadError: it cannot be found, fetched, read or served; says what was tried.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    wanted = DTYPES.get(dtype)
    report = progress or _unheard
    with _one_at_a_time, quiet_transformers():
        cache = _cache_folder(cache_dir)
        model, tokenizer = _load(name, wanted, device, report, cache)
        report("move to device", 0, 1)
        try:
            model.to(torch.device(device))  # type: ignore[arg-type]
            # The probe inside runs the model once, on its device.
            loaded = TransformersModel(model, tokenizer)
            if usable_for(loaded):
                loaded = FlashInferModel(model, tokenizer)
        except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
            raise ModelLoadError(f"model {name!r} does not run on {device}: {error}") from error
        report("move to device", 1, 1)
    return loaded


def _load(
    name: str,
    dtype: torch.dtype | None,
    device: str,
    progress: Progress,
    cache_dir: Path,
) -> tuple[PreTrainedModel, Any]:
    if name.startswith("dummy:"):
        return load_dummy(name.removeprefix("dummy:"), dtype, device)
    if name in BUILTIN_MODELS:
        file = builtin_file(BUILTIN_MODELS[name], cache_dir, progress)
        return _load_gguf(file, dtype, device, progress)
    path = _expanded(name)
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype, device, progress)
    if path.is_dir():
        return _load_checkpoint(str(path), dtype, "folder")
    if path.is_file() or name.startswith(("/", "./", "../", "~")):
        raise ModelLoadError(f"model {name!r} is neither a folder nor a .gguf file")
    return _load_checkpoint(name, dtype, "Hugging Face Hub repository")


def _cache_folder(given: str | Path | None) -> Path:
    try:
        return Path(given).expanduser() if given else Path.home() / ".cache" / "aiosched"
    except RuntimeError as error:  # the user has no home, or there is no such user
        raise ModelLoadError(f"no place for models: {error} Set cache_dir.") from error


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelLoadError(f"model {name!r} cannot be found: {error}") from error


def _load_gguf(
    path: Path, dtype: torch.dtype | None, device: str, progress: Progress
) -> tuple[PreTrainedModel, Any]:
    if dtype is None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    file = GGUFFile(path)
    try:
        return load_gguf_model(file, dtype, progress), load_gguf_tokenizer(file)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{path} cannot be loaded: {_first_line(error)}") from error


def _load_checkpoint(
    name: str, dtype: torch.dtype | None, kind: str
) -> tuple[PreTrainedModel, Any]:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype or "auto", attn_implementation=NAME, trust_remote_code=False
        )
    except Exception as error:  # no end to what a broken file or connection may raise there
        known = ", ".join(BUILTIN_MODELS)
        raise ModelLoadError(
            f"model {name!r} cannot be loaded, tried as a {kind}: {_first_line(error)} "
            f"(built-in models: {known})"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        # Weights without a tokenizer are served by token ids.
        logger.info("%s: no tokenizer: %s", name, _first_line(error))
        tokenizer = None
    return model, tokenizer


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _unheard(stage: str, done: int, total: int) -> None:
    pass
