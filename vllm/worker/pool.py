"""Requests that are pooled: from the hidden states of their tokens to one vector (or one per token), chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from vllm.pooling_params import PoolingParams
from vllm.step.plan import SlotInit


class PoolingKind(Enum):
    """Which hidden states count: the last token's, the first token's, the mean of all, or each for itself."""

    LAST = "LAST"
    CLS = "CLS"
    MEAN = "MEAN"
    ALL = "ALL"


@dataclass(slots=True)
class _Pooled:
    """One request: how many of its tokens were seen, and what was kept of them."""

    params: PoolingParams
    seen: int = 0
    total: Tensor | None = None  # [hidden] fp32, of MEAN
    parts: list[Tensor] = field(default_factory=list)


class Pooler:
    """How a model pools, and what it has seen of the requests in their slots.

    head: what the model makes of pooled states, [rows, hidden] -> [rows, outputs]; None to leave them as they are.
    normalize: to length 1, after a cut to the `dimensions` that a request asks for.   softmax: over the head's outputs.
    """

    def __init__(
        self,
        kind: PoolingKind,
        *,
        normalize: bool = False,
        softmax: bool = False,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._kind, self._normalize, self._softmax, self._head = kind, normalize, softmax, head
        self._requests: dict[int, _Pooled] = {}

    def enter(self, new: Sequence[SlotInit]) -> None:
        """Take in the requests among these that are pooled; they begin anew."""
        for init in new:
            self._requests.pop(init.slot, None)
            if isinstance(init.params, PoolingParams):
                if init.num_computed and self._kind is not PoolingKind.LAST:
                    raise ValueError(f"{self._kind.name} pools every token: a request cannot begin behind a prefix.")
                self._requests[init.slot] = _Pooled(init.params, init.num_computed)

    def leave(self, slots: Sequence[int]) -> None:
        """Forget requests that left their slots."""
        for slot in slots:
            self._requests.pop(slot, None)

    def wanted(self, start: int, end: int, total: int) -> range:
        """Positions, of the tokens `start` to `end` of a prompt of `total`, whose hidden states count."""
        if self._kind is PoolingKind.LAST:
            return range(total - 1, end)
        return range(start, min(end, 1)) if self._kind is PoolingKind.CLS else range(start, end)

    def add(self, slot: int, start: int, end: int, total: int, hidden: Tensor) -> Tensor | None:
        """Take in the wanted states of a chunk, in order; what the request comes to if it was its last chunk, fp32.

        hidden: [len(wanted), hidden].   Returns [outputs], for ALL [total, outputs].
        """
        request = self._requests.get(slot)
        if request is None:
            raise ValueError(f"Slot {slot} holds no request that is pooled.")
        if start != request.seen:
            raise ValueError(f"Tokens from {start} on are pooled where {request.seen} was due.")
        request.seen = end
        states = hidden.float()
        if self._kind is PoolingKind.MEAN:
            sums = states.sum(0)
            request.total = sums if request.total is None else request.total + sums
        elif len(states):
            request.parts.append(states)
        if end < total:
            return None
        return self._result(request, total)

    def _result(self, request: _Pooled, total: int) -> Tensor:
        states = torch.cat(request.parts) if request.total is None else request.total[None] / total
        request.total, request.parts = None, []
        if self._head is not None:
            states = self._head(states).float()
        if request.params.dimensions is not None:
            states = states[:, : request.params.dimensions]
        if self._normalize:
            states = torch.nn.functional.normalize(states, dim=-1)
        if self._softmax:
            states = states.softmax(-1)
        return states if self._kind is PoolingKind.ALL else states[0]
