"""What the core knows of an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vllm.step.kv_policy import KVLayout
from vllm.step.plan import RowMasks, StepPlan
from vllm.step.result import StepResult

# What a token of a prompt may take on a slow CPU: by so much longer may a large step take before it counts as stuck.
CPU_SECONDS_PER_TOKEN = 0.01


class Executor(Protocol):
    """Runs plans in order. `num_blocks` includes the null block; at most `max_in_flight` plans may be uncollected, of a
    pipeline one more.
    """

    kv_layout: KVLayout
    num_blocks: int
    max_in_flight: int

    def submit(self, plan: StepPlan) -> None:
        """Start a step. On a device that runs ahead of the host this returns before the step is done."""

    def complete(self, step_id: int, masks: RowMasks | None) -> None:
        """Give the step submitted last the masks of its `late` rows, by rows of its plan; those without one may say
        anything. It goes on now, and no other may be submitted before.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight. Raises whatever made it fail; the step is then no longer in flight."""

    def runs_ahead(self) -> bool:
        """Whether a plan may be submitted that goes on from tokens which steps in flight have yet to sample."""

    def prepare(self) -> bool:
        """Do a piece of what later steps would have to wait for; whether there is more. Nothing may be in flight."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, by name, or a function with the worker as first argument; results by rank."""

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write every rank's weights for load_format="sharded_state", in files of about `max_size` bytes each."""

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone."""

    def shutdown(self) -> None:
        """End the workers and free what they hold. May be called twice."""


class TogetherExecutor(Executor, Protocol):
    """The executor of a copy of the engine that shares experts with others: all of them run their steps together."""

    def agree(self, tokens: int, busy: bool, calls: int) -> tuple[int, bool]:
        """As `distributed.exchange.Peers` says. Raises EngineDeadError if a copy is gone."""
