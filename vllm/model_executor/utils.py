"""`set_weight_attrs`, which models from outside the tree give their parameters loaders with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def set_weight_attrs(weight: Tensor, weight_attrs: Mapping[str, Any] | None) -> None:
    """Set attributes of a parameter, such as `weight_loader`. Raises ValueError for one that it has already."""
    for name, value in (weight_attrs or {}).items():
        if hasattr(weight, name):
            raise ValueError(f"The parameter has an attribute {name!r} already.")
        setattr(weight, name, value)
