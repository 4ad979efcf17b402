"""Asynchronous engines for tests, and what must hold before, during and after them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 2200,
    "block_size": 8,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 128,
    "disable_log_requests": True,
}
PROMPTS = [f"Number {i} says: Hello, my name is {'Ada ' * (i % 5)}" for i in range(32)]


def greedy(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def make(folder: Path, *, separate: bool = True, **options: Any) -> AsyncLLMEngine:
    """An engine whose core is a process of its own, or a thread if `separate` is False."""
    args = AsyncEngineArgs(model=str(folder), **{**OPTIONS, **options})
    return AsyncLLMEngine.from_vllm_config(
        args.create_engine_config(),
        disable_log_requests=args.disable_log_requests,
        disable_frontend_multiprocessing=not separate,
    )


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[AsyncLLMEngine]:
    """A running engine that is stopped at the end, and then has left nothing behind."""
    before = leftovers()
    engine = make(folder, **options)
    try:
        await engine.check_health()
        yield engine
    finally:
        engine.shutdown_background_loop()
        await engine.shutdown()
        await settle(lambda: leftovers() == before)
        assert leftovers() == before


def core_pid(engine: AsyncLLMEngine) -> int:
    pid = engine._core.pid  # type: ignore[attr-defined]
    assert pid is not None
    return pid


def leftovers() -> tuple[set[int], set[str]]:
    """Processes that this one started, and names in the places where processes leave things."""
    children = {p.pid for p in psutil.Process().children(recursive=True) if "vllm.engine" in " ".join(_cmdline(p))}
    return children, {name for name in os.listdir("/dev/shm") if "vllm" in name}


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def settle(condition: Any, seconds: float = 5.0) -> float:
    """Wait until the condition holds; how long it took. It is an error if it never does."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "the condition never came true"
        await asyncio.sleep(0.01)
    return time.monotonic() - start


async def final(engine: AsyncLLMEngine, prompt: Any, params: SamplingParams, request_id: str) -> RequestOutput:
    """The last output of a request."""
    outputs = [output async for output in engine.generate(prompt, params, request_id)]
    assert outputs[-1].finished
    return outputs[-1]


async def stream_text(engine: AsyncLLMEngine, prompt: Any, params: SamplingParams, request_id: str) -> str:
    """The text of a request put together from its differences."""
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    return "".join([o.outputs[0].text async for o in engine.generate(prompt, params, request_id)])


async def all_final(
    engine: AsyncLLMEngine, prompts: Sequence[Any], params: SamplingParams, tag: str = "r"
) -> list[Any]:
    """The text of every prompt run at once, or its exception."""

    async def one(i: int) -> str:
        return (await final(engine, prompts[i], params, f"{tag}-{i:02d}-")).outputs[0].text

    return await asyncio.gather(*(one(i) for i in range(len(prompts))), return_exceptions=True)


async def assert_idle(engine: AsyncLLMEngine) -> None:
    """Nothing is held anywhere: tables of the front end are empty, all blocks are free."""
    await settle(lambda: not len(engine._traffic))
    report = await engine._core.call("idle_report") if engine._multiprocessing else None
    if report is not None:
        assert report["blocks_free"] == report["blocks_total"], report
        assert not (report["requests"] or report["waiting"] or report["running"] or report["in_flight"]), report
    processor = engine.output_processor
    assert processor.num_unfinished == 0
    assert not processor._owner
    assert not processor._beams
    assert engine._admission.waiting == 0
    assert engine._admission.waiting_tokens == 0
