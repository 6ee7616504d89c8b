"""llama.cpp through the package llama-cpp-python, for ``child.py``.

Its low-level calls, because its high-level class serves one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

BATCH = 2048
"""Tokens in one call of ``llama_decode``; llama.cpp's own default."""


def open_engine(settings: dict[str, Any]) -> tuple[str, Callable[..., list[list[int]]]]:
    import llama_cpp as llama

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(
        settings["gguf"].encode(), llama.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {settings['gguf']}")
    params = llama.llama_context_default_params()
    params.n_ctx = settings["max_model_len"] * settings["max_batch"]
    params.n_seq_max = settings["max_batch"]
    params.n_batch = BATCH
    params.n_threads = params.n_threads_batch = settings["threads"]
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context")
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(BATCH, 0, 1)

    def decode(rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Run rows of (token, position, sequence, whether to sample): the likeliest tokens."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, sample) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = sample
        if code := llama.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode gave {code}")
        count = sum(sample for *_, sample in rows)
        if not count:
            return []
        logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (count, vocab_size))
        likeliest: list[int] = logits.argmax(1).tolist()
        return likeliest

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last: list[int] = []
        for start in range(0, len(rows), BATCH):
            last += decode(rows[start : start + BATCH])
        answers = [[token] for token in last]
        for step in range(new_tokens - 1):
            last = decode(
                [
                    (token, len(prompts[sequence]) + step, sequence, True)
                    for sequence, token in enumerate(last)
                ]
            )
            for answer, token in zip(answers, last):  # noqa: B905  # Python 3.9 has no strict
                answer.append(token)
        return answers

    return str(llama.__version__), generate
