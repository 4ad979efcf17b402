"""Workers of the tests' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from vllm.model_executor.models.traits import Model
from vllm.step.inputs import StepFeatures, StepInputs
from vllm.step.plan import StepPlan
from vllm.worker.pool import Pooler, PoolingKind
from vllm.worker.step_handle import Handle
from vllm.worker.worker import Worker


class MeanWorker(Worker):
    """A generating model that can pool, too."""

    def _pooler(self) -> Pooler:
        return Pooler(PoolingKind.MEAN)


class TappedModel:
    """A model that hands what some of its layers give to a worker."""

    def __init__(self, model: Model, worker: TappedWorker) -> None:
        self._model, self._worker = model, worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, step: StepInputs, kv_caches: Sequence[Tensor]) -> Tensor:
        traits = self._model.traits
        shape = len(step.token_ids), traits.hidden_size
        taps = {layer: torch.full(shape, torch.nan, dtype=traits.dtype) for layer in self._worker.layers}
        hidden = self._model(replace(step, features=StepFeatures(taps=taps)), kv_caches)
        self._worker.take(taps)
        return hidden


class TappedWorker(Worker):
    """Keeps what the `layers` of its model give.

    tapped: by all tokens up to one, and by layer, what that token came to.
    """

    layers: tuple[int, ...] = ()

    def start(self, num_blocks: int) -> None:
        self.layers = self.model.traits.taps
        self.tapped: dict[tuple[int, ...], dict[int, Tensor]] = {}
        super().start(num_blocks)
        self.model_runner.model = TappedModel(self.model, self)

    def execute(self, plan: StepPlan) -> Handle:
        self._plan = plan
        return super().execute(plan)

    def take(self, taps: dict[int, Tensor]) -> None:
        plan, table = self._plan, self.model_runner.table
        places = [
            (int(slot), position)
            for slot, first, count in zip(plan.slots, plan.num_computed, plan.num_tokens, strict=True)
            for position in range(int(first), int(first + count))
        ]
        for i, (slot, position) in enumerate(places):
            key = tuple(table.tokens[slot, : position + 1].tolist())
            self.tapped[key] = {layer: states[i].clone() for layer, states in taps.items()}
