"""The full counts of the reliability plan: `make soak ARGS=tests/soak`. Each test prints the figure it holds."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.server.engines import OPTIONS, PROMPTS, all_final, assert_idle, final, greedy, leftovers, make, running
from tests.server.test_faults import whole_steps_without_a_finite_number
from tests.server.test_reliability import alive, death_of_a_server, deaths_of_the_core, starts_and_stops, tree
from tests.tiny_models import hf_greedy
from vllm import LLM, SamplingParams
from vllm.engine.async_llm_engine import AsyncEngineDeadError
from vllm.exceptions import EngineGenerateError

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", autouse=True)
def strict():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_STRICT", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


async def test_t10_kill_the_core_20_times(model_folder):
    ended, worst = await deaths_of_the_core(model_folder, 20)
    print(f"T10: {ended} of 640 requests ended, the last {worst:.3f} s after the death")
    assert ended == 640
    assert worst < 2.0


@pytest.mark.parametrize("who", ["server", "core"])
def test_t11_kill_a_process_of_the_server_20_times(model_folder, who):
    times = [death_of_a_server(model_folder, who) for _ in range(20)]
    print(f"T11: {who} killed 20 times, everything gone after {max(times):.2f} s at most")
    assert max(times) < 5.0


async def test_t16_one_bad_request_in_32_50_times(model_folder, monkeypatch):
    monkeypatch.setenv("VLLM_FAULTS", "sampler.raise@s-13-,detok.raise@d-13-")
    async with running(model_folder) as engine:
        want = await all_final(engine, PROMPTS, greedy(60), "good")
        for i in range(50):
            got = await all_final(engine, PROMPTS, greedy(60), "sd"[i % 2])
            assert isinstance(got[13], EngineGenerateError)
            assert [t for j, t in enumerate(got) if j != 13] == [t for j, t in enumerate(want) if j != 13]
        await assert_idle(engine)
    print("T16: 50 of 50 bad requests ended alone, 1,550 of 1,550 neighbours exact")


def test_t15_twenty_deaths_while_a_server_starts(model_folder, tmp_path):
    """kill -9 of the core at any moment before the server is ready; SIGTERM to the server at any moment."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder), "--port", "0"]
    rng, worst, ready = random.Random(15), 0.0, 0
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for i in range(20):
        before = leftovers()
        with open(tmp_path.with_suffix(".log"), "w") as log:
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        children: list[psutil.Process] = []
        while not children:  # the core
            assert server.poll() is None, tmp_path.with_suffix(".log").read_text()
            children = psutil.Process(server.pid).children(recursive=True)
            time.sleep(0.01)
        time.sleep(rng.random() * 3)
        ready += "Serving on" in tmp_path.with_suffix(".log").read_text()
        pids = tree(server.pid)
        start = time.monotonic()
        if i % 2:
            os.kill(server.pid, signal.SIGTERM)
        else:
            for child in children:
                child.kill()
        status = server.wait(10)
        while alive(pids):
            assert time.monotonic() - start < 10, alive(pids)
            time.sleep(0.01)
        worst = max(worst, time.monotonic() - start)
        assert status != 0 or i % 2
        assert leftovers() == before
        assert os.listdir(tmp_path) == []
        assert "Traceback" not in tmp_path.with_suffix(".log").read_text() or i % 2 == 0
    print(f"T15: 20 of 20 ended within {worst:.2f} s and left nothing; {ready} of them had just begun to serve")
    assert ready < 20


@pytest.mark.parametrize("separate", [True, False])
async def test_t17_whole_steps_without_a_finite_number_150_times(model_folder, separate):
    ended, exact = await whole_steps_without_a_finite_number(model_folder, separate, rounds=10)
    print(f"T17: whole steps: {ended:,} of 5,760 ended with the error, {exact} of 96 after them exact")
    assert (ended, exact) == (4800, 96)


async def test_t18_any_step_may_fail(model_folder, monkeypatch):
    async with running(model_folder, separate=False) as engine:
        want = await all_final(engine, PROMPTS, greedy(40), "good")
    for step in range(1, 51):
        monkeypatch.setenv("VLLM_FAULTS", f"{'alloc.oom' if step % 2 else 'forward.raise'}@{step}")
        async with running(model_folder, separate=False) as engine:
            got = await all_final(engine, PROMPTS, greedy(40), f"step{step}")
            lost = [i for i in range(32) if isinstance(got[i], EngineGenerateError)]
            assert len(lost) <= 1  # a request that was alone in the step that failed
            assert all(got[i] == want[i] for i in range(32) if i not in lost)
            await assert_idle(engine)
    print("T18: 50 steps failed, no deadlock, nothing held")


