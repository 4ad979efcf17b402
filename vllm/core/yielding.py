"""Who gives up a slot or blocks for others: by priority, and by what each account holds beyond its share."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.core.kv_manager import KVManager
from vllm.core.request import Request
from vllm.core.slots import Slots
from vllm.core.waiting import WaitingQueue


class Yielding:
    """Chooses victims among the running requests; whoever asks preempts them."""

    def __init__(
        self, slots: Slots, waiting: WaitingQueue, kv: KVManager, *, priority: bool, share: float, watermark: int
    ) -> None:
        """share: the part of the blocks that one account may hold while others wait.   watermark: blocks kept free."""
        self._slots, self._waiting, self._kv = slots, waiting, kv
        self._priority, self._share, self._watermark = priority, share, watermark

    def for_waiting(self, turns: Iterator[Request], budget: int, chunk: int, fair: bool) -> Iterator[Request]:
        """Those that must yield before requests whose turn it is find a slot and blocks, each taken out of `running`
        and to be preempted before the next is asked for.

        turns: the requests, in order.   budget: tokens of a step; those behind it are not looked at.   chunk: tokens of
        a prompt in one step.   fair: there are accounts.
        """
        slots, kv = self._slots, self._kv
        reserve = self._watermark + self._growth() if fair and slots.free else 0
        promised: dict[str, int] = {}
        for count, request in enumerate(turns):
            budget -= len(request.tokens)
            if count and budget < 0:
                return
            while len(slots.free) <= count or not kv.can_admit(request, len(request.tokens), chunk, reserve):
                mine = promised.get(request.account or "", 0)
                victim = self._yielding(request, mine) if slots.running else None
                if victim is None:
                    return
                slots.running.remove(victim)
                yield victim
            reserve += kv.blocks_for(len(request.tokens), chunk)
            if request.account is not None:
                promised[request.account] = promised.get(request.account, 0) + 1

    def for_growth(self, start: int) -> Request:
        """Take out of `running[start:]`, which this step has not planned yet, who goes when blocks run out: the last
        one, or the last one of the account that holds the most, if that is beyond its share and no priority is against
        it.
        """
        running = self._slots.running
        last = running[-1]
        if self._waiting.has_accounts:
            account = self._waiting.over_share(last)
            for i in range(len(running) - 1, start - 1, -1) if account is not None else ():
                if running[i].account == account and not (self._priority and running[i].priority < last.priority):
                    return running.pop(i)
        return running.pop()

    def _growth(self) -> int:
        """Blocks that the running requests will take for their next tokens."""
        return self._kv.num_groups * sum(1 for r in self._slots.running if r.num_computed >= r.capacity)

    def _yielding(self, first: Request, promised: int) -> Request | None:
        """Who must yield to `first`: the last one if its priority is lower, else the last one of an account that holds
        more than its share; nobody of higher priority. promised: slots for others of its account.
        """
        running = self._slots.running
        if self._priority and first.priority < running[-1].priority:
            return running[-1]
        account = self._waiting.over_share(first, promised)
        if account is None and self._slots.free and not promised:
            account = self._largest_holder_of_blocks(first)
        if account is None:
            return None
        for request in reversed(running):
            if request.account == account and (not self._priority or request.priority >= first.priority):
                return request
        return None

    def _largest_holder_of_blocks(self, first: Request) -> str | None:
        """The account with several sequences whose blocks are more than its share, if `first` is another's first."""
        if self._waiting.held(first.account):
            return None
        blocks: dict[str, int] = {}
        for request in self._slots.running:
            if request.account is not None:
                blocks[request.account] = blocks.get(request.account, 0) + sum(map(len, request.tables))
        account = max(blocks, key=blocks.__getitem__, default=None)
        if account is None or self._waiting.held(account) < 2:
            return None
        return account if blocks[account] > (self._kv.pool.num_blocks - 1) * self._share else None
