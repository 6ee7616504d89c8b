"""A model for ``--tiny``: integers that talk in bytes, through the engine's own tokenizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aiosched.testing.hash_model import HashModel


def tiny_model() -> HashModel:
    """A HashModel over the 256 bytes; its prompts and answers are text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend: Any = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    model: Any = HashModel(vocab_size=len(alphabet))
    # What aiosched.text.tokenizer asks of a fast tokenizer of transformers.
    model.tokenizer = SimpleNamespace(
        backend_tokenizer=backend,
        eos_token_id=None,
        bos_token=None,
        eos_token=None,
        chat_template=None,
    )
    assert isinstance(model, HashModel)
    return model
