"""Faults on purpose, for tests of survival: switched on by VLLM_FAULTS only, and then announced loudly.

VLLM_FAULTS is a comma-separated list of `point@where` or `point@where:number`:

    forward.raise@K       the K-th step raises            forward.sleep@K:S   the K-th step takes S seconds longer
    forward.nan_row@K     one row's logits of step K are NaN                  alloc.oom@K   step K finds no memory
    forward.logits@K:V    all logits of step K are V: nan, inf, -inf          forward.logit@K:V   one of each row is
    sampler.raise@ID      sampling raises for the request whose id contains ID
    tokenizer.raise@ID    tokenizing raises for it        tokenizer.sleep@ID:S   tokenizing it takes S seconds longer
    detok.raise@ID        detokenizing raises for it      ipc.drop@K   the core ends in place of its K-th message

Nothing in the engine asks for faults: they are put around its parts where these are put together, or are data that the
parts are given.
"""

from __future__ import annotations

import math
import os
import socket
import time
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import msgspec

from vllm import envs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.engine.preparation import Preparation
    from vllm.engine.processed import CheckedParams, ProcessedRequest, RequestInput
    from vllm.executor.base import Executor
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models.traits import Model
    from vllm.sampling_params import SamplingParams
    from vllm.step.plan import SlotInit, StepPlan

logger = init_logger(__name__)

STEP_POINTS = frozenset(
    {
        *("forward.raise", "forward.sleep", "forward.nan_row", "forward.logits", "forward.logit"),
        *("alloc.oom", "ipc.drop"),
    }
)
LOGITS_POINTS = frozenset({"forward.nan_row", "forward.logits", "forward.logit"})
REQUEST_POINTS = frozenset({"sampler.raise", "tokenizer.raise", "tokenizer.sleep", "detok.raise"})


class InjectedFault(RuntimeError):
    """An error that VLLM_FAULTS asked for."""


