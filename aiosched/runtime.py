"""Runtime: the parts of an open engine, put together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from aiosched._threads import in_thread
from aiosched.config import EngineConfig
from aiosched.device.stream import Device
from aiosched.errors import AioschedError, DeviceStalled, InvalidConfig, twin
from aiosched.limits import resolve_limits
from aiosched.model.inputs import Model
from aiosched.model.progress import Progress
from aiosched.observe.stats import EngineStats
from aiosched.observe.timeline import Timeline
from aiosched.prompts import PromptEncoder
from aiosched.request import FinishReason
from aiosched.scheduler.core import EngineCore
from aiosched.scheduler.depth import depth_policy
from aiosched.scheduler.future_map import FutureMap
from aiosched.scheduler.inbox import Inbox
from aiosched.scheduler.loop import event_loop_normal, event_loop_overlap
from aiosched.scheduler.scheduler import Limits, Scheduler
from aiosched.scheduler.watchdog import Watchdog
from aiosched.submission import RequestFactory
from aiosched.text.detokenizer import IncrementalDetokenizer, make_detokenizer
from aiosched.text.tokenizer import Tokenizer, TokenizerLike

_LAST_CHANCE = 0.1  # seconds for a device that did not answer while it was waited for


class Runtime:
    """Model, tokenizer, device and scheduler. ``load`` may take seconds and belongs in a thread;
    ``start`` binds everything to an event loop."""

    inbox: Inbox
    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        config: EngineConfig,
        name: str,
        model: Model,
        device: Device,
        tokenizer: TokenizerLike | None,
        limits: Limits,
    ) -> None:
        self._config = config
        self._name = name
        self.model = model
        self._device = device
        self.tokenizer = tokenizer
        self._owns_tokenizer = tokenizer is not getattr(model, "tokenizer", None)
        self.limits = limits
        self._eos_token_ids = _within(model.eos_token_ids, model.vocab_size)
        self.prompts = PromptEncoder(
            tokenizer, model.vocab_size, limits.max_model_len, limits.num_pages * limits.page_size
        )
        self.factory = RequestFactory(
            vocab_size=model.vocab_size,
            eos_token_ids=self._eos_token_ids,
            tokenizer=tokenizer,
            max_model_len=limits.max_model_len,
            max_unread_tokens=config.max_unread_tokens,
            priority_aging=config.priority_aging,
            priorities=config.policy == "priority",
        )

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        model: Model | None,
        device: Device | None,
        progress: Progress | None = None,
    ) -> Runtime:
        """Find the device and load the model. Blocks.

        Raises:
            ModelLoadError, InvalidConfig: see ``Engine.open``.
        """
        kind = device_kind(config.device) if device is None else device.kind
        if device is None:
            device = make_device(kind, config)  # before the model, which takes seconds to load
        name = config.model if model is None else type(model).__name__
        if model is None:
            from aiosched.model.loader import load_model

            model = load_model(
                config.model,
                dtype=config.dtype,
                quantization=config.quantization,
                compile=config.compile,
                device=kind,
                progress=progress,
                cache_dir=config.cache_dir,
            )
        limits = resolve_limits(config, model, _free_device_bytes(kind))
        tokenizer = _tokenizer_of(model)
        if isinstance(tokenizer, Tokenizer):
            tokenizer.warm_up()
        return cls(config, name, model, device, tokenizer, limits)

    def start(
        self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[DeviceStalled], None]
    ) -> None:
        """Bind to ``loop``: threads, buffers, scheduler.

        Raises:
            InvalidConfig: there is not as much memory as the KV cache is to take.
        """
        self.loop = loop
        self._device.open(loop)
        try:
            self._assemble(loop, on_failure)
        except BaseException as error:
            self._device.close(timeout=1.0)  # it has no work: this returns at once
            if _lacks_memory(error):
                tokens = self.limits.num_pages * self.limits.page_size
                raise InvalidConfig("kv_tokens", tokens, f"what fits in memory: {error}") from error
            raise

    def _assemble(
        self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[DeviceStalled], None]
    ) -> None:
        from aiosched.model.runner import ModelRunner

        self.inbox = Inbox(loop)
        rows = self.limits.rows
        future_map = FutureMap(rows, self._device.torch_device, debug=self._config.debug)
        self._runner = runner = ModelRunner(
            self.model,
            self._device,
            future_map,
            num_pages=self.limits.num_pages,
            page_size=self.limits.page_size,
            max_rows=rows,
            max_running=self.limits.max_running,
        )
        self._scheduler = Scheduler(self.limits, self.inbox, self._eos_token_ids)
        self._state = self._scheduler.state
        self._watchdog = Watchdog(loop, self._config.step_timeout, on_failure)
        self._core = EngineCore(
            loop,
            self._scheduler,
            runner,
            future_map,
            self._watchdog,
            self._device,
            vocab_size=self.model.vocab_size,
            depth=depth_policy(self._config.overlap_depth, self._device.kind),
            disable_consecutive_prefill_overlap=self._config.disable_consecutive_prefill_overlap,
            timeline=self._config.timeline,
        )

    async def warm_up(self) -> None:
        """Do now what would otherwise hold up the first requests."""
        await self._runner.warm_up()

    async def run(self) -> None:
        """The loop that the depth asks for. Returns only by an exception."""
        normal = self._config.overlap_depth == 0
        run = event_loop_normal if normal else event_loop_overlap
        await run(self._core)

    def intake(self) -> None:
        """Take in arrivals and aborts now. Safe wherever a coroutine runs: the scheduler only
        ever waits between its own turns."""
        self._scheduler.intake(self.loop.time())

    @property
    def stalled(self) -> bool:
        return self._watchdog.stalled

    @property
    def waiting(self) -> int:
        """Requests that wait for admission."""
        return len(self._state.waiting) + len(self.inbox.arrivals)

    @property
    def idle_places(self) -> int:
        """Requests that could run at once if there were any."""
        state = self._state
        return max(0, self.limits.max_running - state.active - len(state.resuming))

    def make_detokenizer(self, skip_special_tokens: bool) -> IncrementalDetokenizer | None:
        """A detokenizer for one answer; ``None`` if the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        return make_detokenizer(self.tokenizer, skip_special_tokens)

    def stats(self) -> EngineStats:
        state, meter, memory = self._state, self._core.meter, self._state.memory
        return EngineStats(
            running=state.active + len(state.retiring),
            paused=len(state.paused) + len(state.resuming) + len(state.parked),
            waiting=self.waiting,
            retractions=state.retractions,
            steps=meter.steps,
            tokens=meter.tokens,
            kv_pages_total=memory.pool.total,
            kv_pages_free=memory.pool.free,
            kv_pages_cached=memory.pages_cached,
            device_seconds=meter.device,
            host_seconds=meter.host,
            idle_gap_seconds=meter.idle_gap,
            overlap_ratio=meter.overlap_ratio,
            recent=meter.recent(),
            not_overlapped=dict(meter.not_overlapped),
            finished={reason.value: count for reason, count in state.finished.items()},
        )

    def timeline(self) -> Timeline:
        steps = tuple(self._core.meter.records)
        return Timeline(
            steps, f"{self._name} on {self._device.kind}, depth {self._config.overlap_depth}"
        )

    def describe(self) -> dict[str, Any]:
        """For the log."""
        return {
            "model": self._name,
            "device": self._device.kind,
            "depth": self._config.overlap_depth,
            "kv_tokens": self.limits.num_pages * self.limits.page_size,
            "max_model_len": self.limits.max_model_len,
        }

    async def empty(self) -> None:
        """Until no request is left."""
        self.intake()
        if self._state.live:
            emptied = self.loop.create_future()
            self._state.on_empty.append(emptied)
            await emptied

    def abort_all(self) -> None:
        self.intake()
        for request in list(self._state.live):
            self._state.finish(request, FinishReason.ABORT)

    def fail_all(self, error: AioschedError) -> None:
        """Every request ends with a twin of ``error``."""
        self.intake()
        for request in list(self._state.live):
            self._state.finish(request, FinishReason.ERROR, twin(error))

    async def close(self, timeout: float) -> None:
        """Wait for steps in flight, then join every thread; neither for longer than ``timeout``."""
        self._watchdog.rest()
        settled = False
        try:
            settled = await self._core.settle(timeout)
        finally:
            self._watchdog.rest()
            # Threads without work end at once. One that hangs is left behind: a device that did
            # not answer in all that time will not in a little more, and this holds up the loop.
            self._device.close(timeout if settled else _LAST_CHANCE)
        if self._owns_tokenizer and isinstance(self.tokenizer, Tokenizer):
            await self._close_tokenizer(self.tokenizer, timeout)

    async def _close_tokenizer(self, tokenizer: Tokenizer, timeout: float) -> None:
        if not tokenizer.busy:
            tokenizer.close()  # at once
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await in_thread(tokenizer.close, "aiosched-close")

    def abandon(self) -> None:
        """Let the threads end, and wait for nothing: the engine was dropped without ``close``.

        For a finalizer, which may run in any thread, and after the event loop was closed.
        """
        try:
            self.loop.call_soon_threadsafe(self._device.close, 0.0)
        except RuntimeError:  # the loop is closed
            with contextlib.suppress(RuntimeError):  # collected in the thread that is to be joined
                self._device.close(0.0)


