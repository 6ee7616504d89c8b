"""A stand-in for ``torch.cuda``: streams that do nothing until the test lets them run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

PATIENCE = 10.0


class FakeEvent:
    def __init__(self, cuda: FakeCuda, enable_timing: bool = False, blocking: bool = False) -> None:
        self.cuda = cuda
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.time = 0.0
        self._fired = threading.Event()
        self._fired.set()  # as with CUDA, an event that was never recorded has fired

    def record(self, stream: FakeStream | None = None) -> None:
        self._fired.clear()
        (stream or self.cuda.current).ops.append(self._fire)
        self.cuda.eager and self.cuda.run()

    def _fire(self) -> bool:
        self.time = self.cuda.time
        self._fired.set()
        return True

    def query(self) -> bool:
        if self.cuda.sticky_error is not None:
            raise self.cuda.sticky_error
        return self._fired.is_set()

    def synchronize(self) -> None:
        self.cuda.synchronizing.append(threading.current_thread().name)
        if not self._fired.wait(PATIENCE):
            raise TimeoutError("the fake event never fired")
        if self.cuda.sticky_error is not None:
            raise self.cuda.sticky_error

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.enable_timing and end.enable_timing
        return float(np.float32((end.time - self.time) * 1e3))


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.ops: deque[Callable[[], bool]] = deque()  # False: blocked, try again later
        self.waited_for: list[object] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited_for.append(event)
        self.ops.append(event.query)

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


class FakeCuda:
    """Kernels are functions that a launch enqueues on the current stream with ``kernel``."""

    def __init__(self, eager: bool = False) -> None:
        self.time = 0.0
        self.eager = eager  # events fire as soon as they are recorded
        self.default = FakeStream(self)
        self.current = self.default
        self.streams = [self.default]
        self.sticky_error: Exception | None = None
        self.synchronizing: list[str] = []  # names of the threads that waited for events
        self.devices: list[int] = []  # set_device calls

    # What torch.cuda has.

    def Stream(self, device: int) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing, blocking)

    def current_stream(self, device: int) -> FakeStream:
        return self.current

    def set_device(self, index: int) -> None:
        self.devices.append(index)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # For tests.

    def kernel(self, effect: Callable[[], object] = lambda: None, seconds: float = 0.0) -> None:
        """Called within a launch: enqueue a kernel on the current stream."""

        def execute() -> bool:
            self.time += seconds
            effect()
            return True

        self.current.ops.append(execute)

    def run(self, *streams: FakeStream) -> None:
        """Let the GPU work on ``streams`` (all by default) until each is empty or blocked."""
        progress = True
        while progress:
            progress = False
            for stream in streams or self.streams:
                while stream.ops and stream.ops[0]():
                    stream.ops.popleft()
                    progress = True
