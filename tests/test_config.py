"""EngineConfig: every field has a bound, and nothing that is wrong is taken in silence."""

from __future__ import annotations

import msgspec
import pytest

from aiosched import Engine, EngineConfig, InvalidConfig

BOUNDS = [
    ("overlap_depth", 0, 8, -1, 9),
    ("max_model_len", 2, 2**31 - 1, 1, 2**31),
    ("kv_tokens", 1, 2**40, 0, 2**40 + 1),
    ("page_size", 1, 1024, 0, 1025),
    ("prefill_chunk_tokens", 1, 2**20, 0, 2**20 + 1),
    ("max_batch_tokens", 1, 2**20, 0, 2**20 + 1),
    ("max_running_requests", 1, 65536, 0, 65537),
    ("max_queued_requests", 0, 2**31 - 1, -1, 2**31),
    ("max_unread_tokens", 1, 2**31 - 1, 0, 2**31),
    ("reader_grace", 0.0, 1e9, -0.1, 1e10),
    ("priority_aging", 1e-3, 1e9, 0.0, 1e10),
    ("step_timeout", 1e-3, 1e9, 0.0, 1e10),
    ("compute_threads", 1, 1024, 0, 1025),
]
CHOICES = {
    "device": (("auto", "cpu", "cuda", "cuda:0", "cuda:11"), ("gpu", "cuda:", "cuda:x", "cuda:²")),
    "dtype": (("auto", "float32", "bfloat16", "float16"), ("int8", "")),
    "quantization": (("none", "int8"), ("int4", "int2", "")),
    "overlap_depth": (("auto",), ("Auto", "1")),
    "policy": (("priority", "fifo"), ("lifo", "")),
}
UNBOUNDED = {"model", "prefix_cache", "disable_consecutive_prefill_overlap", "cache_dir", "debug"}
UNBOUNDED |= {"timeline", "compile"}
OPTIONAL = ("max_model_len", "kv_tokens", "max_batch_tokens", "compute_threads", "cache_dir")


def test_every_field_is_in_one_of_these_tables():
    covered = {name for name, *_ in BOUNDS} | CHOICES.keys() | UNBOUNDED
    assert covered == set(EngineConfig.__struct_fields__)


@pytest.mark.parametrize(("field", "low", "high", "below", "above"), BOUNDS)
def test_a_number_is_taken_up_to_its_bounds_and_refused_beyond(field, low, high, below, above):
    assert getattr(EngineConfig(**{field: low}), field) == low
    assert getattr(EngineConfig(**{field: high}), field) == high
    for wrong in (below, above):
        with pytest.raises(InvalidConfig, match=field) as caught:
            EngineConfig(**{field: wrong})
        assert (caught.value.field, caught.value.value) == (field, wrong)
        assert caught.value.bound in str(caught.value)