def _within(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Ids that there are: some configurations name end tokens past the model's vocabulary."""
    return tuple(token for token in token_ids if 0 <= token < vocab_size)


def _lacks_memory(error: BaseException) -> bool:
    """torch says so by words: it has no error type of its own for the memory of the host."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and ("out of memory" in str(error) or "can't allocate memory" in str(error))
    )


def device_kind(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def make_device(kind: str, config: EngineConfig) -> Device:
    if kind == "cpu":
        from aiosched.device.cpu import CpuDevice

        return CpuDevice(threads=config.compute_threads)
    import torch

    if not torch.cuda.is_available():
        raise InvalidConfig("device", kind, "cpu: torch finds no CUDA device")
    from aiosched.device.cuda import CudaDevice

    index = int(kind.partition(":")[2] or 0)
    if index >= (count := torch.cuda.device_count()):
        raise InvalidConfig("device", kind, f"one of the {count} CUDA devices, from cuda:0")
    return CudaDevice(index=index)


def _free_device_bytes(kind: str) -> int | None:
    if not kind.startswith("cuda"):
        return None
    import torch

    return int(torch.cuda.mem_get_info(int(kind.partition(":")[2] or 0))[0])


def _tokenizer_of(model: Model) -> TokenizerLike | None:
    """The model's tokenizer, as the engine uses it; one of ``transformers`` is wrapped."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
        plugged: TokenizerLike | None = tokenizer
        return plugged
    return Tokenizer(tokenizer, eos_token_ids=model.eos_token_ids)
