"""The rotary embedding as a layer, for models from outside the tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.config.hf_rope import parse_rope
from vllm.model_executor.layers.rope import Rope, scaling_from_params
from vllm.model_executor.layers.rope_table import rope_table
from vllm.ops.rotary import rotate


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions.

    rotary_dim: how many of `head_size` dimensions.   max_position: positions that the table covers.
    is_neox_style: pairs are (i, i + rotary_dim / 2), else (2i, 2i + 1).
    """

    cos_sin_cache: Tensor

    def __init__(self, head_size: int, rope: Rope, max_position: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.head_size, self.rope, self.max_position_embeddings = head_size, rope, max_position
        self.rotary_dim, self.base, self.is_neox_style = rope.dim, rope.theta, not rope.interleaved
        device = torch.get_default_device() if device is None else device
        self.register_buffer("cos_sin_cache", rope_table(rope, max_position).to(device), persistent=False)

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """positions: [tokens] int64; query, key: [tokens, heads * head_size] each -> the same, rotated."""
        if offsets is not None:
            positions = positions + offsets
        return self._rotate(positions, query), self._rotate(positions, key)

    def _rotate(self, positions: Tensor, x: Tensor) -> Tensor:
        heads = x.reshape(len(positions), -1, self.head_size)
        out: Tensor = rotate(heads, positions, self.cos_sin_cache, self.rope.interleaved)
        return out.view(x.shape)

    def extra_repr(self) -> str:
        return f"head_size={self.head_size}, {self.rope}"


def get_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float = 10000.0,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
) -> RotaryEmbedding:
    """The rotary embedding of a config's `rope_theta` and `rope_scaling`; its table is fp32 whatever `dtype` is.

    Raises ValueError for a scaling that is unknown or lacks a field.
    """
    settings = parse_rope(
        rope_scaling or {},
        where="rope_scaling",
        theta=float(base),
        partial_rotary_factor=partial_rotary_factor,
        original_max_position_embeddings=None,
        max_position_embeddings=max_position,
        fail=lambda name, value, expected: ValueError(f"get_rope: {name} is {value!r}, expected {expected}."),
    )
    dim = int(rotary_dim * settings.partial_rotary_factor)
    scaling = scaling_from_params(settings.kind, settings.params, max_position)
    return RotaryEmbedding(head_size, Rope(dim, settings.theta, not is_neox_style, scaling), max_position)
