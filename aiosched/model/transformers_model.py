"""Any decoder-only transformers model as an aiosched ``Model``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from aiosched.errors import ModelLoadError
from aiosched.model.attention import PagedAttention
from aiosched.model.inputs import DeviceInputs
from aiosched.model.kv_pool import LayerAttention, PagedKV
from aiosched.model.probe import probe_layers


class TransformersModel:
    """Runs transformers' own model code over paged KV.

    The tokens of all sequences go through the model as one flat sequence ``[1, t]`` with their own
    positions; only attention knows where one sequence ends. The model object is taken over: its
    attention implementation changes and its parameters no longer ask for gradients.

    Args:
        model: on its device and in its dtype already.
        tokenizer: the transformers tokenizer that belongs to it, if there is one.

    Attributes:
        layers: how each layer attends.
        tokenizer: as given.
        dtype: of weights, activations and KV.

    Raises:
        ModelLoadError: the architecture cannot be served; says why.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self._model = model
        model.train(False).requires_grad_(False)
        self.layers, self.vocab_size = probe_layers(model)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.max_model_len = _max_model_len(model)
        self.eos_token_ids = end_token_ids(model, tokenizer)

    def kv_bytes_per_token(self) -> int:
        """Bytes of KV memory that one token takes over all layers."""
        return sum(layer.kv_values for layer in self.layers) * self.dtype.itemsize

    def make_kv(self, num_pages: int, page_size: int) -> PagedKV:
        """A pool of ``num_pages + 1`` pages on the model's device, in its dtype."""
        return PagedKV(self.layers, num_pages, page_size, self.dtype, self.device)

    def forward(self, inputs: DeviceInputs, kv: object) -> torch.Tensor:
        """Logits ``[m + q, vocab_size]`` in the model's dtype; see ``inputs.Model``."""
        assert isinstance(kv, PagedKV)
        return self._run(inputs, _TorchContext(self.layers, inputs, kv))

    @torch.inference_mode()
    def _run(self, inputs: DeviceInputs, context: object) -> torch.Tensor:
        output = self._model(
            input_ids=inputs.input_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.logits_index,
            paged_context=context,
        )
        logits: torch.Tensor = output.logits
        return logits[0]


class _TorchContext:
    """``PagedAttention`` as an ``AttentionContext``."""

    __slots__ = ("_attention",)

    def __init__(self, layers: Sequence[LayerAttention], inputs: DeviceInputs, kv: PagedKV) -> None:
        self._attention = PagedAttention(layers, inputs, kv)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        return self._attention.attend(module.layer_idx, query, key, value, options.get("s_aux"))


def _max_model_len(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise ModelLoadError(
            f"{type(model).__name__} cannot be served: its configuration does not say how long a "
            f"sequence may be (max_position_embeddings)"
        )
    # "longrope" picks its factors by the longest sequence of the batch, so one long request would
    # change what its neighbours compute. Below the original length there is one choice only.
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            length = min(length, original or length)
    return int(length)


def end_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Every id that some part of the model calls its end of sequence, in that order."""
    configs = (model.generation_config, model.config, model.config.get_text_config(decoder=True))
    named = [getattr(config, "eos_token_id", None) for config in (*configs, tokenizer)]
    ids: list[int] = []
    for value in named:
        ids.extend(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(dict.fromkeys(int(id_) for id_ in ids))
