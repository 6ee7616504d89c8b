from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled code is kept during a test run, so that it is built once."""
    return tmp_path_factory.mktemp("native")
