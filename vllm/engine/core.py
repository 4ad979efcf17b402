"""The core loop: a scheduler, an executor, and as many steps in flight between them as the device can hide."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.core.policies import AdmissionPolicy, DelayPolicy, PartialPrefillPolicy
from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.exceptions import EngineDeadError
from vllm.faults import Faults, broken_processor
from vllm.logger import init_logger
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.scheduler import SchedulerConfig
    from vllm.executor.base import Executor

logger = init_logger(__name__)

# Nothing can be planned and nothing is in flight, for example because a policy lets prompts gather: look again then.
IDLE_SECONDS = 0.001
# What a token of a prompt may take on a slow CPU: by so much longer may a large step take before it counts as stuck.
CPU_SECONDS_PER_TOKEN = 0.01


class EngineCore:
    """Runs requests to their end. Not thread-safe: one caller adds, aborts and steps.

    `executor` is for tests; by default it is made from the configuration, which loads the model.
    """

    def __init__(self, config: VllmConfig, executor: Executor | None = None) -> None:
        started = time.perf_counter()
        if executor is None:
            from vllm.executor import create_executor

            executor = create_executor(config)
        loaded = time.perf_counter()
        self._executor = executor
        self._faults = Faults.from_env()
        self._strict = envs.VLLM_STRICT
        self.num_blocks = executor.num_blocks
        self.scheduler = Scheduler(
            scheduler_limits(config.scheduler_config),
            executor.kv_layout,
            executor.num_blocks,
            enable_prefix_caching=config.cache_config.enable_prefix_caching,
            policies=admission_policies(config.scheduler_config),
        )
        self._seconds_per_token = CPU_SECONDS_PER_TOKEN if config.device_config.device == "cpu" else 0.0
        self.step_allowance = 0.0  # seconds that the size of the newest step explains
        self._submitted = 0  # steps handed to the executor whose results were not collected
        self._left_over: deque[CoreOutput] = deque()  # ends of requests that an interrupted step could not return
        self._death: str | None = None
        ready = time.perf_counter()
        logger.info("Engine core ready in %.2f s: weights and cache %.2f s", ready - started, loaded - started)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_requests(self, requests: Iterable[CoreRequest]) -> list[CoreOutput]:
        """Queue requests. Returns the ends of those that cannot be served."""
        self.check_alive()
        rejected = []
        for request in requests:
            if self._faults and self._faults.breaks_sampler(request.request_id):
                request.params.logits_processors = [broken_processor]
            try:
                self.scheduler.add(request)
            except ValueError as error:
                rejected.append(CoreOutput(request.request_id, [], finish_reason="error", error=str(error)))
        return rejected

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """End requests now and free what they hold; unknown ids are ignored."""
        return self.scheduler.abort(request_ids)

    def has_unfinished(self) -> bool:
        return bool(self._left_over) or self.scheduler.has_unfinished()

    def has_waiting(self) -> bool:
        """Whether a request waits for its first step, or for its next after a preemption."""
        return self.scheduler.num_waiting > 0

    @property
    def executor(self) -> Executor:
        """What runs the steps."""
        return self._executor

    @property
    def overlaps(self) -> bool:
        """Whether the device computes a step while the host does something else."""
        return self._executor.max_in_flight > 1

    # -- the loop ------------------------------------------------------------------------------------------------------

    def step(self) -> list[CoreOutput]:
        """Plan and submit what fits in flight, then take in the oldest result.

        If the device fails, the requests concerned are tried again one by one; those that fail alone end with an error.
        Raises EngineDeadError if the executor did not survive, from the next call on.
        """
        if self._left_over:
            outputs = list(self._left_over)
            self._left_over.clear()
            return outputs
        self.check_alive()
        try:
            return self._advance()
        except Exception as error:
            return self._failed(error)
        except BaseException as interrupt:  # Ctrl-C: leave nothing half done behind
            self._survives(interrupt)
            self._left_over.extend(self.scheduler.fail_all(f"interrupted by {type(interrupt).__name__}"))
            raise

    def begin(self) -> None:
        """Submit a first step of what is waiting, where steps run beside the host; `step` takes in its result."""
        if self._submitted or self._left_over or not self.overlaps:
            return
        self.check_alive()
        try:
            self._submit()
        except Exception as error:
            self._left_over.extend(self._failed(error))

    def _submit(self) -> bool:
        """Plan and submit a step; False if there is none to plan now."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.step_allowance = self._seconds_per_token * int(plan.num_tokens.sum())
        if self._faults:
            self._faults.before_forward()
        self._executor.submit(plan)
        self._submitted += 1
        self.scheduler.settle()
        return True

    def _failed(self, error: Exception) -> list[CoreOutput]:
        """What a failed step ends: nothing yet if its requests can be tried again alone, else everything."""
        logger.exception("A step failed")
        text = f"{type(error).__name__}: {error}"
        return self.scheduler.isolate(text) if self._survives(error) else self.scheduler.fail_all(text)

    def _advance(self) -> list[CoreOutput]:
        scheduler, executor = self.scheduler, self._executor
        while self._submitted < executor.max_in_flight and self._submit():
            pass
        if self._submitted == 0:
            if scheduler.has_unfinished():
                time.sleep(IDLE_SECONDS)
            return []
        self._submitted -= 1
        outputs = scheduler.apply(executor.collect())
        if self._submitted and not scheduler.has_unfinished():
            self._drain()
        return outputs

    def _drain(self) -> None:
        """Collect steps whose requests have all ended: their slots and blocks are then nobody's."""
        while self._submitted:
            self._submitted -= 1
            self.scheduler.apply(self._executor.collect())

    def _survives(self, error: BaseException) -> bool:
        """Collect and forget the steps in flight; whether the executor is still there."""
        while self._submitted and not isinstance(error, EngineDeadError):
            self._submitted -= 1
            with contextlib.suppress(Exception):
                self._executor.collect()
        self._submitted = 0
        try:
            self._executor.check_health()
        except Exception as unhealthy:
            logger.error("The executor did not survive: %s", unhealthy)
            self._death = f"{type(error).__name__}: {error}"
            return False
        return True

    def check_alive(self) -> None:
        """Raise EngineDeadError if the executor did not survive a step."""
        if self._death is not None:
            raise EngineDeadError(f"The engine core has ended after an error: {self._death}")

    # -- looking in ----------------------------------------------------------------------------------------------------

    def stats(self) -> CoreStats:
        return self.scheduler.stats()

    def idle_report(self) -> dict[str, int]:
        """What is still held; all zeros, but for `blocks_free` and `blocks_total` being equal, when nothing runs."""
        self.scheduler.check_invariants()
        return {
            "requests": len(self.scheduler.requests),
            "waiting": self.scheduler.num_waiting,
            "running": len(self.scheduler.running),
            "in_flight": self._submitted + self.scheduler.num_in_flight,
            "blocks_free": self.scheduler.kv.pool.num_free,
            "blocks_total": self.num_blocks - 1,
        }

    def check_idle(self) -> None:
        """With VLLM_STRICT=1 and nothing to do: RuntimeError, with all that is known as JSON, if anything is held."""
        if not self._strict or self.has_unfinished():
            return
        report: dict[str, Any] = self.idle_report()
        held = report["blocks_total"] - report["blocks_free"]
        if held or report["requests"] or report["waiting"] or report["running"] or report["in_flight"]:
            raise RuntimeError(f"The idle engine holds what it should not: {json.dumps(report)}")

    def describe(self) -> dict[str, Any]:
        """What a front end in another process cannot know by itself."""
        layout = self._executor.kv_layout
        return {
            "num_blocks": self.num_blocks,
            "block_size": layout.block_size,
            "bytes_per_block": layout.bytes_per_block,
            "max_in_flight": self._executor.max_in_flight,
        }

    def check_health(self) -> None:
        """Raise EngineDeadError if the executor is gone."""
        self.check_alive()
        self._executor.check_health()

    # -- control -------------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False if requests are running."""
        return self.scheduler.reset_prefix_cache()

    def start_profile(self) -> None:
        self._executor.collective_rpc("start_profile")

    def stop_profile(self) -> None:
        self._executor.collective_rpc("stop_profile")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker between two steps; results by rank."""
        self.check_alive()
        return self._executor.collective_rpc(method, timeout, args, kwargs)

    def shutdown(self) -> None:
        """End the workers and free the model. May be called twice."""
        self._executor.shutdown()


def scheduler_limits(config: SchedulerConfig) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        chunked_prefill=config.enable_chunked_prefill,
        priority=config.policy == "priority",
        chunk_threshold=config.long_prefill_token_threshold,
    )


def admission_policies(config: SchedulerConfig) -> list[AdmissionPolicy]:
    policies: list[AdmissionPolicy] = []
    if config.delay_factor > 0:
        policies.append(DelayPolicy(config.delay_factor))
    if config.max_num_partial_prefills > 1:
        policies.append(
            PartialPrefillPolicy(
                config.max_num_partial_prefills,
                config.max_long_partial_prefills,
                config.long_prefill_token_threshold or config.max_model_len,
            )
        )
    return policies
