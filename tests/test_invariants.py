"""The ten invariants: each has a test that would catch its breach, marked ``invariant(n)``."""

from __future__ import annotations

import re
from pathlib import Path

INVARIANTS = {
    1: "relay identity: a step reads what its request's latest step wrote, in the same epoch",
    2: "reuse: a page or row is reused only behind the last step that names it",
    3: "staging: what a pending copy reads or fills is not touched",
    4: "one step late: visible tokens are the committed prefix, known ends are not over-scheduled",
    5: "cancel anywhere: no further token, memory at its baseline, nobody else affected",
    6: "retraction with a result in flight: a result applies only in its own epoch",
    7: "no lag in what shapes logits",
    8: "order of late sampling: the inputs of step N's sampling may wait for the result of N-1",
    9: "liveness: every wait has a deadline and an error that names step, fence and rank",
    10: "a good citizen of the event loop",
}


def test_each_invariant_has_a_test() -> None:
    marked = set()
    for file in Path(__file__).parent.rglob("test_*.py"):
        marked |= {
            int(n)
            for n in re.findall(r"^@pytest\.mark\.invariant\((\d+)\)", file.read_text(), re.M)
        }
    assert marked == set(INVARIANTS)
