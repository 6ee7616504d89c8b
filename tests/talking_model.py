"""A model of integers that can talk: HashModel with letters for tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiosched.errors import InvalidRequest
from aiosched.testing.hash_model import HashModel

if TYPE_CHECKING:
    from click.testing import Result

    from aiosched.model.inputs import Model

VOCAB = 64


class Cli(Protocol):
    """Runs ``aiosched ARGS…`` in this process; the fixture ``cli``."""

    def __call__(self, *args: str, input: str = "", model: Model | None = None) -> Result: ...


class Letters:
    """One character a token: id ``i`` is the character ``chr(48 + i)``.

    The chat template writes ``role:content|`` for each message. ``rendered`` keeps the
    conversations that it was given.
    """

    vocab_size = VOCAB
    eos_token_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()

    def __init__(self, chat_template: str | None = "role:content|") -> None:
        self.chat_template = chat_template
        self.rendered: list[list[dict[str, Any]]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % VOCAB for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(48 + i) for i in ids)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        if self.chat_template is None:
            raise InvalidRequest("messages", messages, "a prompt: there is no chat template")
        self.rendered.append([dict(message) for message in messages])
        return "".join(f"{m['role']}:{m['content']}|" for m in messages)


class TalkingModel(HashModel):
    """A HashModel with a tokenizer."""

    def __init__(self, chat_template: str | None = "role:content|", **options: Any) -> None:
        super().__init__(VOCAB, **options)
        self.tokenizer = Letters(chat_template)  # type: ignore[assignment]
