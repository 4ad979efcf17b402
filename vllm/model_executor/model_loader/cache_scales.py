"""The scales of a float8 KV cache that a checkpoint holds, by whatever name."""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor

# what a name ends with -> whose scale it is: of keys, of values, of both; "" for those that nothing here has a use for
_ENDINGS = {
    ".k_scale": "k",
    ".v_scale": "v",
    ".kv_scale": "kv",
    ".k_proj.output_scale": "k",
    ".v_proj.output_scale": "v",
    ".q_scale": "",
    ".prob_scale": "",
    ".output_scale": "",
    ".prob_output_scale": "",
}


def is_scale(value: float) -> bool:
    """Whether numbers can be divided by it in fp32, and multiplied again."""
    return 2.0**-126 <= value <= 2.0**126


class CheckpointScales:
    """Takes tensors by their names; `layers()` has the scales of each layer's keys and values."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, float]] = {}

    def take(self, name: str, tensor: Tensor, file: Path) -> bool:
        """Whether the tensor is such a scale, which is then kept. Raises ValueError for one that is no number."""
        whose = next((whose for end, whose in _ENDINGS.items() if name.endswith(end)), None)
        number = next((int(part) for part in name.split(".") if part.isascii() and part.isdigit()), None)
        if whose is None or number is None:
            return False
        if not whose:
            return True
        value = float(tensor) if tensor.numel() == 1 and not tensor.is_complex() else math.nan
        if not is_scale(value):
            raise ValueError(f"{file}: tensor {name!r} is no scale: expected one positive number.")
        layer = self._found.setdefault(number, {})
        for one in whose:
            layer[one] = value if len(whose) == 1 else layer.get(one, value)  # its own before that of both
        return True

    def layers(self) -> dict[int, tuple[float, float]]:
        """(of keys, of values) by layer; where a checkpoint has only one of them, it serves both."""
        return {number: (s.get("k", s.get("v", 1.0)), s.get("v", s.get("k", 1.0))) for number, s in self._found.items()}
