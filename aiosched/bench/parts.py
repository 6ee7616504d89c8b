"""Parts: how long each word of the loops takes, seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from time import thread_time
from typing import Any

from aiosched.engine import Engine

NAMES = ("intake", "plan", "launch", "commit")


class Parts:
    """CPU time of the event loop's thread within intake, plan, launch and commit.

    Attributes:
        windows: seconds by part, of each window that has ended.
    """

    def __init__(self) -> None:
        self.windows: list[dict[str, float]] = []
        self._spent: dict[str, float] | None = None

    def attach(self, engine: Engine) -> None:
        """Time the engine's steps from now on."""
        assert engine._runtime is not None
        core: Any = engine._runtime._core  # whose methods are replaced, on this object alone
        for name in ("intake", "plan", "launch"):
            setattr(core, name, self._timed(name, getattr(core, name)))
        core.commit = self._timed_coroutine("commit", core.commit)

    def next_window(self) -> None:
        """A window begins here; the one before, if there was one, ends."""
        if self._spent is not None:
            self.windows.append(self._spent)
        self._spent = dict.fromkeys(NAMES, 0.0)

    def _add(self, name: str, seconds: float) -> None:
        if self._spent is not None:
            self._spent[name] += seconds

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = thread_time()
            try:
                return call(*args)
            finally:
                self._add(name, thread_time() - began)

        return timed

    def _timed_coroutine(
        self, name: str, call: Callable[..., Coroutine[Any, Any, None]]
    ) -> Callable[..., Any]:
        async def timed(*args: Any) -> None:
            await _Slices(call(*args), lambda seconds: self._add(name, seconds))

        return timed


class _Slices:
    """An awaitable that runs a coroutine and times it, its waits left out."""

    def __init__(self, coro: Coroutine[Any, Any, None], add: Callable[[float], None]) -> None:
        self._coro = coro
        self._add = add

    def __await__(self) -> Generator[Any, None, None]:
        step: Callable[[], Any] = lambda: self._coro.send(None)  # noqa: E731
        while True:
            began = thread_time()
            try:
                waited = step()
            except StopIteration:
                return
            finally:
                self._add(thread_time() - began)
            try:
                yield waited
            except BaseException as error:
                thrown = error
                step = lambda: self._coro.throw(thrown)  # noqa: B023, E731
            else:
                step = lambda: self._coro.send(None)  # noqa: E731
