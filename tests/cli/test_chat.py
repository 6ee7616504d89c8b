from __future__ import annotations

import asyncio
import io

import pytest
from conftest import Run
from talking_model import Cli, Letters, TalkingModel

from aiosched import Engine, SamplingParams
from aiosched.cli.chat import Chat
from aiosched.testing.hash_model import oracle

LETTERS = Letters()
GREEDY = ("--temperature", "0", "--max-tokens", "6")


def answer(text: str, count: int = 6) -> str:
    return LETTERS.decode(oracle(LETTERS.encode(text), count))


def test_each_line_of_a_pipe_is_answered_with_what_was_said_before(cli: Cli) -> None:
    result = cli("chat", "--system", "be", *GREEDY, input="hi\n\nand\n")
    first = answer("system:be|user:hi|")
    second = answer(f"system:be|user:hi|assistant:{first}|user:and|")
    assert (result.stdout, result.stderr, result.exit_code) == (f"{first}\n{second}\n", "", 0)


def test_reset_forgets_all_but_the_system_prompt(cli: Cli) -> None:
    result = cli("chat", "--system", "be", *GREEDY, input="hi\n/reset\nhi\n")
    assert result.stdout == f"{answer('system:be|user:hi|')}\n" * 2


def test_help_and_unknown_commands_are_no_messages(cli: Cli) -> None:
    model = TalkingModel()
    result = cli("chat", input="/help\n/leave\n/quit\nnever read\n", model=model)
    assert "/reset" in result.stdout
    assert result.stderr == "There is no command /leave; /help lists them.\n"
    assert model.tokenizer.rendered == []


def test_the_last_line_needs_no_newline_and_a_path_is_a_message(cli: Cli) -> None:
    assert cli("chat", *GREEDY, input="/etc/x").stdout == answer("user:/etc/x|") + "\n"


def test_a_model_without_a_chat_template_cannot_chat(cli: Cli) -> None:
    result = cli("chat", model=TalkingModel(chat_template=None))
    assert result.exit_code == 2
    assert "one with a chat template" in result.stderr


def test_a_message_that_cannot_be_answered_leaves_the_conversation_as_it_was(cli: Cli) -> None:
    model = TalkingModel(max_model_len=64)
    result = cli("chat", *GREEDY, input=f"hi\n{'x' * 60}\nhi\n", model=model)
    assert result.exit_code == 0
    assert result.stderr.startswith("Error: prompt=")
    assert result.stderr.endswith("/reset begins anew.\n")
    first = answer("user:hi|")
    second = answer(f"user:hi|assistant:{first}|user:hi|")
    assert result.stdout == f"{first}\n{second}\n"


def conversation(engine: Engine, typed: str = "") -> Chat:
    params = SamplingParams(temperature=0.0, max_tokens=None)
    return Chat(engine, params, lines=io.StringIO(typed))


def test_an_interrupted_answer_stays_in_the_history_as_far_as_it_was_read(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with Engine(TalkingModel(), kv_tokens=8192) as engine:
            chat = conversation(engine)
            asking = asyncio.create_task(chat.answer("hi"))
            shown = ""
            while len(shown) < 3:
                await asyncio.sleep(0)
                shown += capsys.readouterr().out
            chat.interrupt()
            await asking
            shown += capsys.readouterr().out
            assert [m["role"] for m in chat.history] == ["user", "assistant"]
            assert chat.history[1]["content"] + "\n" == shown
            assert shown.rstrip("\n") == answer("user:hi|", len(shown) - 1)
            while engine.stats().running:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert dict(engine.stats().finished) == {"abort": 1}

    run(main())


def test_an_answer_interrupted_before_its_first_token_leaves_no_trace(run: Run) -> None:
    async def main() -> None:
        async with Engine(TalkingModel(), kv_tokens=8192) as engine:
            chat = conversation(engine)
            asking = asyncio.create_task(chat.answer("hi"))
            await asyncio.sleep(0)
            chat.interrupt()
            await asking
            assert chat.history == []

    run(main())


def test_an_interrupt_at_the_prompt_leaves(run: Run) -> None:
    async def main() -> None:
        async with Engine(TalkingModel()) as engine:
            chat = conversation(engine, "hi\n")
            chat.interrupt()
            chat.interrupt()
            assert await chat.run() is True

    run(main())
