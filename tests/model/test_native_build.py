"""Code is built once, a damaged copy never loaded, and a compiler that is at fault is named."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from aiosched.errors import ModelLoadError
from aiosched.model.native import build, scratch

if not any(build.shutil.which(name) for name in build.COMPILERS):
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.fixture
def whole(native_folder: Path) -> Path:
    """What the compiler makes."""
    return Path(build.load_native(native_folder)._name)


@pytest.fixture
def compilations(whole: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of compilations, which give ``whole`` at once."""
    seen = []
    run = build._run

    def stand_in(command: list[str]) -> str:
        if command[-2] != "-o":
            return run(command)
        seen.append(command)
        Path(command[-1]).write_bytes(whole.read_bytes())
        return ""

    monkeypatch.setattr(build, "_run", stand_in)
    return seen


def compiler(folder: Path, does: str) -> str:
    """A script that knows its version, and otherwise ``does`` something with the file ``$o``."""
    script = folder / "odd-c++"
    script.write_text(f'#!/bin/sh\nfor o; do :; done\n[ "$1" = --version ] && exit 0\n{does}\n')
    script.chmod(0o755)
    return str(script)


def built(cache_dir: Path) -> Path:
    (folder,) = (cache_dir / "native").iterdir()
    return folder


def test_code_is_built_once(tmp_path: Path, compilations: list[list[str]]) -> None:
    for _ in range(2):
        assert build.load_native(tmp_path)._name == str(built(tmp_path) / build.LIBRARY)
    assert len(compilations) == 1


@pytest.mark.parametrize("damaged", [build.LIBRARY, build.CHECKSUM])
@pytest.mark.parametrize("left", [0, 20_000])
def test_a_file_that_is_not_what_was_built_is_built_again(
    tmp_path: Path, damaged: str, left: int, whole: Path, compilations: list[list[str]]
) -> None:
    """The dynamic loader would end the process on one that was cut short."""
    build.load_native(tmp_path)
    file = built(tmp_path) / damaged
    kept = file.read_bytes()[:left][:-1]
    file.unlink()  # this process has the code of the old file in use
    file.write_bytes(kept)
    for _ in range(2):
        build.load_native(tmp_path)
        assert (built(tmp_path) / build.LIBRARY).read_bytes() == whole.read_bytes()
        assert len(compilations) == 2


def test_a_whole_file_that_can_no_longer_be_loaded_is_built_again(
    tmp_path: Path, whole: Path, compilations: list[list[str]]
) -> None:
    folder = tmp_path / "native" / whole.parent.name
    folder.mkdir(parents=True)
    other = b"linked with what this machine lacks by now"
    (folder / build.LIBRARY).write_bytes(other)
    (folder / build.CHECKSUM).write_text(hashlib.sha256(other).hexdigest())
    build.load_native(tmp_path)
    assert (built(tmp_path) / build.LIBRARY).read_bytes() == whole.read_bytes()
    assert len(compilations) == 1


def test_what_another_process_has_built_meanwhile_is_taken(
    tmp_path: Path, compilations: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, there = build._run, []

    def slow(command: list[str]) -> str:
        monkeypatch.setattr(build, "_run", run)
        if command[-2] == "-o":
            build.load_native(tmp_path)
            there.append(os.stat(tmp_path / "native" / Path(command[-1]).parent.name))
        return run(command)

    build._version(tuple(build._compiler()))
    monkeypatch.setattr(build, "_run", slow)
    build.load_native(tmp_path)
    assert len(compilations) == 2
    assert built(tmp_path).stat().st_ino == there[0].st_ino


def test_what_killed_builds_left_is_removed_but_nothing_of_those_under_way(
    tmp_path: Path, compilations: list[list[str]]
) -> None:
    old, young, held = (tmp_path / "native" / f"build-{age}" for age in ("old", "young", "held"))
    for folder in (old, young, held):
        (folder / "decode").mkdir(parents=True)
    for folder in (old, held):
        os.utime(folder, (0, 0))
    with scratch._hold(held):
        build.load_native(tmp_path)
    assert not old.exists()
    assert young.is_dir()
    assert held.is_dir()


def test_a_folder_in_which_a_build_is_under_way_is_held(tmp_path: Path) -> None:
    with scratch.scratch_folder(tmp_path) as folder:
        os.utime(folder, (0, 0))
        with scratch.scratch_folder(tmp_path):
            assert folder.is_dir()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("g++ '", "CXX=.*is no command: No closing quotation"),
        (" ", "CXX=' ' names no compiler"),
        ("true", "true wrote no library: is CXX right"),
        ("no-such-compiler", "no-such-compiler cannot be run"),
    ],
)
def test_a_cxx_that_is_no_compiler_is_named(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", given)
    with pytest.raises(ModelLoadError, match=said):
        build.load_native(tmp_path)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ('echo no > "$o"', r"cannot be loaded \(is CXX right\?\)"),
        ("echo no -march >&2; exit 1", "failed: no -march"),
    ],
)
def test_a_compiler_at_fault_is_named_and_nothing_kept(
    does: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, does))
    with pytest.raises(ModelLoadError, match=rf"odd-c\+\+.*{said}"):
        build.load_native(tmp_path)
    assert not list((tmp_path / "native").iterdir())


def test_a_machine_without_a_compiler_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"no C\+\+ compiler.*CXX"):
        build.load_native(tmp_path)


def test_windows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "system", lambda: "Windows")
    with monkeypatch.context() as patched, pytest.raises(ModelLoadError, match="Windows is not"):
        patched.setattr(build.os, "name", "nt")
        build.load_native(tmp_path)
