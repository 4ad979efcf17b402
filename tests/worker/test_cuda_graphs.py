"""Decode steps over static buffers, run without being captured: kernels in Triton's interpreter, on the CPU."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.worker.toy import Driver, Toy
from vllm.ops.attention import attend
from vllm.ops.triton.attention import attend as triton_attend
from vllm.worker import cuda_graphs
from vllm.worker.cuda_graphs import DecodeGraphs

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the GPU has tests of its own")


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `DecodeGraphs` asks of CUDA when it is made, and steps that never become a graph."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(cuda_graphs, "capture_stream", lambda _: None)
    monkeypatch.setattr(cuda_graphs, "_EAGER_USES", 1 << 30)
    # static steps know their lengths on the device only, which the reference does not read
    monkeypatch.setattr(attend, "_kernels", {"cpu": triton_attend})


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.7, "presence_penalty": 0.4}, {"logprobs": 3}, {"logit_bias": {5: 4.0}}]
)
def test_any_model_decodes_rows_that_leave_the_graph_with_hidden_states(params: dict[str, Any]) -> None:
    """The model has no spec, only traits, like one from outside the tree."""

    def run(graphs: bool) -> tuple[dict[str, list[int]], int]:
        driver = Driver(Toy())
        taken = 0
        if graphs:
            driver.runner.decode_steps = steps = DecodeGraphs(driver.runner, [1, 2, 4], 300, "not finite")
            accepts = steps.accepts

            def count(plan: Any) -> bool:
                nonlocal taken
                taken += accepts(plan)
                return accepts(plan)

            steps.accepts = count  # type: ignore[method-assign]
        driver.add("a", [5, 3, 8, 1, 5, 3], **params)
        driver.add("b", [7, 7])
        driver.add("c", list(range(30)))
        return driver.generate(6), taken

    expected, _ = run(graphs=False)
    found, taken = run(graphs=True)
    assert found == expected
    assert taken >= 5
