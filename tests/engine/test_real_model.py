"""SmolLM2 in float32: greedy tokens equal transformers' own ``generate`` on the same weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_baseline

from aiosched import Engine, SamplingParams
from aiosched.model.builtin import BUILTIN_MODELS, builtin_file
from aiosched.model.dense_model import DenseModel
from aiosched.model.gguf_file import GGUFFile
from aiosched.model.gguf_model import load_gguf_model
from aiosched.model.loader import load_model

pytestmark = pytest.mark.timeout(400)  # the whole reference is made in the first set-up

NEW_TOKENS = 12
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6,",
    "In 1969, the first humans",
    "Water boils at",
    "Roses are red,",
    "The three primary colours are",
    "To make a good cup of tea, you",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox",
    "Q: What is the largest planet?\nA:",
    "SELECT name, age FROM users WHERE",
    "It was a dark and stormy night;",
    "The derivative of x^2 is",
    "Hallo, mein Name ist",
    "Yesterday all my troubles seemed",
    "List of fruits: apple, banana,",
    "Python is a programming language that lets you work quickly and integrate systems more",
]
# One compute thread: an OpenMP team of two crawls when anything else uses one of the two cores.
SETTINGS: dict[str, Any] = {"device": "cpu", "compute_threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def smollm2() -> DenseModel:
    return load_model("smollm2-135m-instruct", dtype="float32")


@pytest.fixture(scope="module")
def expected(smollm2: DenseModel) -> list[list[int]]:
    """What transformers alone generates, with its own attention and its own KV cache."""
    cache = Path.home() / ".cache" / "aiosched"
    file = builtin_file(BUILTIN_MODELS["smollm2-135m-instruct"], cache, lambda *_: None)
    reference: Any = load_gguf_model(GGUFFile(file), torch.float32, lambda *_: None)
    reference.set_attn_implementation("sdpa")
    answers = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for text in PROMPTS:
        ids = torch.tensor([smollm2.tokenizer.backend_tokenizer.encode(text).ids])
        with torch.inference_mode():
            output = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        answers.append(output[0, ids.shape[1] :].tolist())
    torch.set_num_threads(threads)
    return answers


async def answers_of(engine: Engine, prompts: list[str]) -> list[list[int]]:
    """All at once, in one batch."""
    completions = await asyncio.gather(*(engine.complete(text, GREEDY) for text in prompts))
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_twenty_prompts_in_one_batch_equal_transformers_generate(
    smollm2: DenseModel, expected: list[list[int]], depth: int
) -> None:
    async def main() -> None:
        async with Engine(smollm2, **SETTINGS, overlap_depth=depth) as engine:
            assert await answers_of(engine, PROMPTS) == expected
            assert_baseline(engine)

    asyncio.run(main())


@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_read_in_chunks_of_five_equal_transformers_generate(
    smollm2: DenseModel, expected: list[list[int]], page_size: int
) -> None:
    async def main() -> None:
        async with Engine(
            smollm2, **SETTINGS, overlap_depth=1, prefill_chunk_tokens=5, page_size=page_size
        ) as engine:
            assert await answers_of(engine, PROMPTS[:8]) == expected[:8]

    asyncio.run(main())


def test_a_prefix_cache_hit_does_not_change_the_answer(
    smollm2: DenseModel, expected: list[list[int]]
) -> None:
    async def main() -> None:
        async with Engine(smollm2, **SETTINGS, overlap_depth=1, page_size=4) as engine:
            assert await answers_of(engine, PROMPTS[:6]) == expected[:6]
            again = await asyncio.gather(*(engine.complete(p, GREEDY) for p in PROMPTS[:6]))
            assert [list(c.token_ids) for c in again] == expected[:6]
            assert all(c.usage.cached_tokens > 0 for c in again if c.usage.prompt_tokens > 4)

    asyncio.run(main())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_forced_retraction_does_not_change_the_answers(
    smollm2: DenseModel, expected: list[list[int]], depth: int
) -> None:
    async def main() -> None:
        async with Engine(
            smollm2, **SETTINGS, overlap_depth=depth, page_size=4, kv_tokens=96
        ) as engine:
            assert await answers_of(engine, PROMPTS[:8]) == expected[:8]
            assert engine.stats().retractions > 0
            assert_baseline(engine)

    asyncio.run(main())
