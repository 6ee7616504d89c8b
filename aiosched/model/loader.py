"""From a model's name to a model that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aiosched.config import QUANTIZATIONS
from aiosched.errors import ModelLoadError
from aiosched.model.builtin import BUILTIN_MODELS, builtin_file
from aiosched.model.dense_model import DenseModel
from aiosched.model.gguf_checks import FAMILIES, refuse_unsupported
from aiosched.model.gguf_dense import load_gguf_dense
from aiosched.model.gguf_file import GGUFFile
from aiosched.model.linear import has_bfloat16_dot_products
from aiosched.model.progress import Progress

if TYPE_CHECKING:
    from aiosched.model.transformers_model import TransformersModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    compile: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
    cache_dir: str | Path | None = None,
) -> TransformersModel | DenseModel:
    """Load a model and its tokenizer. Blocks, for seconds or longer: not for the event loop.

    Several threads may load at once; where transformers is needed they take turns.

    Code that comes with a checkpoint is never run.

    Args:
        name: one of

            - a built-in model: ``smollm2-135m-instruct``
            - a folder with a transformers checkpoint
            - a ``.gguf`` file
            - ``dummy:…``: random weights, see ``aiosched.model.dummy``
            - anything else: a repository of the Hugging Face Hub, ``owner/name``
        dtype: ``float32``, ``bfloat16`` or ``float16``; ``auto`` is the checkpoint's own, and for a
            GGUF file bfloat16, or float32 on a CPU without dot products in bfloat16.
        quantization: ``none``; ``int8``: weights of linear layers in 8 bits, with a scale for
            each output; ``int4``: in 4 bits, with a scale and a minimum for 32 of them, as a GGUF
            file of type Q4_1 has them, and the head in 8; needs ``compile``.
        compile: decode steps run in C++, built with the machine's compiler and kept in
            ``cache_dir``. Both are for models of the dense llama, qwen2 and qwen3 families on the
            CPU; others are refused.
        device: of torch: ``cpu``, ``cuda``, ``cuda:1`` …
        progress: called with (stage, done, total), in this thread.
        cache_dir: where built-in models and compiled code are kept; ``~/.cache/aiosched`` by
            default. The Hub client has a cache of its own.

    Returns:
        The model, with its fast tokenizer as ``tokenizer`` (``None`` if it has none).

    Raises:
        ModelLoadError: it cannot be found, fetched, read or served; says what was tried.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if quantization not in QUANTIZATIONS:
        kinds = ", ".join(QUANTIZATIONS)
        raise ModelLoadError(f"quantization {quantization!r} is not one of {kinds}")
    wanted = DTYPES.get(dtype)
    report = progress or _unheard
    options: dict[str, Any] = {}
    if quantization != "none":
        options["quantization"] = quantization
    if compile:
        options["compile_in"] = _cache_folder(cache_dir)
    if options and device != "cpu":
        asked = " and ".join(option.removesuffix("_in") for option in options)
        raise ModelLoadError(f"{asked} on {device}: that is for the CPU")
    if name in BUILTIN_MODELS:
        path = builtin_file(BUILTIN_MODELS[name], _cache_folder(cache_dir), report)
        return _load_gguf(path, wanted, device, report, options)
    if not name.startswith("dummy:") and (path := _expanded(name)).suffix == ".gguf":
        return _load_gguf(path, wanted, device, report, options)
    from aiosched.model.transformers_loader import load_through_transformers

    source = _source(name, wanted, device)
    return load_through_transformers(name, source, device, report, options)


def _source(name: str, dtype: torch.dtype | None, device: str) -> Callable[[], tuple[Any, Any]]:
    """What transformers has to do for ``name``."""
    from aiosched.model.transformers_loader import load_checkpoint

    if name.startswith("dummy:"):
        from aiosched.model.dummy import load_dummy

        return lambda: load_dummy(name.removeprefix("dummy:"), dtype, device)
    path = _expanded(name)
    if path.is_dir():
        return lambda: load_checkpoint(str(path), dtype, "folder")
    if path.is_file() or name.startswith(("/", "./", "../", "~")):
        raise ModelLoadError(f"model {name!r} is neither a folder nor a .gguf file")
    return lambda: load_checkpoint(name, dtype, "Hugging Face Hub repository")


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
    path: Path,
    dtype: torch.dtype | None,
    device: str,
    progress: Progress,
    options: dict[str, Any],
) -> TransformersModel | DenseModel:
    if dtype is None:
        slow = device == "cpu" and not has_bfloat16_dot_products()
        dtype = torch.float32 if slow else torch.bfloat16
    file = GGUFFile(path)
    try:
        refuse_unsupported(file)
        if device == "cpu" and file.architecture in FAMILIES:
            return load_gguf_dense(file, dtype, progress, options)
    except ModelLoadError:
        raise
    except Exception as error:
        raise _broken(path, error) from error
    from aiosched.model.gguf_model import load_gguf_model
    from aiosched.model.gguf_tokenizer import load_gguf_tokenizer
    from aiosched.model.transformers_loader import load_through_transformers

    def source() -> tuple[Any, Any]:
        try:
            return load_gguf_model(file, dtype, progress), load_gguf_tokenizer(file)
        except ModelLoadError:
            raise
        except Exception as error:
            raise _broken(path, error) from error

    return load_through_transformers(str(path), source, device, progress, options)


def _broken(path: Path, error: Exception) -> ModelLoadError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ModelLoadError(f"{path} cannot be loaded: {lines[0]}")


def _unheard(stage: str, done: int, total: int) -> None:
    pass