@dataclass(slots=True)
class Faults:
    """The faults of this process; empty (and false) unless VLLM_FAULTS is set."""

    steps: dict[tuple[str, int], float] = field(default_factory=dict)
    requests: list[tuple[str, str, float]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_env(cls) -> Faults:
        """Read VLLM_FAULTS. Raises ValueError for an entry that names no fault point."""
        faults = cls()
        text = envs.VLLM_FAULTS
        for entry in filter(None, (part.strip() for part in text.split(","))):
            point, _, where = entry.partition("@")
            where, _, number = where.partition(":")
            if point in STEP_POINTS and where.isdigit():
                faults.steps[point, int(where)] = float(number or 0)
            elif point in REQUEST_POINTS and where:
                faults.requests.append((point, where, float(number or 0)))
            else:
                raise ValueError(
                    f"VLLM_FAULTS has {entry!r}; expected point@number or point@request for one of "
                    f"{', '.join(sorted(STEP_POINTS | REQUEST_POINTS))}."
                )
        if faults:
            _announce(text)
        return faults

    def __bool__(self) -> bool:
        return bool(self.steps or self.requests)

    def due(self, point: str) -> float | None:
        """Count one passage of a step point; the fault's number if this is the one, else None."""
        count = self.counts[point] = self.counts.get(point, 0) + 1
        return self.steps.get((point, count))

    @property
    def spoils_logits(self) -> bool:
        """Whether some step's logits are to be changed."""
        return any(point in LOGITS_POINTS for point, _ in self.steps)

    def around(self, executor: Executor) -> Executor:
        """The executor, with the faults of steps and of sampling around it; itself if there are none."""
        return FaultyExecutor(executor, self) if self else executor

    def around_model(self, model: Model) -> Model:
        """The model, with the faults of logits around it; itself if there are none."""
        return cast("Model", SpoiledModel(model, self)) if self.spoils_logits else model

    def around_preparation(self, preparation: Preparation) -> Preparation:
        """What makes requests ready, with the faults of tokenizers around it; itself if there are none."""
        return cast("Preparation", FaultyPreparation(preparation, self)) if self.requests else preparation

    def around_connection(self, connection: socket.socket) -> socket.socket:
        """A core's socket, with the end of its process around it; itself if there is none."""
        drops = any(point == "ipc.drop" for point, _ in self.steps)
        return cast(socket.socket, FaultyConnection(connection, self)) if drops else connection

    def before_forward(self) -> None:
        """Raise or sleep if this step is the one."""
        if self.due("alloc.oom") is not None:
            raise MemoryError("out of memory (injected)")
        seconds = self.due("forward.sleep")
        if seconds is not None:
            time.sleep(seconds)
        if self.due("forward.raise") is not None:
            raise InjectedFault("forward pass failed (injected)")

    def spoil(self, logits: Tensor) -> None:
        """Change the logits of this step, in place, if it is the one. logits: [rows, vocab]."""
        if self.due("forward.nan_row") is not None:
            logits[0] = math.nan
        value = self.due("forward.logits")
        if value is not None:
            logits[:] = value
        value = self.due("forward.logit")
        if value is not None:
            logits[:, logits.shape[1] // 2] = value

    def on_request(self, point: str, request_id: str) -> None:
        """Raise or sleep if this request is the one."""
        for name, part, seconds in self.requests:
            if name.startswith(point) and part in request_id:
                if name.endswith(".sleep"):
                    time.sleep(seconds)
                else:
                    raise InjectedFault(f"{point} failed for this request (injected)")

    def breaks(self, point: str, request_id: str) -> bool:
        """Whether this shall raise for this request."""
        return any(name == f"{point}.raise" and part in request_id for name, part, _ in self.requests)


@lru_cache(maxsize=8)
def _announce(text: str) -> None:
    """Once per process, however many parts of it read the variable."""
    logger.warning("VLLM_FAULTS is set: this process will fail on purpose (%s).", text)


def broken_processor(token_ids: Any, logits: Any) -> Any:
    """A logits processor that raises, so that a sampler fault takes the way of a user's own faulty processor."""
    raise InjectedFault("the sampler failed for this request (injected)")


class SpoiledModel:
    """A model whose logits are no numbers in some steps, wherever they go from there. Its steps are not alike, which
    its traits say, so that none is captured, and nobody computes its logits from its weights.
    """

    def __init__(self, model: Model, faults: Faults) -> None:
        self._model, self._faults = model, faults
        self.traits = replace(model.traits, replayable=False, capturable=False, decoder=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *inputs: Any) -> Tensor:
        return self._model(*inputs)

    def logits(self, *inputs: Any) -> Tensor:
        """The model's, changed if this step is the one."""
        logits = self._model.logits(*inputs)
        self._faults.spoil(logits)
        return logits


class FaultyExecutor:
    """An executor that fails on purpose. What is before and behind it takes the path that it always takes."""

    def __init__(self, executor: Executor, faults: Faults) -> None:
        self._executor, self._faults = executor, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> None:
        """Raise or sleep first if this step is the one."""
        self._faults.before_forward()
        self._executor.submit(
            msgspec.structs.replace(plan, new=tuple(map(self._broken, plan.new))) if plan.new else plan
        )

    def _broken(self, init: SlotInit) -> SlotInit:
        """With a processor that raises, if sampling shall fail for this request."""
        if not self._faults.breaks("sampler", init.request_id):
            return init
        params = copy(init.params)
        params.logits_processors = [broken_processor]  # type: ignore[union-attr] # requests that are pooled never sample
        return init._replace(params=params)


class FaultyPreparation:
    """Tokenizing raises or takes long for some requests, and some get a tokenizer that makes no text of tokens."""

    def __init__(self, preparation: Preparation, faults: Faults) -> None:
        self._preparation, self._faults = preparation, faults

    async def tokenized(self, request: RequestInput, deadline: float | None) -> RequestInput:
        """Raise or sleep first, in a thread as tokenizing would, if this request is the one."""
        await self._preparation.beside(deadline, self._faults.on_request, "tokenizer", request.request_id)
        return await self._preparation.tokenized(request, deadline)

    async def checked(self, params: SamplingParams, lora_request: LoRARequest | None) -> CheckedParams:
        """As ever."""
        return await self._preparation.checked(params, lora_request)

    async def processed(self, request: RequestInput, deadline: float | None) -> ProcessedRequest:
        """With a tokenizer of its own, if detokenizing shall fail for this request."""
        processed = await self._preparation.processed(request, deadline)
        if not self._faults.breaks("detok", request.request_id):
            return processed
        tokenizer = processed.tokenizer or self._preparation.tokenizer
        return processed._replace(tokenizer=cast("Any", MuteTokenizer(tokenizer)))


class MuteTokenizer:
    """A tokenizer, none of whose tokens becomes text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def stream(self, *options: Any) -> Any:
        """A stream that raises for its first token."""
        return MuteStream()


class MuteStream:
    """A text that no token is added to."""

    def feed(self, token: int) -> str:
        """Raises."""
        raise InjectedFault(f"detokenizing {token} failed for this request (injected)")

    def finish(self) -> str:
        """Nothing."""
        return ""


class FaultyConnection:
    """A core's socket; instead of a message, the core ends."""

    def __init__(self, connection: socket.socket, faults: Faults) -> None:
        self._connection, self._faults = connection, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendall(self, data: bytes) -> None:
        """End without a word if this message is the one."""
        if self._faults.due("ipc.drop") is not None:
            os._exit(1)
        self._connection.sendall(data)
