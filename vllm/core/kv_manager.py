"""Each request's block tables, in groups: growth, prefix hits, forks with copy-on-write, states and their snapshots."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.core.block_pool import NULL_BLOCK, BlockPool
from vllm.core.kv_groups import CrossGroup, Lookup, state_group, token_groups
from vllm.core.request import ENDLESS, Request
from vllm.core.tier import LowerTier, Moves
from vllm.step.block_hash import block_hash, root_hash
from vllm.step.kv_policy import KVKind, KVPolicy
from vllm.step.plan import BlockAppend, Transfer, TransferKind

TOKENS, STATES = 0, 1  # pools, as plans number them


class KVManager:
    """Owns the block tables (`Request.tables`, one list of block ids per group) over a pool of token pages and, for
    recurrent layers, one of states.

    Full blocks are shared between requests by content; the block that a request writes to is its own, by copy if a fork
    still shares it. A state is always a request's own: what another starts from is a snapshot.

    `Request.capacity` is the next length at which any group must act. Below it nobody asks the groups.
    """

    def __init__(
        self,
        policy: KVPolicy,
        num_blocks: int,
        enable_prefix_caching: bool = True,
        *,
        num_states: int = 0,
        snapshots: bool = True,
        tier_blocks: int = 0,
    ) -> None:
        """snapshots: prompts may be cut where a snapshot is to be taken.   tier_blocks: of a lower tier."""
        self.policy = policy
        self.pool = BlockPool(num_blocks)
        self.tier = LowerTier(self.pool, tier_blocks) if tier_blocks and enable_prefix_caching else None
        self.block_size = policy.unit
        self.enable_prefix_caching = enable_prefix_caching
        self.num_groups = len(policy.groups)
        self._groups = token_groups(policy)
        self._state = state_group(policy)
        self.states = BlockPool(num_states) if self._state is not None else None
        # a state cannot be taken back: drafts need a page each
        self.max_drafts = ENDLESS if self._state is None else policy.states_per_slot - 1
        self.takes_snapshots = self._state is not None and enable_prefix_caching and snapshots
        self._own = [g for g in self._groups if not isinstance(g, CrossGroup)]  # hold the request's own tokens
        self._of_units = [(g.index, g.suffix) for g in self._own if g.units == 1]
        self._of_more = [g for g in self._own if g.units > 1]
        self._single = self.num_groups == 1 and policy.groups[0].kind is KVKind.FULL
        self._to_register: list[tuple[Request, int]] = []
        self._roots: set[bytes] = set()  # hashes of the first blocks of those requests
        self._of_plan = 0  # from here on they are chunks of the plan being made
        self._fresh: set[int] = set()  # blocks that can be found already, and which the plan being made fills

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """As `KVPolicy.blocks_for`."""
        return self.policy.blocks_for(num_tokens, chunk)

    def can_admit(self, request: Request, num_tokens: int, chunk: int, reserve: int) -> bool:
        """Whether `num_tokens` of a waiting request, with those of blocks that it has already, fit beside what runs,
        leaving `reserve` blocks free.
        """
        held = sum(block != NULL_BLOCK for table in request.tables for block in table)
        return self.blocks_for(num_tokens, chunk) - held + reserve <= self.pool.num_free

    # -- admission -----------------------------------------------------------------------------------------------------

    def looks_up(self, request: Request) -> bool:
        """Whether cached blocks are looked for when this request starts."""
        return self.enable_prefix_caching and request.reads_cache and self.num_groups > 0

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
        length = self._attach_single(request, limit) if self._single else self._attach_groups(request, limit)
        if not length:
            return 0
        request.num_registered = length
        request.num_computed = request.num_cached_tokens = request.capacity = length * size
        return request.num_computed

    def fetch(self, request: Request, reserve: int, moves: Moves, transfers: list[Transfer]) -> bool:
        """Load what the lower tier has of the request's prefix behind what is cached here; whether it must wait for it.

        Tried once for each start, and only with room for it beside `reserve` blocks. Asked again while the same plan is
        made, it says the same.
        """
        if self.tier is None or self._of_more or not self.looks_up(request):
            return False
        if request.fetched:
            return request.id in moves.waiting
        request.fetched = True
        self.settle()
        here: list[int] = []
        wanted: list[tuple[int, bytes, bytes]] = []
        for i, content in request.block_contents(0, (len(request.tokens) - 1) // self.block_size, self.block_size):
            keys = [self._hash(request, i, content) + suffix for _, suffix in self._of_units]
            blocks = [self.pool.lookup(key, content) for key in keys]
            places = [self.tier.find(key, content) for key in keys]
            if any(block is None and place is None for block, place in zip(blocks, places, strict=True)):
                break
            for key, block, place in zip(keys, blocks, places, strict=True):
                if block is not None:
                    here.append(block)
                elif place is not None:
                    wanted.append((place, key, content))
        if not wanted or len(wanted) + len(here) + reserve > self.pool.num_free:
            return False
        self.pool.acquire(here)  # so that loading does not evict what it continues
        for place, key, content in wanted:
            self.tier.load(place, key, content, moves, transfers)
        self.pool.release(reversed(here))
        moves.waiting.append(request.id)
        return True

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Share the parent's blocks of the first `num_tokens` tokens with a child that has none.

        The last of them may be partly filled; whoever writes to it first copies it.
        """
        self.settle()
        for group in self._groups:
            g = group.index
            count = len(parent.tables[g]) if group not in self._own else -(-num_tokens // group.size)
            blocks = parent.tables[g][:count]
            self.pool.acquire(b for b in blocks if b != NULL_BLOCK)
            child.tables[g][:] = blocks
            child.freed_behind_window[g] = min(parent.freed_behind_window[g], count)
        child.capacity = min((group.capacity(child) for group in self._own), default=0)
        child.num_computed = num_tokens
        child.num_registered = min(parent.num_registered, num_tokens // self.block_size)
        child.hashes = parent.hashes[: num_tokens // self.block_size]
        parent.shares_tail = child.shares_tail = True

    def can_fork(self, parent: Request, child: Request, num_tokens: int) -> bool:
        """Whether the parent still holds all that the child's query at position `num_tokens` can see. A state has moved
        on; a fork of it starts from the last snapshot.
        """
        if self._state is not None or not self._own or not parent.same_content(child):
            return False
        for group in self._own:  # a tail is copied before the step writes
            index, part = divmod(num_tokens, group.size)
            if part and index < len(table := parent.tables[group.index]) and table[index] in self._fresh:
                return False
        return all(group.holds(parent, num_tokens) for group in self._groups)

    # -- growth --------------------------------------------------------------------------------------------------------

    def grow(self, request: Request, end: int, appends: list[BlockAppend], transfers: list[Transfer]) -> bool:
        """Make room for tokens up to `end` and make the blocks to be written private. False, changing nothing, if
        blocks lack.

        What changed in an already running request's tables is added to `appends` and `transfers`.
        """
        if request.shares_tail and not self._copy_shared_tail(request, appends, transfers):
            return False
        if end <= request.capacity:
            return True
        return (
            self._grow_single(request, end, appends) if self._single else self._grow(request, end, appends, transfers)
        )

    def cut(self, request: Request, start: int, count: int) -> int:
        """How many of `count` tokens from `start` on may be computed in one go, as a snapshot is taken behind them."""
        assert self._state is not None
        return min(count, self._state.next_snapshot(request, start) - start)

    def register_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks within its first `num_tokens` tokens findable by later requests.

        The work is done when it first matters, or in `settle()`.
        """
        self._to_register.append((request, num_tokens))
        if self.enable_prefix_caching and num_tokens >= self.block_size:
            self._roots.add(self._root(request))

    def begin_plan(self) -> None:
        """What is registered from now on is computed by the plan being made."""
        self._of_plan = len(self._to_register)
        self._fresh.clear()

    def settle(self) -> None:
        """Do what was put off so that a step could be on its way sooner."""
        for i, (request, num_tokens) in enumerate(self._to_register):
            if i >= self._of_plan:
                first = request.num_registered * self.block_size
                for group in self._own:
                    self._fresh.update(request.tables[group.index][first // group.size :])
            self._register(request, num_tokens // self.block_size)
        self._to_register.clear()
        self._roots.clear()
        self._of_plan = 0

    def reset_cache(self) -> None:
        """Forget the content of all blocks and states; requests keep theirs."""
        self.settle()
        self.pool.reset_cache()
        if self.tier is not None:
            self.tier.reset()
        if self.states is not None:
            self.states.reset_cache()

    def forget(self, request: Request) -> None:
        """Let nobody find the blocks and snapshots of a request that failed: what they hold may be no numbers."""
        self.settle()
        for group in self._groups:
            for block in request.tables[group.index]:
                if block != NULL_BLOCK:
                    self.pool.forget(block)
        if self.states is not None and self._state is not None:
            for key in request.hashes:
                self.states.forget_key(key + self._state.suffix)
        if self.tier is not None:
            for key in request.hashes:
                for _, suffix in self._of_units:
                    self.tier.forget_key(key + suffix)

    # -- release -------------------------------------------------------------------------------------------------------

    def free(self, requests: Iterable[Request]) -> None:
        """Release all blocks of these requests; of those released together, the longest prefix is evicted first."""
        self.settle()
        blocks: list[int] = []
        depths: list[int] = []
        for request in requests:
            if self.states is not None and self._state is not None:
                table = request.tables[self._state.index]
                self.states.release([*table, request.starts_from] if request.starts_from else table)
                request.starts_from = NULL_BLOCK
                table.clear()
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

    # -- looking in ----------------------------------------------------------------------------------------------------

    def check(self, requests: Iterable[Request], moving: Iterable[int]) -> None:
        """Raise RuntimeError unless every block is referenced exactly as often as tables name it, and none is lost.

        moving: blocks held for plans in flight.
        """
        tokens: list[int] = [*moving]
        states: list[int] = []
        for request in requests:
            for g, table in enumerate(request.tables):
                (states if self._state is not None and g == self._state.index else tokens).extend(table)
            states.append(request.starts_from)
        _check_pool(self.pool, tokens)
        if self.states is not None:
            _check_pool(self.states, states)

    # -- inside: growth ------------------------------------------------------------------------------------------------

    def _grow_single(self, request: Request, end: int, appends: list[BlockAppend]) -> bool:
        """`_grow` for one group of full attention, the usual case."""
        missing = -(-(end - request.capacity) // self.block_size)
        if missing > self.pool.num_free:
            return False
        table = request.tables[0]
        new = self.pool.allocate(missing)
        appends.append(BlockAppend(request.slot, 0, len(table), new))
        table.extend(new)
        request.capacity += missing * self.block_size
        return True

    def _grow(self, request: Request, end: int, appends: list[BlockAppend], transfers: list[Transfer]) -> bool:
        self.settle()
        for group in self._groups:
            group.release_behind(request, request.num_computed - request.num_drafted, self.pool)
        missing = [group.missing(request, end) for group in self._groups]
        if sum(missing) > self.pool.num_free:
            return False
        for group, count in zip(self._groups, missing, strict=True):
            if count:
                table = request.tables[group.index]
                new = self.pool.allocate(count)
                appends.append(BlockAppend(request.slot, group.index, len(table), new))
                table.extend(new)
        capacity = min((group.capacity(request) for group in self._groups), default=ENDLESS)
        if self._state is not None:
            capacity = min(capacity, self._grow_state(request, transfers))
        request.capacity = capacity
        return True

    def _grow_state(self, request: Request, transfers: list[Transfer]) -> int:
        """Give the request its state, from a snapshot or zero, and take a snapshot if one is due; returns the length
        at which the next one is.
        """
        assert self._state is not None and self.states is not None
        table = request.tables[self._state.index]
        if not table:
            table.extend(self.states.allocate(self._state.pages))
            if request.starts_from:
                transfers.append(Transfer(TransferKind.COPY, STATES, request.starts_from, table[0]))
                self.states.release([request.starts_from])
                request.starts_from = NULL_BLOCK
            else:
                transfers.append(Transfer(TransferKind.ZERO, STATES, NULL_BLOCK, table[0]))
        if not self.takes_snapshots:
            return ENDLESS
        start = request.num_computed
        if self._state.is_snapshot(request, start):
            self._take_snapshot(request, start // self.block_size, table[0], transfers)
        return self._state.next_snapshot(request, start)

    def _take_snapshot(self, request: Request, units: int, live: int, transfers: list[Transfer]) -> None:
        """Copy the state behind the first `units` units to a page that later requests find, if there is room."""
        assert self._state is not None and self.states is not None
        self._extend_hashes(request, units)
        key = request.hashes[units - 1] + self._state.suffix
        ((_, content),) = request.block_contents(units - 1, units, self.block_size)
        if self.states.num_free and self.states.lookup(key, content) is None:
            (page,) = self.states.allocate(1)
            transfers.append(Transfer(TransferKind.COPY, STATES, live, page))
            self.states.register(page, key, content)
            self.states.release([page])

    def _copy_shared_tail(self, request: Request, appends: list[BlockAppend], transfers: list[Transfer]) -> bool:
        """Make a fork's partly filled block private: a copy if others hold it, else it just becomes unfindable."""
        refs = self.pool.ref_counts
        held = [
            (group.index, index)
            for group in self._own
            if (index := (request.num_computed - request.num_drafted) // group.size)
            < len(table := request.tables[group.index])
            and table[index] != NULL_BLOCK
        ]
        shared = [(g, index) for g, index in held if refs[request.tables[g][index]] > 1]
        if len(shared) > self.pool.num_free:
            return False
        for g, index in held:
            if (g, index) not in shared:  # the other holder is gone, and may have filled and registered it
                self.pool.forget(request.tables[g][index])
        for g, index in shared:
            table = request.tables[g]
            (copy,) = self.pool.allocate(1)
            transfers.append(Transfer(TransferKind.COPY, TOKENS, table[index], copy))
            self.pool.release([table[index]])
            table[index] = copy
            appends.append(BlockAppend(request.slot, g, index, [copy]))
        # Nothing behind the tail is shared for writing, and the tail is private now.
        request.shares_tail = False
        return True

    # -- inside: what can be found -------------------------------------------------------------------------------------

    def _register(self, request: Request, full: int) -> None:
        start, size = request.num_registered, self.block_size
        if full <= start:
            return
        if self.enable_prefix_caching and self._own:
            if len(request.hashes) < start:
                self._extend_hashes(request, start)
            for i, content in request.block_contents(start, full, size):
                key = self._hash(request, i, content)
                for g, suffix in self._of_units:
                    block = request.tables[g][i]
                    if block != NULL_BLOCK:
                        self.pool.register(block, key + suffix, content)
                        if self.tier is not None:
                            self.tier.registered(block, key + suffix, content)
                for group in self._of_more:
                    index, rest = divmod(i + 1, group.units)
                    if rest == 0 and (block := request.tables[group.index][index - 1]) != NULL_BLOCK:
                        units = request.block_contents(i + 1 - group.units, i + 1, size)
                        self.pool.register(block, key + group.suffix, b"".join(c for _, c in units))
        request.num_registered = full

    def _hash(self, request: Request, index: int, content: bytes) -> bytes:
        """The hash of a block whose predecessor's is known; the root covers adapter, salt and encoder input."""
        hashes = request.hashes
        if index == len(hashes):
            if hashes:
                parent = hashes[-1]
            else:
                parent = root_hash(request.lora_id, request.cache_salt, request.lora_key)
                if request.encoder_key:
                    parent = block_hash(parent, b"", request.encoder_key)
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

    def _attach_single(self, request: Request, limit: int) -> int:
        """`_attach_groups` for one group of full attention, the usual case."""
        found: list[int] = []
        suffix = self._groups[0].suffix
        for i, content in request.block_contents(0, limit, self.block_size):
            block = self.pool.lookup(self._hash(request, i, content) + suffix, content)
            if block is None:
                break
            found.append(block)
        self.pool.acquire(found)
        request.tables[0][:] = found
        return len(found)

    def _attach_groups(self, request: Request, limit: int) -> int:
        """Take the longest prefix of at most `limit` units that every group admits; its length in units."""
        contents: list[bytes] = []
        units = request.block_contents(0, limit, self.block_size)

        def lookup_in(pool: BlockPool, suffix: bytes, count: int) -> Lookup:
            def lookup(last: int) -> int | None:
                while len(contents) <= last:
                    i, content = next(units)
                    self._hash(request, i, content)
                    contents.append(content)
                content = contents[last] if count == 1 else b"".join(contents[last + 1 - count : last + 1])
                return pool.lookup(request.hashes[last] + suffix, content)

            return lookup

        longest, found = limit, []
        for group in self._groups:
            blocks = group.find(lookup_in(self.pool, group.suffix, group.units), longest)
            found.append(blocks)
            if group in self._own:
                longest = min(longest, len(blocks) * group.units)
        snapshot: int | None = NULL_BLOCK
        state_at = None if self._state is None or self.states is None else lookup_in(self.states, self._state.suffix, 1)
        while longest > 0:
            if all(group.admits(blocks, longest) for group, blocks in zip(self._groups, found, strict=True)):
                snapshot = state_at(longest - 1) if state_at is not None else NULL_BLOCK
                if snapshot is not None:
                    break
            longest -= 1
        if longest > 0:
            self._take_found(request, found, longest)
            if self.states is not None and snapshot:
                self.states.acquire([snapshot])
                request.starts_from = snapshot
        return longest

    def _take_found(self, request: Request, found: list[list[int | None]], length: int) -> None:
        for group, blocks in zip(self._groups, found, strict=True):
            if group not in self._own:
                continue
            count = length // group.units
            first = group.first_seen(count * group.size)
            kept = [b for b in blocks[first:count] if b is not None]
            self.pool.acquire(kept)
            request.tables[group.index][:] = [NULL_BLOCK] * first + kept
            request.freed_behind_window[group.index] = first


def _check_pool(pool: BlockPool, named: Iterable[int]) -> None:
    """Raise RuntimeError unless the blocks of `pool` are referenced as often as they are named."""
    counts = [0] * pool.num_blocks
    for block in named:
        counts[block] += 1
    counts[NULL_BLOCK] = 0
    if counts != pool.ref_counts:
        bad = [b for b, (want, got) in enumerate(zip(counts, pool.ref_counts, strict=True)) if want != got]
        raise RuntimeError(f"KV blocks {bad[:8]} are not referenced as often as block tables name them.")
    free = pool.free_blocks()
    if len(free) != pool.num_free or any(counts[b] for b in free) or len(set(free)) != len(free):
        raise RuntimeError("The free queue of KV blocks does not match the reference counts.")
    if len(free) + sum(1 for c in counts if c) != pool.num_blocks - 1:
        raise RuntimeError("KV blocks are lost: neither free nor referenced.")


def resolve(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """The same outcome, with every source as it was before all of them: chains of copies end at their first source.

    So the device may read everything first and then write everything, in one go for each kind. A block that is written
    twice appears once.
    """
    if len(transfers) < 2:
        return tuple(transfers)
    last: dict[tuple[int, int], Transfer] = {}  # what a block holds in the end
    out: list[Transfer] = []
    for transfer in transfers:
        kind, pool, src, dst = transfer
        if kind is TransferKind.COPY or kind is TransferKind.SAVE:
            earlier = last.get((pool, src))
            if earlier is not None and kind is TransferKind.COPY:
                transfer = Transfer(earlier.kind, pool, earlier.src, dst)
            elif earlier is not None and earlier.kind is TransferKind.COPY:
                transfer = Transfer(kind, pool, earlier.src, dst)
        if kind is TransferKind.SAVE:
            out.append(transfer)
        else:
            last.pop((pool, dst), None)
            last[pool, dst] = transfer
    return (*out, *(t for t in last.values() if t.kind is not TransferKind.COPY or t.src != t.dst))
