"""Each request's block tables, in groups: growth, prefix hits, forks with copy-on-write, release behind a window."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.core.block_pool import NULL_BLOCK, BlockPool
from vllm.core.request import Request
from vllm.step.block_hash import block_hash, root_hash
from vllm.step.kv_policy import KVKind, KVLayout
from vllm.step.plan import BlockAppend, BlockCopy


class KVManager:
    """Owns the block tables (`Request.tables`, one list of block ids per group) over one `BlockPool`.

    A block holds `block_size` tokens of one group. Full blocks are shared between requests by content; the block that a
    request writes to is its own, by copy if a fork still shares it.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        for group in layout.groups:
            if group.kind not in (KVKind.FULL, KVKind.SLIDING):
                raise NotImplementedError(f"KV group kind {group.kind.value!r} is not supported yet.")
            if group.kind is KVKind.SLIDING and not group.window:
                raise ValueError("A sliding KV group needs a window of at least one token.")
        self.pool = BlockPool(num_blocks)
        self._layout = layout
        self.block_size = layout.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._windows = [g.window if g.kind is KVKind.SLIDING else None for g in layout.groups]
        self.num_groups = len(layout.groups)
        self._single = self.num_groups == 1 and self._windows[0] is None
        self._group_suffix = [bytes([g]) for g in range(self.num_groups)]
        self._to_register: list[tuple[Request, int]] = []
        self._roots: set[bytes] = set()  # hashes of the first blocks of those requests

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """As `KVLayout.blocks_for`."""
        return self._layout.blocks_for(num_tokens, chunk)

    def can_admit(self, request: Request, num_tokens: int, chunk: int, reserve: int) -> bool:
        """Whether `num_tokens` of a waiting request fit beside what runs, leaving `reserve` blocks free."""
        return self.blocks_for(num_tokens, chunk) + reserve <= self.pool.num_free

    # -- admission -----------------------------------------------------------------------------------------------------

    def looks_up(self, request: Request) -> bool:
        """Whether cached blocks are looked for when this request starts."""
        return self.enable_prefix_caching and request.reads_cache

    def attach_prefix(self, request: Request) -> int:
        """Give a request without blocks the longest cached prefix of its tokens; returns its length in tokens.

        At least one token is always left to compute, since its logits are wanted.
        """
        if not self.looks_up(request):
            return 0
        size = self.block_size
        limit = (len(request.tokens) - 1) // size
        if limit and self._roots and self._root(request) in self._roots:  # else nothing put off can be a prefix of it
            self.settle()
        hits = [self._longest_match(request, limit)] if self._single else self._matching_blocks(request, limit)
        if not hits[0]:
            return 0
        for table, blocks in zip(request.tables, hits, strict=True):
            self.pool.acquire(b for b in blocks if b != NULL_BLOCK)
            table[:] = blocks
        count = len(hits[0])
        for g, blocks in enumerate(hits):
            request.freed_behind_window[g] = sum(1 for b in blocks if b == NULL_BLOCK)
        request.num_registered = count
        request.num_computed = request.num_cached_tokens = count * size
        request.capacity = count * size
        return request.num_computed

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Share the parent's blocks of the first `num_tokens` tokens with a child that has none.

        The last of them may be partly filled; whoever writes to it first copies it.
        """
        self.settle()
        size = self.block_size
        count = -(-num_tokens // size)
        for g in range(self.num_groups):
            blocks = parent.tables[g][:count]
            self.pool.acquire(b for b in blocks if b != NULL_BLOCK)
            child.tables[g][:] = blocks
            child.freed_behind_window[g] = min(parent.freed_behind_window[g], count)
        child.capacity = count * size
        child.num_computed = num_tokens
        child.num_registered = min(parent.num_registered, num_tokens // size)
        child.hashes = parent.hashes[: num_tokens // size]
        parent.shares_tail = child.shares_tail = True

    def can_fork(self, parent: Request, num_tokens: int) -> bool:
        """Whether the parent still holds every block that a query at position `num_tokens` can see."""
        size = self.block_size
        return num_tokens <= parent.capacity and all(
            freed <= (0 if window is None else max(0, num_tokens - window + 1) // size)
            for freed, window in zip(parent.freed_behind_window, self._windows, strict=True)
        )

    # -- growth --------------------------------------------------------------------------------------------------------

    def grow(self, request: Request, end: int, appends: list[BlockAppend], copies: list[BlockCopy]) -> bool:
        """Make room for tokens up to `end` and make the blocks to be written private. False, changing nothing, if
        blocks lack.

        What changed in an already running request's tables is added to `appends` and `copies`.
        """
        size = self.block_size
        pool = self.pool
        if request.shares_tail and not self._copy_shared_tail(request, appends, copies):
            return False
        missing = -(-(end - request.capacity) // size)
        if missing <= 0:
            return True
        if not self._single:
            self.settle()
            self._free_behind_window(request)
        if missing * self.num_groups > pool.num_free:
            return False
        for g, table in enumerate(request.tables):
            new = pool.allocate(missing)
            appends.append(BlockAppend(request.slot, g, len(table), new))
            table.extend(new)
        request.capacity += missing * size
        return True

    def register_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks within its first `num_tokens` tokens findable by later requests.

        The work is done when it first matters, or in `settle()`.
        """
        self._to_register.append((request, num_tokens))
        if self.enable_prefix_caching and num_tokens >= self.block_size:
            self._roots.add(self._root(request))

    def settle(self) -> None:
        """Do what was put off so that a step could be on its way sooner."""
        for request, num_tokens in self._to_register:
            self._register(request, num_tokens // self.block_size)
        self._to_register.clear()
        self._roots.clear()

    def reset_cache(self) -> None:
        """Forget the content of all blocks; requests keep theirs."""
        self.settle()
        self.pool.reset_cache()

    def forget(self, request: Request) -> None:
        """Let nobody find the blocks of a request that failed: what they hold may be no numbers."""
        self.settle()
        for table in request.tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.forget(block)

    # -- release -------------------------------------------------------------------------------------------------------

    def free(self, requests: Iterable[Request]) -> None:
        """Release all blocks of these requests; of those released together, the longest prefix is evicted first."""
        self.settle()
        blocks: list[int] = []
        depths: list[int] = []
        for request in requests:
            for table in request.tables:
                blocks += table
                depths += range(len(table))
                table.clear()
            request.capacity = 0
            request.num_registered = 0
            request.shares_tail = False
            request.freed_behind_window = [0] * self.num_groups
        order = sorted(range(len(blocks)), key=depths.__getitem__, reverse=True)
        self.pool.release(blocks[i] for i in order if blocks[i] != NULL_BLOCK)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _register(self, request: Request, full: int) -> None:
        start, size = request.num_registered, self.block_size
        if full <= start:
            return
        if self.enable_prefix_caching:
            if len(request.hashes) < start:
                self._extend_hashes(request, start)
            for i, content in request.block_contents(start, full, size):
                key = self._hash(request, i, content)
                for g, table in enumerate(request.tables):
                    if table[i] != NULL_BLOCK:
                        self.pool.register(table[i], key + self._group_suffix[g], content)
        request.num_registered = full

    def _hash(self, request: Request, index: int, content: bytes) -> bytes:
        """The hash of a block whose predecessor's is known; the root covers adapter and salt."""
        hashes = request.hashes
        if index == len(hashes):
            parent = hashes[-1] if hashes else root_hash(request.lora_id, request.cache_salt)
            hashes.append(block_hash(parent, content))
        return hashes[index]

    def _root(self, request: Request) -> bytes:
        """The hash of the request's first block, which must be full."""
        if not request.hashes:
            self._extend_hashes(request, 1)
        return request.hashes[0]

    def _extend_hashes(self, request: Request, count: int) -> None:
        for i, content in request.block_contents(len(request.hashes), count, self.block_size):
            self._hash(request, i, content)

    def _longest_match(self, request: Request, limit: int) -> list[int]:
        """The blocks of the longest cached prefix of at most `limit` blocks, for one group without a window."""
        found: list[int] = []
        for i, content in request.block_contents(0, limit, self.block_size):
            block = self.pool.lookup(self._hash(request, i, content) + self._group_suffix[0], content)
            if block is None:
                break
            found.append(block)
        return found

    def _matching_blocks(self, request: Request, limit: int) -> list[list[int]]:
        """Per group, the blocks of the longest cached prefix of at most `limit` blocks."""
        size = self.block_size
        found: list[list[int | None]] = []
        longest = limit
        for window, suffix in zip(self._windows, self._group_suffix, strict=True):
            blocks: list[int | None] = []
            for i, content in request.block_contents(0, longest, size):
                block = self.pool.lookup(self._hash(request, i, content) + suffix, content)
                if block is None and window is None:
                    break
                blocks.append(block)
            found.append(blocks)
            longest = min(longest, len(blocks))
        while longest > 0:
            # the first token the next query, at position longest * size, sees in each group
            firsts = [0 if w is None else max(0, longest * size - w + 1) // size for w in self._windows]
            if all(None not in found[g][first:longest] for g, first in enumerate(firsts)):
                return [
                    [NULL_BLOCK] * first + [b for b in found[g][first:longest] if b is not None]
                    for g, first in enumerate(firsts)
                ]
            longest -= 1
        return [[] for _ in self._windows]

    def _copy_shared_tail(self, request: Request, appends: list[BlockAppend], copies: list[BlockCopy]) -> bool:
        """Make a fork's partly filled block private: a copy if others hold it, else it just becomes unfindable."""
        index = request.num_computed // self.block_size
        refs = self.pool.ref_counts
        held = [g for g, t in enumerate(request.tables) if index < len(t) and t[index] != NULL_BLOCK]
        shared = [g for g in held if refs[request.tables[g][index]] > 1]
        if len(shared) > self.pool.num_free:
            return False
        for g in held:
            if g not in shared:  # the other holder is gone, and may have filled and registered it
                self.pool.forget(request.tables[g][index])
        for g in shared:
            table = request.tables[g]
            (copy,) = self.pool.allocate(1)
            copies.append(BlockCopy(table[index], copy))
            self.pool.release([table[index]])
            table[index] = copy
            appends.append(BlockAppend(request.slot, g, index, [copy]))
        # Nothing behind the tail is shared for writing, and the tail is private now.
        request.shares_tail = False
        return True

    def _free_behind_window(self, request: Request) -> None:
        """Release blocks of sliding groups that no later query sees; their table entries become the null block."""
        for g, window in enumerate(self._windows):
            if window is None:
                continue
            keep = max(0, request.num_computed - window + 1) // self.block_size
            start = request.freed_behind_window[g]
            if keep <= start:
                continue
            table = request.tables[g]
            keep = min(keep, len(table))
            self.pool.release(b for b in reversed(table[start:keep]) if b != NULL_BLOCK)
            table[start:keep] = [NULL_BLOCK] * (keep - start)
            request.freed_behind_window[g] = keep
