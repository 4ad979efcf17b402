"""Importing does next to nothing, and the small helpers work."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from vllm.utils import Counter, cdiv, get_open_port, is_list_of, make_async, merge_async_iterators, random_uuid

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "zmq", "fastapi", "ray", "triton")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_sampling_params_come_without_torch() -> None:
    assert run("import vllm, sys; vllm.SamplingParams; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize(
    "module",
    [
        "vllm.sampling_params",
        "vllm.pooling_params",
        "vllm.outputs",
        "vllm.inputs",
        "vllm.beam_search",
        "vllm.sequence",
        "vllm.logger",
        "vllm.envs",
        "vllm.utils",
        "vllm.usage.usage_lib",
        "vllm.multimodal",
        "vllm.lora.request",
        "vllm.prompt_adapter.request",
        "vllm.exceptions",
        "vllm.v1.engine.exceptions",
        "vllm.core.scheduler",
        "vllm.step.messages",
        "vllm.config",
        "vllm.step.kv_need",
        "vllm.model_executor.models.registry",
        "vllm.model_executor.models.families.llama",
        "vllm.model_executor.models.families.gpt",
    ],
)
def test_light_modules_stay_light(module: str) -> None:
    assert run(f"import {module}, sys; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_importing_changes_nothing_in_the_process() -> None:
    code = (
        "import logging, os, signal, sys, threading, warnings\n"
        "def state():\n"
        "    return (dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),\n"
        "            threading.active_count(), logging.root.handlers[:], logging.root.level, sys.path[:],\n"
        "            sys.getrecursionlimit(), os.getcwd(), sys.excepthook)\n"
        "before = state()\n"
        "import vllm\n"
        "vllm.SamplingParams, vllm.RequestOutput, vllm.TextPrompt, vllm.PoolingParams\n"
        "print(before == state())"
    )
    assert run(code) == "True"


def test_version_is_a_string_and_a_tuple() -> None:
    import vllm

    assert (vllm.__version__, vllm.__version_tuple__) == ("0.9.2+py23", (0, 9, 2, "py23"))


def test_counter_counts_and_starts_again() -> None:
    counter = Counter(5)
    assert [next(counter), next(counter), counter.counter] == [5, 6, 7]
    counter.reset()
    assert next(counter) == 0


def test_lists_are_recognised_by_first_or_all_items() -> None:
    assert is_list_of([], int) and is_list_of(["a", 1], str) and not is_list_of(["a", 1], str, check="all")
    assert not is_list_of(("a",), str) and not is_list_of("abc", str) and is_list_of([[1]], list)


def test_random_names_differ() -> None:
    names = {random_uuid() for _ in range(100)}
    assert len(names) == 100 and all(len(name) == 32 and int(name, 16) >= 0 for name in names)


def test_open_port_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PORT", raising=False)
    first = get_open_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        monkeypatch.setenv("VLLM_PORT", str(first))
        assert get_open_port() > first


def test_blocking_function_runs_in_a_thread() -> None:
    def where(add: int, *, more: int = 0) -> tuple[int, str]:
        return add + more, threading.current_thread().name

    async def main() -> tuple[int, str]:
        return await make_async(where)(1, more=2)

    total, thread = asyncio.run(main())
    assert total == 3 and thread != threading.main_thread().name


def test_divisions_are_rounded_up() -> None:
    assert [cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_merged_iterators_come_as_they_are_ready_and_end_together() -> None:
    ended: list[str] = []

    async def numbers(name: str, count: int, gate: asyncio.Event, opened: asyncio.Event) -> AsyncIterator[str]:
        try:
            for i in range(count):
                await gate.wait()
                yield f"{name}{i}"
            opened.set()
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def main() -> list[tuple[int, str]]:
        first, second, third = (asyncio.Event() for _ in range(3))
        second.set()
        merged = merge_async_iterators(numbers("a", 1, first, third), numbers("b", 2, second, first))
        found = [await anext(merged) for _ in range(3)]
        await merged.aclose()
        return found

    assert asyncio.run(main()) == [(1, "b0"), (1, "b1"), (0, "a0")]
    assert sorted(ended) == ["a", "b"]

    async def failing() -> AsyncIterator[int]:
        yield 1
        raise KeyError("broken")

    async def all_of() -> list[tuple[int, int]]:
        return [pair async for pair in merge_async_iterators(failing())]

    with pytest.raises(KeyError, match="broken"):
        asyncio.run(all_of())
