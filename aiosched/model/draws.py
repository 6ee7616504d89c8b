"""Random draws as a counter: a pure function of (seed, position).

No generator has state, so a draw does not depend on the batch it is made in, on what else runs, on
how far ahead the engine works, or on whether the request was retracted and computed again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform_draws(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """One draw in [0, 1) for each pair, a multiple of 2**-24.

    Args:
        seeds: uint64 ``[m]``, any values; neighbours such as 0, 1, 2 give unrelated draws.
        positions: int64 ``[m]``, the position of the token to be drawn; not negative.

    Returns:
        float32 ``[m]``. The largest value is 1 - 2**-24, which float32 holds exactly.
    """
    # The seed is mixed before the position joins it: added up unmixed, (seed, position + 1) and
    # (seed + 1, position) would be the same or shifted streams.
    state = _mix(np.asarray(seeds, np.uint64) * _MIX_2 + _GOLDEN)
    state = _mix(state + np.asarray(positions, np.int64).astype(np.uint64) * _GOLDEN)
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def derive_seed(seed: int, choice: int) -> int:
    """The seed of one of the ``n`` answers of a request: the first has the request's own."""
    if choice == 0:
        return seed
    # Arrays, because numpy warns of the wanted overflow in scalars.
    mixed = _mix(np.array([seed], np.uint64) * _MIX_1 + np.array([choice], np.uint64) * _GOLDEN)
    return int(mixed[0] >> np.uint64(1))
