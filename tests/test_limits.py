from __future__ import annotations

import pytest

from aiosched import host_memory, limits
from aiosched.config import EngineConfig
from aiosched.errors import InvalidConfig
from aiosched.limits import cpu_kv_bytes, cuda_kv_bytes, resolve_limits
from aiosched.testing import HashModel

GIB = 2**30


class WideModel(HashModel):
    """One MiB of KV per token."""

    def kv_bytes_per_token(self) -> int:
        return 2**20


def test_the_kv_cache_takes_a_quarter_of_the_memory_of_a_small_machine() -> None:
    assert cpu_kv_bytes(GIB) == GIB // 4
    assert cpu_kv_bytes(8 * GIB) == 2 * GIB
    assert cpu_kv_bytes(1024 * GIB) == 2 * GIB
    assert cpu_kv_bytes(None) == 2 * GIB


def test_the_kv_cache_leaves_a_reserve_on_a_gpu_of_any_size() -> None:
    for gib in (1, 2, 3, 8, 24, 80, 140):
        taken = cuda_kv_bytes(gib * GIB)
        assert 0 < taken < gib * GIB
        assert gib * GIB - taken >= min(1.5 * GIB, gib * GIB / 2)


def test_limits_follow_the_memory_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = EngineConfig(page_size=16, max_running_requests=1), WideModel()
    model.max_model_len = 10**6
    for available, pages in ((GIB, 16), (2**44, 128)):
        monkeypatch.setattr(limits, "available_bytes", lambda found=available: found)
        assert resolve_limits(config, model, None).num_pages == pages
    assert resolve_limits(config, model, 2 * GIB).num_pages == int(1024 * 0.85) // 16
    told = EngineConfig(page_size=16, kv_tokens=320)
    assert resolve_limits(told, model, None).num_pages == 20
    monkeypatch.setattr(limits, "available_bytes", lambda: 2**20)
    with pytest.raises(InvalidConfig, match="at least one page"):
        resolve_limits(config, model, None)


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemTotal:  9 kB\nMemAvailable:   1000 kB\n", "max\n", 1_024_000),
        ("MemTotal:  9 kB\nMemAvailable:   1000 kB\n", "512000\n", 512_000),
        ("MemTotal:  9 kB\nMemAvailable:   1000 kB\n", None, 1_024_000),
    ],
)
def test_available_memory_is_that_of_the_machine_or_the_limit_of_the_container(
    tmp_path, monkeypatch, meminfo, limit, expected
) -> None:
    (tmp_path / "meminfo").write_text(meminfo)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CONTAINER_LIMIT", tmp_path / "memory.max")
    assert host_memory.available_bytes() == expected


def test_without_the_files_of_linux_the_whole_memory_counts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(host_memory, "CONTAINER_LIMIT", tmp_path / "none")
    monkeypatch.setattr(
        host_memory.os,
        "sysconf",
        lambda name: {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}[name],
    )
    assert host_memory.available_bytes() == 40960
    monkeypatch.delattr(host_memory.os, "sysconf")
    assert host_memory.available_bytes() is None
