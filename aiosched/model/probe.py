"""What a transformers model asks of attention, found out by asking it.

Configurations name head counts, windows and caps in many ways, and some not at all. One forward of
one token shows what each layer really passes to the attention function. What aiosched would have to
ignore is refused by name here, so that no model runs with attention that is not its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from aiosched.errors import ModelLoadError
from aiosched.model.attention_interface import NAME
from aiosched.model.kv_pool import LayerAttention

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Keywords that change nothing that paged attention computes.
WITHOUT_EFFECT = frozenset(
    {
        "cache",
        "cache_position",
        "dropout",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
UNDERSTOOD = frozenset({"is_causal", "s_aux", "scaling", "sliding_window", "softcap"})


class LayerProbe:
    """An ``AttentionContext`` that writes down what each layer asks for."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self.layers: dict[int, LayerAttention] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        given = {
            name
            for name, setting in options.items()
            if setting is not None and setting is not False and name not in WITHOUT_EFFECT
        }
        if strange := sorted(given - UNDERSTOOD):
            raise self._refusal(f"its attention uses {', '.join(strange)}")
        if not (options.get("is_causal", True) in (True, None) and _is_causal(module)):
            raise self._refusal("its attention is not causal")
        index = getattr(module, "layer_idx", None)
        if index is None or index in self.layers:
            raise self._refusal("its layers do not have an attention of their own each")
        scaling = options.get("scaling")
        self.layers[index] = LayerAttention(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            scaling=float(query.shape[2] ** -0.5 if scaling is None else scaling),
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux") is not None,
        )
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def _refusal(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self._architecture} cannot be served: {why}")


def probe_layers(model: PreTrainedModel) -> tuple[list[LayerAttention], int]:
    """The attention of each layer, and the size of the vocabulary.

    Sets the model's attention implementation to aiosched's.

    Raises:
        ModelLoadError: the architecture needs something that paged attention does not do.
    """
    architecture = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    _refuse_by_config(model, architecture)
    model.set_attn_implementation(NAME)
    probe = LayerProbe(architecture)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        logits = model(
            input_ids=token, position_ids=token, use_cache=False, paged_context=probe
        ).logits
    count = config.num_hidden_layers
    if sorted(probe.layers) != list(range(count)):
        missing = [index for index in range(count) if index not in probe.layers]
        raise ModelLoadError(
            f"{architecture} cannot be served: {len(missing)} of its {count} layers do not go "
            f"through transformers' attention interface (the first is layer {missing[0]})"
            if missing
            else f"{architecture} cannot be served: it attends in more layers than its {count}"
        )
    layers = [probe.layers[index] for index in range(count)]
    _refuse_forgotten_windows(architecture, config, layers)
    return layers, logits.shape[-1]


def _is_causal(module: torch.nn.Module) -> bool:
    return bool(getattr(module, "is_causal", True))


def _refuse_by_config(model: PreTrainedModel, architecture: str) -> None:
    config = model.config.get_text_config(decoder=True)
    why = None
    parameters = inspect.signature(model.forward).parameters
    types = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if model.config.is_encoder_decoder:
        why = "it is an encoder-decoder"
    elif getattr(config, "add_cross_attention", False):
        why = "it has cross attention"
    elif types:
        why = f"it has layers of type {', '.join(sorted(types))}"
    elif not getattr(config, "is_causal", True):  # which goes into the mask only
        why = "its attention is not causal"
    elif not model._supports_attention_backend:
        why = "its code does not use transformers' attention interface"
    elif not {"position_ids", "logits_to_keep"} <= parameters.keys():
        why = "its forward does not take position_ids and logits_to_keep"
    elif getattr(config, "reorder_and_upcast_attn", False):
        why = "reorder_and_upcast_attn computes attention without the attention interface"
    if why is not None:
        raise ModelLoadError(f"{architecture} cannot be served: {why}")


def _refuse_forgotten_windows(architecture: str, config: Any, layers: list[LayerAttention]) -> None:
    """Some code puts the window into its mask only, which paged attention never sees."""
    types = getattr(config, "layer_types", None)
    if types is None:
        configured = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            configured = None
        expected = [configured is not None] * len(layers)
    else:
        expected = [kind == "sliding_attention" for kind in types]
    for index, (layer, slides) in enumerate(zip(layers, expected, strict=True)):
        if (layer.window is not None) != slides:
            raise ModelLoadError(
                f"{architecture} cannot be served: layer {index} does not tell the attention "
                f"function about its sliding window"
            )
