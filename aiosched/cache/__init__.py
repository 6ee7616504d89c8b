"""KV memory on the host: which pages exist, who owns them, and which prefixes they hold."""

from __future__ import annotations

from aiosched.cache.pages import OutOfPages, PageOwnershipError, PagePool
from aiosched.cache.radix import InsertResult, Match, Node, RadixCache

__all__ = [
    "InsertResult",
    "Match",
    "Node",
    "OutOfPages",
    "PageOwnershipError",
    "PagePool",
    "RadixCache",
]
