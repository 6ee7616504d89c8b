"""C74: importing aiosched or making an engine changes nothing in the program around it.

Read from the syntax trees of the whole package, and seen in a fresh interpreter.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import aiosched

ROOT = Path(aiosched.__file__).parent
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}

# The last parts of what may not be called: the process around the library owns these.
FORBIDDEN_CALLS = {
    "get_event_loop",
    "set_event_loop",
    "set_event_loop_policy",
    "signal.signal",
    "add_signal_handler",
    "set_wakeup_fd",
    "sys.exit",
    "os._exit",
    "os.abort",
    "os.kill",
    "exit",
    "quit",
    "set_start_method",
    "putenv",
    "unsetenv",
    "environ.update",
    "environ.setdefault",
    "environ.pop",
    "environ.clear",
    "basicConfig",
    "dictConfig",
    "fileConfig",
    "structlog.configure",
    "configure_once",
    "captureWarnings",
    "filterwarnings",
    "simplefilter",
    "settrace",
    "setprofile",
    "setswitchinterval",
    "setrecursionlimit",
    "excepthook",
    "gc.disable",
    "gc.freeze",
    "gc.set_threshold",
    "set_num_threads",
    "set_default_dtype",
    "set_default_device",
    "manual_seed",
    "atexit.register",
    "os.chdir",
    "setlocale",
}
# The command line is a program of ours; logs.configure is what it calls.
OURS = ("cli/", "commands/", "__main__.py", "bench/")
# What is put back before the function returns; ``test_a_whole_life…`` sees that it is.
RESTORED = {"device/cpu.py torch.set_num_threads", "model/dummy.py torch.manual_seed"}
ASYNCIO_OBJECTS = {
    "Lock",
    "Event",
    "Condition",
    "Semaphore",
    "BoundedSemaphore",
    "Barrier",
    "Queue",
    "PriorityQueue",
    "LifoQueue",
    "Future",
    "Task",
    "create_task",
    "ensure_future",
    "gather",
    "get_running_loop",
    "new_event_loop",
    "Runner",
    "TaskGroup",
    "create_future",
}


def dotted(node):
    """``a.b.c`` of a call's target; only the last names where the rest is an expression."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        names.append(node.id)
    return ".".join(reversed(names))


def calls(tree):
    return [(dotted(n.func), n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Call)]


def ends_with(name, parts):
    """Whether the dotted ``name`` ends with one of ``parts``, and with which."""
    return any(name == part or name.endswith("." + part) for part in parts)


def library():
    return [(path, tree) for path, tree in TREES.items() if not path.startswith(OURS)]


def test_the_trees_are_those_of_the_whole_package():
    assert {"engine.py", "scheduler/loop.py", "device/cpu.py", "model/runner.py"} <= TREES.keys()


def test_the_library_calls_nothing_that_belongs_to_the_program():
    found = [
        f"{path}:{line} {name}"
        for path, tree in library()
        for name, line in calls(tree)
        if ends_with(name, FORBIDDEN_CALLS) and f"{path} {name}" not in RESTORED
    ]
    assert not found


def test_a_forbidden_call_would_be_found():
    tree = ast.parse("import os, logging\nlogging.basicConfig()\nos.environ.setdefault('a', 'b')")
    assert [line for name, line in calls(tree) if ends_with(name, FORBIDDEN_CALLS)] == [2, 3]


def test_nothing_in_the_package_writes_to_the_environment_or_to_a_hook_of_the_interpreter():
    found = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            targets = []
            if isinstance(node, (ast.Assign, ast.Delete)):
                targets = node.targets
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
                targets = [node.target]
            for target in targets:
                base = target.value if isinstance(target, ast.Subscript) else target
                if ends_with(dotted(base), {"os.environ", "sys.excepthook", "sys.unraisablehook"}):
                    found.append(f"{path}:{node.lineno}")
    assert not found


def test_only_logs_configure_sets_up_logging():
    """A ``NullHandler`` on our own logger is what the standard library asks of a library."""
    setters = {"addHandler", "setLevel", "addFilter", "setLoggerClass", "propagate"}
    found = set()
    for path, tree in library():
        for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)] + [tree]:
            body = (
                function.body
                if function is not tree
                else [n for n in tree.body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))]
            )
            for call in (c for n in body for c in ast.walk(n) if isinstance(c, ast.Call)):
                handler = [dotted(a.func) for a in call.args if isinstance(a, ast.Call)]
                if ends_with(dotted(call.func) or "", setters) and handler != [
                    "logging.NullHandler"
                ]:
                    found.add((path, getattr(function, "name", "<module>")))
    assert found <= {("observe/logs.py", "configure")}


