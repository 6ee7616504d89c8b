"""Run one blocking call off the event loop, in a thread that is gone afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(fn: Callable[[], T], name: str) -> T:
    """The result of ``fn()``, run in a daemon thread of its own.

    The loop's default executor would keep its threads until the loop is closed; an engine leaves
    none behind. If the caller is cancelled the thread finishes alone and its result is dropped.
    """
    thread = _DaemonThread(name)
    # By way of the loop, and not past it: a loop in virtual time counts what runs in executors.
    future = asyncio.get_running_loop().run_in_executor(thread, fn)
    try:
        return await future
    finally:
        if future.done() and not future.cancelled():
            thread.join()


class _DaemonThread(Executor):
    """An executor for one call. The interpreter does not wait for it when it exits."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on a cancel does not reach it
        self._thread = threading.Thread(
            target=_work, args=(future, lambda: fn(*args, **kwargs)), name=self._name, daemon=True
        )
        self._thread.start()
        return future

    def join(self) -> None:
        self._thread.join()


def _work(future: Future[T], fn: Callable[[], T]) -> None:
    try:
        result = fn()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future  # an error's traceback names this frame, and so would hold its own future
