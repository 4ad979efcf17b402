"""The pool of KV-cache blocks: reference counts, the LRU queue of free ones, the map from content hash to block."""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 .. num_blocks - 1 are handed out; block 0 is the null block and never is.

    A block with no references sits in the free queue. If its content is known by hash it stays findable there until it
    is handed out again, so "free" and "cached" are one list: least recently used first, blocks without a hash before
    all. The queue is a doubly linked list in two arrays; every operation is O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"The KV cache needs at least 1 block, the null block, got {num_blocks}.")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.num_free = num_blocks - 1
        # Entry 0 is the head and tail of the ring; the null block is never in it.
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._content_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, least recently used first, forgetting their content; ValueError if too few."""
        if count > self.num_free:
            raise ValueError(f"No free blocks available: {count} wanted, {self.num_free} free.")
        nxt, prev, refs, keys = self._next, self._prev, self.ref_counts, self._key_of
        taken = []
        block = nxt[0]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            if keys[block] is not None:
                self.forget(block)
            block = nxt[block]
        nxt[0] = block
        prev[block] = 0
        self.num_free -= count
        return taken

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; a free (cached) one leaves the free queue."""
        refs = self.ref_counts
        for block in blocks:
            if refs[block] == 0:
                self._unlink(block)
                self.num_free -= 1
            refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; unreferenced ones join the free queue in this order, first out first."""
        refs, nxt, prev = self.ref_counts, self._next, self._prev
        for block in blocks:
            refs[block] -= 1
            if refs[block] > 0:
                continue
            if refs[block] < 0:
                raise ValueError(f"Block {block} was released more often than acquired.")
            self.num_free += 1
            if self._key_of[block] is None:  # worthless: reuse before anything cached
                after = nxt[0]
                nxt[0], prev[block], nxt[block], prev[after] = block, 0, after, block
            else:
                before = prev[0]
                prev[0], nxt[block], prev[block], nxt[before] = block, 0, before, block

    def lookup(self, key: bytes, content: bytes) -> int | None:
        """The block whose key is `key`, if its content (the token bytes) is the same too."""
        block = self._block_of.get(key)
        if block is None or self._content_of[block] != content:
            return None
        return block

    def register(self, block: int, key: bytes, content: bytes) -> None:
        """Make a full block findable, unless another block has this key or this block has one already."""
        if self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._content_of[block] = content
            self._block_of[key] = block

    def reset_cache(self) -> None:
        """Forget every hash. Blocks keep their references and their place in the queue."""
        for block in self._block_of.values():
            self._key_of[block] = self._content_of[block] = None
        self._block_of.clear()

    @property
    def num_cached(self) -> int:
        """Blocks findable by hash, referenced or free."""
        return len(self._block_of)

    def free_blocks(self) -> list[int]:
        """The free queue in the order of eviction (for tests and invariant checks)."""
        order, block = [], self._next[0]
        while block != 0:
            order.append(block)
            block = self._next[block]
        return order

    def forget(self, block: int) -> None:
        """Make a block unfindable, because its content is about to change."""
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = self._content_of[block] = None

    def forget_key(self, key: bytes) -> None:
        """Make the block with this key unfindable, if there is one."""
        block = self._block_of.get(key)
        if block is not None:
            self.forget(block)

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