def test_t46_50_servers(model_folder):
    starts_and_stops(model_folder, 50)
    print("T46: 50 of 50 servers ended with status 0 and left nothing")


async def test_t46_20_engines_in_one_process(model_folder):
    resident = []
    for _ in range(20):
        engine = make(model_folder, separate=False)
        assert (await final(engine, "Hello", greedy(5), "a")).finished
        await engine.shutdown(5)
        del engine
        gc.collect()
        resident.append(psutil.Process().memory_info().rss)
    growth = (resident[-1] - resident[3]) / 2**20
    print(f"T46: 16 more engines cost {growth:.1f} MB")
    assert growth < 20


def test_t43_three_starts_with_one_and_two_threads(model_folder, monkeypatch):
    options = {key: value for key, value in OPTIONS.items() if key != "disable_log_requests"}
    drawn = SamplingParams(temperature=1.0, seed=11, max_tokens=30, ignore_eos=True)
    prompts = [f"Number {i} says: my name is {'Ada ' * (i % 9)}" for i in range(100)]
    texts = []
    for threads in ("1", "2", "1"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with LLM(str(model_folder), **options) as llm:
            outputs = [o for params in (greedy(30), drawn) for o in llm.generate(prompts, params, use_tqdm=False)]
        texts.append([o.outputs[0].text for o in outputs])
    differ = sum(text != texts[0][i] for start in texts for i, text in enumerate(start))
    print(f"T43: {differ} of {sum(map(len, texts))} texts differ")
    assert differ == 0 and len(texts[0]) == 200


async def test_t44_200_prompts_against_a_plain_loop(model_folder):
    ids = [[(i * 31 + j * 7) % 300 + 2 for j in range(1 + i % 90)] for i in range(200)]
    async with running(model_folder) as engine:
        outputs = await asyncio.gather(
            *(final(engine, {"prompt_token_ids": p}, greedy(16), f"t{i}") for i, p in enumerate(ids))
        )
    assert [list(o.outputs[0].token_ids) for o in outputs] == [hf_greedy(model_folder, p, 16) for p in ids]
    print("T44: 200 of 200 equal")


async def test_t09_nothing_grows_with_requests(model_folder):
    """100,000 requests of all kinds, a tenth of them left early, a twentieth bad: memory of both processes stays."""
    async with running(model_folder, max_num_queued_reqs=4000) as engine:
        processes = [psutil.Process(), psutil.Process(engine._core.pid)]

        async def one(i: int) -> None:
            params = greedy(8) if i % 2 else SamplingParams(temperature=1.0, n=1 + i % 3, max_tokens=8)
            prompt = {"prompt_token_ids": [10**6]} if i % 20 == 0 else f"{i} {PROMPTS[i % 32]}"
            try:
                async for _ in engine.generate(prompt, params, f"r{i}"):
                    if i % 10 == 5:
                        return
            except ValueError:
                assert i % 20 == 0

        sizes = []
        for batch in range(500):
            await asyncio.gather(*(one(batch * 200 + j) for j in range(200)))
            sizes.append([p.memory_info().rss for p in processes])
        await assert_idle(engine)
        growth = [(last - first) / (400 * 200) for first, last in zip(sizes[100], sizes[-1], strict=True)]
        print(f"T09: bytes per request after warm-up: front end {growth[0]:.1f}, core {growth[1]:.1f}")
        assert max(growth) <= 50


@pytest.mark.parametrize("who", ["rank", "core", "frozen rank"])
async def test_t12_kill_one_of_two_20_times(model_folder, monkeypatch, who):
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "3")
    worst = 0.0
    for _ in range(20):
        async with running(model_folder, tensor_parallel_size=2) as engine:
            core = engine._core.pid
            (rank,) = [p.pid for p in psutil.Process(core).children()]
            tasks = [asyncio.ensure_future(final(engine, p, greedy(480), p)) for p in PROMPTS]
            while not engine.metrics.generation_tokens:
                await asyncio.sleep(0.001)
            os.kill(core if who == "core" else rank, signal.SIGSTOP if who == "frozen rank" else signal.SIGKILL)
            start = time.monotonic()
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 8.0)
            worst = max(worst, time.monotonic() - start)
            assert all(isinstance(e, (AsyncEngineDeadError, EngineGenerateError)) for e in ends)
            while alive([core, rank]):
                assert time.monotonic() - start < 10.0
                await asyncio.sleep(0.01)
    print(f"T12: {who}: 20 of 20, every request ended within {worst:.2f} s")
    assert worst < (3 + 2 if who == "frozen rank" else 2)
