"""The slots: who holds one, in which order they are served, and which were given back since the last plan."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from vllm.core.policies import AdmissionPolicy
from vllm.core.request import Request, Status
from vllm.core.waiting import WaitingQueue


class Slots:
    """`count` rows of the worker. The waiting queue and the policies are told of every one given and taken back.

    running: the requests that hold a slot, in the order in which they are served.
    free: slots that nobody holds.   freed: those of them that the worker has not been told of.
    """

    def __init__(self, count: int, priority: bool, waiting: WaitingQueue, policies: Sequence[AdmissionPolicy]) -> None:
        """priority: requests are served by priority, else in the order in which they came in."""
        self.count, self._priority = count, priority
        self._waiting, self._policies = waiting, policies
        self.running: list[Request] = []
        self.free = list(range(count - 1, -1, -1))
        self.freed: list[int] = []

    def give(self, request: Request) -> None:
        """Give a request that was taken out of the queue a free slot."""
        request.slot = self.free.pop()
        request.status = Status.RUNNING
        request.entered_with = len(request.tokens)
        self._waiting.admitted(request)
        for policy in self._policies:
            policy.admitted(request)
        if self._priority:
            insort(self.running, request, key=Request.order)
        else:
            self.running.append(request)

    def take_back(self, request: Request) -> None:
        """Take the slot of a request that is not among `running` any more."""
        self.free.append(request.slot)
        self.freed.append(request.slot)
        request.slot = -1
        self._waiting.left(request)
        for policy in self._policies:
            policy.left(request)

    def take_freed(self) -> tuple[int, ...]:
        """What the worker is to be told with the next plan."""
        freed = tuple(self.freed)
        self.freed.clear()
        return freed

    def check(self) -> None:
        """Raise RuntimeError unless every slot is free or held, once."""
        held = sorted([r.slot for r in self.running] + self.free)
        if held != list(range(self.count)):
            raise RuntimeError(f"Slots do not add up: {held}.")
