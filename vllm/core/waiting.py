"""Requests that wait for a slot, and whose turn it is: fair between accounts, else first come first served or by
priority.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from vllm.core.request import Request

_NOBODY = -math.inf, 0  # arrival, before all
_TURN = 512  # tokens that an account may have computed in its turn before others have theirs


class _Account:
    """The sequences of one account. While it holds no slot, its foremost waiting sequence stands among the firsts."""

    __slots__ = ("aside", "behind", "first", "held", "paused", "waiting", "work")

    def __init__(self) -> None:
        self.held = 0  # slots
        self.work = 0  # tokens computed in its turn, known when it holds no slot
        self.behind = _NOBODY, 0  # arrival of the newest request there was when its turn ended, and a count
        self.waiting: deque[Request] = deque()
        self.first: Request | None = None  # the one among the firsts
        self.aside = 0  # sequences set aside
        self.paused = False  # with one of those: none of the others may go either


class WaitingQueue:
    """The order in which requests get slots.

    Sequences of one user's request (n > 1, beams, many prompts in one call) have an account in common. The first
    sequence of each account goes before all further ones of others; among those, the account that holds the fewest
    slots goes next. An account that gives its last slot back after 512 tokens or more stands behind all others with its
    next sequence. Requests without an account are accounts of one. Priorities come before all this.

    share: while others wait, one account may keep this part of the slots; what it holds beyond may be preempted for
    others (`over_share`). Where nobody else waits an account may hold everything.
    """

    def __init__(self, priority: bool, num_slots: int, share: float) -> None:
        self._priority = priority
        self._num_slots, self._most = num_slots, max(1, int(num_slots * share))
        self._firsts: deque[Request] = deque()
        self._accounts: dict[str, _Account] = {}
        self._further: dict[str, _Account] = {}  # those that hold slots and have more to start
        self._aside: list[Request] = []
        self._passed: set[str] = set()  # accounts whose sequences may have gone before those set aside
        self._size = 0
        self._newest = _NOBODY  # arrival of a request
        self._turns = 0  # that accounts have had

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        yield from (r for r in self._firsts if r.account is None)
        for account in self._accounts.values():
            yield from account.waiting
        yield from self._aside

    # -- coming and going ----------------------------------------------------------------------------------------------

    def push(self, request: Request, front: bool = False) -> None:
        """Queue a request; `front`: before all others, because it had a slot already."""
        self._size += 1
        self._newest = max(self._newest, self._arrival(request))
        if request.account is None:
            self._insert(self._firsts, request, front)
            return
        account = self._accounts.setdefault(request.account, _Account())
        self._insert(account.waiting, request, front)
        self._place(request.account, account, front)

    def push_back_in(self, request: Request) -> None:
        """Queue a request where it would stand had it waited here all the time."""
        self._size += 1
        self._newest = max(self._newest, self._arrival(request))
        if request.account is None:
            insort(self._firsts, request, key=self._turn)
            return
        account = self._accounts.setdefault(request.account, _Account())
        self._insert_in_order(account.waiting, request)
        self._place(request.account, account)

    def remove(self, requests: Collection[Request]) -> None:
        """Take these out, wherever they stand."""
        if not requests:
            return
        self._size -= len(requests)
        gone = set(requests)
        if any(r.account is None for r in requests):
            if len(requests) == 1:
                self._firsts.remove(next(iter(requests)))
            else:
                self._firsts = deque(r for r in self._firsts if r.account is not None or r not in gone)
        for name in {r.account for r in requests if r.account is not None}:
            account = self._accounts[name]
            account.waiting = deque(r for r in account.waiting if r not in gone)
            self._place(name, account)

    def first(self) -> Request | None:
        """Whose turn it is."""
        account = self._next_further()
        if account is not None:
            return account.waiting[0]
        return self._firsts[0] if self._firsts else None

    def turns(self, limit: int) -> Iterator[Request]:
        """Up to `limit` requests in the order in which they would start if nothing was against it. What happens to the
        queue meanwhile does not change the order.
        """
        heap: list[tuple[int, int, int, int, list[Request]]] = []  # priority, slots held, place, tie, rest of the line
        for place, request in enumerate(islice(self._firsts, limit)):
            account = self._accounts[request.account] if request.account is not None else None
            line = [request] if account is None else list(islice(account.waiting, limit))
            heap.append((request.priority if self._priority else 0, 0, place, len(heap), line[::-1]))
        for account in self._further.values():
            line = list(islice(account.waiting, limit))
            place = line[0].sequence_number
            heap.append((line[0].priority if self._priority else 0, account.held, place, len(heap), line[::-1]))
        heapify(heap)
        while heap and limit > 0:
            limit -= 1
            _, held, _, tie, line = heappop(heap)
            yield line.pop()
            if line:
                following = line[-1]
                priority = following.priority if self._priority else 0
                heappush(heap, (priority, held + 1, following.sequence_number, tie, line))

    def take(self) -> Request | None:
        """Take out the one whose turn it is: then it is `admitted`, `put_back` or `set_aside`."""
        account = self._next_further()
        if account is not None:
            request = account.waiting.popleft()
        elif self._firsts:
            request = self._firsts.popleft()
            if request.account is not None:
                account = self._accounts[request.account]
                account.waiting.popleft()
                account.first = None
        else:
            return None
        self._size -= 1
        return request

    def put_back(self, request: Request) -> None:
        """It could not start: it is next again."""
        self._size += 1
        if request.account is not None:
            account = self._accounts[request.account]
            account.waiting.appendleft(request)
            if account.held:
                return
            account.first = request
        self._firsts.appendleft(request)

    def set_aside(self, request: Request, forks: bool = False) -> None:
        """Not this one, nor the rest of its account, until `restore`. `forks`: it waits for its parent, as those behind
        it do that have the same one, and these alone of its account.
        """
        self._size += 1
        self._aside.append(request)
        if request.account is None:
            return
        account = self._accounts[request.account]
        account.aside += 1
        if not forks:
            account.paused = True
            return
        while account.waiting and account.waiting[0].fork_of == request.fork_of:
            self._aside.append(account.waiting.popleft())
            account.aside += 1
        self._passed.add(request.account)
        self._place(request.account, account)

    def restore(self) -> None:
        """Let those that were set aside wait again, where they stood."""
        while self._aside:
            request = self._aside.pop()
            account = self._accounts[request.account] if request.account is not None else None
            if account is not None:
                account.aside -= 1
                account.paused = False
            if account is not None and request.account in self._passed:
                account.waiting.appendleft(request)
            else:
                self._size -= 1
                self.put_back(request)
        for name in self._passed:
            self._place(name, self._accounts[name])
        self._passed.clear()

    # -- slots ---------------------------------------------------------------------------------------------------------

    def admitted(self, request: Request) -> None:
        """A request that was taken has a slot now."""
        if request.account is not None:
            account = self._accounts.setdefault(request.account, _Account())
            account.held += 1
            account.work -= request.num_computed
            self._place(request.account, account)

    def left(self, request: Request) -> None:
        """A request has given its slot back."""
        if request.account is not None:
            account = self._accounts[request.account]
            account.held -= 1
            account.work += len(request.tokens)
            if not account.held and account.work >= _TURN:
                self._turns += 1
                account.behind, account.work = (self._newest, self._turns), 0
            self._place(request.account, account)

    @property
    def has_accounts(self) -> bool:
        """Whether any request has an account at all."""
        return bool(self._accounts)

    def held(self, account: str | None) -> int:
        """Slots that an account holds."""
        return self._accounts[account].held if account in self._accounts else 0

    def crowd(self) -> str | None:
        """The account with the most sequences, if they are more than a quarter of its share of the slots."""
        name = max(self._accounts, key=self._sequences, default=None)
        return name if name is not None and self._sequences(name) > max(1, self._most // 4) else None

    def _sequences(self, name: str) -> int:
        account = self._accounts[name]
        return account.held + len(account.waiting)

    def over_share(self, waiting: Request, promised: int = 0) -> str | None:
        """The account that must give up a slot for `waiting`, if there is one: the one that holds the most, if that is
        more than its share. For the first sequence of another a quarter of it must do, or as much as each account would
        have if all had the same.

        promised: slots that will be given to others of the same account before.
        """
        mine = self.held(waiting.account) + promised
        most = self._most if mine else max(1, min(self._most // 4, self._num_slots // (1 + len(self._accounts))))
        if mine >= most:
            return None
        name = max(self._accounts, key=self.held, default=None)
        return name if name != waiting.account and self.held(name) > most else None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _next_further(self) -> _Account | None:
        """The account whose next sequence goes before all firsts there are, if any."""
        best: _Account | None = None
        for account in self._further.values():
            if account.paused or not account.waiting:
                continue
            if best is None or self._before(account, best):
                best = account
        if best is None or not self._firsts:
            return best
        return best if self._priority and best.waiting[0].priority < self._firsts[0].priority else None

    def _before(self, one: _Account, other: _Account) -> bool:
        a, b = one.waiting[0], other.waiting[0]
        if self._priority and a.priority != b.priority:
            return a.priority < b.priority
        return (one.held, a.sequence_number) < (other.held, b.sequence_number)

    def _insert(self, queue: deque[Request], request: Request, front: bool) -> None:
        if self._priority:
            insort(queue, request, key=self._turn if queue is self._firsts else Request.order)
        elif front:
            queue.appendleft(request)
        else:
            queue.append(request)

    def _insert_in_order(self, queue: deque[Request], request: Request) -> None:
        insort(queue, request, key=Request.order if self._priority else _arrival)

    def _arrival(self, request: Request) -> tuple[float, int]:
        return request.arrival_time if self._priority else 0.0, request.sequence_number

    def _turn(self, request: Request) -> tuple[int, tuple[tuple[float, int], int]]:
        """Where one of the firsts stands: in the order of arrival, but an account that has had a turn behind those that
        had come by then, who would wait for all of its sequences where each holds a slot for a step only.
        """
        arrival = self._arrival(request), 0
        behind = arrival if request.account is None else self._accounts[request.account].behind
        return request.priority if self._priority else 0, max(arrival, behind)

    def _place(self, name: str, account: _Account, front: bool = False) -> None:
        """Let the account's foremost sequence stand where it belongs, after a change."""
        foremost = account.waiting[0] if account.waiting and not account.held else None
        if foremost is not account.first:
            if account.first is not None:
                self._firsts.remove(account.first)
            account.first = foremost
            if foremost is not None and front:
                self._insert(self._firsts, foremost, front)
            elif foremost is not None:
                insort(self._firsts, foremost, key=self._turn)
        if account.held and account.waiting:
            self._further[name] = account
        else:
            self._further.pop(name, None)
        if not account.held and not account.waiting and not account.aside:
            self._accounts.pop(name, None)


def _arrival(request: Request) -> int:
    return request.sequence_number
