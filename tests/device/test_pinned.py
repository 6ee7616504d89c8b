from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda

from aiosched.device.pinned import SMALLEST, PinnedPool

DTYPES = [np.int64, np.int32, np.uint8, np.float32, np.float64, np.float16, np.bool_]


class FakeMemory:
    """Ordinary memory, and events that fire when the test runs the fake GPU."""

    def __init__(self) -> None:
        self.gpu = FakeCuda()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def new_event(self):
        return self.gpu.Event()


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def pool(memory) -> PinnedPool:
    return PinnedPool("cpu", memory)


def to_device(pool: PinnedPool, array: np.ndarray) -> torch.Tensor:
    with pool.together() as upload:
        return upload(array)


def allocated_bytes(pool: PinnedPool) -> int:
    return sum(size * len(buffers) for size, buffers in pool._buffers.items())


def addresses(pool: PinnedPool) -> set[int]:
    return {b.memory.data_ptr() for buffers in pool._buffers.values() for b in buffers}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 7), (2, 0, 3)])
def test_arrays_arrive_with_shape_dtype_and_content(pool, dtype, shape):
    array = (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape)
    tensor = to_device(pool, array)
    assert tensor.shape == shape
    assert np.array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype == dtype
    back = pool.to_host(tensor)
    assert back.dtype == dtype
    assert back.shape == shape
    assert np.array_equal(back, array)


def test_what_is_uploaded_together_travels_in_one_copy_from_the_second_time_on(pool, memory):
    arrays = [
        np.arange(3, dtype=np.int64),
        np.array([True, False, True]),
        np.array([0.5, 1.0, 2.0], dtype=np.float32),
        np.empty(0, dtype=np.int32),
        np.arange(1000, dtype=np.int32),
    ]
    ops = memory.gpu.default.ops
    for copies in (2, 1):
        before = len(ops)
        with pool.together() as upload:
            tensors = [upload(array) for array in arrays]
        assert len(ops) - before == copies  # each has an event behind it
        for tensor, array in zip(tensors, arrays, strict=True):
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.storage_offset() * array.itemsize % 64 == 0
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == copies
    with pool.together():
        pass
    assert len(ops) == 3


def test_uploads_within_others_have_a_buffer_of_their_own(pool):
    with pool.together() as upload:
        first = upload(np.arange(4))
        second = to_device(pool, np.arange(4, 8))
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [4, 5, 6, 7]


def test_a_buffer_whose_upload_failed_half_way_is_used_again(pool):
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), pool.together() as upload:
            upload(np.arange(4))
            _ = 1 // 0
    assert len(addresses(pool)) == 1


def test_arrays_that_are_read_only_or_not_contiguous_are_taken(pool):
    array = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    array.flags.writeable = False
    assert np.array_equal(to_device(pool, array).numpy(), array)


def test_tensors_that_are_not_contiguous_are_taken(pool):
    tensor = torch.arange(12).reshape(3, 4).T[::2]
    assert np.array_equal(pool.to_host(tensor), tensor.numpy())


def test_the_source_may_change_once_it_is_uploaded(pool):
    array = np.arange(4)
    tensor = to_device(pool, array)
    array[:] = -1
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_source_is_reused_only_after_its_copy(pool, memory):
    to_device(pool, np.arange(4))
    (first,) = addresses(pool)
    to_device(pool, np.arange(4))
    assert len(addresses(pool)) == 2  # the first copy is pending
    memory.gpu.run()
    for _ in range(10):
        to_device(pool, np.arange(4))
        memory.gpu.run()
    assert len(addresses(pool)) == 2
    assert first in addresses(pool)


def test_a_target_is_reused_only_after_its_copy_even_if_nobody_reads_it(pool, memory):
    pool.to_host(torch.arange(4))
    pool.to_host(torch.arange(4))
    assert len(addresses(pool)) == 2
    memory.gpu.run()
    pool.to_host(torch.arange(4))
    assert len(addresses(pool)) == 2


def test_a_target_is_its_readers_while_a_view_of_it_lives(pool, memory):
    whole = pool.to_host(torch.arange(8).reshape(2, 4))
    view = whole[1, 1:]
    tensor = torch.from_numpy(view)
    memory.gpu.run()
    for keep in (whole, view, tensor):
        others = [pool.to_host(torch.full((2, 4), -1)) for _ in range(3)]
        memory.gpu.run()
        assert np.array_equal(np.asarray(keep).ravel()[-3:], [5, 6, 7])
        del others
    del whole, view, keep
    to_device(pool, np.zeros(8))
    memory.gpu.run()
    assert tensor.tolist() == [5, 6, 7]
    before = len(addresses(pool))
    del tensor
    held = [pool.to_host(torch.zeros(8)) for _ in range(before)]
    assert len(addresses(pool)) == before  # the last view is gone: its buffer is free, too
    assert len({array.ctypes.data for array in held}) == before


def test_steps_in_flight_never_share_a_buffer(pool, memory):
    results = []
    for step in range(4):  # the GPU stands still: all four are in flight
        with pool.together() as upload:
            tensor, _ = upload(np.full(5, step)), upload(np.full(2, -step))
        results.append((step, pool.to_host(tensor)))
    assert len({array.ctypes.data for _, array in results}) == 4
    memory.gpu.run()
    for step, array in results:
        assert array.tolist() == [step] * 5


def test_sizes_are_rounded_up_to_powers_of_two(pool, memory):
    to_device(pool, np.zeros(1, np.uint8))
    assert allocated_bytes(pool) == SMALLEST
    memory.gpu.run()
    to_device(pool, np.zeros(SMALLEST, np.uint8))
    assert allocated_bytes(pool) == SMALLEST
    to_device(pool, np.zeros(SMALLEST + 1, np.uint8))
    assert allocated_bytes(pool) == 3 * SMALLEST


def test_buffers_serve_inside_and_outside_of_inference_mode(pool, memory):
    with torch.inference_mode():
        tensor = to_device(pool, np.arange(4))
    memory.gpu.run()
    assert pool.to_host(tensor).tolist() == [0, 1, 2, 3]
    assert len(addresses(pool)) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stalled_stream_sees_what_was_staged_for_it():
    from aiosched.device.cuda import CudaDevice

    async def main():
        device = CudaDevice()
        device.open(asyncio.get_running_loop())
        pool = PinnedPool(device.torch_device)
        flights = []
        for step in range(8):

            def stage(step=step):
                torch.cuda._sleep(20_000_000)
                return to_device(pool, np.full(1000, step))

            staged = device.schedule.launch(stage, step=step, label="stage")
            flights.append(
                device.copy.launch(
                    lambda staged=staged: pool.to_host(staged.value),
                    step=step,
                    label="copy",
                    after=[staged],
                )
            )
        for step, flight in enumerate(flights):
            assert (await flight).tolist() == [step] * 1000
        device.close(10)

    asyncio.run(main())
