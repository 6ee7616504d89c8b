"""The cost model: shapes of steps, curves, and the fit."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls
from simulations import calibration

from aiosched.errors import InvalidConfig
from aiosched.model.inputs import StepInputs
from aiosched.simulate.cost import Calibration, StepCost, StepShape, interpolate
from aiosched.simulate.fit import fit_cost, nonnegative_least_squares


def step_inputs(decode_lens, chunks):
    """A step of sequences that decode at these lengths, and of (start, end) chunks."""
    starts = np.cumsum([0, *(1 for _ in decode_lens), *(end - start for start, end in chunks)])
    lens = [*decode_lens, *(end for _, end in chunks)]
    empty = StepInputs.empty(16)
    fields = {name: getattr(empty, name) for name in StepInputs.__dataclass_fields__}
    return StepInputs(
        **fields
        | {
            "num_decodes": len(decode_lens),
            "query_start": starts.astype(np.int32),
            "seq_lens": np.array(lens, dtype=np.int32),
        }
    )


def test_the_shape_of_a_step_that_decodes():
    assert StepShape.of(step_inputs([10, 30], [])) == StepShape(2, 40, 60)


def test_the_shape_of_a_step_that_reads_prompts_counts_what_each_token_looks_at():
    # Tokens 0, 1, 2 of one look at 1, 2, 3; tokens 4 and 5 of another at 5 and 6.
    assert StepShape.of(step_inputs([], [(0, 3), (4, 6)])) == StepShape(0, 0, 0, 2, 5, 17)


def test_the_shape_of_a_mixed_step_is_both():
    assert StepShape.of(step_inputs([7], [(0, 1)])) == StepShape(1, 7, 7, 1, 1, 1)


def test_a_curve_is_straight_between_its_points_and_goes_on_beyond():
    curve = ((1, 10.0), (2, 14.0), (4, 18.0))
    counts = (0, 1, 2, 3, 4, 8)
    assert [interpolate(curve, n) for n in counts] == [10, 10, 14, 16, 18, 26]
    assert interpolate(((3, 5.0),), 100) == 5.0
    assert interpolate(((0, 5.0), (1, 1.0)), 100) == 0.0


def test_a_cost_is_the_sum_of_its_parts():
    cost = StepCost(
        rows=((0, 1.0), (2, 3.0)),
        prompt_tokens=((1, 10.0), (11, 20.0)),
        decode_kv=0.1,
        decode_kv_padded=0.01,
        prefill_rows=0.5,
        prefill_pairs=0.001,
    )
    assert cost.seconds(StepShape(1, 10, 20)) == pytest.approx(2.0 + 1.0 + 0.2)
    assert cost.seconds(StepShape(0, 0, 0, 2, 6, 100)) == pytest.approx(1.0 + 15.0 + 1.0 + 0.1)


@pytest.mark.parametrize(
    "fields", [{"rows": ()}, {"rows": ((2, 1.0), (1, 1.0))}, {"rows": ((1, -1.0),)}]
)
def test_a_cost_that_makes_no_sense_is_refused(fields):
    with pytest.raises(ValueError, match="must be"):
        StepCost(**fields)


@pytest.mark.parametrize("seed", range(5))
def test_nonnegative_least_squares_finds_what_scipy_finds(seed):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(30, 8)) * 10.0 ** rng.integers(-4, 4, size=8)
    target = rng.normal(size=30)
    found = nonnegative_least_squares(matrix, target)
    assert (found >= 0).all()
    expected, residual = nnls(matrix, target)
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(residual, rel=1e-9)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def random_shapes(count):
    rng = np.random.default_rng(0)
    shapes = []
    for rows in rng.integers(1, 33, size=count).tolist():
        kv = rows * int(rng.integers(10, 500))
        tokens = int(rng.integers(1, 300)) * int(rng.random() < 0.3)
        shapes.append(StepShape(rows, kv, int(1.2 * kv), int(tokens > 0), tokens, tokens * 50))
    return shapes


TRUE = StepCost(
    rows=((1, 0.010), (2, 0.012), (4, 0.014), (8, 0.016), (16, 0.020), (32, 0.030)),
    prompt_tokens=((1, 0.001), (300, 0.2)),
    decode_kv=1e-6,
)


def test_the_fit_finds_the_cost_that_made_the_steps():
    shapes = random_shapes(400)
    cost, fit = fit_cost(shapes, [TRUE.seconds(shape) for shape in shapes])
    assert fit.error_p90 < 0.01
    assert cost.seconds(StepShape(8, 800, 960)) == pytest.approx(
        TRUE.seconds(StepShape(8, 800, 960)), rel=0.01
    )


def test_noise_and_a_few_interruptions_do_not_pull_the_fit():
    rng = np.random.default_rng(1)
    shapes = random_shapes(600)
    seconds = [TRUE.seconds(shape) * rng.normal(1.0, 0.1) for shape in shapes]
    for hit in (10, 200, 300):
        seconds[hit] += 1.0
    cost, _ = fit_cost(shapes, seconds)
    predicted = sum(cost.seconds(shape) for shape in shapes)
    assert predicted == pytest.approx(sum(TRUE.seconds(shape) for shape in shapes), rel=0.02)


def test_curves_of_the_fit_never_fall():
    rng = np.random.default_rng(2)
    shapes = random_shapes(60)
    cost, _ = fit_cost(shapes, rng.uniform(0.01, 0.1, size=60).tolist())
    for curve in (cost.rows, cost.prompt_tokens):
        seconds = [value for _, value in curve]
        assert seconds == sorted(seconds)


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="cannot tell"):
        fit_cost([StepShape(1, 10, 10)], [1.0])


def test_a_calibration_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "calibration.json"
    calibration().write(path)
    assert Calibration.read(path) == calibration()


@pytest.mark.parametrize("text", ["", "{}", '{"model": 1}'])
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match="bench calibrate"):
        Calibration.read(path)


def test_the_recorded_calibration_is_there_and_plausible():
    recorded = Calibration.recorded()
    assert recorded.model == "smollm2-135m-instruct"
    assert 0.001 < recorded.device.seconds(StepShape(1, 100, 100)) < 1.0
    assert recorded.host.seconds(StepShape(1, 100, 100)) < 0.01
