"""Replays the decode steps of pipeline stages before the last as recorded graphs: layers between two streams.

A graph begins with the tokens that stand in the slot table, or with the stream of the stage before, and leaves the
stream behind this stage's layers where the next one's begins. Nothing is sampled here, so that it makes no difference
what rows want.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace
from torch import Tensor

from vllm.step.inputs import StepFeatures
from vllm.step.plan import StepPlan
from vllm.worker.decode_program import DecodeProgram
from vllm.worker.static_steps import SPANS, Entry, StaticSteps

if TYPE_CHECKING:
    from vllm.worker.stage_runner import StageRunner


class _Key(NamedTuple):
    """One graph: rows, tokens of each, how long sequences may be, whether a prefix is shared, whether rows use
    adapters.
    """

    size: int
    query: int
    span: int
    shared: bool
    adapted: bool


def uniform(plan: StepPlan) -> int:
    """The tokens that every row computes, if all decode and compute as many; else 0."""
    tokens = int(plan.num_tokens[0])
    drafts = 0 if plan.drafts is None else plan.drafts
    decodes = bool((plan.num_tokens == drafts + 1).all()) and bool(plan.sample.all())
    return tokens if decodes and bool((plan.num_tokens == tokens).all()) else 0


class StageGraphs(StaticSteps[_Key]):
    """The decode steps of one stage's runner."""

    _runner: StageRunner

    def forward(self, plan: StepPlan, adapted: bool) -> Tensor | None:
        """Queue the plan's step behind what the slot table has taken in. Returns [tokens, hidden], which the next step
        overwrites; None for a plan that no graph covers.

        adapted: a row uses an adapter.
        """
        query, rows = uniform(plan), len(plan.slots)
        size = self._size(rows, query) if query else None
        longest = int(plan.num_computed.max()) + query
        if size is None or plan.exact is not None or longest > min(self._max_seq_len, self._table.max_width - 1):
            return None
        if rows > self._sizes[0] and self._still_compiling():
            return None
        self._require_width(longest + 1)
        self._upload(plan, size)
        self._receive(rows * query)
        shared = False
        if self._sharing is not None and query == 1:
            shared = self._sharing.find(plan.slots, plan.num_computed, size)
        span = next((s for s in SPANS if s >= longest), self._width)
        self._use(_Key(size, query, span, shared, adapted))
        return self._received(rows * query)

    def prepare(self, first: bool = False) -> bool:
        """Run or capture, over nothing but padding, one step that batches will need: the largest first, or with `first`
        only those of the smallest batch. Whether there are more. Nothing may be in flight.
        """
        if not first and self._still_compiling():
            return True
        adapted = (False,) if self._runner.adapters is None else (False, True)
        wanted = itertools.product(adapted, self._ready_spans(first), self._ready_sizes(first))
        return self._prepare_one(_Key(size, 1, span, False, uses) for uses, span, size in wanted)

    def _upload(self, plan: StepPlan, size: int) -> None:
        rows = len(plan.slots)
        sent = self._context.pinned(*self._inputs.shape)
        host = sent.numpy()
        host[0, :rows], host[0, rows:size] = plan.slots, -1
        host[1, :rows], host[2] = plan.num_computed, 0
        host[3, :rows] = 0 if plan.drafts is None else plan.drafts
        self._inputs.copy_(sent, non_blocking=True)

    def _prepare(self, key: _Key) -> Entry:
        size = key.size
        slots, positions = self._inputs[0, :size], self._inputs[1, :size]
        plan = self._sharing.plan(size) if key.shared and self._sharing is not None else None
        stream = self._received(size * key.query)
        if stream is None:
            raise RuntimeError("A stage that is all of the pipeline has no stream.")
        weights = self._weights
        if weights is not None and key.query == 1 and weights.covers(size, key.adapted):
            by_slot = self._adapters_by_slot() if key.adapted else None
            program = DecodeProgram(
                weights, size, key.span, slots, positions, shared=plan, stream=stream, adapters=by_slot
            )
            return Entry(lambda: program.run(self._table), None, (program,))
        step, fill = self._static_step(size, key.span, key.query, plan)
        view = self._adapters(size, key.query) if key.adapted else None
        if view is not None:
            step = replace(step, features=StepFeatures(adapters=(view, view)))

        def run() -> None:
            fill()
            self._fill_adapters(view, slots)
            stream.copy_(self._run_model(step))

        return Entry(run, step, (step,))
