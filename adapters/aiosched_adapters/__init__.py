"""Request sources and web front ends for aiosched, each behind an extra."""

from __future__ import annotations
