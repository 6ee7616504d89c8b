"""The records of ``decode.cpp``, field by field."""

from __future__ import annotations

import ctypes

_pointer, _int, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Matrix(ctypes.Structure):
    """``weight`` ``[n, k]``; ``scale`` and ``bias`` float32 ``[n]`` or null."""

    _fields_ = (("weight", _pointer), ("scale", _pointer), ("bias", _pointer))


class Layer(ctypes.Structure):
    """Norms are float32; those of queries and keys may be null."""

    _fields_ = (
        ("attention_norm", _pointer),
        ("query_norm", _pointer),
        ("key_norm", _pointer),
        ("mlp_norm", _pointer),
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("layers", _int),
        ("hidden", _int),
        ("width", _int),
        ("heads", _int),
        ("kv_heads", _int),
        ("dim", _int),
        ("vocab", _int),
        ("positions", _int),
        ("weight_kind", _int),  # 0 float32, 1 bfloat16, 2 int8, 3 int4 and the head int8
        ("kv_kind", _int),  # 0 float32, 1 bfloat16
        ("tiled", _int),
        ("eps", _double),
        ("embedding", _pointer),
        ("norm", _pointer),
        ("cosine", _pointer),
        ("sine", _pointer),
        ("layer", ctypes.POINTER(Layer)),
        ("head", Matrix),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("batch", _int),
        ("page_size", _int),
        ("table_stride", _int),
        ("ids", _pointer),
        ("positions", _pointer),
        ("slots", _pointer),
        ("tables", _pointer),
        ("lengths", _pointer),
        ("keys", _pointer),
        ("values", _pointer),
        ("scratch", _pointer),
        ("logits", _pointer),
    )
