"""aiosched bench offline: engines in processes of their own, side by side."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from aiosched.bench import offline
from aiosched.bench.measure import Foreign
from aiosched.bench.offline import Round, brief, race, random_prompts, row_of
from aiosched.bench.peers.checkpoint import Checkpoint, prepare, unpack_gguf
from aiosched.bench.peers.engines import Contestant, Workload, aiosched_engines, llama_cpp_engines
from aiosched.bench.peers.process import EngineProcess, EngineProcessFailed
from aiosched.model.gguf_file import GGUFFile

WORK = Workload(
    model="m", dtype="float32", threads=None, cores=2, max_batch=2, prompt_tokens=4, new_tokens=3
)


@pytest.fixture
def interpreter(tmp_path):
    """Makes a program that stands for an interpreter with an engine; ``answers`` is its heart."""

    def make(answers="[[7] * n for _ in prompts]", name="python"):
        program = tmp_path / name
        program.write_text(
            f"#!{sys.executable}\n"
            "import json, sys\n"
            "print(json.dumps({'version': '1.2'}), flush=True)\n"
            "for line in sys.stdin:\n"
            "    order = json.loads(line)\n"
            "    prompts, n = order['prompts'], order['new_tokens']\n"
            f"    print(json.dumps({{'seconds': n / 8, 'token_ids': {answers}}}), flush=True)\n"
        )
        program.chmod(0o755)
        return str(program)

    return make


def contestant(python, engine="peer"):
    return Contestant(
        engine=engine, dtype="float32", package=engine, driver="none", settings={}, python=python
    )


def round_(prefill, total, others=0.0):
    foreign = Foreign()
    foreign.cores = others
    return Round(prefill, total, foreign)


class Idle:
    start_s = 2.5

    def rss_mb(self):
        return 10.0


def test_the_first_new_token_counts_as_prefill_and_the_rest_as_decoding():
    row = row_of(contestant(""), Idle(), 8, 5, [round_(1.0, 3.0)])
    assert row["prefill_s"] == 1.0
    assert row["step_ms"] == 500.0
    assert row["decode_tok_s"] == 16.0
    assert (row["engine"], row["batch"], row["dtype"]) == ("peer", 8, "float32")
    assert (row["start_s"], row["rss_mb"]) == (2.5, 10.0)


def test_rounds_that_others_disturbed_are_left_out():
    row = row_of(contestant(""), Idle(), 1, 2, [round_(0, 9, 0.5), round_(0, 1), round_(0, 1)])
    assert (row["runs"], row["decode_low"], row["decode_high"]) == (2, 1.0, 1.0)


def test_if_every_round_was_disturbed_all_of_them_count():
    row = row_of(contestant(""), Idle(), 1, 2, [round_(0, 2, 0.5), round_(0, 4, 0.9)])
    assert (row["runs"], row["foreign_cores"]) == (2, 0.9)


def test_a_table_has_the_quartiles_beside_their_median():
    row = brief(row_of(contestant(""), Idle(), 8, 5, [round_(1.0, 3.0), round_(1.0, 5.0)]))
    assert row["decode_tok_s"] == "12 (8–16)"
    keys = "engine batch dtype prefill_s decode_tok_s step_ms start_s rss_mb foreign"
    assert list(row) == keys.split()


def test_prompts_are_the_same_at_every_call():
    prompts = random_prompts(50, 3, 4)
    assert prompts == random_prompts(50, 3, 4)
    assert [len(prompt) for prompt in prompts] == [4, 4, 4]
    assert max(max(prompt) for prompt in prompts) < 50


def test_a_peer_that_fails_is_a_note_and_the_others_go_on(interpreter, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho first >&2\necho the reason >&2\nexit 1\n")
    broken.chmod(0o755)
    short = interpreter("[[7]] if n < 3 else []", "short")
    field = [
        contestant(str(broken), "broken"),
        contestant(interpreter(), "good"),
        contestant(short, "short"),
        contestant(str(tmp_path / "absent"), "absent"),
    ]
    rows, notes, versions = asyncio.run(race(field, [[1, 2]], [1], 3, 2))
    assert [(row["engine"], row["decode_tok_s"]) for row in rows] == [("good", 8.0)]
    assert versions == {"good": "1.2"}
    assert "broken (float32): the reason" in notes
    assert "short (float32): 1 prompts with 3 new tokens each gave []" in notes
    assert any(note.startswith("absent (float32): [Errno 2]") for note in notes)


def test_closing_an_engine_ends_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr("aiosched.bench.peers.process.END_TIMEOUT", 0.01)
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nsleep 600 &\necho \'{"version": "1"}\'\ncat >/dev/null\n')
    program.chmod(0o755)

    async def lived():
        process = EngineProcess(str(program), "none", {})
        await process.start()
        # It reads to the end of an output that the sleeper has open, too.
        await process.close()

    asyncio.run(asyncio.wait_for(lived(), 60))


def test_a_driver_that_cannot_import_its_engine_says_so():
    async def tried():
        process = EngineProcess(sys.executable, "vllm", {"threads": 1})
        try:
            await process.start()
        finally:
            await process.close()

    with pytest.raises(EngineProcessFailed, match="No module named 'vllm'"):
        asyncio.run(tried())


def test_aiosched_takes_part_with_both_loops_and_with_each_setting_asked_for():
    field = list(aiosched_engines(WORK, ["int8"], True))
    assert [(c.engine, c.dtype) for c in field] == [
        ("aiosched overlap", "float32"),
        ("aiosched normal", "float32"),
        ("aiosched overlap", "int8"),
        ("aiosched overlap, compiled", "float32"),
        ("aiosched overlap, compiled", "int8"),
    ]
    assert field[2].settings["engine"]["quantization"] == "int8"
    assert "quantization" not in field[0].settings["engine"]


def test_int4_takes_part_compiled_and_is_refused_uncompiled():
    field = [c for c in aiosched_engines(WORK, ["int4"], True) if c.dtype == "int4"]
    assert [c.engine for c in field] == ["aiosched overlap, compiled"]
    assert field[0].settings["engine"]["compile"]
    with pytest.raises(ValueError, match="int4 needs --compile"):
        list(aiosched_engines(WORK, ["int4"], False))


def test_llama_cpp_is_refused_without_a_gguf_file():
    with pytest.raises(ValueError, match="GGUF"):
        list(llama_cpp_engines("python", WORK, Checkpoint(folder="f", vocab_size=9)))


def test_a_dummy_model_is_written_as_a_folder_that_others_can_read(tmp_path):
    checkpoint = prepare(offline.TINY_MODEL, "float32", tmp_path, None, for_gguf_readers=False)
    config = json.loads((Path(checkpoint.folder) / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("llama", checkpoint.vocab_size)
    assert (Path(checkpoint.folder) / "model.safetensors").stat().st_size > 0


def test_it_runs_and_prints_the_promised_keys(monkeypatch, interpreter):
    def overlap_alone(*args):
        return list(aiosched_engines(*args))[:1]

    monkeypatch.setattr(offline, "aiosched_engines", overlap_alone)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = CliRunner().invoke(
        offline.command,
        "--tiny --json --dtype float32 --engine aiosched --threads 1 --peer vllm=" + interpreter(),
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert len(report["rows"]) == 2 * 3, report["notes"]
    keys = "engine batch dtype prefill_s decode_tok_s step_ms start_s rss_mb"
    for row in report["rows"]:
        assert set(keys.split()) <= set(row)
    assert report["versions"]["vllm"] == "1.2"
    assert report["settings"]["peer"] == ["vllm"]


@pytest.mark.parametrize("peer", ["vllm", "vllm=", "other=python"])
def test_a_peer_that_is_not_known_is_refused(peer):
    done = CliRunner().invoke(offline.command, ["--tiny", "--peer", peer])
    assert done.exit_code == 2
    assert "NAME=PYTHON" in done.output


def test_a_gguf_file_is_written_again_with_its_matrices_unpacked(tmp_path):
    rng = np.random.default_rng(0)
    matrix, vector = rng.normal(size=(4, 64)).astype(np.float32), np.ones(64, np.float32)
    writer = GGUFWriter(tmp_path / "packed.gguf", "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("llama.rope.freq_base", 0.5)
    packed = quantize(matrix, GGMLQuantizationType.Q4_1)
    writer.add_tensor("matrix", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.add_tensor("vector", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    assert unpack_gguf(tmp_path / "packed.gguf", tmp_path / "plain.gguf", "float32") == "q4_1"
    file = GGUFFile(tmp_path / "plain.gguf")
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert file.metadata["llama.rope.freq_base"] == 0.5
    assert file.metadata["general.file_type"] == LlamaFileType.ALL_F32
    expected = dequantize(packed, GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(file.tensor("matrix"), expected)
    np.testing.assert_array_equal(file.tensor("vector"), vector)
