"""ModelRunner: launches the device work of a step. Nothing of a step stays on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

from aiosched._threads import in_thread
from aiosched.device.stream import Device, InFlight
from aiosched.model.graphs import DecodeGraphs, PlannedModel
from aiosched.model.inputs import Logprobs, Model, SamplingInputs, StepInputs, StepResult
from aiosched.model.logprobs import DeviceLogprobs, token_logprobs
from aiosched.model.relay import RelayPayload, StepRelay, resolve_forward_inputs
from aiosched.model.sampler import SampleOutput, Sampler
from aiosched.model.staging import StagedStep, stage_sampling, stage_step
from aiosched.model.transfers import transfers_of

T = TypeVar("T")

MAX_GRAPH_BATCH = 256


class StepMemory:
    """The device tensors of one step, alive as long as some stream may read them.

    They are handed from stream to stream here and not as values of the ``InFlight``s, so that
    all of them die with this.
    """

    __slots__ = ("__weakref__", "logits", "output", "prompt_logprobs", "staged")

    def __init__(self) -> None:
        self.staged: StagedStep | None = None
        self.logits: torch.Tensor | None = None
        self.output: SampleOutput | None = None
        self.prompt_logprobs: DeviceLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedForward:
    """A step whose sampling is launched later.

    Attributes:
        staged: its inputs are on the device.
        forward: the model has run.
    """

    inputs: StepInputs
    staged: InFlight[None]
    forward: InFlight[None]
    memory: StepMemory = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step on its way through the streams.

    The caller keeps it until ``result`` has landed: a stream may still read its tensors.

    Attributes:
        staged: its inputs are on the device.
        forward: the model has run, and the sampler too unless it was launched apart.
        result: the copy to the host.
        memory: its tensors on the device; on a CPU, those that the arrays of ``result`` lie in.
    """

    inputs: StepInputs
    staged: InFlight[None]
    forward: InFlight[None]
    result: InFlight[StepResult]
    memory: StepMemory = field(repr=False)


