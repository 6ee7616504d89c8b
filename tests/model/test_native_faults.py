"""Compiled steps keep to their own memory, threads and rows, whatever they are given."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_models import VOCAB, dense, original
from paged_steps import PagedSequences, greedy

from aiosched.errors import ModelLoadError
from aiosched.model.dense_model import DenseModel
from aiosched.model.dense_shape import DenseShape, rope_table
from aiosched.model.native import build, builder
from aiosched.model.native.teams import Teams
from aiosched.model.transformers_dense import dense_model_of

if not any(build.shutil.which(name) for name in build.COMPILERS):
    pytest.skip("no C++ compiler", allow_module_level=True)

NAN, INF = float("nan"), float("inf")
KINDS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, "int8"),
    "int8, float32": (torch.float32, "int8"),
    "int4": (torch.bfloat16, "int4"),
    "int4, float32": (torch.float32, "int4"),
}


@pytest.fixture
def folder(native_folder: Path) -> Path:
    return native_folder


def compiled(folder: Path, kind: str = "float32") -> DenseModel:
    dtype, quantization = KINDS[kind]
    return dense("llama", dtype, quantization=quantization, compile_in=folder)


def prompts(count: int) -> dict[str, list[int]]:
    return {str(index): [3 + index % 7, 5, 2 + index % 11] for index in range(count)}


def rows_with_nan(logits: torch.Tensor) -> list[int]:
    whole = logits.isnan().all(1)
    assert torch.equal(whole, ~logits.isfinite().all(1)), "a row is part NaN"
    return whole.nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_decides_nothing(dtype: torch.dtype, folder: Path) -> None:
    model = compiled(folder)
    expected = greedy(model, [5, 6, 7], 8)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert greedy(model, [5, 6, 7], 8) == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2, 19])
@pytest.mark.parametrize(
    ("where", "poison"),
    [("embedding", NAN), ("key", NAN), ("value", NAN), ("embedding", INF), ("value", INF)],
)
def test_nan_reaches_the_logits_of_its_own_row_and_of_no_other(
    where: str, batch: int, kind: str, poison: float, folder: Path
) -> None:
    model = compiled(folder, kind)
    kv = model.make_kv(batch, 4)
    sequences = PagedSequences(batch, 4)
    first = sequences.step({}, prompts(batch))
    model.forward(first, kv)
    step = sequences.step({name: 4 for name in prompts(batch)}, {})
    row = batch - 1
    page = int(step.host.page_tables[row, 0])
    if where == "embedding":
        step.input_ids[row] = 9
        model._embedding[9, 11] = poison
    elif where == "key":
        kv.keys[0][page, 1, 0, 3] = poison
    else:
        kv.values[0][page, 1, 0, 3] = poison
    assert rows_with_nan(model.forward(step, kv)) == [row]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 19])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "gate_proj"])
def test_nan_of_a_weight_reaches_all_logits(name: str, batch: int, kind: str, folder: Path) -> None:
    dtype, quantization = KINDS[kind]
    source = original("llama", dtype)
    layer: Any = source.model.layers[1]
    part = layer.mlp if name == "gate_proj" else layer.self_attn
    with torch.no_grad():
        getattr(part, name).weight[1, 2] = NAN
    options = {"quantization": quantization, "compile_in": folder}
    model = dense_model_of(source, None, lambda *_: None, options)
    kv = model.make_kv(batch, 4)
    sequences = PagedSequences(batch, 4)
    step = sequences.step(dict.fromkeys(prompts(batch), 4), {})
    assert rows_with_nan(model.forward(step, kv)) == list(range(batch))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(token: int, folder: Path) -> None:
    model = compiled(folder)
    step = PagedSequences(4, 4).step({"a": 1, "b": token}, {})
    with pytest.raises(IndexError, match=f"sequence 1: token {token}"):
        model.forward(step, model.make_kv(4, 4))


def test_a_position_beyond_the_model_is_refused(folder: Path) -> None:
    model = compiled(folder)
    step = PagedSequences(4, 4).step({"a": 1}, {})
    step = replace(step, positions=torch.tensor([model.max_model_len]))
    with pytest.raises(IndexError, match="position 128"):
        model.forward(step, model.make_kv(4, 4))


def test_angles_for_fewer_positions_than_the_model_has_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(shape: DenseShape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(table[:-1] for table in rope_table(shape, dtype))

    monkeypatch.setattr(builder, "rope_table", short)
    with pytest.raises(ModelLoadError, match=rf"cosine is \[{127 * 16}\], not \[{128 * 16}\]"):
        compiled(folder)


def test_two_threads_share_a_model_and_get_what_each_gets_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    model = compiled(folder)
    asked = [[5, 6, 7], [8, 9]]
    expected = [greedy(model, prompt, 40) for prompt in asked]
    got: dict[int, list[int]] = {}
    start = threading.Barrier(2)

    def decode(index: int) -> None:
        start.wait()
        for _ in range(4):
            got[index] = greedy(model, asked[index], 40)

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[0], got[1]] == expected


FORK = """
import os, signal, sys
from pathlib import Path
from aiosched.model.native.build import load_native
from aiosched.model.native.teams import Teams