@pytest.mark.parametrize("field", ["reader_grace", "priority_aging", "step_timeout"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_number_of_seconds_is_finite(field, wrong):
    with pytest.raises(InvalidConfig, match=field):
        EngineConfig(**{field: wrong})


@pytest.mark.parametrize("field", CHOICES)
def test_a_choice_is_one_of_its_names(field):
    allowed, refused = CHOICES[field]
    for name in allowed:
        assert getattr(EngineConfig(**{field: name}), field) == name
    for name in refused:
        with pytest.raises(InvalidConfig, match=field):
            EngineConfig(**{field: name})


@pytest.mark.parametrize("field", EngineConfig.__struct_fields__)
def test_every_field_refuses_a_value_of_another_type(field):
    wrong = 1 if isinstance(getattr(EngineConfig(), field), bool) else [1]
    with pytest.raises(InvalidConfig, match="of type") as caught:
        EngineConfig(**{field: wrong})
    assert caught.value.field == field


@pytest.mark.parametrize("field", sorted(set(EngineConfig.__struct_fields__) - {*OPTIONAL}))
def test_only_what_the_machine_decides_may_be_none(field):
    with pytest.raises(InvalidConfig, match=field):
        EngineConfig(**{field: None})


def test_the_fields_that_the_machine_decides_are_none_by_default():
    assert all(getattr(EngineConfig(), field) is None for field in OPTIONAL)


def test_a_bool_is_no_number():
    with pytest.raises(InvalidConfig, match="overlap_depth"):
        EngineConfig(overlap_depth=True)


def test_unknown_settings_are_refused():
    with pytest.raises(TypeError, match="overlap_dept"):
        EngineConfig(overlap_dept=1)
    with pytest.raises(TypeError, match="overlap_dept"):
        Engine("dummy", overlap_dept=1)
    with pytest.raises(msgspec.ValidationError, match="overlap_dept"):
        msgspec.json.decode(b'{"overlap_dept": 1}', type=EngineConfig)


def test_the_environment_is_read_by_upper_case_names():
    environ = {
        "AIOSCHED_OVERLAP_DEPTH": "2",
        "AIOSCHED_DISABLE_CONSECUTIVE_PREFILL_OVERLAP": "1",
        "AIOSCHED_READER_GRACE": "0.5",
        "AIOSCHED_DEBUG": "true",
        "AIOSCHED_MODEL": "dummy:tiny",
        "PATH": "/bin",
    }
    assert EngineConfig.from_env(environ) == EngineConfig(
        overlap_depth=2,
        disable_consecutive_prefill_overlap=True,
        reader_grace=0.5,
        debug=True,
        model="dummy:tiny",
    )


def test_the_process_environment_is_read_by_from_env_alone(monkeypatch):
    monkeypatch.setenv("AIOSCHED_OVERLAP_DEPTH", "3")
    assert EngineConfig.from_env().overlap_depth == 3
    assert EngineConfig().overlap_depth == "auto"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("AIOSCHED_OVERLAP_DEPT", "1"),
        ("AIOSCHED_OVERLAP_DEPTH", "one"),
        ("AIOSCHED_DEBUG", "perhaps"),
        ("AIOSCHED_KV_TOKENS", ""),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused_by_its_name(name, text):
    with pytest.raises(InvalidConfig, match=name) as caught:
        EngineConfig.from_env({name: text})
    assert (caught.value.field, caught.value.value) == (name, text)


def test_a_variable_is_held_to_the_bound_of_its_field():
    with pytest.raises(InvalidConfig, match="overlap_depth=9"):
        EngineConfig.from_env({"AIOSCHED_OVERLAP_DEPTH": "9"})


def test_arguments_win_over_the_environment():
    environ = {"AIOSCHED_OVERLAP_DEPTH": "2", "AIOSCHED_PAGE_SIZE": "8"}
    config = EngineConfig.from_env(environ, overlap_depth=0)
    assert (config.overlap_depth, config.page_size) == (0, 8)


def test_xdg_cache_home_moves_the_cache_unless_it_is_named():
    xdg = {"XDG_CACHE_HOME": "/somewhere"}
    assert EngineConfig.from_env(xdg).cache_dir == "/somewhere/aiosched"
    assert EngineConfig.from_env({"XDG_CACHE_HOME": ""}).cache_dir is None
    assert EngineConfig.from_env(xdg | {"AIOSCHED_CACHE_DIR": "/here"}).cache_dir == "/here"
    assert EngineConfig.from_env(xdg, cache_dir="/there").cache_dir == "/there"


@pytest.mark.parametrize("header", ["", "[engine]\n"])
def test_a_file_holds_the_fields_at_its_top_or_in_its_engine_table(tmp_path, header):
    path = tmp_path / "engine.toml"
    path.write_text(header + "overlap_depth = 2\nmodel = 'dummy:tiny'\nreader_grace = 1\n")
    expected = EngineConfig(overlap_depth=2, model="dummy:tiny", reader_grace=1)
    assert EngineConfig.from_file(path) == expected
    assert EngineConfig.from_file(str(path), overlap_depth=0).overlap_depth == 0


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("overlap_dept = 1", "overlap_dept"),
        ("overlap_depth = 9", "overlap_depth"),
        ("overlap_depth = '1'", "overlap_depth"),
        ("overlap_depth", "file"),
        ("engine = 3", "engine"),
        ("engine = 'fast'", "engine"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_the_field(tmp_path, content, field):
    path = tmp_path / "engine.toml"
    path.write_text(content)
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig.from_file(path)
    assert caught.value.field == field


def test_a_file_that_is_no_text_is_refused_and_one_that_is_missing_is_an_os_error(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="TOML"):
        EngineConfig.from_file(path)
    with pytest.raises(FileNotFoundError):
        EngineConfig.from_file(tmp_path / "missing.toml")


def test_single_settings_win_over_a_config_and_are_checked():
    config = EngineConfig(overlap_depth=2, page_size=8)
    engine = Engine("dummy:tiny", config=config, device="cpu", overlap_depth=0)
    assert engine.config == EngineConfig(
        model="dummy:tiny", device="cpu", overlap_depth=0, page_size=8
    )
    with pytest.raises(InvalidConfig, match="overlap_depth"):
        Engine(config=config, overlap_depth=9)


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        EngineConfig().overlap_depth = 2


def test_a_variable_that_is_no_text_is_named():
    with pytest.raises(InvalidConfig, match="AIOSCHED_PAGE_SIZE"):
        EngineConfig.from_env({"AIOSCHED_PAGE_SIZE": "\udcff"})
