from __future__ import annotations

import msgspec
from talking_model import Cli, Letters, TalkingModel

from aiosched import Completion
from aiosched.testing.hash_model import oracle

LETTERS = Letters()
GREEDY = ("--temperature", "0", "--max-tokens", "6")


def answer(text: str, count: int = 6) -> str:
    return LETTERS.decode(oracle(LETTERS.encode(text), count))


def test_the_answer_goes_to_standard_output(cli: Cli) -> None:
    result = cli("complete", "hello", "--no-chat", *GREEDY)
    assert (result.stdout, result.stderr, result.exit_code) == (answer("hello") + "\n", "", 0)


def test_a_model_with_a_chat_template_gets_a_message(cli: Cli) -> None:
    assert cli("complete", "hi", *GREEDY).stdout == answer("user:hi|") + "\n"
    plain = TalkingModel(chat_template=None)
    assert cli("complete", "hi", *GREEDY, model=plain).stdout == answer("hi") + "\n"


def test_chat_without_a_template_is_refused(cli: Cli) -> None:
    result = cli("complete", "hi", "--chat", model=TalkingModel(chat_template=None))
    assert result.exit_code == 2
    assert "there is no chat template" in result.stderr


def test_a_dash_reads_standard_input(cli: Cli) -> None:
    result = cli("complete", "-", "--no-chat", *GREEDY, input="hello\n")
    assert result.stdout == answer("hello") + "\n"


def test_json_is_one_object_that_the_librarys_type_reads(cli: Cli) -> None:
    result = cli("complete", "hello", "--no-chat", "--json", "--n", "2", *GREEDY)
    (line,) = result.stdout.splitlines()
    completion = msgspec.json.decode(line, type=Completion)
    assert [choice.text for choice in completion.choices] == [answer("hello")] * 2
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 12)


def test_several_answers_are_told_apart(cli: Cli) -> None:
    said = cli("complete", "hello", "--no-chat", "--n", "2", *GREEDY).stdout
    assert said == f"--- 1 of 2 ---\n{answer('hello')}\n--- 2 of 2 ---\n{answer('hello')}\n"


def test_stop_strings_and_seeds_reach_the_sampler(cli: Cli) -> None:
    whole = answer("hello", 20)
    stop = ("--stop", whole[3], "--stop", whole[4])
    args = ("complete", "hello", "--no-chat", "--temperature", "0", "--max-tokens", "20")
    first = min(whole.index(whole[3]), whole.index(whole[4]))
    assert cli(*args, *stop).stdout == whole[:first] + "\n"
    hot = ("complete", "hi", "--temperature", "2", "--max-tokens", "20", "--seed")
    seeded = [cli(*hot, seed).stdout for seed in "112"]
    assert seeded[0] == seeded[1] != seeded[2]
