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
    snapshot_interval: tokens of a prompt up to its first snapshot; later ones are further apart.
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
class CacheTensor:
    """One tensor that layers read: a view of the blocks of one memory.

    pool: 0 for token pages, 1 for recurrent states.   memory: which of the pool's.   offset: bytes into each block.
    shape: of one block.   dtype: a name, None for the cache's.
    """

    pool: int
    memory: int
    offset: int
    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The cache of one model on one rank: what the core sees of it, and the memory behind it.

    A block is as many bytes as all of `page_bytes`, a state as all of `state_bytes`: so many of each memory.
    tensors: what layers read, as `KVPlace` numbers them.   bytes_per_element: of the cache's dtype.
    """

    policy: KVPolicy
    tensors: tuple[CacheTensor, ...]
    page_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    bytes_per_element: int

    @classmethod
    def alike(
        cls, groups: tuple[KVGroup, ...], block_size: int, kv_heads: int, head_dim: int, bytes_per_element: int
    ) -> KVLayout:
        """The usual cache: layers of attention, all with the same heads."""
        shape = (2, kv_heads, block_size, head_dim)
        count = max((len(group.layers) for group in groups), default=0)
        return cls(
            KVPolicy(groups, block_size),
            tuple(CacheTensor(0, i, 0, shape) for i in range(count)),
            (2 * kv_heads * block_size * head_dim * bytes_per_element,) * count,
            (),
            bytes_per_element,
        )

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return self.policy.groups

    @property
    def block_size(self) -> int:
        """Tokens of a hash unit, which is the block of a group with `units=1`."""
        return self.policy.unit

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """As `KVPolicy.blocks_for`."""
        return self.policy.blocks_for(num_tokens, chunk)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block of token pages occupies over all memories."""
        return sum(self.page_bytes)

    def places_in(self, size: int) -> int:
        """How many blocks of token pages a lower tier of `size` bytes holds."""
        return size // self.bytes_per_block if self.bytes_per_block else 0

    def bytes_of_states(self, max_num_seqs: int) -> int:
        """Bytes of all pages of recurrent state."""
        return sum(self.state_bytes) * self.policy.num_states(max_num_seqs)
