"""Paged forwards give what transformers gives on the same weights, and refuse what they cannot."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import transformers
from paged_steps import PagedSequences
from transformers import AutoModelForCausalLM, PreTrainedModel

from aiosched.errors import ModelLoadError
from aiosched.model.transformers_model import TransformersModel

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {**SMALL, "head_dim": 8, "sliding_window": 6}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "llama, rope scaled": (
        "LlamaConfig",
        {**SMALL, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "qwen2": ("Qwen2Config", SMALL),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 16}),
    "mistral, sliding": ("MistralConfig", SLIDING),
    "gemma2, sliding, softcap": ("Gemma2Config", {**SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3, sliding": (
        "Gemma3TextConfig",
        {**SLIDING, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "gpt-oss, sinks, sliding": (
        "GptOssConfig",
        {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "cohere, logit scale": ("CohereConfig", {**SMALL, "logit_scale": 0.25}),
    "granite, multipliers": (
        "GraniteConfig",
        {**SMALL, "logits_scaling": 3.0, "attention_multiplier": 0.2},
    ),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt2, learned positions": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "eos_token_id": 2,
         "bos_token_id": 1},
    ),
    "deepseek v3, keys wider than values": (
        "DeepseekV3Config",
        {**SMALL, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4,
         "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}  # fmt: skip

REFUSED = {
    "FalconConfig": "attention interface",
    "BloomConfig": "attention interface",
    "MambaConfig": "linear_attention",
    "Llama4TextConfig": "chunked_attention",
}


def random_model(config: str, settings: dict[str, Any]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings))
        # The default initialization is so flat that wrong attention would hardly show.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=0.3)
    return model.float().eval()


@pytest.fixture(scope="module", params=SERVED)
def models(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, TransformersModel]:
    plain = random_model(*SERVED[request.param])
    plain.set_attn_implementation("eager")
    return plain, TransformersModel(copy.deepcopy(plain))


def expected(plain: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return plain(torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunked_prefill_and_batched_decode_give_the_logits_of_a_plain_forward(
    models: tuple[PreTrainedModel, TransformersModel], page_size: int
) -> None:
    plain, paged = models
    rng = random.Random(2)
    prompts = {name: [rng.randrange(3, 61) for _ in range(n)] for name, n in
               {"short": 3, "long": 29, "late": 18}.items()}  # fmt: skip
    kv = paged.make_kv(160, page_size)
    sequences = PagedSequences(160, page_size)

    def check(decodes: dict[str, int], extends: dict[str, list[int]]) -> None:
        for name, token in decodes.items():
            written[name] = [*written[name], token]
        for name, ids in extends.items():
            written[name] = [*written.get(name, []), *ids]
        logits = paged.forward(sequences.step(decodes, extends), kv)
        assert logits.shape == (len(decodes) + len(extends), paged.vocab_size)
        for row, name in enumerate([*decodes, *extends]):
            torch.testing.assert_close(
                logits[row], expected(plain, written[name]), rtol=1e-4, atol=1e-4
            )

    written: dict[str, list[int]] = {}
    check({}, {"short": prompts["short"], "long": prompts["long"][:11]})
    check({"short": 7}, {"long": prompts["long"][11:28]})
    check({"short": 9, "long": prompts["long"][28]}, {"late": prompts["late"]})
    check({"long": 4, "late": 5, "short": 6}, {})


def test_logits_come_only_where_they_are_asked_for() -> None:
    paged = TransformersModel(random_model("LlamaConfig", SMALL))
    step = PagedSequences(4, 16).step({}, {"a": [5, 6, 7, 8]})
    object.__setattr__(step, "logits_index", torch.tensor([3, 0]))
    last_and_first = paged.forward(step, paged.make_kv(4, 16))
    object.__setattr__(step, "logits_index", torch.tensor([], dtype=torch.int64))
    nothing = paged.forward(step, paged.make_kv(4, 16))
    alone = PagedSequences(4, 16).step({}, {"a": [5]})
    first = paged.forward(alone, paged.make_kv(4, 16))

    assert nothing.shape == (0, 61)
    torch.testing.assert_close(last_and_first[1], first[0])


def test_kv_sizes_follow_from_what_the_layers_write() -> None:
    paged = TransformersModel(random_model("LlamaConfig", SMALL))
    kv = paged.make_kv(5, 16)

    assert [keys.shape for keys in kv.keys] == [(6, 16, 2, 8)] * 3
    held = sum(tensor.nbytes for tensor in (*kv.keys, *kv.values))
    assert held == paged.kv_bytes_per_token() * 6 * 16


def test_every_id_that_ends_a_sequence_is_known() -> None:
    model = random_model("LlamaConfig", {**SMALL, "eos_token_id": [2, 9]})
    model.generation_config.eos_token_id = 5

    assert TransformersModel(model).eos_token_ids == (5, 2, 9)


def test_longrope_is_served_up_to_its_original_length() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    settings = {**SMALL, "rope_parameters": rope, "original_max_position_embeddings": 64}
    assert TransformersModel(random_model("LlamaConfig", settings)).max_model_len == 64
    assert TransformersModel(random_model("LlamaConfig", SMALL)).max_model_len == 256


@pytest.mark.parametrize("config", REFUSED)
def test_an_architecture_without_paged_attention_is_refused_by_name(config: str) -> None:
    settings = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 61,
                "num_attention_heads": 4, "intermediate_size": 48, "pad_token_id": 0,
                "eos_token_id": 2, "bos_token_id": 1}  # fmt: skip
    model = random_model(config, settings)

    with pytest.raises(ModelLoadError, match=REFUSED[config]) as error:
        TransformersModel(model)
    assert type(model).__name__ in str(error.value)


def test_a_bidirectional_model_is_refused() -> None:
    settings = {**SLIDING, "use_bidirectional_attention": True}
    with pytest.raises(ModelLoadError, match="not causal"):
        TransformersModel(random_model("Gemma3TextConfig", settings))


def test_a_model_whose_configuration_alone_says_that_it_is_not_causal_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="not causal"):
        TransformersModel(random_model("LlamaConfig", {**SMALL, "is_causal": False}))


def test_an_attention_keyword_nobody_knows_is_refused() -> None:
    model = random_model("LlamaConfig", SMALL)
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kw: forward(*args, **kw, position_bias=torch.ones(1))

    with pytest.raises(ModelLoadError, match="position_bias"):
        TransformersModel(model)
