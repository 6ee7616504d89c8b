"""Stop strings in a stream of text."""

from __future__ import annotations

import re

from aiosched.errors import InvalidRequest


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces, and shows nothing past it.

    The match that completes first in the stream counts; of those that complete at the same
    character, the one that starts first. How the text is cut into pieces does not matter. Time is
    linear in the text, whatever the stops (Aho and Corasick, *Efficient string matching*, 1975).

    Args:
        stops: the stop strings. None at all is fine: then nothing is ever held back.
        include_stop: show the stop string too.

    Raises:
        InvalidRequest: a stop string is empty.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        if "" in stops:
            raise InvalidRequest("stop", stops, "strings that are not empty")
        self.found = False
        self._include_stop = include_stop
        self._state = 0
        self._build(stops)
        firsts = "".join(map(re.escape, sorted({stop[0] for stop in stops})))
        self._first_char = re.compile(f"[{firsts}]") if stops else None

    def push(self, text: str) -> tuple[str, bool]:
        """Take a piece of text.

        Returns:
            The text that may be shown now, and whether a stop string was found. Text that may yet
            become a stop string is held back. Once found, nothing more is shown.
        """
        if self.found or self._first_char is None:
            return ("" if self.found else text), self.found
        start = 0
        if not self._state:
            first = self._first_char.search(text)
            if first is None:
                return text, False
            start = first.start()
        held = self._prefix[self._state], self._depth[self._state]
        for i in range(start, len(text)):
            self._advance(text[i])
            if match := self._match[self._state]:
                self.found = True
                kept = i + 1 - (0 if self._include_stop else match)
                return _shown(*held, text, kept), True
        return _shown(*held, text, len(text) - self._depth[self._state]), False

    def flush(self) -> str:
        """Return what is held, when the text ended without a stop string."""
        state, self._state = self._state, 0
        return "" if self.found else self._prefix[state][: self._depth[state]]

    def _advance(self, char: str) -> None:
        state = self._state
        while state and char not in self._next[state]:
            state = self._fail[state]
        self._state = self._next[state].get(char, 0)

    def _build(self, stops: tuple[str, ...]) -> None:
        """Make the automaton. State s stands for the text ``_prefix[s][: _depth[s]]``.

        That text is the longest end of the stream that begins a stop string, which is exactly
        what has to be held back. ``_match[s]`` is the length of the longest stop that ends it.
        """
        self._next: list[dict[str, int]] = [{}]
        self._prefix, self._depth, self._fail, self._match = [""], [0], [0], [0]
        for stop in stops:
            state = 0
            for depth, char in enumerate(stop, 1):
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._prefix.append(stop)
                    self._depth.append(depth)
                    self._fail.append(0)
                    self._match.append(0)
                state = self._next[state][char]
            self._match[state] = len(stop)
        queue = list(self._next[0].values())
        for state in queue:  # breadth first: what fails to a shorter text is ready
            self._match[state] = self._match[state] or self._match[self._fail[state]]
            for char, child in self._next[state].items():
                fail = self._fail[state]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)
                queue.append(child)


def _shown(prefix: str, depth: int, text: str, end: int) -> str:
    """Held text and new text, up to ``end``, an index into the new text that may be negative."""
    return prefix[: depth + end] if end <= 0 else prefix[:depth] + text[:end]
