"""A file that a command writes at its end, refused at its beginning if it cannot be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class OutFile(click.Path):
    """The path of a file to be written. It, or the folder where it will be, must be writable."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """A ``Path``. Raises ``BadParameter`` if nothing can be written there."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.exists():
            folder = path.parent
            if not folder.is_dir():
                self.fail(f"{str(path)!r}: there is no folder {str(folder)!r}.", param, ctx)
            if not os.access(folder, os.W_OK | os.X_OK):
                self.fail(f"{str(path)!r}: the folder is not writable.", param, ctx)
        return path
