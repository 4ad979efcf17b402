"""What the model tells the core about its KV cache: groups of layers that share a block table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class KVKind(Enum):
    """How a group's blocks live. Cross attention and recurrent state have their place; nothing uses them yet."""

    FULL = "full"
    SLIDING = "sliding"
    CROSS = "cross"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers `layers` (model layer indices) share one block table. `window` is in tokens, for SLIDING only.

    A token attends to itself and the `window - 1` tokens before it. Every group of a model has at most as many layers
    as the first (`KVLayout.layers_per_group`); layer j of a group uses cache tensor j.
    """

    kind: KVKind
    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The cache of one model on one rank."""

    groups: tuple[KVGroup, ...]
    block_size: int  # tokens per block
    kv_heads: int  # on this rank
    head_dim: int
    bytes_per_element: int

    @property
    def layers_per_group(self) -> int:
        return max(len(g.layers) for g in self.groups)

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks, over all groups, that a request of `num_tokens` can hold when it computes at most `chunk` a step."""
        total = 0
        for group in self.groups:
            window = group.window if group.kind is KVKind.SLIDING else None
            tokens = num_tokens if window is None else min(num_tokens, window - 1 + chunk + self.block_size)
            total += -(-tokens // self.block_size)
        return total

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block occupies over all cache tensors."""
        per_layer = 2 * self.kv_heads * self.block_size * self.head_dim * self.bytes_per_element
        return self.layers_per_group * per_layer
