"""The process of one part: ``python -m aiosched.bench.gpu.child PART SETTINGS``.

Each row is a line of JSON on standard output as soon as it is measured. Apart from the rows there
may be a line with ``gpu``, the name of the device, and one with ``error``. Standard input is a pipe
whose end is the end of the process.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, TextIO

import msgspec

from aiosched.bench.gpu.settings import Settings
from aiosched.bench.orphans import end_with_parent
from aiosched.commands.running import run


def main() -> None:
    end_with_parent()
    name, settings = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Settings)
    # Libraries print to standard output as they like: from here on that is standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as rows:
        os.dup2(2, 1)
        run(_measure(name, settings, rows))


async def _measure(name: str, settings: Settings, rows: TextIO) -> None:
    module = import_module(f"aiosched.bench.gpu.{name.replace('-', '_')}")

    def put(row: dict[str, Any]) -> None:
        print(msgspec.json.encode(row).decode(), file=rows, flush=True)

    try:
        if settings.on_cuda:
            import torch

            torch.cuda.set_device(settings.index)
            put({"gpu": torch.cuda.get_device_name(settings.index)})
        async for row in module.measure(settings):
            put(row)
    except Exception as error:
        put({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        raise


if __name__ == "__main__":
    main()
