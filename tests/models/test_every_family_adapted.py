"""Every family and variant of the tables with adapters, in pipeline stages, and with weights that are quantized while
they are loaded. A run takes those of one turn (see `test_every_family`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from tests.models.harness import PagedDriver, load, relative_error
from tests.models.kernels import kernels
from tests.models.test_every_family import OWN, chosen, save
from vllm.config import ParallelConfig
from vllm.lora.layers import LoRALayers
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.method import QuantizedLinearMethod
from vllm.step.inputs import RowView, StepFeatures

CASES = [case for case in chosen() if case not in OWN]
CHUNKS = [5, 1, 8]


class Stages:
    """Stages one after the other as one model, each with a cache of its own."""

    def __init__(self, stages: list[Any], requests: int) -> None:
        self.stages = stages
        self.traits = replace(stages[-1].traits, layers=range(len(stages[-1].traits.kv)))
        self._caches = [PagedDriver(stage, requests=requests).caches for stage in stages]

    def __call__(self, step: Any, _: list[Tensor]) -> Tensor | None:
        stream = None
        for stage, caches in zip(self.stages, self._caches, strict=True):
            stream = stage(step, caches, stream)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.stages[-1].logits(hidden)
        return logits


class Adapted:
    """A model all of whose rows have its one adapter."""

    def __init__(self, model: Any) -> None:
        self.model, self.traits = model, model.traits

    def __call__(self, step: Any, caches: list[Tensor]) -> Tensor:
        view = RowView(torch.zeros(len(step.token_ids), dtype=torch.int32), ())
        features = structs.replace(step.features or StepFeatures(), adapters=(view, view))
        hidden: Tensor = self.model(structs.replace(step, features=features), caches)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.logits(hidden, RowView(torch.zeros(len(hidden), dtype=torch.int32), ()))
        return logits


def prompts() -> list[Tensor]:
    return [torch.randint(0, 131, (n,)) for n in (23, 1, 9)]


@pytest.mark.parametrize("case", CASES)
def test_adapters_add_what_changed_weights_would(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    texts = prompts()
    with kernels("reference"):  # which leaves weights as they are
        model, changed = load(tmp_path), load(tmp_path)
        plain = PagedDriver(changed, requests=3).run(texts, CHUNKS)
        LoRALayers(model.adaptable(), 1, 3, torch.float32, torch.device("cpu"))
        twins = dict(changed.named_modules())
        count = 0
        for path, module in model.named_modules():
            if not isinstance(module, LinearBase) or module.lora is None:
                continue
            stack: Any = module.lora
            stack.a.normal_().mul_(0.05)
            stack.b.normal_()
            stack.ranks.fill_(3)
            inputs = module.weight.shape[1]  # type: ignore[union-attr]
            change = torch.zeros(inputs, module.weight.shape[0])  # type: ignore[union-attr]
            stack.add(change, torch.eye(inputs), RowView(torch.zeros(inputs, dtype=torch.int32), ()))
            assert change.abs().max() > 0
            twins[path].weight.data += change.T
            count += 1
        assert count >= 2 * len(model.spec.blocks)
        wanted = PagedDriver(changed, requests=3).run(texts, CHUNKS)
        found = PagedDriver(Adapted(model), requests=3).run(texts, CHUNKS)
    assert max(relative_error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-4
    assert max(relative_error(a, b) for a, b in zip(found, plain, strict=True)) > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_stages_compute_what_the_whole_model_does(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    whole = load(tmp_path)
    count = min(2, len(whole.spec.blocks))
    parallel = ParallelConfig(pipeline_parallel_size=count, distributed_executor_backend="mp")
    stages = [load(tmp_path, stage=stage, parallel_config=parallel) for stage in range(count)]
    texts = prompts()
    expected = PagedDriver(whole, requests=3).run(texts, CHUNKS)
    found = PagedDriver(Stages(stages, 3), requests=3).run(texts, CHUNKS)
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_weights_are_quantized_while_they_are_loaded(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    texts = prompts()
    expected = PagedDriver(load(tmp_path), requests=3).run(texts, CHUNKS)
    model = load(tmp_path, quantization="fp8")
    stored = [m for m in model.modules() if isinstance(m, LinearBase) and isinstance(m.method, QuantizedLinearMethod)]
    assert len(stored) >= 2 * len(model.spec.blocks)
    found = PagedDriver(model, requests=3).run(texts, CHUNKS)
    # some tokens may take another expert now, or see what those have become
    real = [b[0] > -1e4 for b in expected]  # not the logits of padding tokens
    triples = zip(found, expected, real, strict=True)
    errors = torch.cat([(a - b)[:, kept].norm(dim=-1) / b[:, kept].norm(dim=-1) for a, b, kept in triples])
    assert errors.max() > 1e-4 and errors.median() < 0.3
