"""The LoRA adapters of one engine: which are in host memory, which are being read, and who waits for them."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.core.adapters import AdapterSlots
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.step.messages import CoreOutput, CoreRequest

if TYPE_CHECKING:
    from vllm.core.scheduler import Scheduler
    from vllm.executor.base import Executor

logger = init_logger(__name__)

REASON = "adapter"
READY, LOADING, UNKNOWN = "ready", "loading", "unknown"


class Adapters:
    """Owns the ids and folders of adapters, and what the ranks hold in host memory: at most `capacity` adapters, of
    which the least recently used that no request needs makes room for the next.

    A request whose adapter is not there is blocked until it has been read, which happens beside the steps. When
    adapters have waited for longer than `patience` seconds for room, requests of those that are there queue up, too.
    """

    def __init__(
        self,
        executor: Executor,
        slots: int,
        capacity: int,
        *,
        patience: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = AdapterSlots(slots, ended=self._request_ended)
        self._executor, self._capacity, self._patience, self._clock = executor, capacity, patience, clock
        self._folders: dict[int, str] = {}
        self._digests: OrderedDict[int, bytes] = OrderedDict()  # in host memory, least recently used first
        self._errors: dict[int, str] = {}
        self._users: Counter[int] = Counter()  # requests that may run, by adapter
        self._pinned: set[int] = set()
        self._removed: set[int] = set()  # to be dropped when their last request has ended
        self._left: dict[int, bytes] = {}  # digests of those that are on the device and not in host memory
        self._queue: deque[tuple[int, float]] = deque()  # adapters to be read, and since when
        self._loading: int | None = None
        self._unwanted = False  # whether what is being read is to be forgotten
        self._leaving: set[int] = set()  # to be removed as soon as the requests run that wait for them
        self._reports: list[str | None] = []  # of the ranks that have read it: the digest, or None
        self._waiting: dict[int, list[CoreRequest]] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, adapter_id: int, folder: str) -> None:
        """Raise ValueError if the id already stands for another folder."""
        known = self._folders.get(adapter_id)
        if known is not None and known != folder and adapter_id not in self._removed:
            raise VLLMValidationError(
                f"lora_int_id {adapter_id} already stands for the adapter in {known}; use another number for {folder}.",
                parameter="lora_int_id",
                value=adapter_id,
            )

    def want(self, request: CoreRequest, scheduler: Scheduler) -> None:
        """Let a request that the scheduler has taken run, or block it until its adapter is there."""
        adapter_id = request.lora_id
        self._folders[adapter_id] = request.lora_path
        self._errors.pop(adapter_id, None)
        starving = bool(self._queue) and self._clock() - self._queue[0][1] > self._patience
        if adapter_id in self._digests and not starving and adapter_id not in self._removed:
            self._let_run(request, scheduler)
            return
        scheduler.block(request.request_id, REASON)
        self._waiting.setdefault(adapter_id, []).append(request)
        self._enqueue(adapter_id)

    def _let_run(self, request: CoreRequest, scheduler: Scheduler) -> None:
        self._digests.move_to_end(request.lora_id)
        live = scheduler.requests.get(request.request_id)
        if live is None:
            return  # it was aborted while it waited
        self._users[request.lora_id] += 1
        live.lora_key = self._digests[request.lora_id]

    def _enqueue(self, adapter_id: int) -> None:
        if (adapter_id != self._loading or self._unwanted) and not self._is_queued(adapter_id):
            self._queue.append((adapter_id, self._clock()))

    def _is_queued(self, adapter_id: int) -> bool:
        return any(queued == adapter_id for queued, _ in self._queue)

    def _request_ended(self, adapter_id: int) -> None:
        if self._users[adapter_id]:
            self._users[adapter_id] -= 1
        if adapter_id in self._removed and not self._users[adapter_id]:
            self._drop(adapter_id)

    # -- loading -------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an adapter is being read or waits for that."""
        return self._loading is not None or bool(self._queue)

    def advance(self, scheduler: Scheduler) -> list[CoreOutput]:
        """Take in what has been read, begin with the next; the ends of requests whose adapter cannot be read."""
        outputs: list[CoreOutput] = []
        if self._loading is not None:
            outputs = self._collect(scheduler)
        while self._loading is None:
            # one that was removed and is still used is read anew when its last request has ended; others pass it
            ready = (entry for entry in self._queue if entry[0] not in self._removed)
            if (entry := next(ready, None)) is None:
                break
            adapter_id = entry[0]
            if adapter_id in self._digests:
                self._queue.remove(entry)
                self._unblock(adapter_id, scheduler)
                continue
            if not self._make_room():
                break
            self._queue.remove(entry)
            self._loading, self._reports = adapter_id, []
            self._executor.collective_rpc("begin_loading_adapter", args=(adapter_id, self._folders[adapter_id]))
        return outputs

    def _collect(self, scheduler: Scheduler) -> list[CoreOutput]:
        """Ask the ranks whether they have read the adapter; all must have."""
        answers = self._executor.collective_rpc("loaded_adapters")
        if not self._reports:
            self._reports = [LOADING] * len(answers)
        error = None
        for rank, answer in enumerate(answers):
            for _, digest, problem in answer:
                self._reports[rank] = digest
                error = error or problem
        if LOADING in self._reports:
            if error is not None:
                self._errors[self._loading or 0] = error
            return []
        adapter_id, self._loading = self._loading or 0, None
        if self._unwanted:
            self._unwanted = False
            self._errors.pop(adapter_id, None)
            self._executor.collective_rpc("drop_adapter", args=(adapter_id,))
            return []
        error = error or self._errors.pop(adapter_id, None)
        if error is not None or None in self._reports:
            return self._fail(adapter_id, error or "A rank could not read it.", scheduler)
        digest = self._digests[adapter_id] = bytes.fromhex(self._reports[0] or "")
        if self._left.pop(adapter_id, digest) != digest:
            self.slots.remove(adapter_id)  # what is there was read before the files changed
        self._unblock(adapter_id, scheduler)
        return []

    def _unblock(self, adapter_id: int, scheduler: Scheduler) -> None:
        for request in self._waiting.pop(adapter_id, ()):
            self._let_run(request, scheduler)
            scheduler.unblock(request.request_id, REASON)
        if adapter_id in self._leaving:
            self._leaving.discard(adapter_id)
            self.remove(adapter_id)

    def _fail(self, adapter_id: int, error: str, scheduler: Scheduler) -> list[CoreOutput]:
        """No rank keeps it, and every request that waits for it ends."""
        self._executor.collective_rpc("drop_adapter", args=(adapter_id,))
        self._errors[adapter_id] = error
        waiting = [request.request_id for request in self._waiting.pop(adapter_id, ())]
        self._folders.pop(adapter_id, None)
        self._leaving.discard(adapter_id)
        return [
            CoreOutput(output.request_id, [], finish_reason="error", error=f"The LoRA adapter cannot be used: {error}")
            for output in scheduler.abort(waiting)
        ]

    def _make_room(self) -> bool:
        """Whether one more adapter may be read, after dropping the one that nobody has needed for longest."""
        if len(self._digests) < self._capacity:
            return True
        for adapter_id in self._digests:
            if not self._users[adapter_id] and adapter_id not in self._pinned:
                self._drop(adapter_id, forget=False)
                return True
        return False

    def _drop(self, adapter_id: int, *, forget: bool = True) -> None:
        digest = self._digests.pop(adapter_id, None)
        if digest is not None:
            self._executor.collective_rpc("drop_adapter", args=(adapter_id,))
        self._removed.discard(adapter_id)
        self._pinned.discard(adapter_id)
        if not forget:  # it may stay on the device
            if digest is not None and self.slots.holds(adapter_id):
                self._left[adapter_id] = digest
            return
        self._left.pop(adapter_id, None)
        self.slots.remove(adapter_id)
        if adapter_id not in self._waiting and not self._is_queued(adapter_id):
            self._folders.pop(adapter_id, None)

    # -- by hand -------------------------------------------------------------------------------------------------------

    def add(self, adapter_id: int, folder: str) -> None:
        """Begin to read an adapter that no request has asked for yet; `state` tells what became of it."""
        self.check(adapter_id, folder)
        self._errors.pop(adapter_id, None)
        self._folders[adapter_id] = folder
        self._leaving.discard(adapter_id)
        if adapter_id not in self._digests or adapter_id in self._removed:
            self._enqueue(adapter_id)

    def state(self, adapter_id: int) -> str:
        """ "ready", "loading", "unknown", or why it cannot be used (told once). One that was read and has made room for
        others since is ready, too: its next request has it read again.
        """
        if adapter_id in self._errors and adapter_id != self._loading:
            return self._errors.pop(adapter_id)
        is_kept = adapter_id not in self._removed
        is_read = adapter_id == self._loading and not self._unwanted
        if adapter_id in self._digests and is_kept:
            return READY
        if is_read or self._is_queued(adapter_id):
            return LOADING
        return READY if adapter_id in self._folders and is_kept else UNKNOWN

    def remove(self, adapter_id: int) -> bool:
        """Forget an adapter, once the requests that use it have ended; False if it is not known. One that is being read
        is read to its end only if requests wait for it.
        """
        if adapter_id in self._waiting:
            is_new = adapter_id not in self._leaving
            self._leaving.add(adapter_id)
            return is_new
        self._queue = deque(entry for entry in self._queue if entry[0] != adapter_id)
        if adapter_id == self._loading and not self._unwanted:
            self._unwanted = True
            self._executor.collective_rpc("drop_adapter", args=(adapter_id,))
        displaced = adapter_id in self._folders and adapter_id not in self._digests
        if not displaced and (adapter_id not in self._digests or adapter_id in self._removed):
            return False
        self._removed.add(adapter_id)
        if not self._users[adapter_id]:
            self._drop(adapter_id)
        return True

    def pin(self, adapter_id: int) -> bool:
        """Keep an adapter in host memory and, once it is there, on the device. Raises ValueError if it cannot be."""
        if adapter_id not in self._digests:
            raise ValueError(f"Adapter {adapter_id} cannot be pinned: it is not loaded. Load it first (add_lora).")
        if len(self._pinned | {adapter_id}) > max(0, self._capacity - 1):
            raise ValueError(
                f"Adapter {adapter_id} cannot be pinned: of {self._capacity} adapters in host memory (max_cpu_loras) "
                "one must stay free for others."
            )
        self.slots.pin(adapter_id)
        self._pinned.add(adapter_id)
        return True

    def ids(self) -> list[int]:
        """The adapters in host memory."""
        return sorted(adapter_id for adapter_id in self._digests if adapter_id not in self._removed)

    def waiting(self) -> list[int]:
        """Adapters of requests that do not run: they wait for the adapter, for its slot, or for anything else."""
        queued = {adapter_id for adapter_id, users in self._users.items() if users > self.slots.users(adapter_id)}
        return sorted(queued | self._waiting.keys())
