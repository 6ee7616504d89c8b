"""From measured steps to a ``StepCost``: least squares with coefficients of at least 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiosched.simulate.cost import LINEAR, Fit, StepCost, StepShape, weights

Floats = NDArray[np.float64]

OUTLIER = 20.0
"""Steps that a first fit misses by so many times the median error are not fitted to: something
else had the machine. Lesser delays stay: they come in production, too, and belong to the mean."""

SUPPORT = 3.0
"""Steps that must stand by a point of a curve, those between two points counting in part."""


def fit_cost(
    shapes: Sequence[StepShape],
    seconds: Sequence[float],
    *,
    growth: int = 2,
    linear: Sequence[str] = LINEAR,
) -> tuple[StepCost, Fit]:
    """The cost that comes closest to the measured ``seconds``, and how close that is.

    Errors count relative to what the fit says of a step, so that the short steps of small batches
    weigh as much as the long ones, and the noise of a measurement pulls no mean down.

    Args:
        growth: each point of the curve of rows stands at so many times the rows of the one before.
        linear: the terms of ``LINEAR`` that the cost may have.

    Raises:
        ValueError: there are no more steps than there are numbers to find.
    """
    measured = np.asarray(seconds, dtype=np.float64)
    rows = _points([shape.decode_rows for shape in shapes], growth)
    tokens = _points([s.prefill_tokens for s in shapes if s.prefill_tokens], 4)
    rising = _rising(len(rows), len(tokens), len(linear))
    matrix = np.array([_terms(shape, rows, tokens, linear) for shape in shapes]) @ rising
    if len(shapes) <= matrix.shape[1]:
        raise ValueError(f"{len(shapes)} steps cannot tell {matrix.shape[1]} numbers")
    # Relative to what was measured an interruption weighs little, however long it was.
    first = nonnegative_least_squares(matrix / measured[:, None], np.ones_like(measured))
    misses = np.abs(matrix @ first - measured)
    kept = misses <= OUTLIER * np.median(_errors(matrix, measured, first)) * (matrix @ first)
    if kept.sum() > matrix.shape[1]:
        matrix, measured = matrix[kept], measured[kept]
    coefficients = _relative_fit(matrix, measured)
    errors = _errors(matrix, measured, coefficients)
    fit = Fit(
        steps=len(measured),
        mean_ms=1e3 * float(measured.mean()),
        error_median=float(np.median(errors)),
        error_p90=float(np.quantile(errors, 0.9)),
    )
    found = (rising @ coefficients).tolist()
    of_rows, of_tokens = found[: len(rows)], found[len(rows) : len(rows) + len(tokens)]
    cost = StepCost(
        rows=tuple(zip(rows, of_rows, strict=True)),
        prompt_tokens=tuple(zip(tokens, of_tokens, strict=True)) or ((1, 0.0),),
        **dict(zip(linear, found[len(rows) + len(tokens) :], strict=True)),
    )
    return cost, fit


def _points(counts: Sequence[int], growth: int) -> list[int]:
    """Where a curve gets its points: the least and the most, and powers of ``growth`` between.

    A point that too few steps stand by is left out: it would follow their noise.
    """
    if not counts:
        return []
    low, high = min(counts), max(counts)
    points, power = {low, high}, 1
    while power < high:
        points |= {power} if power > low else set()
        power *= growth
    kept = sorted(points)
    while len(kept) > 2:
        support = [0.0] * len(kept)
        for count in counts:
            for index, share in weights(kept, count):
                support[index] += share
        weakest = min(range(1, len(kept)), key=support.__getitem__)
        if support[weakest] >= SUPPORT:
            break
        del kept[weakest]
    return kept


def _rising(rows: int, tokens: int, linear: int) -> Floats:
    """From steps upwards to the points of curves: more rows, or more tokens, never cost less.

    Where few steps say what a large batch costs, KV terms could else make up for nonsense.
    """
    matrix = np.eye(rows + tokens + linear)
    for start, count in ((0, rows), (rows, tokens)):
        matrix[start : start + count, start : start + count] = np.tri(count)
    return matrix


def _terms(
    shape: StepShape, rows: Sequence[int], tokens: Sequence[int], linear: Sequence[str]
) -> list[float]:
    """How much of each number of a cost a step of this shape takes."""
    terms = [0.0] * (len(rows) + len(tokens))
    for index, share in weights(rows, shape.decode_rows):
        terms[index] += share
    if shape.prefill_tokens:
        for index, share in weights(tokens, shape.prefill_tokens):
            terms[len(rows) + index] += share
    return terms + [float(getattr(shape, term)) for term in linear]


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The ``x >= 0`` that minimises ``|matrix @ x - target|``, by Lawson and Hanson's active set.

    Args:
        matrix: [m, n].
        target: [m].
    """
    columns = matrix.shape[1]
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(norms > 0, norms, 1.0)  # terms differ by many powers of ten
    x = np.zeros(columns)
    free = np.zeros(columns, dtype=np.bool_)
    for _ in range(3 * columns):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10 * np.linalg.norm(target):
            break
        free[best] = True
        x = _solve_free(scaled, target, x, free)
    return x / np.where(norms > 0, norms, 1.0)


def _solve_free(matrix: Floats, target: Floats, x: Floats, free: NDArray[np.bool_]) -> Floats:
    """Least squares over the free columns; a column that would go below 0 is fixed there."""
    while True:
        solved = np.zeros_like(x)
        solved[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        negative = free & (solved <= 0)
        if not negative.any():
            return solved
        # Go from x towards the solution until the first coefficient meets 0.
        reach = x[negative] / (x[negative] - solved[negative])
        x = x + reach.min() * (solved - x)
        free &= x > 1e-14 * x.max(initial=1e-300)
        x[~free] = 0.0
        if not free.any():
            return x


def _relative_fit(matrix: Floats, measured: Floats) -> Floats:
    """Least squares of the errors relative to the fit itself, which is found on the way."""
    scale = measured
    for _ in range(4):
        coefficients = nonnegative_least_squares(matrix / scale[:, None], measured / scale)
        scale = np.maximum(matrix @ coefficients, 1e-3 * measured.mean())
    return coefficients


def _errors(matrix: Floats, measured: Floats, coefficients: Floats) -> Floats:
    errors: Floats = np.abs(matrix @ coefficients - measured) / measured
    return errors
