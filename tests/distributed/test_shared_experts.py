"""Copies of the engine that share experts: the same answers as one, and one fate."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.test_expert_parallel import places, save
from tests.server.engines import greedy, make, running, settle
from tests.tiny_models import save_llama
from vllm.config import ParallelConfig
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.exceptions import EngineGenerateError

SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True, "skip_tokenizer_init": True}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 60 tokens, some with common beginnings."""
    return [[2 + (i % 5 + j * (1 + i % 3)) % 120 for j in range(1 + 59 * i % 60)] for i in range(count)]


async def answer(engine: AsyncLLMEngine, prompt: list[int], tokens: int, name: str) -> list[int]:
    params = greedy(tokens, detokenize=False)
    found = [output async for output in engine.generate({"prompt_token_ids": prompt}, params, name)]
    return list(found[-1].outputs[0].token_ids)


async def answers(engine: AsyncLLMEngine, count: int) -> list[list[int]]:
    return await asyncio.gather(*(answer(engine, p, 3 + i % 7, f"a{i}") for i, p in enumerate(prompts(count))))


MOVING = {"enable_eplb": True, "eplb_step_interval": 4, "eplb_window_size": 4}


@pytest.mark.parametrize(
    ("case", "tp", "more"),
    [("mixtral", 1, MOVING), ("qwen2_moe-mixed", 2, {"quantization": "experts_int8"})],
    ids=["mixtral", "qwen2"],
)
async def test_two_copies_give_the_answers_of_one(case: str, tp: int, more: dict[str, Any], tmp_path: Path) -> None:
    """Also where experts change places between the copies, and where they are quantized."""
    save(case, tmp_path, 512)
    stored = more.get("quantization")
    async with running(tmp_path, separate=False, skip_tokenizer_init=True, quantization=stored) as engine:
        expected = await answers(engine, 24)
    async with running(tmp_path, tensor_parallel_size=tp, **SHARED, **more) as engine:
        fleet: Any = engine._core
        assert await answers(engine, 24) == expected
        cores = [psutil.Process(replica.client.pid) for replica in fleet._replicas]
        before = [sum(core.cpu_times()[:2]) for core in cores]
        await asyncio.sleep(0.5)
        assert all(sum(core.cpu_times()[:2]) - b < 0.1 for core, b in zip(cores, before, strict=True)), "all are idle"
        alone = [await answer(engine, p, 3 + i % 7, f"b{i}") for i, p in enumerate(prompts(4))]  # the other one serves
        assert alone == expected[:4]
        if "enable_eplb" in more:
            assert any(layer != sorted(layer) for layer in (await engine.collective_rpc(places))[0])
        held = await engine._core.call("idle_report")
        assert held["requests"] == held["in_flight"] == 0 and held["blocks_free"] == held["blocks_total"]


@pytest.mark.timeout(60)
async def test_a_part_of_a_prompt_that_asks_for_no_token_holds_nobody_up(tmp_path: Path) -> None:
    """Of the last layer it needs nothing, but others may need the experts there."""
    save("mixtral", tmp_path, 512)
    asked = [[2 + (i + j * (1 + i % 3)) % 120 for j in range(90 if i % 2 else 3)] for i in range(8)]
    found = []
    for options in ({"separate": False, "skip_tokenizer_init": True}, SHARED):
        async with running(tmp_path, max_num_batched_tokens=32, **options) as engine:
            found.append(await asyncio.gather(*(answer(engine, p, 9, f"c{i}") for i, p in enumerate(asked))))
    assert found[0] == found[1]


async def test_all_copies_end_and_are_started_again_together(tmp_path: Path) -> None:
    save("mixtral", tmp_path, 512)
    async with running(tmp_path, **SHARED) as engine:
        fleet: Any = engine._core
        expected = await answers(engine, 2)
        endless = asyncio.ensure_future(answer(engine, [5, 6, 7], 400, "endless"))
        while not any(held.begun for replica in fleet._replicas for held in replica.held.values()):
            await asyncio.sleep(0.01)
        idle = next(replica for replica in fleet._replicas if not replica.held)
        os.kill(idle.client.pid, signal.SIGKILL)
        with pytest.raises(EngineGenerateError, match="replica that worked on this request has ended"):
            await endless
        await settle(lambda: all(replica.alive for replica in fleet._replicas), 60)
        assert await answers(engine, 2) == expected


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="this model has none that can be dealt out. Leave out enable_expert_para"):
        make(save_llama(tmp_path), **SHARED)


def test_what_cannot_share_experts_is_said() -> None:
    def copies(**more: Any) -> ParallelConfig:
        return ParallelConfig(data_parallel_size=2, enable_expert_parallel=True, **more)

    assert copies().shares_experts and not ParallelConfig(data_parallel_size=2).shares_experts
    assert not copies(data_parallel_rank=1).shares_experts  # copies that are started one by one know of no others
    with pytest.raises(ValueError, match="leave out data_parallel_size_local"):
        copies(data_parallel_size_local=1)
    with pytest.raises(ValueError, match="use tensor_parallel_size in place of pipeline_parallel_size"):
        copies(pipeline_parallel_size=2, distributed_executor_backend="mp")
    with pytest.raises(ValueError, match="processes of one host: use 'mp' for"):
        copies(distributed_executor_backend="ray")
