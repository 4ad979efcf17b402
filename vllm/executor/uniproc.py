"""One worker in the calling process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.ranks import Ranks
from vllm.exceptions import EngineDeadError
from vllm.executor.calls import Caller, callable_of, worker_class
from vllm.ipc import functions
from vllm.step.plan import RowMasks, StepPlan
from vllm.step.result import StepResult
from vllm.worker.step_handle import Handle
from vllm.worker.worker import Worker, compile_ahead

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class UniprocExecutor:
    """Executes plans with a worker of its own."""

    def __init__(self, config: VllmConfig) -> None:
        parallel = config.parallel_config
        ranks = Ranks(device=parallel.first_device, local=(parallel.replica, parallel.local_replicas))
        worker = worker_class(config)(config, ranks, compile_ahead(config))
        self._start(worker, worker.count_blocks(), 2 if worker.context.is_async and config.overlap_steps else 1)

    def _start(self, worker: Worker, num_blocks: int, max_in_flight: int) -> None:
        """Let the worker take plans."""
        worker.start(num_blocks)
        self._worker: Worker | None = worker
        self.kv_layout, self.num_blocks, self.max_in_flight = worker.layout, num_blocks, max_in_flight
        self._in_flight: deque[Handle] = deque()
        self._caller = Caller()

    @property
    def worker(self) -> Worker:
        """The worker, when it is free; raises EngineDeadError after `shutdown()`."""
        self._caller.wait()
        if self._worker is None:
            raise EngineDeadError("The executor has been shut down.")
        return self._worker

    @property
    def driver_worker(self) -> Worker:
        """`worker`, under the name that training frameworks know."""
        return self.worker

    def submit(self, plan: StepPlan) -> None:
        """Start a step; on the CPU it is done when this returns."""
        self._in_flight.append(self.worker.execute(plan))

    def complete(self, step_id: int, masks: RowMasks | None) -> None:
        """Give the step submitted last the masks that it waits for."""
        self.worker.complete(step_id, masks)

    def collect(self) -> StepResult:
        """The result of the oldest step in flight."""
        return self._in_flight.popleft().result()

    def runs_ahead(self) -> bool:
        """Whether a plan may be submitted that goes on from tokens which steps in flight have yet to sample."""
        return self.max_in_flight > 1

    def prepare(self) -> bool:
        """Let the worker capture graphs that will be needed."""
        return self.worker.prepare()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker, or a function with the worker as first argument.

        timeout: seconds after which TimeoutError is raised; the call itself goes on, and the next step waits for it.
        """
        given, named = functions.received(list(args)), functions.received(dict(kwargs or {}))
        call = partial(callable_of(self.worker, method), *given, **named)
        return [self._caller.call(self.worker, call, timeout)]

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write this rank's weights for load_format="sharded_state"."""
        self.collective_rpc("save_sharded_state", args=(path, pattern, max_size))

    def check_health(self) -> None:
        """Raises if the executor has been shut down or its device does not answer."""
        self.worker.check_health()

    def shutdown(self) -> None:
        """Drop the model and the cache."""
        self._in_flight.clear()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
