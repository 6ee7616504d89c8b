"""The forward alone: what a step would cost if nothing were around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from aiosched.bench.gpu.decode_step import decode_step, on_device
from aiosched.bench.gpu.timing import seconds_per_call, synchronize
from aiosched.model.graphs import PlannedModel
from aiosched.model.inputs import Model

PAGE_SIZE = 16


class Bare(NamedTuple):
    """Attributes:
    name: ``graph replay``, or ``forward`` where the model runs without graphs.
    seconds: of one.
    """

    name: str
    seconds: float


@torch.inference_mode()
def bare_step(model: Model, device: str, *, batch: int, length: int, calls: int) -> Bare:
    """Time of a decode forward of ``batch`` sequences of ``length`` tokens, again and again.

    Without sampling, and with its inputs on the device already.
    """
    width = -(-length // PAGE_SIZE)
    kv = model.make_kv(batch * width, PAGE_SIZE)
    inputs = on_device(decode_step(batch, length, PAGE_SIZE), device)
    if device.startswith("cuda") and isinstance(model, PlannedModel):
        model.plan(inputs, kv)
        call, name = _captured(lambda: model.forward(inputs, kv), device), "graph replay"
    else:
        call, name = (lambda: model.forward(inputs, kv)), "forward"
    return Bare(name, seconds_per_call(call, device, calls=calls))


def _captured(forward: Callable[[], object], device: str) -> Callable[[], object]:
    """The replay of ``forward``, captured aside from the default stream."""
    synchronize(device)
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        for _ in range(2):  # lets libraries make their handles and workspaces outside the graph
            forward()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = forward()

    def replay() -> object:
        graph.replay()
        return logits  # lives as long as the graph that writes to it

    return replay
