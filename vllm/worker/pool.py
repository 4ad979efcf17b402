"""Requests that are pooled: from the hidden states of their tokens to one vector (or one per token).

Prompts that are computed in one step, which most are, are pooled together, without a word from the host; those that
come chunk by chunk one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.pooling_params import PoolingParams
from vllm.step.plan import SlotInit, StepPlan

_NEVER = np.iinfo(np.int64).max


class PoolingKind(Enum):
    """Which hidden states count: the last token's, the first token's, the mean of all, each for itself, or those of the
    tokens that end a step, each for itself.
    """

    LAST = "LAST"
    CLS = "CLS"
    MEAN = "MEAN"
    ALL = "ALL"
    STEP = "STEP"

    @property
    def gives_many(self) -> bool:
        """Whether the result has a row for each of several tokens."""
        return self in (PoolingKind.ALL, PoolingKind.STEP)


class PooledChunk(NamedTuple):
    """Tokens `start` to `end` of a prompt of `total`, of which `rows` states stand from row `first` on.

    A request of several prompts is one chunk, of all of them.
    """

    plan_row: int
    slot: int
    first: int
    rows: int
    start: int
    end: int
    total: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end == self.total


@dataclass(frozen=True, slots=True)
class PooledRun:
    """Results of rows of the plan, in one tensor: fp32 [rows, outputs], or with `lengths` [sum of them, outputs]."""

    plan_rows: list[int]
    values: Tensor
    lengths: list[int] | None = None

    def parts(self, found: np.ndarray) -> Iterator[np.ndarray]:
        """Each row's part of the values, which are on the host."""
        if self.lengths is None:
            yield from found
            return
        ends: np.ndarray = np.cumsum(self.lengths)
        yield from np.split(found, ends[:-1])


@dataclass(slots=True)
class _Request:
    """One request: how many of its tokens were seen, and what was kept of them.

    tags: of STEP, the positions of the tokens that end a step.
    parts: of a request of several prompts [prompts, 2] int64, each one's tokens and where its second text begins or -1.
    """

    params: PoolingParams
    parts: np.ndarray | None = None
    seen: int = 0
    total: Tensor | None = None  # [hidden] fp32, of MEAN
    pieces: list[Tensor] = field(default_factory=list)
    tags: np.ndarray | None = None


