"""The tokenizer that a GGUF file describes.

A file holds vocabulary and merges, but only a name for how text is cut before merging
(``tokenizer.ggml.pre``). Cut wrongly, text still tokenizes, into tokens that the model has hardly
ever seen; so the cut is set here by name, and an unknown name is warned about.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.models import BPE

from aiosched.model.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Cut(NamedTuple):
    """How a family of tokenizers cuts text, and what else it does unasked."""

    pre_tokenizer: pre.PreTokenizer
    ignore_merges: bool = False  # a word that is a token needs no merges
    nfc: bool = False
    adds_bos: bool = False


def _by_pattern(pattern: str) -> pre.PreTokenizer:
    split = pre.Split(Regex(pattern), behavior="isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre.PreTokenizer:
    return pre.ByteLevel(add_prefix_space=False, use_regex=True)


def _cuts() -> dict[str, _Cut]:
    digits = pre.Sequence([pre.Digits(individual_digits=True), _gpt2()])
    llama3 = _Cut(_by_pattern(_LLAMA3), ignore_merges=True, adds_bos=True)
    qwen2 = _Cut(_by_pattern(_QWEN2), nfc=True)
    return {
        "gpt-2": _Cut(_gpt2()),
        "smollm": _Cut(digits),
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "qwen2": qwen2,
        "deepseek-r1-qwen": qwen2,
    }


@dataclass(frozen=True, slots=True)
class FileTokenizer:
    """What the engine asks of a fast tokenizer of transformers, without transformers."""

    backend_tokenizer: Tokenizer
    bos_token: str | None
    eos_token: str | None
    eos_token_id: int | None
    chat_template: str | None


def load_fast_tokenizer(file: GGUFFile) -> Any:
    """A ``FileTokenizer`` with the file's special tokens and chat template; one of transformers
    for a file that does not say how its text is cut, or in words unknown here."""
    cut = _known_cut(file)
    if cut is None:
        return _through_transformers(file)
    return FileTokenizer(
        backend_tokenizer=_byte_level(file.metadata, cut),
        bos_token=_special(file, "bos"),
        eos_token=_special(file, "eos"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )


def load_gguf_tokenizer(file: GGUFFile) -> Any:
    """The same as a fast tokenizer of transformers, which takes a second to import."""
    cut = _known_cut(file)
    if cut is None:
        return _through_transformers(file)
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_byte_level(file.metadata, cut),
        bos_token=_special(file, "bos"),
        eos_token=_special(file, "eos"),
        unk_token=_special(file, "unknown"),
        pad_token=_special(file, "padding"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = file.metadata.get("tokenizer.chat_template")
    return tokenizer


def _known_cut(file: GGUFFile) -> _Cut | None:
    if file.metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    name = file.metadata.get("tokenizer.ggml.pre")
    cut = _cuts().get(str(name))
    if cut is None:
        logger.warning(
            "%s: pre-tokenizer %r is not known to aiosched; text may be cut into other tokens than "
            "the model was trained with",
            file.path.name,
            name,
        )
    return cut


def _through_transformers(file: GGUFFile) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = file.metadata.get("tokenizer.chat_template")
    return tokenizer


def _special(file: GGUFFile, key: str) -> str | None:
    index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    token: str | None = None if index is None else file.metadata["tokenizer.ggml.tokens"][index]
    return token


def _byte_level(data: dict[str, Any], cut: _Cut) -> Tokenizer:
    tokens: list[str] = data["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in data["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=cut.ignore_merges))
    backend.pre_tokenizer = cut.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    kinds: list[int] = data.get("tokenizer.ggml.token_type", [])
    special, plain = [], []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
    index = data.get("tokenizer.ggml.bos_token_id")
    if index is not None and data.get("tokenizer.ggml.add_bos_token", cut.adds_bos):
        bos = tokens[index]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, index)]
        )
    return backend
