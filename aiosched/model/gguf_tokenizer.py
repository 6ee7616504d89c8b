"""The tokenizer that a GGUF file describes.

A file holds vocabulary and merges, but only a name for how text is cut before merging
(``tokenizer.ggml.pre``). Cut wrongly, text still tokenizes, into tokens that the model has hardly
ever seen; so the cut is set here by name, and an unknown name is warned about.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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


def load_gguf_tokenizer(file: GGUFFile) -> Any:
    """A fast transformers tokenizer with the file's special tokens and chat template."""
    data = file.metadata
    name = data.get("tokenizer.ggml.pre")
    if data.get("tokenizer.ggml.model") == "gpt2":
        cut = _cuts().get(str(name))
        if cut is not None:
            return _byte_level(data, cut)
        logger.warning(
            "%s: pre-tokenizer %r is not known to aiosched; text may be cut into other tokens than "
            "the model was trained with",
            file.path.name,
            name,
        )
    tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = data.get("tokenizer.chat_template")
    return tokenizer


def _byte_level(data: dict[str, Any], cut: _Cut) -> Any:
    tokens: list[str] = data["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in data["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=cut.ignore_merges))
    backend.pre_tokenizer = cut.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    kinds: list[int] = data.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])

    def special(key: str) -> str | None:
        index = data.get(f"tokenizer.ggml.{key}_token_id")
        return None if index is None else tokens[index]

    bos = special("bos")
    if bos is not None and data.get("tokenizer.ggml.add_bos_token", cut.adds_bos):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = data.get("tokenizer.chat_template")
    return tokenizer