class Pooler:
    """How a model pools, and what it has seen of the requests in their slots.

    head: what the model makes of pooled states, [rows, hidden] -> [rows, outputs], both fp32; None to leave them.
    normalize: to length 1, after a cut to the `dimensions` that a request asks for.
    activation: of the outputs: "softmax", "sigmoid" or "none".   step_tag: for STEP, the token that ends a step.
    takes_types: the model wants to know which text of a pair each token belongs to.
    """

    def __init__(
        self,
        kind: PoolingKind,
        *,
        normalize: bool = False,
        activation: str = "none",
        head: Callable[[Tensor], Tensor] | None = None,
        step_tag: int | None = None,
        takes_types: bool = False,
    ) -> None:
        if activation not in ("softmax", "sigmoid", "none"):
            raise ValueError(f'activation is {activation!r}, expected "softmax", "sigmoid" or "none".')
        if kind is PoolingKind.STEP and step_tag is None:
            raise ValueError("Pooling of kind STEP needs the token that ends a step.")
        self._kind, self._normalize, self._activation, self._head = kind, normalize, activation, head
        self._step_tag, self._takes_types = step_tag, takes_types
        self._requests: dict[int, _Request] = {}

    def enter(self, new: Sequence[SlotInit]) -> None:
        """Take in the requests among these that are pooled; they begin anew."""
        for init in new:
            self._requests.pop(init.slot, None)
            if isinstance(init.params, PoolingParams):
                if init.num_computed and self._kind is not PoolingKind.LAST:
                    raise ValueError(f"{self._kind.name} pools every token: a request cannot begin behind a prefix.")
                parts = np.array(init.parts, np.int64) if init.parts else None
                if parts is not None and self._kind.gives_many:
                    raise ValueError(f"{self._kind.name} gives several rows for a prompt: each needs its own request.")
                request = self._requests[init.slot] = _Request(init.params, parts, init.num_computed)
                if self._kind is PoolingKind.STEP:
                    request.tags = np.flatnonzero(np.asarray(init.token_ids) == self._step_tag)

    def leave(self, slots: Sequence[int]) -> None:
        """Forget requests that left their slots."""
        for slot in slots:
            self._requests.pop(slot, None)

    def token_types(self, plan: StepPlan, positions: np.ndarray) -> np.ndarray | None:
        """Which text of a pair each token of a plan belongs to, [tokens] int64; None if no request is a pair.

        positions: [tokens], in their sequences.
        """
        if not self._takes_types:
            return None
        pieces = []
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            request = self._requests.get(slot)
            second = None if request is None else request.params.second_from
            if request is None or request.parts is None:
                pieces.append(np.array([[count, -1 if second is None else second]]))
            else:
                pieces.append(request.parts)
        lengths, seconds = np.concatenate(pieces).T
        if (seconds < 0).all():
            return None
        types: np.ndarray = positions >= np.repeat(np.where(seconds < 0, _NEVER, seconds), lengths)
        return types.astype(np.int64)

    def wanted(self, slot: int, start: int, end: int, total: int) -> np.ndarray:
        """Positions, of the tokens `start` to `end` of a prompt of `total`, whose hidden states count: [n] int64.

        Of a request of several prompts: places in all of its tokens.
        """
        parts = self._request(slot).parts
        if parts is not None and self._kind is not PoolingKind.MEAN:
            ends: np.ndarray = np.cumsum(parts[:, 0])
            places: np.ndarray = ends - 1 if self._kind is PoolingKind.LAST else ends - parts[:, 0]
            return places
        if self._kind is PoolingKind.STEP:
            tags = self._request(slot).tags
            assert tags is not None
            chosen: np.ndarray = tags[(tags >= start) & (tags < end)]
            return chosen
        first = total - 1 if self._kind is PoolingKind.LAST else start
        last = min(end, 1) if self._kind is PoolingKind.CLS else end
        return np.arange(first, last, dtype=np.int64)

    def _request(self, slot: int) -> _Request:
        request = self._requests.get(slot)
        if request is None:
            raise ValueError(f"Slot {slot} holds no request that is pooled.")
        return request

    def pool(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> list[PooledRun]:
        """The results of the prompts that end with a step. hidden: [rows, hidden] of its wanted tokens.

        The chunks' rows stand in the order of the chunks.
        """
        found: list[PooledRun] = []
        whole: list[PooledChunk] = []
        for chunk in chunks:
            if chunk.start != self._request(chunk.slot).seen:
                seen = self._request(chunk.slot).seen
                raise ValueError(f"Tokens from {chunk.start} on are pooled where {seen} was due.")
            together = self._request(chunk.slot).parts is not None
            if chunk.is_whole and not together:
                whole.append(chunk)
                continue
            found += self._pool_whole(hidden, whole)
            whole = []
            if together:
                found += self._pool_whole(hidden, [chunk])
                continue
            result = self._add(chunk, hidden[chunk.first : chunk.first + chunk.rows])
            if result is not None:
                found.append(result)
        return found + self._pool_whole(hidden, whole)

    def _pool_whole(self, hidden: Tensor, chunks: list[PooledChunk]) -> list[PooledRun]:
        """The results of prompts that were computed in one go and whose states follow each other; or of one request of
        several.
        """
        if not chunks:
            return []
        for chunk in chunks:
            self._requests[chunk.slot].seen = chunk.end
        states = hidden[chunks[0].first : chunks[-1].first + chunks[-1].rows].float()
        parts = self._requests[chunks[0].slot].parts
        lengths = [chunk.rows for chunk in chunks] if parts is None else parts[:, 0].tolist()
        if self._kind is PoolingKind.MEAN:
            states = _means(states, lengths)
        if self._head is not None:
            states = self._head(states)
        rows = [chunk.plan_row for chunk in chunks]
        if parts is not None:
            return [PooledRun(rows, self._finish(states, _wishes(self._requests[chunks[0].slot].params)), [len(parts)])]
        wishes = [_wishes(self._requests[chunk.slot].params) for chunk in chunks]
        if len(set(wishes)) == 1:
            return [PooledRun(rows, self._finish(states, wishes[0]), lengths if self._kind.gives_many else None)]
        counts = lengths if self._kind.gives_many else [1] * len(chunks)
        found = []
        for row, part, wish in zip(rows, states.split(counts), wishes, strict=True):
            values = self._finish(part, wish)
            found.append(PooledRun([row], values, [len(part)] if self._kind.gives_many else None))
        return found

    def _add(self, chunk: PooledChunk, hidden: Tensor) -> PooledRun | None:
        """Take in the wanted states of a chunk; what the request comes to if it was its last."""
        request = self._request(chunk.slot)
        request.seen = chunk.end
        states = hidden.float()
        if self._kind is PoolingKind.MEAN:
            sums = states.sum(0)
            request.total = sums if request.total is None else request.total + sums
        else:
            request.pieces.append(states)
        if chunk.end < chunk.total:
            return None
        states = torch.cat(request.pieces) if request.total is None else request.total[None] / chunk.total
        request.total, request.pieces = None, []
        if self._head is not None:
            states = self._head(states)
        values = self._finish(states, _wishes(request.params))
        return PooledRun([chunk.plan_row], values, [len(states)] if self._kind.gives_many else None)

    def _finish(self, states: Tensor, wish: tuple[int | None, bool]) -> Tensor:
        """[rows, outputs] -> [rows, outputs or dimensions]. wish: as `_wishes` says."""
        dimensions, activates = wish
        if dimensions is not None:
            states = states[:, :dimensions]
        if not activates:
            return states
        if self._normalize:
            states = torch.nn.functional.normalize(states, dim=-1)
        if self._activation == "softmax":
            return states.softmax(-1)
        return states.sigmoid() if self._activation == "sigmoid" else states


def _wishes(params: PoolingParams) -> tuple[int | None, bool]:
    """(Size of the vector, None for all of it; whether to normalise and activate)."""
    return params.dimensions, params.use_activation is not False


def _means(states: Tensor, lengths: Sequence[int]) -> Tensor:
    """The mean of each so many rows. Each is summed in order, by itself: it does not depend on the others."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    if states.device.type != "cpu":
        counts = counts.pin_memory().to(states.device, non_blocking=True)
    return torch.segment_reduce(states, "mean", lengths=counts, axis=0, unsafe=True)


class OwnPooler(Pooler):
    """Of a model whose class pools by itself: it gets the states of all tokens, once a prompt is complete.

    pool: (states [tokens, hidden] of prompts one behind the other, each one's token ids, each one's parameters) -> a
    tensor for each, [outputs] or [rows, outputs].
    """

    def __init__(
        self,
        pool: Callable[[Tensor, Sequence[Tensor], Sequence[PoolingParams]], Sequence[Tensor]],
        *,
        takes_types: bool = False,
    ) -> None:
        super().__init__(PoolingKind.MEAN, takes_types=takes_types)  # which every token counts for, too
        self._own = pool
        self._ids: dict[int, np.ndarray] = {}

    def enter(self, new: Sequence[SlotInit]) -> None:
        super().enter(new)
        for init in new:
            self._ids[init.slot] = np.array(init.token_ids, np.int64)

    def leave(self, slots: Sequence[int]) -> None:
        super().leave(slots)
        for slot in slots:
            self._ids.pop(slot, None)

    def pool(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> list[PooledRun]:
        complete = []
        for chunk in chunks:
            request = self._request(chunk.slot)
            request.seen = chunk.end
            request.pieces.append(hidden[chunk.first : chunk.first + chunk.rows])
            if chunk.end == chunk.total:
                complete.append(chunk)
        if not complete:
            return []
        states, ids, params, counts = [], [], [], []
        for chunk in complete:
            request = self._request(chunk.slot)
            states += request.pieces
            request.pieces = []
            lengths = [chunk.total] if request.parts is None else request.parts[:, 0].tolist()
            ids += torch.from_numpy(self._ids[chunk.slot]).split(lengths)
            params += [request.params] * len(lengths)
            counts.append(len(lengths))
        found = [torch.as_tensor(part).float() for part in self._own(torch.cat(states), ids, params)]
        if len(found) != len(ids):
            raise ValueError(f"The model's pooler gave {len(found)} results for {len(ids)} prompts.")
        runs, first = [], 0
        for chunk, count in zip(complete, counts, strict=True):
            parts = found[first : first + count]
            first += count
            if self._request(chunk.slot).parts is not None:
                runs.append(PooledRun([chunk.plan_row], torch.stack(parts), [count]))
            elif parts[0].dim() > 1:
                runs.append(PooledRun([chunk.plan_row], parts[0], [len(parts[0])]))
            else:
                runs.append(PooledRun([chunk.plan_row], parts[0].reshape(1, -1)))
        return runs
