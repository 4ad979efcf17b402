"""Types as bytes: msgpack with a schema, derived from the types themselves; nothing that could run code.

Arrays travel as (dtype, shape, bytes) and arrive read-only.
"""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import numpy as np

_NAMES = ("bool", "uint8", "int32", "uint32", "int64", "float32")
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NAMES}


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.name not in _DTYPES:
            raise TypeError(f"Arrays of {value.dtype} do not travel: expected one of {', '.join(_DTYPES)}.")
        return value.dtype.name, value.shape, value.tobytes()
    raise TypeError(f"A {type(value).__name__} cannot be sent to another process: only plain data can.")


def _decode(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"No way to read a {kind.__name__}.")
    name, shape, data = value
    dtype = _DTYPES.get(name)
    if dtype is None or not isinstance(data, bytes) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("An array must be (dtype, shape, bytes).")
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"An array of {name} and shape {shape} cannot have {len(data)} bytes.")
    return np.frombuffer(data, dtype).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_encode).encode


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """What reads messages of type `kind`, a class or a union of classes; msgspec.DecodeError for anything else."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode)
