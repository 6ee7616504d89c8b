"""What the documentation says is so: its programs run, its names and links exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click
import pytest

import aiosched
from aiosched import AioschedError, EngineConfig, SamplingParams, errors
from aiosched.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = [ROOT, ROOT / "aiosched", ROOT / "docs"]


class Block(NamedTuple):
    page: str
    line: int
    info: str
    code: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found, lines = [], page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines, 1):
        if line.startswith("```") and start is None:
            start = number
        elif line.startswith("```") and start is not None:
            info = lines[start - 1].removeprefix("```")
            code = "\n".join(lines[start : number - 1])
            found.append(Block(page.name, start, info, code + "\n"))
            start = None
    assert start is None, f"{page.name}:{start}: a block that is never closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.info.startswith("python")]
RUNNABLE = [block for block in PYTHON if block.info.endswith("runnable")]
SHELL = [block for block in BLOCKS if block.info in ("sh", "bash", "console")]


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


def tree(block: Block) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    parsed = compile(block.code, name(block), "exec", flags)
    assert isinstance(parsed, ast.Module)
    return parsed


@pytest.mark.parametrize("block", RUNNABLE, ids=name)
def test_a_runnable_block_runs(block, monkeypatch):
    module = ModuleType("documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block.code, name(block), "exec"), module.__dict__)


def test_there_is_a_whole_model_to_run():
    assert [block.page for block in RUNNABLE].count("writing-a-model.md") == 1


@pytest.mark.parametrize("block", PYTHON, ids=name)
def test_a_python_block_imports_only_what_there_is(block):
    for node in ast.walk(tree(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiosched"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("block", PYTHON, ids=name)
def test_a_python_block_names_only_parameters_that_there_are(block):
    generate = {"priority", "deadline", "request_id"}
    settings = set(EngineConfig.__struct_fields__)
    allowed = {
        "SamplingParams": set(SamplingParams.__struct_fields__),
        "EngineConfig": settings,
        "Engine": settings | {"config", "progress"},
        "generate": generate,
        "complete": generate,
    }
    for node in ast.walk(tree(block)):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = {keyword.arg for keyword in node.keywords}
            assert given <= allowed.get(called, given), f"{called}: {given}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`([a-z_./]+/(?:[a-z_]+\.(?:py|md|svg|toml))?)`", text):
        assert any((package / path).exists() for package in PACKAGES), f"{page.name}: {path}"


def test_pictures_are_well_formed():
    for picture in (ROOT / "docs").glob("*.svg"):
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_the_readme_lists_every_setting_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", README, re.MULTILINE))
    defaults = {f: getattr(EngineConfig(), f) for f in EngineConfig.__struct_fields__}
    assert rows == {field: str(default) for field, default in defaults.items()}


def test_streams_md_lists_every_error_under_its_parent():
    text = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([│├└ ]*)(\w+)` \|", text, re.MULTILINE)
    parents: list[str] = []
    found = {}
    for indent, error in listed:
        if hasattr(errors, error):
            depth = len(indent) // 2
            parents[depth:] = [error]
            found[error] = parents[depth - 1] if depth else None
    known = {c for c in vars(errors).values() if isinstance(c, type)}
    known = {c for c in known if issubclass(c, AioschedError)}
    expected = {c.__name__: c.__base__.__name__ for c in known - {AioschedError} if c.__base__}
    for cls in known - {AioschedError}:
        expected[cls.__name__] = next(b.__name__ for b in cls.__bases__ if b in known)
    assert found == expected | {"AioschedError": None}
    assert set(found) <= set(aiosched.__all__)


def command_lines(code: str) -> list[list[str]]:
    """The words behind ``aiosched`` in each line that calls it, up to a pipe or a redirection."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        if line.startswith("aiosched "):
            words = shlex.split(line, comments=True)[1:]
            end = next((i for i, word in enumerate(words) if word in ("<", ">", "|")), len(words))
            found.append(words[:end])
    return found


def resolved(words: list[str]) -> tuple[click.Context, str, click.Command, list[str]]:
    """From the group on to the command that ``words`` name, and what is left for it."""
    ctx, name, command = click.Context(app, **app.context_settings), "aiosched", app
    while isinstance(command, click.Group) and words:
        _, words, _ = command.make_parser(ctx).parse_args(words)
        found, inner, rest = command.resolve_command(ctx, words)
        assert inner is not None
        name, command, words = found or "", inner, rest
        ctx = click.Context(command, parent=ctx)
    return ctx, name, command, words


LINES = [
    pytest.param(words, id=f"{name(block)} aiosched {' '.join(words)}")
    for block in SHELL
    for words in command_lines(block.code)
]
TEXTS = [page.read_text(encoding="utf-8") for page in PAGES]
SPANS = sorted({span for text in TEXTS for span in re.findall(r"`aiosched ([^`]+)`", text)})


@pytest.mark.parametrize("words", LINES)
def test_a_command_line_in_a_block_is_one_that_the_command_takes(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in words:
        if re.fullmatch(r"[\w-]+\.(jsonl?|toml)", word):
            Path(word).touch()
    ctx, name, command, rest = resolved(words)
    assert not isinstance(command, click.Group)
    command.make_context(name, rest, parent=ctx.parent)


@pytest.mark.parametrize("span", SPANS)
def test_a_command_that_a_sentence_names_has_these_options(span):
    words = [word for word in shlex.split(span) if word.startswith("-") or not word.isupper()]
    _, _, command, rest = resolved(words)
    known = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known


def test_the_readme_names_every_command_and_benchmarks_md_every_benchmark():
    from aiosched.cli.bench import BENCHMARKS

    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for command in app.commands:
        assert f"aiosched {command}" in README, command
    for benchmark in BENCHMARKS:
        assert f"aiosched bench {benchmark}" in benchmarks, benchmark


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"`?make ([a-z]+)\b(?=`|  |$)", page.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: {target}"
