"""The process of an engine under test: one engine, driven by lines of JSON.

    PYTHON child.py DRIVER.py SETTINGS

``PYTHON`` is the interpreter of the engine's own environment, so only the standard library is
imported here. The driver has one function, ``open_engine(settings)``, that returns the engine's
version and a function ``generate(prompts, new_tokens)``: greedy, blind to ends of sequence, it
returns the new token ids of each prompt.

The first line on standard output comes after the first token: ``{"version": …}``. Each line on
standard input ``{"prompts": […], "new_tokens": n}`` is answered by
``{"seconds": …, "token_ids": […]}``. The process ends with its input, whatever it is doing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from time import perf_counter


class Orders:
    """The lines of standard input. At its end the process ends: at once if it is at work then."""

    def __init__(self) -> None:
        self._lines = queue.SimpleQueue[str]()
        self._waiting = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[str]:
        while True:
            self._waiting.set()
            line = self._lines.get()
            self._waiting.clear()
            if not line:
                return
            yield line

    def _read(self) -> None:
        # Not by sys.stdin: Python dies on the way out if a thread holds its lock.
        with open(0, encoding="utf-8", closefd=False) as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")
        if not self._waiting.is_set():
            os._exit(1)


def main() -> None:
    orders = Orders()
    # What the engine prints belongs to standard error: only answers go where they are read.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    # The folder of this script must not shadow the engine's own modules.
    del sys.path[0]
    driver, settings = sys.argv[1], json.loads(sys.argv[2])
    spec = importlib.util.spec_from_file_location("driver", driver)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    version, generate = module.open_engine(settings)
    generate([[1, 2, 3, 4]], 1)
    answers.write(json.dumps({"version": version}) + "\n")
    for line in orders:
        order = json.loads(line)
        began = perf_counter()
        token_ids = generate(order["prompts"], order["new_tokens"])
        seconds = perf_counter() - began
        answers.write(json.dumps({"seconds": seconds, "token_ids": token_ids}) + "\n")


# Engines that start processes of their own import this module again in them.
if __name__ == "__main__":
    main()
