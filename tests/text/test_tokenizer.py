"""The tokenizer encodes exactly, off the event loop where it matters, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from aiosched.errors import EngineClosed, InvalidRequest
from aiosched.text.tokenizer import Tokenizer

CHATML = "{% for m in messages %}{{ bos_token ~ m.role ~ ':' ~ m.content ~ eos_token }}{% endfor %}"


def make(**options: Any) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat"] * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"),
        **options,
    )


async def encode_large(tokenizer: Tokenizer, text: Any) -> list[int]:
    return await tokenizer.off_loop(lambda: tokenizer.encode_without_gil(text))


def tokenizer_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("aiosched-tokenizer")]


def test_what_is_encoded_decodes_to_itself() -> None:
    tokenizer = make()
    ids = tokenizer.encode("the cat , 世界 .")
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "the cat , 世界 ."
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the cat , 世界 ."
    assert tokenizer.encode("the cat , 世界 .", add_special_tokens=False) == ids[1:]


def test_the_vocabulary_is_described() -> None:
    tokenizer = make(eos_token_ids=[5, 1])
    assert tokenizer.eos_token_ids == (1, 5)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.knows(tokenizer.vocab_size - 1)
    assert not tokenizer.knows(tokenizer.vocab_size)
    assert tokenizer.decode([tokenizer.vocab_size]) == ""


def test_truncation_and_padding_of_others_do_not_reach_a_prompt() -> None:
    tokenizer = make()
    ids = tokenizer.encode("the cat sat")
    tokenizer._backend.enable_truncation(2)
    tokenizer._backend.enable_padding(length=64)
    assert tokenizer.encode("the cat sat") == ids
    tokenizer._backend.enable_truncation(2)
    assert asyncio.run(encode_large(tokenizer, "the cat sat")) == ids
    tokenizer.close()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("text", "said"),
    [("ab\ud800c", r"U\+D800 at index 2"), (b"ab", "a string"), (None, "a string")],
)
def test_what_cannot_be_encoded_is_refused_and_named(text: Any, said: str, large: bool) -> None:
    tokenizer = make()
    with pytest.raises(InvalidRequest, match=said) as caught:
        asyncio.run(encode_large(tokenizer, text)) if large else tokenizer.encode(text)
    assert caught.value.field == "prompt"
    tokenizer.close()


def test_a_large_text_gives_the_same_ids_in_a_thread() -> None:
    tokenizer = make()
    text = "the cat 世界 " * 1_000
    assert tokenizer_threads() == []
    assert asyncio.run(encode_large(tokenizer, text)) == tokenizer.encode(text)
    assert len(tokenizer_threads()) == 1
    tokenizer.close()
    assert tokenizer_threads() == []


def test_the_event_loop_turns_while_a_large_text_is_encoded() -> None:
    tokenizer = make()

    async def main() -> int:
        task = asyncio.create_task(encode_large(tokenizer, "the cat sat on the mat " * 40_000))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        await task
        return turns

    # With the GIL held throughout there would be two or three.
    assert asyncio.run(main()) > 10
    tokenizer.close()


def test_a_closed_tokenizer_says_so() -> None:
    tokenizer = make()
    tokenizer.close()
    tokenizer.close()
    with pytest.raises(EngineClosed):
        asyncio.run(encode_large(tokenizer, "x"))
    assert tokenizer_threads() == []


def test_the_length_of_a_large_text_can_be_refused_before_there_is_a_list_of_its_ids() -> None:
    tokenizer = make()
    lengths: list[int] = []

    def refuse(length: int) -> None:
        lengths.append(length)
        raise OverflowError

    with pytest.raises(OverflowError):
        tokenizer.encode_without_gil("the cat", check_length=refuse)
    assert lengths == [len(tokenizer.encode("the cat"))]
    ids = tokenizer.encode_without_gil("the cat", check_length=lengths.append)
    assert ids == tokenizer.encode("the cat")


def blocked(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make texts wait in their thread until the event is set."""
    gate = threading.Event()
    encode = tokenizer.encode_without_gil

    def wait(text: str) -> list[int]:
        gate.wait(10)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode_without_gil", wait)
    return gate


def test_close_ends_waiting_texts_with_an_error_not_a_cancel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make(threads=1)
    gate = blocked(tokenizer, monkeypatch)

    async def main() -> None:
        running = asyncio.create_task(encode_large(tokenizer, "the cat"))
        waiting = asyncio.create_task(encode_large(tokenizer, "the mat"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(tokenizer.close))
        with pytest.raises(EngineClosed):
            await waiting
        gate.set()
        assert await running == tokenizer.encode("the cat")
        await closing

    asyncio.run(main())


def test_a_cancelled_reader_is_cancelled_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make(threads=1)
    gate = blocked(tokenizer, monkeypatch)

    async def main() -> None:
        running, waiting, other = (
            asyncio.create_task(encode_large(tokenizer, text)) for text in ("a", "b", "the cat")
        )
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        gate.set()
        assert await other == tokenizer.encode("the cat")

    asyncio.run(main())
    tokenizer.close()


def test_messages_are_rendered_by_the_models_template() -> None:
    tokenizer = make()
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(messages)
    tokenizer._hf.chat_template = CHATML
    assert tokenizer.render_chat(messages) == "<s>user:hi</s>"
    tokenizer._hf.chat_template = {"default": CHATML, "tool_use": "x"}
    assert tokenizer.render_chat(messages) == "<s>user:hi</s>"


def test_the_template_is_compiled_while_the_model_is_loaded() -> None:
    from aiosched.text.chat import _environment

    tokenizer = make()
    tokenizer.warm_up()  # without a template there is nothing to do
    tokenizer._hf.chat_template = "{{ 'warmed up' }}"
    tokenizer.warm_up()
    misses = _environment().compiled.cache_info().misses
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "warmed up"
    assert _environment().compiled.cache_info().misses == misses
    tokenizer._hf.chat_template = "{% if"
    tokenizer.warm_up()  # said when a conversation is rendered
    with pytest.raises(InvalidRequest, match="chat_template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_importing_text_loads_neither_transformers_nor_jinja() -> None:
    names = ["tokenizer", "detokenizer", "stop", "chat"]
    code = "import sys\n" + "".join(f"import aiosched.text.{name}\n" for name in names)
    code += "print({'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
