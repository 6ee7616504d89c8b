"""The bookkeeping runs against a fake GPU; tests marked ``cuda`` need a real one."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
import torch
from fake_cuda import FakeCuda

from aiosched.device.cuda import CudaDevice
from aiosched.device.stream import DeviceClosed

PATIENCE = 10.0


def opened(gpu: FakeCuda, **settings) -> CudaDevice:
    device = CudaDevice(api=gpu, **settings)
    gpu.eager = True  # open() waits for an event of its own
    device.open(asyncio.get_running_loop())
    gpu.eager = False
    return device


async def wait(flight):
    return await flight


async def waiting_for(flight):
    """A task that waits for ``flight``."""
    task = asyncio.create_task(wait(flight))
    await asyncio.sleep(0)
    return task


class Tensor:
    """Something that can be referred to weakly."""


def test_a_launch_enqueues_at_once_and_lands_when_its_event_fires(run):
    async def main():
        gpu, landed = FakeCuda(), []
        device = opened(gpu)

        def step():
            gpu.kernel(lambda: landed.append("kernel"))
            return "tensor"

        flight = device.forward.launch(step, step=0, label="forward")
        assert flight.value == "tensor"  # to launch dependent work with
        assert not flight.done()
        task = await waiting_for(flight)
        assert landed == []
        gpu.run()
        assert await task == "tensor"
        assert landed == ["kernel"]
        device.close(PATIENCE)

    run(main())


def test_work_that_landed_before_it_was_wanted_wakes_no_thread(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        gpu.synchronizing.clear()
        flight = device.forward.launch(lambda: 1, step=0, label="forward")
        gpu.run()
        assert await flight == 1
        assert gpu.synchronizing == []
        device.close(PATIENCE)

    run(main())


def test_one_thread_waits_once_however_many_tasks_do(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        gpu.synchronizing.clear()
        flight = device.forward.launch(lambda: 1, step=0, label="forward")
        tasks = [await waiting_for(flight) for _ in range(4)]
        tasks[0].cancel()
        gpu.run()
        assert await asyncio.gather(*tasks[1:]) == [1, 1, 1]
        assert gpu.synchronizing == ["aiosched-events"]
        device.close(PATIENCE)

    run(main())


def test_streams_wait_for_the_events_of_after_and_for_nothing_else(run):
    async def main():
        gpu, order = FakeCuda(), []
        device = opened(gpu)

        def kernel(name):
            return lambda: gpu.kernel(lambda: order.append(name))

        stage = device.schedule.launch(kernel("stage"), step=0, label="stage")
        forward = device.forward.launch(kernel("forward"), step=0, label="forward", after=[stage])
        copy = device.copy.launch(kernel("copy"), step=0, label="copy", after=[forward])
        device.forward.launch(kernel("next"), step=1, label="forward", after=[forward])
        gpu.run(device.copy._cuda)
        assert order == []
        gpu.run(device.forward._cuda, device.copy._cuda)
        assert order == []
        gpu.run()
        assert order[:2] == ["stage", "forward"]
        await copy
        # The same stream is in order by itself, and what has landed needs no waiting.
        assert forward._end not in device.forward._cuda.waited_for
        device.schedule.launch(lambda: None, step=2, label="stage", after=[copy])
        assert copy._end not in device.schedule._cuda.waited_for
        gpu.run()
        device.close(PATIENCE)

    run(main())


def test_the_first_launch_of_a_stream_waits_for_what_the_caller_enqueued_before(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        for stream in (device.schedule, device.forward, device.copy):
            for step in range(2):
                stream.launch(lambda: None, step=step, label="forward")
            assert stream._cuda.waited_for == [gpu.default]
        gpu.run()
        device.close(PATIENCE)

    run(main())


def test_the_stream_is_current_inside_a_launch_only(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        seen = device.copy.launch(lambda: gpu.current, step=0, label="copy").value
        assert seen is device.copy._cuda
        assert gpu.current is gpu.default
        gpu.run()
        device.close(PATIENCE)

    run(main())


def test_an_error_in_a_launch_fails_the_work_and_its_dependents_not_the_caller(run):
    async def main():
        gpu, ran = FakeCuda(), []
        device = opened(gpu)
        bad = device.forward.launch(lambda: 1 // 0, step=0, label="forward")
        dependent = device.copy.launch(lambda: ran.append(1), step=0, label="copy", after=[bad])
        for flight in (bad, dependent):
            assert flight.done()
            with pytest.raises(ZeroDivisionError):
                await flight
            with pytest.raises(ZeroDivisionError):
                _ = flight.value
        assert ran == []
        gpu.run()
        device.close(PATIENCE)

    run(main())


def test_an_error_of_the_gpu_reaches_those_who_wait(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        flight = device.forward.launch(lambda: 1, step=0, label="forward")
        behind = device.forward.launch(lambda: 2, step=1, label="forward")
        tasks = [await waiting_for(flight), await waiting_for(behind)]
        gpu.sticky_error = RuntimeError("CUDA error: an illegal memory access was encountered")
        gpu.run()
        for task in tasks:
            with pytest.raises(RuntimeError, match="illegal memory access"):
                await task
        device.close(PATIENCE)

    run(main())


def test_an_error_of_cuda_at_the_launch_fails_the_work(run, monkeypatch):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)

        def refuse(event):
            raise RuntimeError("CUDA error: device lost")

        first = device.schedule.launch(lambda: 1, step=0, label="stage")
        monkeypatch.setattr(device.forward._cuda, "wait_event", refuse)
        flight = device.forward.launch(lambda: 2, step=0, label="forward", after=[first])
        with pytest.raises(RuntimeError, match="device lost"):
            await flight
        gpu.run()
        device.close(PATIENCE)

    run(main())


def test_all_that_a_stream_still_reads_is_alive_until_its_event_and_no_longer(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        captured, staged, result = Tensor(), Tensor(), Tensor()
        refs = [weakref.ref(captured), weakref.ref(staged), weakref.ref(result)]
        stage = device.schedule.launch(lambda box=[staged]: box.pop(), step=0, label="stage")
        gpu.run(device.schedule._cuda)
        assert stage.done()
        forward = device.forward.launch(
            lambda box=[result], captured=captured: box.pop(),
            step=0,
            label="forward",
            after=[stage],
        )
        del captured, staged, result, stage, forward
        gc.collect()
        assert all(ref() is not None for ref in refs)
        gpu.run()
        device.forward.launch(lambda: None, step=1, label="forward")
        gc.collect()
        assert [ref() for ref in refs] == [None, None, None]
        gpu.run()
        device.close(PATIENCE)

    run(main())


def test_times_are_measured_on_the_device_and_placed_on_the_clock_of_the_host(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        flights = []
        for step in range(3):
            flights.append(
                device.forward.launch(lambda: gpu.kernel(seconds=0.004), step=step, label="forward")
            )
        gpu.run()
        for flight in flights:
            await flight
        assert [flight.device_seconds for flight in flights] == pytest.approx([0.004] * 3)
        assert flights[1].started == pytest.approx(flights[0].finished)
        assert flights[2].finished - flights[0].started == pytest.approx(0.012)
        # The fake clock began when the device opened.
        assert flights[0].started <= device.now()
        device.close(PATIENCE)

    run(main())


def test_times_stay_exact_to_a_microsecond_after_days(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        began, gpu_began = device._anchor[1], gpu.time
        for step in range(200):
            seconds = 0.0041 if step % 2 else 1800.0
            flight = device.forward.launch(
                lambda seconds=seconds: gpu.kernel(seconds=seconds), step=step, label="forward"
            )
            gpu.run()
            await flight
            if step % 2:
                assert flight.device_seconds == pytest.approx(0.0041, abs=1e-6)
        assert flight.finished - began == pytest.approx(gpu.time - gpu_began, abs=1e-4)
        device.close(PATIENCE)

    run(main())


@pytest.mark.parametrize("spin", [False, True])
def test_events_block_unless_the_device_is_told_to_spin(run, spin):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu, spin=spin, index=3)
        flight = device.forward.launch(lambda: None, step=0, label="forward")
        assert flight._end.blocking is not spin
        gpu.run()
        device.close(PATIENCE)
        assert gpu.devices == [3]
        assert device.torch_device == "cuda:3"

    run(main())


def test_close_waits_for_the_gpu_and_lets_results_land(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        flight = device.forward.launch(lambda: "value", step=0, label="forward")
        timer = threading.Timer(0.01, gpu.run)
        timer.start()
        device.close(PATIENCE)
        timer.join()
        assert flight.done()
        assert await flight == "value"
        assert "aiosched-events" not in {thread.name for thread in threading.enumerate()}
        with pytest.raises(DeviceClosed):
            device.forward.launch(lambda: None, step=1, label="forward")
        device.close(PATIENCE)

    run(main())


def test_close_gives_up_on_a_gpu_that_hangs_and_keeps_its_memory(run):
    async def main():
        gpu = FakeCuda()
        device = opened(gpu)
        tensor = Tensor()
        ref = weakref.ref(tensor)
        flight = device.forward.launch(lambda box=[tensor]: box.pop(), step=0, label="forward")
        del tensor
        task = await waiting_for(flight)
        device.close(0.01)
        with pytest.raises(DeviceClosed, match="step 0 'forward'"):
            await task
        del flight, task
        gc.collect()
        assert ref() is not None  # a kernel may still write there
        gpu.run()
        for thread in threading.enumerate():
            if thread.name == "aiosched-events":
                thread.join(PATIENCE)

    run(main())


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_gpu
def test_a_step_on_a_real_gpu(run):
    async def main():
        device = CudaDevice()
        device.open(asyncio.get_running_loop())
        host = torch.arange(1 << 20, dtype=torch.float32).pin_memory()
        for step in range(20):
            stage = device.schedule.launch(
                lambda: host.to(device.torch_device, non_blocking=True), step=step, label="stage"
            )
            forward = device.forward.launch(
                lambda stage=stage: stage.value * 2, step=step, label="forward", after=[stage]
            )
            copy = device.copy.launch(
                lambda forward=forward: forward.value.to("cpu", non_blocking=True),
                step=step,
                label="copy",
                after=[forward],
            )
            assert torch.equal(await copy, host * 2)
            assert 0 < forward.device_seconds < 1
            assert stage.started <= forward.started <= copy.finished
        device.close(PATIENCE)

    run(main())


@pytest.mark.cuda
@needs_gpu
def test_the_loop_runs_while_a_real_gpu_works(run):
    async def main():
        device = CudaDevice()
        device.open(asyncio.get_running_loop())
        flight = device.forward.launch(
            lambda: torch.cuda._sleep(200_000_000), step=0, label="forward"
        )
        assert not flight.done()
        task = asyncio.create_task(wait(flight))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10
        device.close(PATIENCE)

    run(main())
