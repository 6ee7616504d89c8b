"""Decode steps in compiled code give the plain path's tokens; without a compiler they say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from dense_models import FAMILIES, dense, logits_of_mixed_steps
from paged_steps import greedy

from aiosched.errors import ModelLoadError
from aiosched.model.loader import load_model
from aiosched.model.native import build

if not any(build.shutil.which(name) for name in build.COMPILERS):
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.fixture
def folder(native_folder: Path) -> Path:
    return native_folder


@pytest.mark.parametrize("name", FAMILIES)
def test_in_float32_tokens_and_logits_equal_the_plain_path(name: str, folder: Path) -> None:
    plain, compiled = dense(name), dense(name, compile_in=folder)

    assert greedy(compiled, [5, 6, 7], 24) == greedy(plain, [5, 6, 7], 24)
    for sequences in (1, 2, 3, 15):  # one, two, four and eight at a time
        expected = logits_of_mixed_steps(plain, sequences)
        for got, wanted in zip(logits_of_mixed_steps(compiled, sequences), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("sequences", [1, 3, 17, 70])
def test_in_bfloat16_logits_stay_near_the_plain_path(
    sequences: int, quantization: str | None, folder: Path
) -> None:
    expected = logits_of_mixed_steps(
        dense("qwen3", torch.bfloat16, quantization=quantization), sequences
    )
    compiled = dense("qwen3", torch.bfloat16, quantization=quantization, compile_in=folder)
    for got, wanted in zip(logits_of_mixed_steps(compiled, sequences), expected, strict=True):
        assert (got - wanted).norm() / wanted.norm() < 0.05


def test_int8_with_float32_activations_equals_its_dequantized_weights(folder: Path) -> None:
    compiled = dense("llama", quantization="int8", compile_in=folder)
    got = logits_of_mixed_steps(compiled, 5)
    compiled._native = None
    for one, other in zip(got, logits_of_mixed_steps(compiled, 5), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_code_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.load_native(tmp_path)
    (built,) = (tmp_path / "native").iterdir()
    before = (built / build.LIBRARY).stat()
    build.load_native(tmp_path)
    assert (built / build.LIBRARY).stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("damaged", [build.LIBRARY, build.CHECKSUM])
@pytest.mark.parametrize("left", [0, 20_000])
def test_a_file_that_is_not_what_was_built_is_built_again(
    folder: Path, tmp_path: Path, damaged: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dynamic loader would end the process on one that was cut short."""
    whole = Path(build.load_native(folder)._name)
    compilations = stand_in_for_the_compiler(monkeypatch, whole)
    build.load_native(tmp_path)
    (built,) = (tmp_path / "native").iterdir()
    content = (built / damaged).read_bytes()[:left][:-1]
    (built / damaged).unlink()  # and not cut short in place: this process has it mapped
    (built / damaged).write_bytes(content)
    build.load_native(tmp_path)
    assert (built / build.LIBRARY).read_bytes() == whole.read_bytes()
    assert len(compilations) == 2
    build.load_native(tmp_path)
    assert len(compilations) == 2


def stand_in_for_the_compiler(monkeypatch: pytest.MonkeyPatch, whole: Path) -> list[list[str]]:
    """Compilations give ``whole`` instead, at once."""
    compilations = []
    run = build._run

    def stand_in(command: list[str]) -> str:
        if command[-2] != "-o":
            return run(command)
        compilations.append(command)
        Path(command[-1]).write_bytes(whole.read_bytes())
        return ""

    monkeypatch.setattr(build, "_run", stand_in)
    return compilations


def test_what_a_killed_build_left_is_removed_but_not_that_of_one_under_way(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_the_compiler(monkeypatch, Path(build.load_native(folder)._name))
    old, new = (tmp_path / "native" / f"build-{name}" for name in ("old", "new"))
    for scratch in (old, new):
        scratch.mkdir(parents=True)
    os.utime(old, (0, 0))
    build.load_native(tmp_path)
    assert new.is_dir()
    assert not old.exists()


@pytest.mark.parametrize(
    ("given", "said"), [("g++ '", "CXX=.*no command"), (" ", "CXX=.*names no compiler")]
)
def test_a_command_in_cxx_that_cannot_be_read_is_named(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", given)
    with pytest.raises(ModelLoadError, match=said):
        build.load_native(tmp_path)


@pytest.mark.parametrize(
    ("writes", "said"), [(":", "wrote no library"), ('echo no > "$o"', "cannot be loaded")]
)
def test_what_is_no_library_is_not_kept(
    writes: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong-c++"
    wrong.write_text(f'#!/bin/sh\nfor o; do :; done\n[ "$1" = --version ] || {writes}\n')
    os.chmod(wrong, 0o755)
    monkeypatch.setenv("CXX", str(wrong))
    with pytest.raises(ModelLoadError, match=rf"wrong-c\+\+.*{said}"):
        build.load_native(tmp_path)
    assert not list((tmp_path / "native").iterdir())


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"no C\+\+ compiler.*CXX"):
        build.load_native(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelLoadError, match="no-such-compiler cannot be run"):
        build.load_native(tmp_path)


def test_a_failing_compiler_is_named_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no -march" >&2; exit 1\n')
    os.chmod(broken, 0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ModelLoadError, match=r"broken-c\+\+ failed: no -march"):
        build.load_native(tmp_path)
    assert not list((tmp_path / "native").iterdir())


@pytest.mark.parametrize(
    ("setting", "said"),
    [("vocab_size=61", "vocab_size = 61"), ("hidden_size=40", "hidden_size = 40")],
)
def test_sizes_that_do_not_fit_vectors_are_refused(setting: str, said: str, folder: Path) -> None:
    spec = f"dummy:llama?num_hidden_layers=1&intermediate_size=64&num_attention_heads=2&{setting}"
    with pytest.raises(ModelLoadError, match=said):
        load_model(spec, compile=True, cache_dir=folder)


def test_half_precision_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"float16.*bfloat16"):
        dense("llama", torch.float16, compile_in=folder)
