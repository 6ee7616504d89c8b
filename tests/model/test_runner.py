from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda

from aiosched.device.cpu import CpuDevice
from aiosched.device.happens_before import RaceError
from aiosched.device.pinned import PinnedPool
from aiosched.device.sim import SimDevice
from aiosched.model.inputs import (
    DeviceInputs,
    PromptLogprobInputs,
    SamplingInputs,
    StepInputs,
    StepResult,
)
from aiosched.model.runner import LaunchedStep, ModelRunner
from aiosched.scheduler.future_map import FutureMap

VOCAB = 50
PAGE = 4


@dataclass
class CountingModel:
    """Says token + 1 after each token, and notes what it was given."""

    vocab_size: int = VOCAB
    max_model_len: int = 64
    eos_token_ids: tuple[int, ...] = ()
    seen: list[list[int]] = field(default_factory=list)
    logits: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    nan_after: int = -1

    def kv_bytes_per_token(self) -> int:
        return 1

    def make_kv(self, num_pages: int, page_size: int) -> object:
        return torch.zeros((num_pages + 1) * page_size, dtype=torch.int64)

    def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        assert isinstance(kv, torch.Tensor)
        assert torch.is_inference_mode_enabled()
        kv[inputs.slots] = inputs.input_ids
        self.seen.append(inputs.input_ids.tolist())
        last = inputs.input_ids[inputs.logits_index]
        logits = torch.nn.functional.one_hot((last + 1) % VOCAB, VOCAB).float() * 8
        logits[last == self.nan_after] = math.nan
        self.logits.append(weakref.ref(logits))
        self.inputs.append(weakref.ref(inputs.input_ids))
        return logits


@dataclass(frozen=True)
class Seq:
    """One sequence of a step: its row, and tokens to read in, or none to decode one."""

    row: int
    tokens: tuple[int, ...] = ()
    length: int = 0  # of its KV before the step
    generation: int = 1
    samples: bool = True


