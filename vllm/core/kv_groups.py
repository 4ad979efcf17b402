"""How the blocks of each kind of KV group live: how many a request needs, what it may find cached, what it gives back.

A group keeps nothing itself: its part of a request is `request.tables[group.index]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

from vllm.core.block_pool import NULL_BLOCK, BlockPool
from vllm.core.request import ENDLESS, Request
from vllm.step.kv_policy import KVGroup, KVKind, KVPolicy

_WIDEST = 8  # first intervals between two snapshots far into a prompt
# Number of a unit -> the group's cached block that ends with it.
Lookup = Callable[[int], int | None]


class FullGroup:
    """Every token stays: ceil(tokens / size) blocks.   size: tokens of a block.   units: hash units of a block."""

    def __init__(self, index: int, group: KVGroup, policy: KVPolicy) -> None:
        self.index = index
        self.suffix = bytes([index])  # of its blocks' keys
        self.units = group.units
        self.size = policy.unit * group.units

    def missing(self, request: Request, end: int) -> int:
        """Blocks to be added before the tokens up to `end` can be computed."""
        return max(0, -(-end // self.size) - len(request.tables[self.index]))

    def capacity(self, request: Request) -> int:
        """Tokens that can be computed before the group must act."""
        return len(request.tables[self.index]) * self.size

    def release_behind(self, request: Request, position: int, pool: BlockPool) -> None:
        """Release what no query from `position` on sees."""

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether all that a query at `num_tokens` sees is still there."""
        return num_tokens <= self.capacity(request)

    def find(self, lookup: Lookup, longest: int) -> list[int | None]:
        """What is cached of a prefix of `longest` units, per block; it may stop where no longer prefix can be one."""
        found: list[int | None] = []
        for i in range(longest // self.units):
            block = lookup((i + 1) * self.units - 1)
            if block is None:
                break
            found.append(block)
        return found

    def admits(self, found: Sequence[int | None], length: int) -> bool:
        """Whether a request may start behind a prefix of `length` units."""
        return length % self.units == 0 and length // self.units <= len(found)

    def first_seen(self, position: int) -> int:
        """The first block that a query at `position` sees."""
        return 0


class SlidingGroup(FullGroup):
    """A token attends to itself and the `window - 1` tokens before it; blocks behind that are given back."""

    def __init__(self, index: int, group: KVGroup, policy: KVPolicy) -> None:
        super().__init__(index, group, policy)
        if not group.window:
            raise ValueError("A sliding KV group needs a window of at least one token.")
        self.window = group.window

    def release_behind(self, request: Request, position: int, pool: BlockPool) -> None:
        table, start = request.tables[self.index], request.freed_behind_window[self.index]
        keep = min(self.first_seen(position), len(table))
        if keep > start:
            pool.release(b for b in reversed(table[start:keep]) if b != NULL_BLOCK)
            table[start:keep] = [NULL_BLOCK] * (keep - start)
            request.freed_behind_window[self.index] = keep

    def holds(self, request: Request, num_tokens: int) -> bool:
        freed = request.freed_behind_window[self.index]
        return num_tokens <= self.capacity(request) and freed <= self.first_seen(num_tokens)

    def find(self, lookup: Lookup, longest: int) -> list[int | None]:
        return [lookup((i + 1) * self.units - 1) for i in range(longest // self.units)]

    def admits(self, found: Sequence[int | None], length: int) -> bool:
        count, rest = divmod(length, self.units)
        first = self.first_seen(count * self.size)
        return rest == 0 and count <= len(found) and None not in found[first:count]

    def first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.size


class CrossGroup(FullGroup):
    """Keys of the encoder's output: as many blocks as that needs, for good, from the first step on."""

    def missing(self, request: Request, end: int) -> int:
        return max(0, -(-request.encoder_tokens // self.size) - len(request.tables[self.index]))

    def capacity(self, request: Request) -> int:
        return ENDLESS

    def holds(self, request: Request, num_tokens: int) -> bool:
        return self.missing(request, 0) == 0

    def find(self, lookup: Lookup, longest: int) -> list[int | None]:
        return []

    def admits(self, found: Sequence[int | None], length: int) -> bool:
        return True


class StateGroup:
    """A recurrent state: one page per request and possible number of accepted drafts, in a pool of its own. The page is
    written in every step and therefore never shared; what others can start from are snapshots of it.
    """

    def __init__(self, index: int, policy: KVPolicy) -> None:
        self.index = index
        self.suffix = bytes([index])
        self.pages = policy.states_per_slot
        # where the blocks of all groups end: elsewhere nobody could start
        self._unit = policy.unit * lcm(*(group.units for group in policy.groups))
        self._interval = max(1, policy.snapshot_interval // self._unit) * self._unit

    def next_snapshot(self, request: Request, start: int) -> int:
        """Where the chunk that starts at `start` must end, because a snapshot is taken there: at the interval, twice,
        four and eight times as far, at every multiple of that, and at the last position in the prompt from which
        another request with this prompt could start. Whoever shares a prefix finds half of it at least, and most of a
        long prompt is computed in large steps.
        """
        last = (request.num_prompt_tokens - 1) // self._unit * self._unit
        if start >= last:
            return ENDLESS
        distance, widest = self._interval, _WIDEST * self._interval
        while distance <= start and distance < widest:
            distance *= 2
        return min(last, (start // distance + 1) * distance)

    def is_snapshot(self, request: Request, position: int) -> bool:
        """Whether one is taken at `position`."""
        return position > 0 and self.next_snapshot(request, position - 1) == position


def token_groups(policy: KVPolicy) -> list[FullGroup]:
    """The groups of `policy` whose blocks hold tokens."""
    kinds = {KVKind.FULL: FullGroup, KVKind.SLIDING: SlidingGroup, KVKind.CROSS: CrossGroup}
    return [kinds[g.kind](i, g, policy) for i, g in enumerate(policy.groups) if g.kind in kinds]


def state_group(policy: KVPolicy) -> StateGroup | None:
    """The group of the recurrent layers; they all have the same states, so there is one at most."""
    found = [i for i, group in enumerate(policy.groups) if group.kind is KVKind.RECURRENT]
    if len(found) > 1:
        raise ValueError(f"All recurrent layers belong to one KV group, got {len(found)} groups.")
    return StateGroup(found[0], policy) if found else None
