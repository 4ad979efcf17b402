"""A lower tier of token pages: what it holds by hash, and the blocks on their way to it and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.core.block_pool import BlockPool
from vllm.step.plan import Transfer, TransferKind


@dataclass(slots=True)
class Moves:
    """The transfers of one plan to and from the tier; blocks and places are held until its result is there."""

    saved: list[tuple[int, int, bytes, bytes]] = field(default_factory=list)  # block, place, key, content
    loaded: list[tuple[int, int, bytes, bytes]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # requests that wait for what is loaded

    def blocks(self) -> Iterable[int]:
        """Blocks of the device that are held."""
        return (move[0] for move in (*self.saved, *self.loaded))


class LowerTier:
    """`num_places` blocks outside the device, least recently used first out.

    A block is saved by the plan after the one that filled it, as soon as it can be found by hash: at eviction it would
    be too late, since the plan that evicts it overwrites it. A block that is loaded becomes a cached block like any
    other; whoever wants it waits, blocked, until it is there.
    """

    def __init__(self, pool: BlockPool, num_places: int) -> None:
        self._pool = pool
        self.places = BlockPool(num_places + 1)
        self._unsaved: list[tuple[int, bytes, bytes]] = []

    def registered(self, block: int, key: bytes, content: bytes) -> None:
        """A block can be found by hash from now on."""
        self._unsaved.append((block, key, content))

    def save(self, moves: Moves, transfers: list[Transfer]) -> None:
        """Save what was registered before this plan and is still there."""
        for block, key, content in self._unsaved:
            if (
                self._pool.lookup(key, content) == block
                and self.places.lookup(key, content) is None
                and self.places.num_free
            ):
                (place,) = self.places.allocate(1)
                self.places.register(place, key, content)
                self._pool.acquire([block])
                moves.saved.append((block, place, key, content))
                transfers.append(Transfer(TransferKind.SAVE, 0, block, place))
        self._unsaved.clear()

    def find(self, key: bytes, content: bytes) -> int | None:
        """The place of a block, if the tier has it."""
        return self.places.lookup(key, content)

    def load(self, place: int, key: bytes, content: bytes, moves: Moves, transfers: list[Transfer]) -> None:
        """Load a block into a free one of the device."""
        (block,) = self._pool.allocate(1)
        self.places.acquire([place])
        moves.loaded.append((block, place, key, content))
        transfers.append(Transfer(TransferKind.LOAD, 0, place, block))

    def done(self, moves: Moves) -> None:
        """The plan's result is there: what was loaded can be found."""
        for block, place, key, content in moves.loaded:
            self._pool.register(block, key, content)
            self._pool.release([block])
            self.places.release([place])
        for block, place, _, _ in moves.saved:
            self._pool.release([block])
            self.places.release([place])

    def undo(self, moves: Moves) -> None:
        """There is no plan after all: save with the next one."""
        self.dropped(moves)
        self._unsaved += [(block, key, content) for block, _, key, content in moves.saved]

    def dropped(self, moves: Moves) -> None:
        """The plan was not carried out, or nobody knows how far: nothing that it moved can be trusted."""
        for block, place, _, _ in moves.saved:
            self.places.forget(place)
            self._pool.release([block])
            self.places.release([place])
        for block, place, _, _ in moves.loaded:
            self._pool.release([block])
            self.places.release([place])
        self._unsaved.clear()

    def forget_key(self, key: bytes) -> None:
        """Let nobody find this block."""
        self.places.forget_key(key)

    def reset(self) -> None:
        """Forget everything."""
        self._unsaved.clear()
        self.places.reset_cache()
