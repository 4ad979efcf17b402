"""Names of the dtypes that models run in."""

from __future__ import annotations

import torch

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of a resolved dtype name."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"dtype {name!r} is not supported. Expected one of {', '.join(_DTYPES)}.") from None
