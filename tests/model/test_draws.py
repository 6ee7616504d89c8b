from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from aiosched.model.draws import uniform_draws

N = 100_000


def draw(seeds: object, positions: object) -> np.ndarray:
    seeds, positions = np.broadcast_arrays(
        np.asarray(seeds, np.uint64), np.asarray(positions, np.int64)
    )
    return uniform_draws(seeds, positions)


STREAMS = {
    "positions of seed 0": lambda: draw(0, np.arange(N)),
    "positions of a large seed": lambda: draw(2**64 - 1, np.arange(N)),
    "seeds 0, 1, 2 … at position 0": lambda: draw(np.arange(N), 0),
    "seeds 0, 1, 2 … at position 17": lambda: draw(np.arange(N), 17),
    "seeds that differ in high bits": lambda: draw(
        np.arange(N, dtype=np.uint64) << np.uint64(46), 3
    ),
    "the diagonal": lambda: draw(np.arange(N), np.arange(N)),
    "the other diagonal": lambda: draw(np.arange(N), np.arange(N)[::-1]),
}


@pytest.mark.parametrize("name", STREAMS)
def test_draws_are_uniform(name: str) -> None:
    counts = np.bincount((STREAMS[name]() * 256).astype(np.int64), minlength=256)
    assert len(counts) == 256
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("lag", [1, 2, 3, 7, 64])
def test_neighbours_are_independent(name: str, lag: int) -> None:
    draws = STREAMS[name]()
    first, second = draws[:-lag], draws[lag:]
    cells = np.bincount((first * 16).astype(np.int64) * 16 + (second * 16).astype(np.int64))
    assert stats.chisquare(cells).pvalue > 1e-4
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(N)


def test_low_bits_are_uniform_too() -> None:
    bits = (draw(1, np.arange(N)) * 2**24).astype(np.int64) & 255
    assert stats.chisquare(np.bincount(bits, minlength=256)).pvalue > 1e-4


def test_a_draw_depends_on_its_own_pair_alone() -> None:
    seeds = np.arange(50, dtype=np.uint64) * np.uint64(10**17)
    positions = np.arange(50, dtype=np.int64)[::-1] * 1000
    together = uniform_draws(seeds, positions)
    alone = [uniform_draws(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    assert together.tolist() == alone


def test_draws_lie_in_the_half_open_unit_interval() -> None:
    draws = draw(np.arange(10)[:, None], np.arange(N)).ravel()
    assert draws.dtype == np.float32
    assert draws.min() >= 0.0
    assert draws.max() <= 1 - 2**-24


def test_no_two_pairs_of_a_small_grid_share_a_stream() -> None:
    grid = draw(np.arange(64)[:, None], np.arange(64))
    assert len(np.unique(grid.ravel())) > 64 * 64 - 8


def test_draws_are_the_same_in_every_release() -> None:
    """Seeds are part of what users store: a changed draw breaks their reproductions."""
    bits = (draw([0, 1, 2**64 - 1], [0, 5, 10**6]).astype(np.float64) * 2**24).astype(int)
    assert bits.tolist() == [4727170, 7595580, 6492421]


def test_the_module_needs_no_torch() -> None:
    code = "import sys, aiosched.model.draws; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