def step_of(
    step: int,
    sequences: Sequence[Seq],
    sampling: SamplingInputs | None = None,
    prompt: PromptLogprobInputs | None = None,
) -> StepInputs:
    counts = [max(len(one.tokens), 1) for one in sequences]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    samples = np.array([i for i, one in enumerate(sequences) if one.samples], np.int64)
    positions = np.concatenate(
        [np.arange(one.length, one.length + n) for one, n in zip(sequences, counts, strict=True)]
    )
    tables = np.array([[one.row * 2, one.row * 2 + 1] for one in sequences], np.int32)
    rows = np.repeat(np.arange(len(sequences)), counts)
    return StepInputs(
        step=step,
        page_size=PAGE,
        num_decodes=sum(not one.tokens for one in sequences),
        rows=np.array([one.row for one in sequences], np.int64),
        generations=np.array([one.generation for one in sequences], np.int64),
        query_start=starts,
        seq_lens=np.array(
            [one.length + n for one, n in zip(sequences, counts, strict=True)], np.int32
        ),
        page_tables=tables,
        input_ids=np.array([t for one in sequences for t in one.tokens or (0,)], np.int64),
        positions=positions,
        slots=tables[rows, positions // PAGE] * PAGE + positions % PAGE,
        logits_index=(starts[1:] - 1).astype(np.int64)[samples],
        sample_sequence=samples,
        sampling=sampling or SamplingInputs(),
        prompt_logprobs=prompt,
    )


class Rig:
    """A runner over a device that is open inside ``async with``."""

    make_device: type[CpuDevice] | type[SimDevice] = CpuDevice

    def __init__(self, model: CountingModel) -> None:
        self.model = model
        self.device = self.make_device()
        self.relay = FutureMap(8, debug=True)
        self.runner = ModelRunner(model, self.device, self.relay, 20, PAGE, 8, max_running=8)

    async def __aenter__(self) -> Rig:
        self.device.open(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.device.close(10)
        if isinstance(self.device, SimDevice):
            assert self.device.races == []

    def launch(self, step: int, sequences: Sequence[Seq], **kwargs: object) -> LaunchedStep:
        return self.runner.launch(step_of(step, sequences, **kwargs))  # type: ignore[arg-type]

    async def tokens(self, step: int) -> list[int]:
        return (await self.relay.arrival(step)).tokens.tolist()


@pytest.fixture(params=[CpuDevice, SimDevice], autouse=True)
def every_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "make_device", request.param)


def test_a_step_reads_its_tokens_from_the_step_before_it_without_the_host() -> None:
    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            rig.launch(1, [Seq(3, (10, 11)), Seq(5, (20,))])
            rig.launch(2, [Seq(5, length=1), Seq(3, length=2)])
            rig.launch(3, [Seq(3, length=3), Seq(1, (30, 31, 32))])
            assert len(rig.relay._expected) == 3
            assert [await rig.tokens(step) for step in (1, 2, 3)] == [[12, 21], [22, 13], [14, 33]]
            assert rig.model.seen == [[10, 11, 20], [21, 12], [13, 30, 31, 32]]

    asyncio.run(main())


def test_a_middle_chunk_neither_samples_nor_touches_the_relay() -> None:
    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            rig.launch(1, [Seq(2, (10,))])
            rig.launch(2, [Seq(2, length=1), Seq(4, (30, 31), samples=False)])
            rig.launch(3, [Seq(4, (32,), length=2)])
            rig.launch(4, [Seq(2, length=2), Seq(4, length=3)])
            assert [await rig.tokens(step) for step in (1, 2, 3, 4)] == [[11], [12], [33], [13, 34]]

    asyncio.run(main())


def test_a_step_of_middle_chunks_alone_arrives_without_tokens() -> None:
    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            rig.launch(1, [Seq(2, (10, 11), samples=False)])
            assert await rig.tokens(1) == []

    asyncio.run(main())


def test_the_host_arrays_of_a_step_are_not_written_to() -> None:
    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            rig.launch(1, [Seq(2, (10,))])
            inputs = step_of(2, [Seq(2, length=1), Seq(3, (20, 21))])
            inputs.input_ids.flags.writeable = False
            rig.runner.launch(inputs)
            assert await rig.tokens(2) == [12, 22]
            assert inputs.input_ids.tolist() == [0, 20, 21]

    asyncio.run(main())


def test_a_row_whose_logits_are_no_numbers_fails_alone_and_relays_a_valid_id() -> None:
    async def main() -> None:
        async with Rig(CountingModel(nan_after=7)) as rig:
            rig.launch(1, [Seq(1, (7,)), Seq(2, (20,))])
            rig.launch(2, [Seq(1, length=1), Seq(2, length=1)])
            assert await rig.tokens(1) == [-1, 21]
            assert await rig.tokens(2) == [1, 22]
            assert rig.model.seen[1] == [0, 21]

    asyncio.run(main())


def test_a_late_step_of_an_old_owner_leaves_the_new_owners_token() -> None:
    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            rig.launch(1, [Seq(1, (10,), generation=2)])
            rig.launch(2, [Seq(1, (40,), generation=1)])
            rig.launch(3, [Seq(1, length=1, generation=2)])
            assert [await rig.tokens(step) for step in (1, 2, 3)] == [[11], [41], [12]]

    asyncio.run(main())


def test_sampling_parameters_and_logprobs_reach_the_sampler() -> None:
    sampling = SamplingInputs(
        bias_index=np.array([1]),
        bias_ids=np.array([5]),
        bias_values=np.array([100], np.float32),
        logprob_index=np.array([0, 1]),
        num_top=2,
    )

    async def main() -> StepResult:
        async with Rig(CountingModel()) as rig:
            rig.launch(1, [Seq(1, (10,)), Seq(2, (20,))], sampling=sampling)
            return await rig.relay.arrival(1)

    result = asyncio.run(main())
    assert result.tokens.tolist() == [11, 5]
    assert result.logprobs is not None
    likely = 8 - math.log(math.exp(8) + VOCAB - 1)
    np.testing.assert_allclose(result.logprobs.chosen, [likely, likely - 8], atol=1e-5)
    assert result.logprobs.top_ids.tolist() == [[11, 0], [21, 0]]


def test_prompt_logprobs_stand_behind_the_rows_that_sample() -> None:
    prompt = PromptLogprobInputs(
        logits_index=np.array([0, 1, 2]),
        targets=np.array([11, 40, 13]),
        sequence=np.zeros(3, np.int64),
        num_top=1,
    )

    async def main() -> StepResult:
        async with Rig(CountingModel()) as rig:
            rig.launch(1, [Seq(1, (10, 40, 12, 13))], prompt=prompt)
            return await rig.relay.arrival(1)

    result = asyncio.run(main())
    assert result.tokens.tolist() == [14]
    assert result.logprobs is None
    assert result.prompt_logprobs is not None
    likely = 8 - math.log(math.exp(8) + VOCAB - 1)
    np.testing.assert_allclose(
        result.prompt_logprobs.chosen, [likely, likely - 8, likely], atol=1e-5
    )
    assert result.prompt_logprobs.top_ids.tolist() == [[11], [41], [13]]


@pytest.mark.invariant(8)
def test_deferred_sampling_takes_inputs_that_come_later() -> None:
    late = SamplingInputs(allowed=((0, np.array([3, 4])),))

    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            inputs = step_of(1, [Seq(1, (10,))])
            launched = rig.runner.launch_forward(inputs)
            await launched.forward
            assert len(rig.relay._expected) == 0
            step = rig.runner.launch_sample(launched, late)
            assert step.memory is launched.memory
            rig.launch(2, [Seq(1, length=1)])
            assert await rig.tokens(1) == [3]
            assert await rig.tokens(2) == [4]

    asyncio.run(main())


def test_deferred_sampling_without_new_inputs_uses_those_of_the_step() -> None:
    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            inputs = step_of(1, [Seq(1, (10,))])
            rig.runner.launch_sample(rig.runner.launch_forward(inputs))
            assert await rig.tokens(1) == [11]

    asyncio.run(main())


def test_logits_die_with_their_step_and_inputs_with_the_last_reference_to_it() -> None:
    """C14: nothing of a step outlives it, on the runner or elsewhere."""

    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            rig.launch(1, [Seq(1, (10,))])
            launched = rig.launch(2, [Seq(1, length=1)])
            third = rig.launch(3, [Seq(1, length=2)])
            for step in (1, 2, 3):
                await rig.tokens(step)
            await rig.device.copy.launch(lambda: None, step=4, label="barrier")
            gc.collect()
            assert [ref() for ref in rig.model.logits] == [None] * 3
            memory = weakref.ref(third.memory)
            assert launched.memory.staged is not None
            del launched, third
            assert memory() is None
            assert [ref() for ref in rig.model.inputs] == [None] * 3

    asyncio.run(main())


def test_two_steps_in_flight_share_no_arrays() -> None:
    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            rig.launch(1, [Seq(row, (row,)) for row in range(1, 6)])
            rig.launch(2, [Seq(row, length=1) for row in (2, 4)])
            second = await rig.relay.arrival(2)
            first = await rig.relay.arrival(1)
            assert second.tokens.tolist() == [4, 6]
            assert first.tokens.tolist() == [2, 3, 4, 5, 6]
            assert not np.shares_memory(first.tokens, second.tokens)

    asyncio.run(main())


def test_a_copy_that_lands_late_brings_the_tokens_of_its_own_step() -> None:
    """C09: steps of five and of two rows; the copy of the first is behind a gate."""

    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            if isinstance(rig.device, SimDevice):
                rig.device.hold(1, "copy")
            first = rig.launch(1, [Seq(row, (row,)) for row in range(1, 6)])
            second = rig.launch(2, [Seq(row, length=1) for row in (2, 4)])
            await second.forward
            if isinstance(rig.device, SimDevice):
                assert not first.result.done()
                rig.device.release(1, "copy")
            assert [await rig.tokens(step) for step in (1, 2)] == [[2, 3, 4, 5, 6], [4, 6]]

    asyncio.run(main())


def test_a_forward_that_raises_fails_its_step_and_not_the_launch() -> None:
    class Broken(CountingModel):
        def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
            raise OSError("broken")

    async def main() -> None:
        async with Rig(Broken()) as rig:
            launched = rig.launch(1, [Seq(1, (10,))])
            with pytest.raises(OSError, match="broken"):
                await rig.relay.arrival(1)
            assert launched.staged.done()

    asyncio.run(main())


def test_a_step_goes_to_the_device_in_one_copy_and_comes_back_in_one() -> None:
    gpu = FakeCuda()

    class Memory:
        def empty(self, nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8)

        def new_event(self) -> object:
            return gpu.Event()

    sampling = SamplingInputs(
        temperature=np.ones(2, np.float32),
        top_k=np.array([1, 1]),
        top_p=np.full(2, 0.9, np.float32),
        uniform=np.full(2, 0.5, np.float32),
    )

    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            rig.runner._transfers = PinnedPool("cpu", Memory())
            copies = []
            for step in (1, 2, 3):
                before = len(gpu.default.ops)  # every copy has an event behind it
                rows = (1, 2)
                tokens = (10, 11) if step == 1 else ()
                length = 0 if step == 1 else step
                rig.launch(
                    step, [Seq(row, tokens, length=length) for row in rows], sampling=sampling
                )
                assert await rig.tokens(step) == [10 + step + 1] * 2
                copies.append(len(gpu.default.ops) - before)
            assert copies[1:] == [2, 2]

    asyncio.run(main())


def test_without_cuda_there_is_nothing_to_warm_up() -> None:
    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            await rig.runner.warm_up()
            assert rig.model.seen == []

    asyncio.run(main())


class PlanningModel(CountingModel):
    def plan(self, inputs: DeviceInputs, kv: object) -> None:
        """Nothing to prepare."""


class CudaLike(CpuDevice):
    """Named a GPU, so that the runner prepares graphs."""

    kind = "cuda"


def runner_with_graphs(max_running: int) -> ModelRunner:
    return ModelRunner(PlanningModel(), CudaLike(), FutureMap(8), 20, PAGE, 8, max_running)


def test_graphs_are_made_for_batches_as_large_as_run_and_not_for_every_row() -> None:
    graphs = runner_with_graphs(max_running=3)._graphs
    assert graphs is not None
    assert graphs.fits(step_of(1, [Seq(row, length=1) for row in (1, 2, 3)]))
    assert not graphs.fits(step_of(1, [Seq(row, length=1) for row in (1, 2, 3, 4)]))


def without_cuda_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def test_graphs_are_captured_in_a_thread_while_the_loop_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_cuda_streams(monkeypatch)
    runner = runner_with_graphs(max_running=3)
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def warm_up(page_size: int, given_up: threading.Event) -> None:
        begun.set()
        assert go_on.wait(10)
        seen.append((page_size, given_up.is_set(), torch.is_inference_mode_enabled()))

    monkeypatch.setattr(runner._graphs, "warm_up", warm_up)

    async def main() -> None:
        warming = asyncio.create_task(runner.warm_up())
        await asyncio.sleep(0)
        assert begun.wait(10)  # the loop is here, and the capture under way
        go_on.set()
        await warming
        assert seen == [(PAGE, False, True)]

    asyncio.run(main())


def test_a_cancelled_warm_up_gives_up_the_captures_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda_streams(monkeypatch)
    runner = runner_with_graphs(max_running=3)
    begun, ended = threading.Event(), threading.Event()

    def warm_up(page_size: int, given_up: threading.Event) -> None:
        begun.set()
        assert given_up.wait(10)
        ended.set()

    monkeypatch.setattr(runner._graphs, "warm_up", warm_up)

    async def main() -> None:
        warming = asyncio.create_task(runner.warm_up())
        await asyncio.sleep(0)
        assert begun.wait(10)
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        assert ended.wait(10)

    asyncio.run(main())


def test_a_checking_device_catches_a_host_that_touches_a_step_in_flight() -> None:
    async def main() -> None:
        device, relay = SimDevice(), FutureMap(8)
        device.open(asyncio.get_running_loop())
        runner = ModelRunner(CountingModel(), device, relay, 20, PAGE, 8, max_running=8)
        launched = runner.launch(step_of(1, [Seq(1, (10,))]))
        with pytest.raises(RaceError, match="write by the host behind the read"):
            device.host_access(writes=(launched.inputs,))
        with pytest.raises(RaceError, match="read by the host behind the write"):
            device.host_access(reads=(launched.memory,))
        await relay.arrival(1)
        device.host_access(reads=(launched.memory,), writes=(launched.inputs,))
        device.close(10)

    asyncio.run(main())


def test_launch_names_the_shared_buffers_it_touches() -> None:
    """A checking device can only prove the order of what is declared."""

    async def main() -> None:
        async with Rig(CountingModel()) as rig:
            declared: dict[str, tuple[object, ...]] = {}

            def spy(stream: object) -> None:
                launch = stream.launch  # type: ignore[attr-defined]

                def noting(fn: object, **kwargs: object) -> object:
                    label = str(kwargs["label"])
                    declared[label] = (*kwargs.get("reads", ()), *kwargs.get("writes", ()))  # type: ignore[misc]
                    return launch(fn, **kwargs)

                stream.launch = noting  # type: ignore[attr-defined]

            for stream in (rig.device.schedule, rig.device.forward, rig.device.copy):
                spy(stream)
            launched = rig.launch(1, [Seq(1, (10,))])
            await rig.tokens(1)
            assert any(one is rig.relay for one in declared["forward"])
            assert any(one is rig.runner.kv for one in declared["forward"])
            for label in ("stage", "forward", "copy"):
                assert any(one is launched.memory for one in declared[label])
            for label in ("stage", "forward"):
                assert any(one is launched.inputs for one in declared[label])

    asyncio.run(main())
