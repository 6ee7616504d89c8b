"""The arguments of ``Engine``, held against each other: name or object, config or settings."""

from __future__ import annotations

from typing import Any

import msgspec

from aiosched.config import EngineConfig
from aiosched.errors import InvalidConfig

OF_LOADING: dict[str, Any] = {"quantization": "none", "compile": False}
"""Settings that say how a named model is loaded, at the only values that a model object takes."""


def checked_config(
    model: object, config: object, device: object, settings: dict[str, Any]
) -> EngineConfig:
    """The configuration that the arguments of ``Engine`` come to; settings win over ``config``.

    Raises:
        InvalidConfig: an argument is nothing of its kind, or would be ignored. Of the fields of a
            ``config``, only ``OF_LOADING`` are refused beside a model object. Others may be set for
            engines without objects that share it, or by the environment (``cache_dir``).
    """
    if isinstance(model, str):
        settings["model"] = model
    elif model is not None:
        if not (hasattr(model, "make_kv") and hasattr(model, "forward")):
            raise InvalidConfig("model", model, "a name, or an object with the Model protocol")
        given = ("model", "dtype", *OF_LOADING, "cache_dir")
        _refuse(settings, given, "left out: the model is an object")
        if isinstance(config, EngineConfig):
            _refuse_changed(config)
    if isinstance(device, str):
        settings["device"] = device
    elif device is not None:
        if not (hasattr(device, "forward") and hasattr(device, "now")):
            raise InvalidConfig("device", device, "a kind, or an object with the Device protocol")
        _refuse(settings, ("compute_threads",), "left out: the device is an object")
    if config is None:
        return EngineConfig(**settings)
    if not isinstance(config, EngineConfig):
        raise InvalidConfig("config", config, "an EngineConfig")
    return msgspec.structs.replace(config, **settings) if settings else config


def _refuse_changed(config: EngineConfig) -> None:
    for field, default in OF_LOADING.items():
        if (value := getattr(config, field)) != default:
            raise InvalidConfig(field, value, f"{default!r}: the model is an object")


def _refuse(settings: dict[str, Any], fields: tuple[str, ...], bound: str) -> None:
    """Settings that would be ignored in silence."""
    for field in fields:
        if field in settings:
            raise InvalidConfig(field, settings[field], bound)
