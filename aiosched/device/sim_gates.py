"""The gates of a simulated device: where a test holds work at its end, and waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

W = TypeVar("W")


class _Rule(NamedTuple):
    """A word about gates. ``None`` stands for every step, or for every label."""

    step: int | None
    label: str | None
    shut: bool

    def matches(self, step: int | None, label: str | None) -> bool:
        return self.step in (None, step) and self.label in (None, label)


class Gates(Generic[W]):
    """Which work is held, which has come to its end, and who (``W``) waits for that.

    Args:
        shut: whether gates are shut about which nothing was said.
    """

    def __init__(self, shut: bool) -> None:
        self._rules = [_Rule(None, None, shut)]
        self._at_end: set[tuple[int, str]] = set()
        self._watchers: dict[tuple[int, str], list[W]] = {}

    def rule(self, step: int | None, label: str | None, shut: bool) -> None:
        """Shut or open the gate of matching work. The last rule that matches decides."""
        new = _Rule(step, label, shut)
        self._rules = [old for old in self._rules if not new.matches(old.step, old.label)]
        self._rules.append(new)

    def shut(self, step: int, label: str) -> bool:
        """Whether this work is held."""
        return next((r.shut for r in reversed(self._rules) if r.matches(step, label)), False)

    def arrive(self, step: int, label: str) -> list[W]:
        """The work has come to its end. Returns who waited for that."""
        self._at_end.add((step, label))
        return self._watchers.pop((step, label), [])

    def watch(self, step: int, label: str, watcher: W) -> bool:
        """Add a watcher for the end of this work. False if it has come there already."""
        if (step, label) in self._at_end:
            return False
        self._watchers.setdefault((step, label), []).append(watcher)
        return True

    def forget_watchers(self) -> Iterator[W]:
        """Remove and return everybody who waits."""
        watchers, self._watchers = self._watchers, {}
        for waiting in watchers.values():
            yield from waiting
