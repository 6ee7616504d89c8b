"""Pictures of simulations: that they are drawn from the figures, and stand alone."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from simulations import calibration

from aiosched.config import EngineConfig
from aiosched.errors import InvalidConfig
from aiosched.simulate.chart import Line, Panel, draw
from aiosched.simulate.generate import generate
from aiosched.simulate.metrics import Slo, over_time
from aiosched.simulate.plot import panels, save_plot
from aiosched.simulate.run import Load, ReplicaLog, simulate
from aiosched.simulate.trace import TraceRequest
from aiosched.simulate.workload import Workload

SVG = "{http://www.w3.org/2000/svg}"


def runs():
    trace = generate(Workload(rate=10.0, requests=20, prompt_tokens=(4, 16), output_tokens=(2, 8)))
    return [
        simulate(trace, calibration(), EngineConfig(), replicas=2, router=router)
        for router in ("round-robin", "least-loaded")
    ]


def test_there_is_a_line_for_each_run_in_each_panel():
    drawn = panels(runs(), Slo())
    assert [panel.title for panel in drawn] == [
        "Time to first token",
        "Time per output token",
        "Requests in the queue",
        "Requests in a step",
    ]
    for panel in drawn:
        assert [line.name for line in panel.lines] == ["round-robin", "least-loaded"]
    assert drawn[0].limit == 1000.0


def test_a_run_that_takes_no_time_is_drawn_without_lines(tmp_path):
    trace = [TraceRequest(arrival=0.0, prompt_tokens=5000, output_tokens=1)]
    save_plot(tmp_path / "plot.svg", [simulate(trace, calibration(), EngineConfig())], Slo(), "")
    assert "<polyline" not in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_plot_is_one_file_that_fetches_nothing(tmp_path, suffix):
    path = tmp_path / f"plot{suffix}"
    save_plot(path, runs(), Slo(), "A <title>")
    text = path.read_text()
    assert "A &lt;title&gt;" in text
    assert not [part for part in ("<script", "<link", "href", "url(") if part in text]
    picture = ElementTree.fromstring(text[text.index("<svg") :])
    assert len(picture.findall(f".//{SVG}polyline")) == 8


def test_other_formats_are_refused_by_name(tmp_path):
    with pytest.raises(InvalidConfig, match=r"plot.*\.svg or \.html"):
        save_plot(tmp_path / "plot.png", runs(), Slo(), "")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "points",
    [(), ((3.0, 0.0),), ((1.0, 5.0), (1.0, 5.0)), ((0.02, 1.0), (9000.0, 1e6)), ((10.0, 0.1),)],
)
def test_points_lie_within_the_panel_whatever_they_are(log, points):
    picture = ElementTree.fromstring(
        draw([Panel("p", "x", "y", [Line("a", points)], log_x=log)], "t")
    )
    for line in picture.findall(f".//{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 460
            assert 0 <= y <= 280


def test_load_over_time_is_the_mean_between_edges():
    log = ReplicaLog()
    log.loads = [Load(1.0, 2, 0), Load(3.0, 4, 0), Load(4.0, 0, 0)]
    means = over_time(log, "running", np.array([0.0, 2.0, 4.0, 6.0]))
    assert means.tolist() == [1.0, 3.0, 0.0]


def test_a_replica_without_steps_has_no_load():
    assert over_time(ReplicaLog(), "waiting", np.array([0.0, 1.0])).tolist() == [0.0]
