"""What the core must know of a model's KV cache: groups of layers that share a block table, and the pools they use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class KVKind(Enum):
    """How a group's blocks live: every token's stay, those in a window stay, those of an encoder's output, or one
    recurrent state for all tokens.
    """

    FULL = "full"
    SLIDING = "sliding"
    CROSS = "cross"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers `layers` (model layer indices) share one block table. `window` is in tokens, for SLIDING only.

    A token attends to itself and the `window - 1` tokens before it. units: a block holds so many hash units of tokens,
    so that blocks of layers with little per token are as large as those of others.
    """

    kind: KVKind
    layers: tuple[int, ...]
    window: int | None = None
    units: int = 1


@dataclass(frozen=True, slots=True)
class KVPolicy:
    """How the cache is shared out; equal on every rank, and all that the core knows of it.

    unit: tokens of a hash unit, which is the block of a group with `units=1`.
    max_encoder_tokens: for CROSS groups.
    states_per_slot: pages of recurrent state that a request has: 1 more than the drafts that a step may verify.
    snapshots: pages of recurrent state kept for prefixes beyond those of running requests.
    snapshot_interval: tokens of a prompt between two snapshots.
    """

    groups: tuple[KVGroup, ...]
    unit: int
    max_encoder_tokens: int = 0
    states_per_slot: int = 1
    snapshots: int = 0
    snapshot_interval: int = 1024

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks of token pages, over all groups, that a request of `num_tokens` can hold when it computes at most
        `chunk` a step.
        """
        total = 0
        for group in self.groups:
            size = self.unit * group.units
            if group.kind is KVKind.FULL:
                total += -(-num_tokens // size)
            elif group.kind is KVKind.SLIDING:
                total += -(-min(num_tokens, (group.window or 1) - 1 + chunk + size) // size)
            elif group.kind is KVKind.CROSS:
                total += -(-self.max_encoder_tokens // size)
        return total

    def num_states(self, max_num_seqs: int) -> int:
        """Pages of recurrent state, the null page included; 0 for a model without."""
        if all(group.kind is not KVKind.RECURRENT for group in self.groups):
            return 0
        return 1 + max_num_seqs * self.states_per_slot + self.snapshots


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The cache of one model on one rank."""

    groups: tuple[KVGroup, ...]
    block_size: int  # tokens per block
    kv_heads: int  # on this rank
    head_dim: int
    bytes_per_element: int

    @property
    def policy(self) -> KVPolicy:
        """What the core sees of it."""
        return KVPolicy(self.groups, self.block_size)

    @property
    def layers_per_group(self) -> int:
        return max((len(g.layers) for g in self.groups), default=0)

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """As `KVPolicy.blocks_for`."""
        return self.policy.blocks_for(num_tokens, chunk)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block occupies over all cache tensors."""
        per_layer = 2 * self.kv_heads * self.block_size * self.head_dim * self.bytes_per_element
        return self.layers_per_group * per_layer
