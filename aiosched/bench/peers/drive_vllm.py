"""vLLM on the CPU, for ``child.py``: compiled, or eager (``enforce_eager``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def open_engine(settings: dict[str, Any]) -> tuple[str, Callable[..., list[list[int]]]]:
    cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
    )
    import vllm

    llm = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_batch"],
        enforce_eager=settings["eager"],
        enable_prefix_caching=False,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = llm.generate(inputs, params, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in done]

    return str(vllm.__version__), generate