class ModelRunner:
    """Runs a model on a device: staging, forward, sampling, and the copy back.

    Args:
        model: see ``inputs.Model``; one with ``plan`` runs its decode batches as CUDA graphs.
        device: where to launch. Need not be open yet.
        relay: the FutureMap of the engine.
        num_pages: pages of the KV pool, page 0 (padding) not counted.
        page_size: tokens per page.
        max_rows: the largest row.
        max_running: sequences that decode at once: the largest batch that gets a CUDA graph.
        cuda_graphs: whether graphs may be used at all.

    Attributes:
        kv: the KV pool that the model made.
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        relay: StepRelay,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_running: int,
        cuda_graphs: bool = True,
    ) -> None:
        self.model = model
        self.device = device
        self.kv = model.make_kv(num_pages, page_size)
        self._page_size = page_size
        self._relay = relay
        self._sampler = Sampler(model.vocab_size, max_rows, device.torch_device)
        self._transfers = transfers_of(device)
        # Asked once: isinstance of a protocol looks at every member each time.
        self._planned = model if isinstance(model, PlannedModel) else None
        self._graphs: DecodeGraphs | None = None
        if cuda_graphs and device.kind == "cuda" and self._planned is not None:
            self._graphs = DecodeGraphs(
                self._planned,
                self.kv,
                max_batch=min(max_running, MAX_GRAPH_BATCH),
                max_pages=-(-model.max_model_len // page_size),
                device=device.torch_device,
            )

    def launch(self, inputs: StepInputs) -> LaunchedStep:
        """Enqueue a step on all three streams and return at once.

        Args:
            inputs: owned by the step from now on; nobody writes to its arrays.
        """
        launched = self._launch(inputs, sample=True)
        return self._launch_copy(launched, launched.forward)

    def launch_forward(self, inputs: StepInputs) -> LaunchedForward:
        """Enqueue a step without its sampling.

        ``launch_sample`` must follow before the next launch, which reads this step's tokens from
        the relay.
        """
        return self._launch(inputs, sample=False)

    def launch_sample(
        self, launched: LaunchedForward, sampling: SamplingInputs | None = None
    ) -> LaunchedStep:
        """Enqueue the sampling and the copy of a step whose forward is under way.

        Args:
            launched: of ``launch_forward``.
            sampling: replaces the sampling inputs of the step, which may have become known late.
        """
        memory, step = launched.memory, launched.inputs.step
        after: tuple[InFlight[None], ...] = (launched.forward,)
        if sampling is not None:
            restaged = self.device.schedule.launch(
                lambda: self._stage_sampling(sampling, memory),
                step=step,
                label="stage sampling",
                after=after,
                writes=(memory,),
            )
            after = (launched.forward, restaged)
        sampled = self.device.forward.launch(
            lambda: self._sample(memory),
            step=step,
            label="sample",
            after=after,
            writes=(memory, self._relay, self._sampler),
        )
        return self._launch_copy(launched, sampled)

    async def warm_up(self) -> None:
        """Capture the CUDA graphs now rather than when they are first needed. Before any step.

        In a thread: dozens of captures would hold up the event loop for seconds. Whoever is
        cancelled here leaves the thread to end with the size that it is at.
        """
        graphs = self._graphs
        if graphs is None:
            return
        given_up = threading.Event()

        def capture() -> None:
            # The device's streams know nothing of this one, so all is done on both sides of it.
            torch.cuda.synchronize(self.device.torch_device)
            aside = torch.cuda.Stream(self.device.torch_device)  # type: ignore[no-untyped-call]
            with torch.inference_mode(), torch.cuda.stream(aside):
                graphs.warm_up(self._page_size, given_up)
            torch.cuda.synchronize(self.device.torch_device)

        try:
            await in_thread(capture, "aiosched-graphs")
        finally:
            given_up.set()

    def _launch(self, inputs: StepInputs, sample: bool) -> LaunchedForward:
        self.device.host_access(writes=(inputs,))  # filled by now, and for the last time
        memory = StepMemory()
        staged = self.device.schedule.launch(
            lambda: self._stage(inputs, memory),
            step=inputs.step,
            label="stage",
            reads=(inputs,),
            writes=(memory,),
        )
        forward = self.device.forward.launch(
            lambda: self._forward(memory, sample),
            step=inputs.step,
            label="forward",
            after=(staged,),
            reads=(inputs,),  # planners work on the host, and a CPU has no other copy of them
            writes=(memory, self.kv, self._relay, self._sampler),
        )
        return LaunchedForward(inputs, staged, forward, memory)

    def _launch_copy(self, launched: LaunchedForward, sampled: InFlight[None]) -> LaunchedStep:
        memory, step = launched.memory, launched.inputs.step
        result = self.device.copy.launch(
            lambda: self._copy(memory),
            step=step,
            label="copy",
            after=(sampled,),
            reads=(memory,),
        )
        self._relay.expect(step, result)
        return LaunchedStep(launched.inputs, launched.staged, launched.forward, result, memory)

    # What follows is device work: it runs where the device says, on the stream of its launch.

    def _stage(self, inputs: StepInputs, memory: StepMemory) -> None:
        with torch.inference_mode(), self._transfers.together() as upload:
            memory.staged = stage_step(inputs, self.model.vocab_size, upload)

    def _stage_sampling(self, sampling: SamplingInputs, memory: StepMemory) -> None:
        with torch.inference_mode(), self._transfers.together() as upload:
            memory.staged = replace(
                _present(memory.staged),
                sampling=stage_sampling(sampling, self.model.vocab_size, upload),
            )

    def _forward(self, memory: StepMemory, sample: bool) -> None:
        staged = _present(memory.staged)
        with torch.inference_mode():
            inputs = resolve_forward_inputs(
                staged.inputs,
                staged.decode_rows,
                staged.decode_generations,
                self._relay,
                self.model.vocab_size,
            )
            if self._graphs is not None and self._graphs.fits(inputs.host):
                memory.logits = self._graphs.forward(inputs)
            else:
                if self._planned is not None:
                    self._planned.plan(inputs, self.kv)
                memory.logits = self.model.forward(inputs, self.kv)
        if sample:
            self._sample(memory)

    def _sample(self, memory: StepMemory) -> None:
        staged, logits = _present(memory.staged), _present(memory.logits)
        memory.logits = None  # the largest tensor of a step: dead once it is sampled from
        m = len(staged.sample_rows)
        with torch.inference_mode():
            output = self._sampler.sample(logits[:m], staged.sample_rows, staged.sampling)
            payload = RelayPayload.of(output.tokens, self.model.vocab_size)
            self._relay.stash(staged.sample_rows, staged.sample_generations, payload.tokens)
            prompt = staged.inputs.host.prompt_logprobs
            if prompt is not None and (targets := staged.prompt_targets) is not None:
                memory.prompt_logprobs = token_logprobs(logits[m:], targets, prompt.num_top)
        memory.output = output

    def _copy(self, memory: StepMemory) -> StepResult:
        output, to_host = _present(memory.output), self._transfers.to_host
        return StepResult(
            tokens=to_host(output.tokens),
            logprobs=_logprobs_to_host(output.logprobs, to_host),
            prompt_logprobs=_logprobs_to_host(memory.prompt_logprobs, to_host),
        )


def _logprobs_to_host(
    logprobs: DeviceLogprobs | None, to_host: Callable[[torch.Tensor], NDArray[Any]]
) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(to_host(logprobs.chosen), to_host(logprobs.top_ids), to_host(logprobs.top))


def _present(value: T | None) -> T:
    """What an earlier stage of the same step left; the order of launches says that it is there."""
    assert value is not None
    return value
