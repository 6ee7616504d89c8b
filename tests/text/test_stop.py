"""The first stop string ends the text, however the text is cut; nothing past it is ever shown."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiosched.errors import InvalidRequest
from aiosched.text.stop import StopMatcher

ab = st.text("ab", max_size=12)
stops_of_ab = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """Start and end of the match that completes first, and of those, starts first."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return start, end
    return None


def could_begin(tail: str, stops: tuple[str, ...]) -> bool:
    return any(stop.startswith(tail) for stop in stops)


@settings(deadline=None)
@given(text=ab, stops=stops_of_ab, include_stop=st.booleans(), data=st.data())
def test_finds_what_a_naive_search_finds(
    text: str, stops: tuple[str, ...], include_stop: bool, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=len(text)).map(sorted))
    edges = [0, *cuts, len(text)]
    match = first_match(text, stops)
    matcher = StopMatcher(stops, include_stop)
    shown, found, seen = "", False, 0
    for a, b in pairwise(edges):
        delta, found = matcher.push(text[a:b])
        shown, seen = shown + delta, b
        assert found == matcher.found == (match is not None and match[1] <= seen)
        if not found:  # all is shown but the longest end that may yet become a stop
            held = next(i for i in range(seen + 1) if i == seen or could_begin(text[i:seen], stops))
            assert shown == text[:held]
    shown += matcher.flush()
    assert shown == (text if match is None else text[: match[include_stop]])


def test_c19_no_delta_holds_the_beginning_of_a_stop() -> None:
    matcher = StopMatcher(("STOP",))
    assert [matcher.push(text) for text in ("a", " ST", "OP")] == [
        ("a", False),
        (" ", False),
        ("", True),
    ]
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stop", "text", "shown"), [("aab", "aaab", "a"), ("abab", "abaabab", "aba")]
)
def test_c20_a_stop_that_overlaps_itself_is_found(stop: str, text: str, shown: str) -> None:
    matcher = StopMatcher((stop,))
    assert "".join(matcher.push(char)[0] for char in text) == shown
    assert matcher.found


def test_of_stops_that_end_together_the_longest_counts() -> None:
    assert StopMatcher(("c", "abc")).push("xabc") == ("x", True)


def test_a_stop_that_ends_first_counts_though_another_began_before() -> None:
    assert StopMatcher(("abcd", "bc")).push("abcd") == ("a", True)


def test_a_failed_beginning_is_shown_at_the_end() -> None:
    matcher = StopMatcher(("STOP",))
    assert matcher.push("a STO") == ("a ", False)
    assert matcher.flush() == "STO"
    assert matcher.flush() == ""


def test_include_stop_shows_the_stop_and_nothing_after_it() -> None:
    matcher = StopMatcher(("STOP",), include_stop=True)
    assert matcher.push("a ST") == ("a ", False)
    assert matcher.push("OP now") == ("STOP", True)
    assert matcher.push("more") == ("", True)


def test_without_stops_nothing_is_held() -> None:
    matcher = StopMatcher(())
    assert matcher.push("anything") == ("anything", False)
    assert matcher.flush() == ""


@pytest.mark.parametrize("stop", ["]", "^", "-", "\\", "\n", "👩"])
def test_every_character_can_begin_a_stop(stop: str) -> None:
    assert StopMatcher((stop, "a")).push(f"xb{stop}y") == ("xb", True)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        StopMatcher(("a", ""))


def test_time_is_linear_for_stops_that_almost_match_everywhere() -> None:
    def seconds(size: int) -> float:
        matcher = StopMatcher(("a" * size + "b",))
        start = time.process_time()
        for _ in range(2 * size):
            matcher.push("a")
        return time.process_time() - start

    # Four times the text and four times the stop: linear is 4, quadratic is 16.
    assert min(seconds(8_000) for _ in range(3)) < 9 * min(seconds(2_000) for _ in range(3)) + 0.002
