"""One model in the formats that the engines read: a transformers folder, and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from aiosched.errors import ModelLoadError


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The same weights, for everybody.

    Attributes:
        folder: a transformers folder, or the Hub repository that was named.
        vocab_size: of the model.
        gguf: the GGUF file that the weights come from, and its kind of weights in lower case.
        unpacked: a GGUF file with the weights in the dtype asked for.
    """

    folder: str
    vocab_size: int
    gguf: tuple[Path, str] | None = None
    unpacked: Path | None = None


def prepare(
    model: str, dtype: str, scratch: Path, cache_dir: str | None, *, for_gguf_readers: bool
) -> Checkpoint:
    """Write what is missing into ``scratch``. Takes seconds; nothing of it is measured.

    Args:
        model: as ``EngineConfig.model``.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        for_gguf_readers: whether ``unpacked`` is needed.

    Raises:
        ModelLoadError: the model cannot be found or read.
    """
    import torch
    from transformers import AutoConfig

    from aiosched.model.dummy import load_dummy
    from aiosched.model.gguf_file import GGUFFile
    from aiosched.model.gguf_model import load_gguf_model
    from aiosched.model.gguf_tokenizer import load_gguf_tokenizer
    from aiosched.model.quiet import quiet_transformers

    torch_dtype: torch.dtype = getattr(torch, dtype)
    folder = scratch / "checkpoint"
    file = _gguf_file(model, cache_dir)
    with quiet_transformers():
        if model.startswith("dummy:"):
            loaded, tokenizer = load_dummy(model.removeprefix("dummy:"), torch_dtype, "cpu")
        elif file is not None:
            loaded = load_gguf_model(GGUFFile(file), torch_dtype, lambda stage, done, total: None)
            tokenizer = load_gguf_tokenizer(GGUFFile(file))
        else:
            try:
                config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            except (OSError, ValueError) as error:
                raise ModelLoadError(f"model {model!r} has no configuration: {error}") from error
            return Checkpoint(folder=model, vocab_size=_vocab_size(config))
        loaded.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    vocab_size = _vocab_size(loaded.config)
    if file is None or not for_gguf_readers:
        return Checkpoint(folder=str(folder), vocab_size=vocab_size)
    unpacked = scratch / f"{dtype}.gguf"
    kind = unpack_gguf(file, unpacked, dtype)
    return Checkpoint(
        folder=str(folder), vocab_size=vocab_size, gguf=(file, kind), unpacked=unpacked
    )


def unpack_gguf(source: Path, target: Path, dtype: str) -> str:
    """Write ``source`` with its matrices in ``dtype``; vectors stay as they are.

    Returns:
        What kind of weights ``source`` has, in lower case: ``q4_1``, ``f16`` …
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    kind = GGMLQuantizationType[kinds[dtype]]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    given = "mixed"
    for name, field in reader.fields.items():
        if name == "general.file_type":
            given = LlamaFileType(field.contents()).name
            prefix = "ALL" if kind is GGMLQuantizationType.F32 else "MOSTLY"
            writer.add_file_type(LlamaFileType[f"{prefix}_{kind.name}"])
        elif not name.startswith("GGUF.") and name != "general.architecture":
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = quantize(dequantize(tensor.data, tensor.tensor_type), kind)
            writer.add_tensor(tensor.name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return given.removeprefix("MOSTLY_").removeprefix("ALL_").lower()


def _gguf_file(model: str, cache_dir: str | None) -> Path | None:
    from aiosched.model.builtin import BUILTIN_MODELS, builtin_file

    if model in BUILTIN_MODELS:
        cache = Path(cache_dir) if cache_dir else Path.home() / ".cache" / "aiosched"
        return builtin_file(BUILTIN_MODELS[model], cache, lambda stage, done, total: None)
    path = Path(model).expanduser()
    return path if path.suffix == ".gguf" else None


def _vocab_size(config: Any) -> int:
    return int(config.get_text_config(decoder=True).vocab_size)