def test_logs_configure_is_called_by_our_programs_alone():
    for path, tree in library():
        names = [name for name, _ in calls(tree)]
        assert not [name for name in names if ends_with(name, {"logs.configure"})], path


def at_import(tree):
    """Statements that run when the module is imported: not the bodies of functions."""
    for node in tree.body:
        yield from _outside_functions(node)


def _outside_functions(node):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_functions(child)


def test_no_asyncio_object_is_made_at_import_or_in_a_constructor():
    found = []
    for path, tree in library():
        constructors = [
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "__new__", "__post_init__")
        ]
        nodes = [*at_import(tree), *(n for c in constructors for n in ast.walk(c))]
        for node in nodes:
            if isinstance(node, ast.Call):
                *owner, name = dotted(node.func).split(".")
                if name in ASYNCIO_OBJECTS and (owner[:1] == ["asyncio"] or "loop" in owner):
                    found.append(f"{path}:{node.lineno} {dotted(node.func)}")
    assert not found


SNAPSHOT = """
import asyncio, gc, json, logging, os, signal, sys, threading, warnings

def torch_settings():
    torch = sys.modules.get("torch")
    return [torch.get_num_threads, torch.initial_seed, torch.get_default_dtype] if torch else []

def snapshot():
    return {
        "environment": dict(os.environ),
        "policy": repr(asyncio.get_event_loop_policy()),
        "root": [repr(h) for h in logging.root.handlers] + [logging.root.level],
        "logging": [logging.root.manager.disable, logging.getLoggerClass().__name__],
        "warnings": [repr(f) for f in warnings.filters],
        "threads": sorted(t.name for t in threading.enumerate()),
        "signals": [repr(signal.getsignal(s)) for s in signal.valid_signals()],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
        "collector": [gc.isenabled(), gc.get_threshold()],
        "switch": sys.getswitchinterval(),
        "torch": [str(setting()) for setting in torch_settings()],
    }

import {first}
asyncio.get_event_loop_policy()  # made at its first use, which may be ours
loaded = set(sys.modules)
before = snapshot()
{code}
after = snapshot()
changed = [key for key in before if before[key] != after[key]]
print(json.dumps({"changed": changed, "modules": sorted(set(sys.modules) - loaded)}))
"""


def in_a_fresh_interpreter(code, first="structlog, numpy, msgspec"):
    """What ``code`` changes. ``first``: third parties, whose own imports are not ours to judge."""
    script = SNAPSHOT.replace("{code}", code).replace("{first}", first)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


MAKE = (
    "import aiosched\n"
    "from aiosched.testing.hash_model import HashModel\n"
    "engine = aiosched.Engine(HashModel(), device='cpu')\n"
    "named = aiosched.Engine('smollm2-135m-instruct')"
)


@pytest.mark.parametrize("code", ["import aiosched", MAKE], ids=["import", "construct"])
def test_importing_and_constructing_change_nothing_and_load_no_torch(code):
    seen = in_a_fresh_interpreter(code)
    assert seen["changed"] == []
    modules = set(seen["modules"])
    heavy = {"torch", "transformers", "tokenizers", "gguf", "safetensors", "jinja2", "uvloop"}
    assert not heavy & modules
    adapters = {"fastapi", "uvicorn", "click", "rich", "httpx", "aiosched_adapters"}
    assert not adapters & modules


RUN = (
    "import aiosched\n"
    "from aiosched.testing.hash_model import HashModel\n"
    "from aiosched.device.cpu import CpuDevice\n"
    "async def main():\n"
    "    device = CpuDevice(threads=1)\n"
    "    async with aiosched.Engine(HashModel(), device=device, kv_tokens=256) as engine:\n"
    "        await engine.complete([1, 2, 3], aiosched.SamplingParams(max_tokens=3))\n"
    "with asyncio.Runner() as runner:\n"
    "    runner.run(main())"
)


def test_a_whole_life_of_an_engine_changes_nothing():
    first = "structlog, numpy, msgspec, torch"
    assert in_a_fresh_interpreter(RUN, first)["changed"] == []
