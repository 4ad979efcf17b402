"""Which LoRA adapter lies in which slot on the device, and when requests whose adapter has none may start."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from vllm.core.policies import AdmissionPolicy, StepView, Verdict
from vllm.core.request import Request
from vllm.step.plan import AdapterLoad


class AdapterSlots(AdmissionPolicy):
    """Deals `count` slots to adapters as requests start. An adapter keeps its slot until another needs it: the least
    recently used one that no running request uses gives way.

    Requests whose adapter is on the device pass one that waits for a slot, but not for longer than `patience` seconds:
    then those that came after it wait behind it, except requests without an adapter, and so do the sequences of
    another account whenever they came, of which there may be thousands.
    """

    def __init__(
        self,
        count: int,
        *,
        patience: float = 1.0,
        clock: Callable[[], float] = time.time,
        ended: Callable[[int], None] = lambda adapter_id: None,
    ) -> None:
        """ended: called with the adapter of each request that has ended, if it was there for the request."""
        self._patience, self._clock, self._ended = patience, clock, ended
        self._free = list(range(count - 1, -1, -1))
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._users: Counter[int] = Counter()
        self._pinned: set[int] = set()
        self._loads: list[AdapterLoad] = []
        self._starving: tuple[Request, float] | None = None

    def admit(self, request: Request, view: StepView) -> Verdict:
        adapter = request.lora_id
        if not adapter:
            return Verdict.ADMIT
        starving, since = self._starving or (None, 0.0)
        if starving is not None and self._behind(request, starving) and self._clock() - since > self._patience:
            return Verdict.SKIP
        if adapter in self._slot_of or self._free or self._victim() is not None:
            return Verdict.ADMIT
        if starving is None:
            self._starving = (request, self._clock())
        return Verdict.SKIP

    def admitted(self, request: Request) -> None:
        adapter = request.lora_id
        if not adapter:
            return
        if adapter not in self._slot_of:
            victim = None if self._free else self._victim()
            slot = self._free.pop() if victim is None else self._slot_of.pop(victim)
            self._slot_of[adapter] = slot
            self._loads.append(AdapterLoad(slot, adapter))
        self._slot_of.move_to_end(adapter)
        self._users[adapter] += 1
        request.columns = (self._slot_of[adapter],)
        if self._starving is not None and self._starving[0] is request:
            self._starving = None

    def left(self, request: Request) -> None:
        if request.lora_id:
            self._users[request.lora_id] -= 1

    def forget(self, request: Request) -> None:
        if self._starving is not None and self._starving[0] is request:
            self._starving = None
        if request.lora_id and request.lora_key:
            self._ended(request.lora_id)

    def loads(self) -> tuple[AdapterLoad, ...]:
        found = tuple(self._loads)
        self._loads.clear()
        return found

    def failed(self) -> None:
        """What was on its way to the device may not be there: every adapter is copied again."""
        self._free += self._slot_of.values()
        self._slot_of.clear()
        self._loads.clear()

    def pin(self, adapter_id: int) -> None:
        """Never take this adapter's slot away once it has one. Raises ValueError if others would have none."""
        if len(self._pinned | {adapter_id}) >= len(self._free) + len(self._slot_of):
            raise ValueError(
                f"Adapter {adapter_id} cannot be pinned: of {len(self._free) + len(self._slot_of)} slots (max_loras) "
                "one must stay free for other adapters."
            )
        self._pinned.add(adapter_id)

    def remove(self, adapter_id: int) -> None:
        """Forget an adapter that nobody uses any more."""
        self._pinned.discard(adapter_id)
        if not self._users[adapter_id] and adapter_id in self._slot_of:
            self._free.append(self._slot_of.pop(adapter_id))

    def holds(self, adapter_id: int) -> bool:
        """Whether an adapter has a slot."""
        return adapter_id in self._slot_of

    def users(self, adapter_id: int) -> int:
        """Running requests that use an adapter."""
        return self._users.get(adapter_id, 0)

    @property
    def running(self) -> set[int]:
        """Adapters of running requests."""
        return {adapter for adapter, users in self._users.items() if users}

    @staticmethod
    def _behind(request: Request, starving: Request) -> bool:
        if request is starving:
            return False
        if request.account is not None and request.account != starving.account:
            return request.priority >= starving.priority
        return starving.order() < request.order()

    def _victim(self) -> int | None:
        """The least recently used adapter on the device that may go."""
        return next((a for a in self._slot_of if not self._users[a] and a not in self._pinned), None)
