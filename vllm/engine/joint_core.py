"""One core for the ranks of an engine that a launcher has started, each of which runs the whole program.

Every rank's front end is asked the same by its program. The first rank has the core: what it answers, all answer. So
nothing that a rank finds for itself (what steps take, when a grammar was compiled or an adapter read) can make it go
another way than the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace

from vllm.engine.core import EngineCore
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.ipc import codec
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.executor.base import Executor
    from vllm.executor.external_launcher import ExternalLauncherExecutor

# What all ranks ask together. Everything else each may ask by itself.
_TOGETHER = frozenset(
    {
        "check_grammars", "abort", "has_unfinished", "reset_prefix_cache", "start_profile", "stop_profile", "describe",
        "begin_adapter", "adapter_state", "remove_lora", "pin_lora", "list_loras",
    }
)  # fmt: skip
_OUTPUTS = frozenset({"add_requests", "step", "abort"})  # calls that answer with these
_ERRORS = {kind.__name__: kind for kind in (VLLMValidationError, EngineDeadError, ValueError, TypeError)}


class Answer(msgspec.Struct, array_like=True, omit_defaults=True):
    """What the first rank's core has answered. number, call: to which call.   about: see `_about`.   error: the name of
    its class and its text.
    """

    number: int
    call: str
    about: int = 0
    outputs: list[CoreOutput] = []
    value: Any = None
    stats: CoreStats | None = None
    error: tuple[str, str] | None = None


_decode: Callable[[bytes], Answer] = codec.decoder(Answer).decode


def core_for(config: VllmConfig, executor_class: Callable[[VllmConfig], Executor] | None = None) -> EngineCore:
    """The core of a front end in this process."""
    if config.parallel_config.distributed_executor_backend not in (None, "uni", "mp", "ray"):
        from vllm.executor import create_executor

        executor_class = executor_class or create_executor
    if executor_class is None:
        return EngineCore(config)
    executor = executor_class(config)
    if getattr(executor, "must_be_led", False):
        return cast("EngineCore", JointCore(config, cast("ExternalLauncherExecutor", executor)))
    return EngineCore(config, executor)


class JointCore:
    """What a front end sees of the core, as of an `EngineCore` of its own."""

    overlaps = False

    def __init__(self, config: VllmConfig, executor: ExternalLauncherExecutor) -> None:
        self.executor = executor
        self._core = EngineCore(config, cast("Executor", executor.of_all_ranks())) if executor.is_first else None
        self._calls = 0
        self._stats = CoreStats()

    def __getattr__(self, name: str) -> Any:
        if name in _TOGETHER:
            return partial(self._ask, name)
        raise AttributeError(name)

    def add_requests(self, requests: Iterable[CoreRequest]) -> list[CoreOutput]:
        """As `EngineCore` does. Raises ValueError on a rank that was given other requests than the first."""
        requests = list(requests)
        outputs: list[CoreOutput] = self._ask("add_requests", requests, about=_about(requests))
        return outputs

    def begin(self) -> None:
        """Nothing: steps do not run beside the host."""

    def step(self) -> list[CoreOutput]:
        """As `EngineCore` does."""
        outputs: list[CoreOutput] = self._ask("step")
        return outputs

    def stats(self) -> CoreStats:
        """As of the last step."""
        found = self._stats
        self._stats = replace(found, prompt_tokens=0, generation_tokens=0)
        return found

    def check_health(self) -> None:
        """Raise EngineDeadError if the executor is gone."""
        (self._core or self.executor).check_health()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of this rank's worker."""
        return self.executor.collective_rpc(method, timeout, args, kwargs)

    def shutdown(self) -> None:
        """End this rank's worker."""
        (self._core or self.executor).shutdown()

    def _ask(self, call: str, *args: Any, about: int = 0) -> Any:
        """What the first rank's core answers; on the others, after they have done their part of it."""
        self._calls += 1
        answer = self._heard(call, about) if self._core is None else self._said(self._core, call, args, about)
        if answer.stats is not None:
            answer.stats.prompt_tokens += self._stats.prompt_tokens
            answer.stats.generation_tokens += self._stats.generation_tokens
            self._stats = answer.stats
        return answer.outputs if call in _OUTPUTS else answer.value

    def _said(self, core: EngineCore, call: str, args: Sequence[Any], about: int) -> Answer:
        answer = Answer(self._calls, call, about)
        try:
            found = getattr(core, call)(*args)
            if call in _OUTPUTS:
                answer.outputs = found
            else:
                answer.value = found
            if call == "step":
                answer.stats = core.stats()
        except BaseException as error:  # an interrupt, too: the others wait
            answer.error = type(error).__name__, getattr(error, "reason", str(error))
            raise
        finally:
            with suppress(EngineDeadError):  # the next step will tell
                self.executor.say(codec.encode(answer))
        return answer

    def _heard(self, call: str, about: int) -> Answer:
        while (answer := _decode(self.executor.follow())).number < self._calls:
            pass  # a call that an interrupt has ended here
        if answer.number > self._calls or answer.call != call:
            raise EngineDeadError(
                f"This rank asks its engine to {call}, the first one to {answer.call}: every rank's program must make "
                "the same calls in the same order."
            )
        if answer.error is not None:
            name, text = answer.error
            raise _ERRORS.get(name, RuntimeError)(text)
        if answer.about != about:
            raise ValueError("This rank was given other requests than the first one of its engine: all must be alike.")
        return answer


def _about(requests: Sequence[CoreRequest]) -> int:
    """What tells requests from others."""
    return zlib.crc32(codec.encode([(request.request_id, request.prompt_token_ids) for request in requests]))
