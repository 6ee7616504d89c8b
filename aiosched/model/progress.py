"""How loading a model says where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (stage, done, total), in the thread that loads."""
