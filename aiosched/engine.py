"""Engine: a language model inside an asyncio program."""

from __future__ import annotations

import asyncio
import uuid
import warnings
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from aiosched._threads import in_thread
from aiosched.answer import Answer
from aiosched.arguments import checked_config
from aiosched.config import EngineConfig
from aiosched.device.stream import Device
from aiosched.encoding import Encodings
from aiosched.errors import (
    AioschedError,
    EngineClosed,
    EngineFailed,
    InvalidConfig,
    InvalidRequest,
    QueueFull,
    WrongEventLoop,
    twin,
)
from aiosched.model.inputs import Int32Array, Model
from aiosched.model.progress import Progress
from aiosched.observe.logs import get_logger
from aiosched.observe.stats import EngineStats, Health, Status
from aiosched.observe.timeline import Timeline
from aiosched.params import SamplingParams
from aiosched.prompts import LargeText, Prompt
from aiosched.request import Completion
from aiosched.runtime import Runtime
from aiosched.stream import TokenStream
from aiosched.text.tokenizer import TokenizerLike

log = get_logger("aiosched.engine")

_DEFAULTS = SamplingParams()
_CLOSE_PATIENCE = 5.0  # seconds that close() waits for steps in flight


class Engine:
    """Generates text with a language model, in the event loop of the program around it.

    ::

        async with Engine("smollm2-135m-instruct") as engine:
            async for token in engine.generate("The capital of France is"):
                print(token.text, end="", flush=True)

    Args:
        model: a name (see ``EngineConfig.model``), or an object with the ``Model`` protocol.
        config: all settings at once; or give them one by one as keyword arguments, which win.
        device: a kind (``auto``, ``cpu``, ``cuda``), or an object with the ``Device`` protocol.
        progress: called in the loading thread with (stage, done, total) while a model is fetched
            and read; done and total are bytes or pieces, as the stage says.

    An engine belongs to the event loop that opens it. It can be constructed anywhere, opened once,
    and closed any number of times.
    """

    def __init__(
        self,
        model: str | Model | None = None,
        *,
        config: EngineConfig | None = None,
        device: str | Device | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        self.config = checked_config(model, config, device, settings)
        self._given_model = None if isinstance(model, str) else model
        self._given_device = None if isinstance(device, str) else device
        self._progress = progress
        self._runtime: Runtime | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._encoding = Encodings()
        self._answers: WeakValueDictionary[str, Answer] = WeakValueDictionary()
        self._failure: BaseException | None = None
        self._status = Status.NEW

    async def open(self) -> Self:
        """Load the model (in a thread, unless it is given) and start. ``async with`` does this.

        Raises:
            ModelLoadError: the model cannot be had.
            InvalidConfig: the settings do not fit the model or the machine.
            EngineClosed: the engine was opened before, or closed while it opened.
        """
        if self._status is not Status.NEW or self._loop is not None:
            raise EngineClosed("an engine is opened once; make a new one")
        self._loop = loop = asyncio.get_running_loop()
        config, model, device = self.config, self._given_model, self._given_device
        progress = self._progress

        def load() -> Runtime:
            return Runtime.load(config, model, device, progress)

        # With both given there is nothing to wait for.
        given = model is not None and device is not None
        runtime = load() if given else await in_thread(load, "aiosched-load")
        self._refuse_if_closed()
        runtime.start(loop, self._fail)
        self._runtime = runtime
        try:
            await runtime.warm_up()
            self._refuse_if_closed()
        except BaseException:
            await runtime.close(_CLOSE_PATIENCE)
            raise
        self._status = Status.OK
        self._task = loop.create_task(self._run(runtime), name="aiosched-scheduler")
        log.info("engine open", **runtime.describe())
        return self

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> TokenStream:
        """Submit a request; the stream gives its tokens as they come.

        The request is queued at once, and everything that can be refused is refused at once; only
        a long text is tokenized in a thread first, and what is wrong with it is raised by the
        stream.

        Args:
            prompt: text, token ids, or chat messages (mappings with ``role`` and ``content``,
                rendered by the model's own template).
            params: how to sample and when to end.
            priority: higher goes first; one level weighs as much as ``priority_aging`` seconds of
                waiting.
            deadline: seconds from now after which it ends, queued or running, with the
                finish reason ``deadline``.
            request_id: for ``abort`` and logs; must not be in use. Made up if not given.

        Raises:
            InvalidRequest: a parameter or the prompt cannot be served.
            PromptTooLong: the prompt does not fit; an ``InvalidRequest`` with both numbers.
            QueueFull: too many requests wait.
            EngineClosed: not open, draining or closed.
            EngineFailed: the engine is dead.
            WrongEventLoop: called from outside the engine's event loop.
        """
        runtime = self._ready()
        params = _DEFAULTS if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("params", params, "SamplingParams or None")
        banned = runtime.factory.check(params, priority, deadline)
        request_id = self._free_id(request_id)
        self._admit(runtime, params.n)
        encoded = runtime.prompts.encode(prompt)
        answer = Answer(request_id, runtime.inbox, params.n, self.config.max_unread_tokens)
        now = runtime.loop.time()
        deadline_at = None if deadline is None else now + deadline

        def submit(ids: Int32Array) -> None:
            requests = runtime.factory.make(
                answer, ids, params, banned, priority=priority, now=now, deadline_at=deadline_at
            )
            answer.begin(requests)

        if isinstance(encoded, LargeText):
            self._encoding.start(runtime.prompts, answer, encoded, submit)
        else:
            submit(encoded)
        self._answers[answer.id] = answer
        return TokenStream(answer, runtime.loop, runtime.make_detokenizer, self.config.reader_grace)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> Completion:
        """The whole answer at once. Arguments and errors are those of ``generate``.

        A cancelled call aborts its request.
        """
        stream = self.generate(
            prompt, params, priority=priority, deadline=deadline, request_id=request_id
        )
        async with stream:
            return await stream

    def abort(self, request_id: str) -> bool:
        """End a request; its reader gets a last event with the reason ``abort``.

        Returns whether there was such a request, still unfinished.
        """
        runtime = self._runtime_here()
        answer = self._answers.get(request_id)
        if answer is None or answer.finished or answer.aborted:
            return False
        answer.cut_off()
        runtime.intake()
        return True

    @property
    def model(self) -> Model:
        """The model, once the engine is open. Other engines may be opened over it."""
        return self._runtime_here().model

    @property
    def tokenizer(self) -> TokenizerLike | None:
        """The model's tokenizer, once the engine is open; ``None`` if it has none."""
        return self._runtime_here().tokenizer

    def stats(self) -> EngineStats:
        """Counts and times up to now."""
        return self._runtime_here().stats()

    def timeline(self) -> Timeline:
        """The latest steps, at most 10,000, as they went on the device and on the host.

        Raises:
            InvalidConfig: the engine does not record them; open it with ``timeline=True``.
        """
        runtime = self._runtime_here()
        if not self.config.timeline:
            raise InvalidConfig("timeline", False, "True, for steps to be recorded")
        return runtime.timeline()

    def health(self) -> Health:
        """Whether the engine can serve. Never raises."""
        status = self._status
        if status is Status.FAILED:
            return Health(status=status, reason=str(self._failure))
        if status is Status.OK and self._runtime is not None and self._runtime.stalled:
            return Health(status=Status.STALLED, reason="a step takes longer than step_timeout")
        return Health(status=status)

    async def drain(self, timeout: float | None = None) -> None:
        """Take no more requests, and let those there are end; cut them off after ``timeout`` s.

        The cut ones end with the reason ``abort``.
        """
        runtime = self._runtime_here()
        if self._status is Status.OK:
            self._status = Status.DRAINING
        try:
            async with asyncio.timeout(timeout):
                await self._encoding.finish()
                await runtime.empty()
        except TimeoutError:
            self._encoding.cut_off()
            runtime.abort_all()

    async def close(self) -> None:
        """End every stream with ``EngineClosed``, wait for the steps in flight, join all threads.

        Idempotent. Bounded in time, even if the device never answers. A close that is cancelled
        still joins the threads.
        """
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise WrongEventLoop("an engine is closed on the event loop that opened it")
        if self._status is not Status.CLOSED:
            self._status = Status.CLOSED
            self._end_all(EngineClosed("the engine was closed"))
            if self._task is not None:
                self._task.cancel()
        # A second call takes these steps too: the first may be under way, or was cancelled.
        try:
            if self._task is not None:
                await asyncio.wait({self._task})
        finally:
            if self._runtime is not None:
                await self._runtime.close(_CLOSE_PATIENCE)

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)
        if runtime is None or self._status is Status.CLOSED:
            return
        warnings.warn(f"unclosed engine {self!r}", ResourceWarning, source=self, stacklevel=2)
        runtime.abandon()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, runtime: Runtime) -> None:
        """The scheduler's task: a loop for as long as the engine lives."""
        try:
            await runtime.run()
        except asyncio.CancelledError:
            # By close() or _fail(), or by a program that cancels whatever tasks it finds.
            self._fail(EngineFailed("the scheduler's task was cancelled"))
            raise
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The engine is dead: everybody gets to know why."""
        if self._status in (Status.FAILED, Status.CLOSED):
            return
        self._status = Status.FAILED
        self._failure = error
        log.error("engine failed", exc_info=error)
        self._end_all(self._failed())
        if self._task is not None:
            self._task.cancel()

    def _end_all(self, error: AioschedError) -> None:
        self._encoding.fail(error)
        if self._runtime is not None:
            self._runtime.fail_all(error)

    def _failed(self) -> EngineFailed:
        if isinstance(self._failure, EngineFailed):
            return twin(self._failure)
        error = EngineFailed(f"the engine failed: {self._failure!r}")
        error.__cause__ = self._failure
        return error

    def _runtime_here(self) -> Runtime:
        """The runtime, for a call from the right event loop."""
        if self._runtime is None or self._loop is None:
            raise EngineClosed("the engine is not open: use `async with Engine(...)`")
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongEventLoop("an engine is used from within its event loop") from None
        if running is not self._loop:
            raise WrongEventLoop("the engine belongs to the event loop that opened it")
        return self._runtime

    def _ready(self) -> Runtime:
        """The runtime, if it takes requests."""
        runtime = self._runtime_here()
        match self._status:
            case Status.OK:
                return runtime
            case Status.FAILED:
                raise self._failed()
            case Status.DRAINING:
                raise EngineClosed("the engine drains: it takes no new requests")
            case _:
                raise EngineClosed("the engine is not open")

    def _refuse_if_closed(self) -> None:
        """Raise ``EngineClosed`` if somebody closed the engine while it was being opened."""
        if self._status is Status.CLOSED:
            raise EngineClosed("the engine was closed while it was being opened")

    def _admit(self, runtime: Runtime, count: int) -> None:
        """Raise ``QueueFull`` unless ``count`` more requests may wait."""
        limit = self.config.max_queued_requests
        most = limit + runtime.limits.max_running
        if count > most:
            raise InvalidRequest("n", count, f"at most {most}: places in the batch and the queue")
        if self._waiting(runtime) + count <= limit + runtime.idle_places:
            return
        runtime.intake()  # some of those may have been aborted
        waiting = self._waiting(runtime)
        if waiting + count > limit + runtime.idle_places:
            raise QueueFull(waiting, limit)

    def _waiting(self, runtime: Runtime) -> int:
        """Requests that wait, those included whose prompts are still tokenized."""
        return runtime.waiting + self._encoding.requests

    def _free_id(self, request_id: str | None) -> str:
        if request_id is None:
            return f"req-{uuid.uuid4().hex[:16]}"
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= 256:
            raise InvalidRequest("request_id", request_id, "a string of 1 to 256 characters")
        known = self._answers.get(request_id)
        if known is not None and not known.finished and not known.aborted:
            raise InvalidRequest("request_id", request_id, "not in use by another request")
        return request_id
