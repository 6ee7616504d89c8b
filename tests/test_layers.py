"""Imports run one way: what docs/architecture.md says of them holds for every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiosched

PACKAGE = Path(aiosched.__file__).parent
LAYERS = (
    {"config", "errors", "params", "request", "_threads", "host_memory"},
    {"device"},
    {"observe"},
    {"cache", "model", "text", "testing"},
    {"scheduler"},
    {"engine"},
    {"commands", "simulate"},
    {"bench"},
    {"cli"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FOUNDATION = LAYERS[0]
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(module: str) -> str:
    """The layer's name; a module at the top is ``engine``'s, unless it is one that all may know."""
    name = module.split(".")[1]
    return name if name in FOUNDATION or (PACKAGE / name).is_dir() else "engine"


def imported(body: ast.AST) -> Iterator[str]:
    """Modules of ours that run with ``body``, at once or when a function is called."""
    for node in ast.iter_child_nodes(body):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiosched."):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("aiosched."))
        yield from imported(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_its_own_layer_and_those_below(path):
    own = layer_of(".".join(("aiosched", *path.relative_to(PACKAGE).with_suffix("").parts)))
    for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
        other = layer_of(module)
        same = own == other or {own, other} <= FOUNDATION
        assert same or RANK[other] < RANK[own], f"{own} imports {module}"
        assert other != "text" or RANK[own] >= RANK["engine"] or own == "text", module
