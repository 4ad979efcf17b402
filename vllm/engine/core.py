"""The core loop: a scheduler, an executor, and as many steps in flight between them as the device can hide."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from msgspec.structs import replace

from vllm import envs
from vllm.config.scheduler import DEFAULT_SCHEDULER_CLASS
from vllm.core.policies import AdmissionPolicy, DelayPolicy, PartialPrefillPolicy
from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.engine.adapters import Adapters
from vllm.exceptions import EngineDeadError, VLLMValidationError, told
from vllm.executor.base import CPU_SECONDS_PER_TOKEN
from vllm.faults import Faults
from vllm.ipc.functions import named
from vllm.logger import init_logger
from vllm.reasoning import reasoning_end
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats
from vllm.step.plan import RowMasks, StepPlan
from vllm.structured_output.compiler import GrammarCompiler
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.requests import COMPLETE_EARLY, GrammarRequests, Masks, refusal
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.scheduler import SchedulerConfig
    from vllm.core.request import Request
    from vllm.engine.tokenizer import Tokenizer
    from vllm.executor.base import Executor, TogetherExecutor

logger = init_logger(__name__)

# Nothing can be planned and nothing is in flight, for example because a policy lets prompts gather: look again then.
IDLE_SECONDS = 0.001
COMPILING = "grammar"  # what a request waits for whose grammar is being compiled
# Nothing runs, and a grammar is being compiled: wait for it, but not so long that an abort goes unheard.
IDLE_GRAMMAR_SECONDS = 0.005
# Tokens that must follow are taken together where a step takes longer per row: they cost so much themselves.
JUMP_SECONDS = 1.5e-5


def scheduler_class(config: VllmConfig) -> type[Scheduler]:
    """The class that `scheduler_cls` names. Raises ValueError if it is no scheduler."""
    path = config.scheduler_config.scheduler_cls
    found: Any = Scheduler if path in (None, DEFAULT_SCHEDULER_CLASS) else named(path, "scheduler_cls")
    if not isinstance(found, type) or not issubclass(found, Scheduler):
        raise ValueError(f"scheduler_cls must name a subclass of {DEFAULT_SCHEDULER_CLASS}, got {path!r}.")
    return found


class EngineCore:
    """Runs requests to their end. Not thread-safe: one caller adds, aborts and steps.

    `executor` is for tests; by default it is made from the configuration, which loads the model.
    """

    def __init__(self, config: VllmConfig, executor: Executor | None = None) -> None:
        started = time.perf_counter()
        if executor is None:
            from vllm.executor import create_executor

            executor = create_executor(config)
        if getattr(executor, "must_be_led", False):
            executor.shutdown()
            raise ValueError(
                "The ranks of an engine that a launcher has started must be asked the same in the same order, as LLM "
                "and LLMEngine are by a program. AsyncLLMEngine is not: use distributed_executor_backend='mp' or 'ray'."
            )
        loaded = time.perf_counter()
        self._executor = executor = Faults.from_env().around(executor)
        self._strict = envs.VLLM_STRICT
        self.num_blocks = executor.num_blocks
        lora = config.lora_config
        self.adapters = None if lora is None else Adapters(executor, lora.max_loras, lora.host_adapters)
        policies = admission_policies(config.scheduler_config)
        self.scheduler = scheduler_class(config)(
            scheduler_limits(
                config.scheduler_config, config.model_config.logits_width, config.parallel_config.pipeline_parallel_size
            ),
            executor.kv_layout.policy,
            executor.num_blocks,
            enable_prefix_caching=config.cache_config.enable_prefix_caching,
            policies=policies if self.adapters is None else [*policies, self.adapters.slots],
            late_masks=executor.max_in_flight > 1,
            tier_blocks=executor.kv_layout.places_in(config.kv_offloading_bytes),
        )
        self._grammars = grammar_requests(config)
        self._pipelined = config.parallel_config.pipeline_parallel_size > 1
        self._seconds_per_token = CPU_SECONDS_PER_TOKEN if config.device_config.device == "cpu" else 0.0
        self.step_allowance = 0.0  # seconds that the size of the newest step explains
        self._late: tuple[int, list[int]] | None = None  # the newest step, and its rows that wait for masks
        self._together = cast("TogetherExecutor", executor) if config.parallel_config.shares_experts else None
        self._calls = self._followed = 0  # to work together, and those that came before a common end of work
        self.more_to_come = False  # requests of a call that was counted
        self._submitted = 0  # steps handed to the executor whose results were not collected
        self._left_over: deque[CoreOutput] = deque()  # ends of requests that an interrupted step could not return
        self._death: str | None = None
        ready = time.perf_counter()
        logger.info("Engine core ready in %.2f s: weights and cache %.2f s", ready - started, loaded - started)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_requests(self, requests: Iterable[CoreRequest], calls: int = 1) -> list[CoreOutput]:
        """Queue requests. Returns the ends of those that cannot be served.

        calls: of how many calls these are the first; copies that share experts count as many.
        """
        self.check_alive()
        self._calls += calls
        rejected = []
        for request in requests:
            rejected += self._queue(request)
        return rejected

    def _queue(self, request: CoreRequest) -> list[CoreOutput]:
        try:
            if request.lora_id and self.adapters is not None:
                self.adapters.check(request.lora_id, request.lora_path)
            self.scheduler.add(request)
        except ValueError as error:
            return [CoreOutput(request.request_id, [], finish_reason="error", error=str(error))]
        if request.grammar is not None:
            added = self.scheduler.requests[request.request_id]
            if not self._grammars.add(added, request.grammar, request.begins):
                self.scheduler.block(added.id, COMPILING)
        if request.lora_id and self.adapters is not None:
            self.adapters.want(request, self.scheduler)
        return []

    def check_grammars(self, specs: Iterable[GrammarSpec]) -> None:
        """Wait until these are compiled. Raises VLLMValidationError for the first that cannot be."""
        try:
            self._grammars.check(specs)
        except GrammarError as error:
            raise VLLMValidationError(refusal(error), parameter="guided_decoding") from error

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """End requests now and free what they hold; unknown ids are ignored. Nothing more is said of any of them."""
        request_ids = list(request_ids)
        if self._left_over:
            ended = set(request_ids)
            self._left_over = deque(output for output in self._left_over if output.request_id not in ended)
        if self._grammars:
            self._grammars.forget(request_ids)
        return self.scheduler.abort(request_ids)

    def request_ids(self) -> list[str]:
        """The requests that have not ended."""
        return list(self.scheduler.requests)

    def has_unfinished(self) -> bool:
        return bool(self._left_over) or self.scheduler.has_unfinished()

    def has_work(self) -> bool:
        """Whether `step` should be called: for a request of this core's, for a step that was left in flight when the
        last one left, or for others' requests, which need experts from here.
        """
        if self._together is None:
            return self.has_unfinished() or self._submitted > 0
        return self.has_unfinished() or self._calls > self._followed

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
            self._left_over.extend(self._fail_all(f"interrupted by {type(interrupt).__name__}"))
            raise

    def prepare(self) -> bool:
        """With nothing to do, let the executor do a piece of what later steps would wait for; whether there is more."""
        if self.has_work() or self._submitted:
            return False
        try:
            return self._executor.prepare()
        except Exception:
            logger.exception("Preparing later steps failed; they will do without")
            return False

    def begin(self) -> None:
        """Submit a first step of what is waiting, where steps run beside the host, of a pipeline one for each stage.
        `step` takes in the results.
        """
        if self._submitted or self._left_over or not self.overlaps:
            return
        self.check_alive()
        try:
            if self._pipelined:
                self._fill()
            else:
                self._submit()
        except Exception as error:
            self._left_over.extend(self._failed(error))

    def _submit(self) -> bool:
        """Plan and submit a step; False if there is none to plan now."""
        planned = self._plan(self.scheduler.schedule)
        if planned is not None:
            self._start(*planned)
        return planned is not None

    def _plan(self, schedule: Callable[..., StepPlan | None]) -> tuple[StepPlan, dict[str, str]] | None:
        """A step, and why some of its requests cannot go on; None if there is none to plan now.

        schedule: the scheduler's way to make one.
        """
        errors: dict[str, str] = {}

        def masks(requests: list[Request], sample: list[bool]) -> dict[str, Any]:
            """Those of the rows that have a grammar. Rows whose newest tokens are still in flight are only named: their
            masks come late.
            """
            nonlocal errors
            rows = self._grammars.rows(requests, sample)
            late = [row for row in rows if requests[row].num_pending > 1] if self.overlaps else []
            known = [row for row in rows if requests[row].num_pending <= 1] if late else rows
            found = self._grammars.masks(requests, known)
            errors = found.errors
            said: dict[str, Any] = {"masks": _row_masks(found)}
            if late:
                said["late"] = np.zeros(len(requests), bool)
                said["late"][late] = True
            return said

        grammars, scheduler = self._grammars, self.scheduler
        scheduler.paused = grammars.paused(scheduler.running, len(scheduler.requests)) if grammars else ()
        plan = schedule(masks if grammars else None)
        if self._together is not None:
            tokens = 0 if plan is None else self.scheduler.planned_tokens
            tokens, go_on = self._together.agree(tokens, self.has_unfinished() or self.more_to_come, self._calls)
            if not go_on:
                self._followed = self._calls
            if tokens:
                plan = replace(plan or self.scheduler.empty_plan(), exchanged=tokens)
        return None if plan is None else (plan, errors)

    def _start(self, plan: StepPlan, errors: dict[str, str]) -> None:
        """Submit a step."""
        self.step_allowance = self._seconds_per_token * max(plan.exchanged, self.scheduler.planned_tokens)
        self._executor.submit(plan)
        self._submitted += 1
        if plan.late is not None:
            self._late = (plan.step_id, plan.late.nonzero()[0].tolist())
        self._refuse(errors)
        self.scheduler.settle()

    def _complete(self, step_id: int, late: list[int]) -> None:
        """Give the newest step the masks that need the tokens just taken in. Requests that have ended get none."""
        self._late = None
        masks = self._grammars.masks(self.scheduler.planned, late)
        self._executor.complete(step_id, _row_masks(masks))
        self._refuse(masks.errors)

    def _refuse(self, errors: dict[str, str]) -> None:
        """These requests cannot go on; they end with the next step."""
        for request_id, error in errors.items():
            self._left_over += self._ended(self.scheduler.refuse([request_id], f"Guided decoding failed: {error}"))

    def _jump(self, outputs: list[CoreOutput]) -> list[CoreOutput]:
        """`outputs`, with the tokens that must follow them: none of these needs a step of its own."""
        pays = self.scheduler.step_seconds > JUMP_SECONDS * len(outputs)
        for output, tokens in self._grammars.advance(outputs, self.scheduler.requests, pays):
            self.scheduler.extend(output, tokens)
        return outputs

    def _admit_compiled(self) -> list[CoreOutput]:
        """Let the requests go whose grammars are ready; returns the ends of those that have none."""
        idle = not self._submitted and self.scheduler.all_blocked
        found = self._grammars.ready(IDLE_GRAMMAR_SECONDS if idle else 0.0)
        ends = [end for i, error in found.refused.items() for end in self.scheduler.refuse([i], error)]
        ends += [end for i, error in found.late.items() for end in self.scheduler.refuse([i], error, at_fault=False)]
        for request_id in found.begin:
            self.scheduler.unblock(request_id, COMPILING)
        return ends

    def _ended(self, outputs: list[CoreOutput]) -> list[CoreOutput]:
        """`outputs`, after the grammars of the requests that end with them were forgotten."""
        if self._grammars:
            ended = [output for output in outputs if output.finish_reason is not None]
            for output in ended:
                if output.finish_reason == "stop" and self._grammars.stopped_early(output.request_id):
                    output.stop_reason = COMPLETE_EARLY
            self._grammars.forget(output.request_id for output in ended)
        return outputs

    def _fail_all(self, text: str) -> list[CoreOutput]:
        self._grammars.forget_all()
        return self.scheduler.fail_all(text)

    def _failed(self, error: Exception) -> list[CoreOutput]:
        """What a failed step ends: nothing yet if its requests can be tried again alone, else everything."""
        logger.exception("A step failed")
        text = told(error)
        return self._ended(self.scheduler.isolate(text)) if self._survives(error) else self._fail_all(text)

    def _advance(self) -> list[CoreOutput]:
        scheduler, executor = self.scheduler, self._executor
        if self._grammars.num_waiting and (ends := self._admit_compiled()):
            return ends
        if self.adapters is not None and self.adapters.busy:
            failed = self.adapters.advance(scheduler)
            if failed:
                return self._ended(failed)
        self._fill()
        if self._submitted == 0:
            if self.has_work():
                time.sleep(IDLE_SECONDS)
            return []
        # The first stage goes on from the tokens of the oldest step: it shall know how before they are here.
        runs_ahead = self._pipelined and executor.runs_ahead()
        ahead = self._plan(scheduler.schedule_ahead) if runs_ahead or (self._pipelined and self._is_full) else None
        if ahead is not None and runs_ahead:
            self._start(*ahead)
            ahead = None
        self._submitted -= 1
        result = executor.collect()
        failure: Exception | None = None
        if ahead is not None:
            try:
                self._start(*ahead)
            except Exception as error:
                failure = error
        outputs = scheduler.apply(result)
        if self._grammars:
            outputs = self._ended(outputs if self.overlaps else self._jump(outputs))
        if failure is not None:
            return outputs + self._failed(failure)
        if self._late is not None:
            try:
                self._complete(*self._late)
                self._submit()  # before anybody looks at the outputs: what the device does now is soon done
            except Exception as error:
                self._left_over.extend(self._failed(error))
        if self._submitted and not scheduler.has_unfinished():
            self._drain()
        if self._pipelined:  # a stage waits for the tokens just taken in: no time for what becomes of them first
            try:
                self._fill()
            except Exception as error:
                outputs += self._failed(error)
        return outputs

    def _fill(self) -> None:
        """Submit as many steps as may be in flight."""
        while self._late is None and not self._is_full and self._submit():
            pass

    @property
    def _is_full(self) -> bool:
        """Whether no further step may be in flight."""
        return self._submitted >= self._executor.max_in_flight

    def _drain(self) -> None:
        """Collect steps whose requests have all ended: their slots and blocks are then nobody's."""
        if self._late is not None:
            self._complete(*self._late)
        while self._submitted:
            self._submitted -= 1
            self.scheduler.apply(self._executor.collect())

    def _survives(self, error: BaseException) -> bool:
        """Collect and forget the steps in flight; whether the executor is still there."""
        self._late = None
        while self._submitted and not isinstance(error, EngineDeadError):
            self._submitted -= 1
            with contextlib.suppress(Exception):
                self._executor.collect()
        self._submitted = 0
        try:
            self._executor.check_health()
        except Exception as unhealthy:
            logger.error("The executor did not survive: %s", told(unhealthy))
            self._death = told(error)
            return False
        return True

    def check_alive(self) -> None:
        """Raise EngineDeadError if the executor did not survive a step."""
        if self._death is not None:
            raise EngineDeadError(f"The engine core has ended after an error: {self._death}")

    # -- looking in ----------------------------------------------------------------------------------------------------

    def stats(self) -> CoreStats:
        stats = self.scheduler.stats()
        if self.adapters is not None:
            stats.running_adapters = sorted(self.adapters.slots.running)
            stats.waiting_adapters = self.adapters.waiting()
        return stats

    def idle_report(self) -> dict[str, int]:
        """What is still held; all zeros, but for `blocks_free` and `blocks_total` being equal, when nothing runs."""
        self.scheduler.check_invariants()
        return {
            "requests": len(self.scheduler.requests),
            "waiting": self.scheduler.num_waiting,
            "grammars": len(self._grammars),
            "running": len(self.scheduler.running),
            "in_flight": max(self._submitted, self.scheduler.num_in_flight),
            "blocks_free": self.scheduler.kv.pool.num_free,
            "blocks_total": self.num_blocks - 1,
        }

    def check_idle(self) -> None:
        """With VLLM_STRICT=1 and nothing to do: RuntimeError, with all that is known as JSON, if anything is held."""
        if not self._strict or self.has_unfinished():
            return
        report: dict[str, Any] = self.idle_report()
        held = report["blocks_total"] - report["blocks_free"]
        if (
            held
            or report["requests"]
            or report["waiting"]
            or report["running"]
            or report["in_flight"]
            or report["grammars"]
        ):
            raise RuntimeError(f"The idle engine holds what it should not: {json.dumps(report)}")

    def describe(self) -> dict[str, Any]:
        """What a front end in another process cannot know by itself."""
        layout = self._executor.kv_layout
        return {
            "num_blocks": self.num_blocks,
            "block_size": layout.block_size,
            "bytes_per_block": layout.bytes_per_block,
            "max_in_flight": self._executor.max_in_flight,
            "keeps_nothing": not layout.groups,
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

    def _known_adapters(self) -> Adapters:
        if self.adapters is None:
            raise ValueError("LoRA is not enabled: set enable_lora=True (--enable-lora).")
        return self.adapters

    def begin_adapter(self, adapter_id: int, folder: str) -> None:
        """Begin to read a LoRA adapter; `adapter_state` tells what became of it."""
        adapters = self._known_adapters()
        adapters.add(adapter_id, folder)
        self._left_over.extend(self._ended(adapters.advance(self.scheduler)))

    def adapter_state(self, adapter_id: int) -> str:
        """ "ready", "loading", "unknown", or why the adapter cannot be used (told once)."""
        adapters = self._known_adapters()
        if adapters.busy:
            self._left_over.extend(self._ended(adapters.advance(self.scheduler)))
        return adapters.state(adapter_id)

    def remove_lora(self, adapter_id: int) -> bool:
        """Forget an adapter once its requests have ended; False if it is not loaded."""
        adapters = self._known_adapters()
        is_known = adapters.remove(adapter_id)
        if adapters.busy:
            self._left_over.extend(self._ended(adapters.advance(self.scheduler)))
        return is_known

    def pin_lora(self, adapter_id: int) -> bool:
        """Keep a loaded adapter where it is. Raises ValueError if it cannot be."""
        return self._known_adapters().pin(adapter_id)

    def list_loras(self) -> list[int]:
        """The adapters in host memory."""
        return self._known_adapters().ids()

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
        self._grammars.close()
        self._executor.shutdown()


def _row_masks(masks: Masks) -> RowMasks | None:
    return RowMasks(masks.rows, masks.bits) if len(masks.rows) else None


def grammar_requests(config: VllmConfig) -> GrammarRequests:
    """Structured output for the model; tokenizer and libraries are loaded when the first request needs them."""
    model, decoding = config.model_config, config.decoding_config

    @cache
    def tokenizer() -> Tokenizer:
        from vllm.engine.tokenizer_files import load_tokenizer

        return load_tokenizer(model.tokenizer_path, model.tokenizer_mode, model.trust_remote_code)

    compiler = GrammarCompiler(lambda: vocabulary_of(tokenizer(), model.logits_width))
    if decoding.backend_name != "auto":
        compiler.warm(decoding.backend_name)
    name = decoding.reasoning_backend
    if not name or decoding.enable_in_reasoning:
        return GrammarRequests(compiler)
    return GrammarRequests(compiler, lambda: reasoning_end(name, tokenizer()))


def scheduler_limits(config: SchedulerConfig, vocab_size: int, stages: int = 1) -> SchedulerLimits:
    """vocab_size: of the logits.   stages: of the pipeline, each of which has work when others have."""
    return SchedulerLimits(
        max_num_seqs=stages * config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        chunked_prefill=config.enable_chunked_prefill,
        priority=config.policy == "priority",
        chunk_threshold=config.long_prefill_token_threshold,
        num_drafts=config.num_drafts,
        max_pending=1 if stages > 1 else None,
        stages=stages,
        max_gap=config.max_token_gap / 1000,
        vocab_size=vocab_size,
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