signal.alarm(60)  # instead of a test that hangs
teams = Teams(load_native(Path(sys.argv[1])))
with teams.held(3) as inherited:
    child = os.fork()
    if child == 0:  # while the lock is held
        with teams.held(3) as team:
            assert team != inherited
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
child = os.fork()
if child == 0:
    sys.exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
with teams.held(3) as team:
    assert team == inherited
"""


def test_a_forked_process_has_a_team_of_its_own_and_ends(folder: Path) -> None:
    build.load_native(folder)
    done = subprocess.run([sys.executable, "-c", FORK, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_team_ends_with_its_decoder_but_not_from_another_process(
    elsewhere: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teams, ended = Teams(build.load_native(folder)), []
    end, teams._end = teams._end, lambda team: ended.append(team)
    with teams.held(2) as team:
        pass
    here = os.getpid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: here + elsewhere)
        del teams
    assert ended == ([] if elsewhere else [team])
    end(team)


NO_THREADS = """
import ctypes, resource, sys
library = ctypes.CDLL(sys.argv[1])
library.aiosched_team.restype = ctypes.c_void_p
resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, resource.RLIM_INFINITY))
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (3 << 25)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
assert library.aiosched_team(ctypes.c_int64(64)) is None
"""


def test_threads_that_the_machine_does_not_give_are_an_error(folder: Path) -> None:
    library: Any = build.load_native(folder)
    done = subprocess.run(
        [sys.executable, "-c", NO_THREADS, library._name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

    teams = Teams(library)
    teams._new = lambda threads: None
    with pytest.raises(RuntimeError, match="no 3 threads"), teams.held(3):
        pass


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.embed_tokens.weight", r"embedding is \[95, 64\], not \[96, 64\]"),
        ("model.norm.weight", r"norm is \[63\]"),
        ("model.layers.1.input_layernorm.weight", "layer 1 attention norm"),
        ("model.layers.1.post_attention_layernorm.weight", "layer 1 mlp norm"),
        ("model.layers.1.self_attn.q_norm.weight", "layer 1 query norm"),
        ("model.layers.1.self_attn.k_norm.weight", "layer 1 key norm"),
        ("model.layers.1.self_attn.v_proj.weight", "layer 1 q, k, v"),
        ("model.layers.1.self_attn.o_proj.weight", "layer 1 output"),
        ("model.layers.1.mlp.up_proj.weight", "layer 1 gate, up"),
        ("model.layers.1.mlp.down_proj.weight", "layer 1 down"),
        ("lm_head.weight", "head"),
    ],
)
def test_a_tensor_of_another_shape_is_named(name: str, said: str, folder: Path) -> None:
    source: Any = original("qwen3")
    state = source.state_dict()
    state[name] = state[name][:-1]
    source.state_dict = lambda: state
    with pytest.raises(ModelLoadError, match=said):
        dense_model_of(source, None, lambda *_: None, {"compile_in": folder})


def test_a_bias_of_another_shape_is_named(folder: Path) -> None:
    source: Any = original("qwen2")
    state = source.state_dict()
    name = "model.layers.0.self_attn.k_proj.bias"
    state[name] = state[name][:-1]
    source.state_dict = lambda: state
    with pytest.raises(ModelLoadError, match="layer 0 q, k, v bias"):
        dense_model_of(source, None, lambda *_: None, {"compile_in": folder})
