from __future__ import annotations

from pathlib import Path

import pytest

from aiosched.commands.options import engine_config, sampling_params
from aiosched.errors import InvalidConfig


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "aiosched.toml"
    file.write_text('[engine]\nmodel = "file"\ndtype = "float16"\npage_size = 8\n')
    environ = {"AIOSCHED_MODEL": "environment", "AIOSCHED_DTYPE": "bfloat16", "HOME": "/"}
    flags = {"config_file": file, "model": "flag", "dtype": None}
    config = engine_config(flags, environ)
    assert (config.model, config.dtype, config.page_size) == ("flag", "bfloat16", 8)
    assert engine_config({"model": None}, environ).model == "environment"


def test_a_variable_that_repeats_the_default_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "aiosched.toml"
    file.write_text("overlap_depth = 2\n")
    assert engine_config({"config_file": file}, {}).overlap_depth == 2
    assert engine_config({"config_file": file}, {"AIOSCHED_OVERLAP_DEPTH": "1"}).overlap_depth == 1


def test_settings_that_need_each_other_may_come_from_two_places(tmp_path: Path) -> None:
    file = tmp_path / "aiosched.toml"
    file.write_text("compile = true\n")
    config = engine_config({"config_file": file}, {"AIOSCHED_QUANTIZATION": "int4"})
    assert (config.quantization, config.compile) == ("int4", True)


def test_the_cache_folder_of_the_desktop_yields_to_the_file(tmp_path: Path) -> None:
    file, environ = tmp_path / "aiosched.toml", {"XDG_CACHE_HOME": "/cache"}
    file.write_text("")
    assert engine_config({"config_file": file}, environ).cache_dir == str(Path("/cache/aiosched"))
    file.write_text('cache_dir = "/models"')
    assert engine_config({"config_file": file}, environ).cache_dir == "/models"


def test_unknown_variables_and_fields_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="AIOSCHED_MODLE"):
        engine_config({}, {"AIOSCHED_MODLE": "x"})
    file = tmp_path / "aiosched.toml"
    file.write_text("modle = 1")
    with pytest.raises(InvalidConfig, match="modle"):
        engine_config({"config_file": file}, {})


def test_flags_that_were_not_given_leave_the_librarys_defaults() -> None:
    flags = {"max_tokens": 5, "temperature": 0.5, "top_p": None, "seed": 0, "stop": ("a", "b")}
    params = sampling_params(flags)
    assert (params.max_tokens, params.temperature, params.top_p) == (5, 0.5, 1.0)
    assert (params.seed, params.stop_strings) == (0, ("a", "b"))
