"""The same answers however an engine is divided: families, layouts, and who starts the ranks, each with each.

    make test-distributed

200 requests of mixed lengths, twice, so that the second time much is cached: greedy and drawn, with penalties, with
logprobs of prompts and outputs, some as beams, on so small a cache that requests are preempted. The plain test suite
has a share of it (`tests/executor/test_pipeline.py`, `test_expert_parallel.py`, `test_ray_cluster.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.workload import (
    SMALL,
    answers,
    beams_of,
    differences,
    engine,
    plain_answers,
    preemptions,
    workload,
)
from tests.executor.test_pipeline import save
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
COUNT = int(os.environ.get("VLLM_TEST_REQUESTS", "200"))
FAMILIES = ("llama", "gpt2", "gemma2", "mixtral")
LAYERS = 7  # which three stages cannot share evenly
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2},
    "pp3": {"pipeline_parallel_size": 3},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS if layout != "ep2" or family == "mixtral"]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    ray: Any = pytest.importorskip("ray", reason="pip install 'vllm[ray]'")
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="warning")
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    yield
    os.environ.pop("RAY_ADDRESS")
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
    ray.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Of each family a model and the answers of one process; filled when first asked for."""

    class Found(dict[str, Any]):
        def __missing__(self, family: str) -> tuple[Path, Any]:
            folder = save(family, tmp_path_factory.mktemp(family), LAYERS)
            single = engine(folder, num_gpu_blocks_override=_blocks(family))
            self[family] = folder, answers(single, COUNT)
            assert preemptions(single) > 0
            return self[family]

    return Found()


def _blocks(family: str) -> int:
    return 40 if family == "gemma2" else 24


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_ranks_of_this_host(family: str, layout: str, expected: dict[str, tuple[Path, Any]]) -> None:
    compare(family, layout, expected, "mp")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_ranks_of_ray(family: str, layout: str, expected: dict[str, tuple[Path, Any]]) -> None:
    compare(family, layout, expected, "ray")


def compare(family: str, layout: str, expected: dict[str, tuple[Path, Any]], backend: str) -> None:
    folder, wanted = expected[family]
    settings = {**LAYOUTS[layout], "distributed_executor_backend": backend, "num_gpu_blocks_override": _blocks(family)}
    if layout == "dp2":
        found = asyncio.run(answers_of_copies(folder, settings))
    else:
        divided = engine(folder, **settings)
        try:
            found = answers(divided, COUNT)
        finally:
            divided.llm_engine.model_executor.shutdown()
    assert differences(found, wanted) == []


async def answers_of_copies(folder: Path, settings: dict[str, Any]) -> list[Any]:
    """As `answers`, of all copies behind one front end; both must have worked."""
    serving = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(str(folder), disable_log_requests=True, max_num_queued_reqs=COUNT, **{**SMALL, **settings})
    )

    async def ask(number: object, prompt: Any, params: SamplingParams) -> Any:
        outputs = [output async for output in serving.generate(prompt, params, str(number))]
        return outputs[-1]

    try:
        prompts, params = workload(COUNT)
        found: list[Any] = []
        for turn in range(2):
            asked = [ask(f"{turn}-{i}", *both) for i, both in enumerate(zip(prompts, params, strict=True))]
            found += plain_answers(await asyncio.gather(*asked))
        beams = SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=6, ignore_eos=True)
        outputs = await asyncio.gather(*(ask(f"beam-{i}", prompt, beams) for i, prompt in enumerate(prompts[:3])))
        worked = {metric.labels["engine"] for metric in _requests(serving) if metric.value > 0}
        assert worked == {"0", "1"}
        return [*found, [beams_of(output) for output in outputs]]
    finally:
        await serving.shutdown(0)


def _requests(serving: AsyncLLMEngine) -> list[Any]:
    from vllm.v1.metrics.reader import snapshot

    return [metric for metric in snapshot(serving.metrics) if metric.name == "vllm:generation_tokens"]
