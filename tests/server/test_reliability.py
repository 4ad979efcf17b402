"""Same answer under pressure, and as many deaths as every run has time for; `tests/soak` has the full counts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import psutil
import pytest

from tests.server.engines import (
    OPTIONS,
    PROMPTS,
    all_final,
    assert_idle,
    core_pid,
    final,
    greedy,
    leftovers,
    make,
    running,
)
from tests.server.http_server import Server, sse_events
from tests.tiny_models import hf_greedy
from vllm import LLM, SamplingParams
from vllm.engine.async_llm_engine import AsyncEngineDeadError


@pytest.fixture(scope="module", autouse=True)
def strict():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_STRICT", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


async def test_starved_cache_changes_no_answer(model_folder):
    """T20: 64 requests, twice, in a cache for one and a half of the longest; 200 preemptions or more, same bytes."""
    prompts = [f"{i}: The capital of {'Japan ' * (i % 7)}is" for i in range(64)]
    async with running(model_folder, separate=False) as engine:
        want = await all_final(engine, prompts, greedy(120), "big")
    async with running(model_folder, separate=False, max_model_len=200, num_gpu_blocks_override=32) as engine:
        for round_ in range(2):
            assert await all_final(engine, prompts, greedy(120), f"small {round_}") == want
        print(f"T20: 128 of 128 the same bytes, {engine.metrics.stats.num_preemptions} preemptions")
        assert engine.metrics.stats.num_preemptions >= 200
        with pytest.raises(ValueError, match="longer than the maximum"):
            await final(engine, {"prompt_token_ids": [5] * 201}, greedy(), "never fits")
        await assert_idle(engine)


def test_seeds_and_greedy_survive_restarts_and_thread_counts(model_folder, monkeypatch):
    """T43: three starts, one and two threads: the same bytes."""
    options = {k: v for k, v in OPTIONS.items() if k != "disable_log_requests"}
    params = [greedy(30), SamplingParams(temperature=1.0, seed=11, max_tokens=30, ignore_eos=True)]
    texts = []
    for threads in ("1", "2", "1"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with LLM(str(model_folder), **options) as llm:
            texts.append([o.outputs[0].text for p in params for o in llm.generate(PROMPTS, p, use_tqdm=False)])
    assert texts[0] == texts[1] == texts[2]


async def test_served_greedy_tokens_equal_a_plain_loop(model_folder):
    """T44: 32 prompts at once against a loop without any cache."""
    async with running(model_folder, separate=False) as engine:
        ids = [[(i * 31 + j * 7) % 300 + 2 for j in range(1 + 3 * i)] for i in range(32)]
        outputs = await asyncio.gather(
            *(final(engine, {"prompt_token_ids": p}, greedy(12), f"t{i}") for i, p in enumerate(ids))
        )
    assert [list(o.outputs[0].token_ids) for o in outputs] == [hf_greedy(model_folder, p, 12) for p in ids]


async def deaths_of_the_core(model_folder, count: int) -> tuple[int, float]:
    """T10: kill the core with 32 requests in flight. How many requests ended with the error, and the worst time."""
    ended, worst = 0, 0.0
    for _ in range(count):
        before = leftovers()
        engine = make(model_folder)
        await engine.check_health()
        tasks = [asyncio.ensure_future(final(engine, p, greedy(480), p)) for p in PROMPTS]
        while not engine.metrics.generation_tokens:
            await asyncio.sleep(0.001)
        os.kill(core_pid(engine), signal.SIGKILL)
        start = time.monotonic()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2.0)
        worst = max(worst, time.monotonic() - start)
        ended += sum(isinstance(e, AsyncEngineDeadError) for e in ends)
        await engine.shutdown(0)
        assert leftovers() == before
    return ended, worst


async def test_killing_the_core_twice(model_folder):
    ended, worst = await deaths_of_the_core(model_folder, 2)
    assert ended == 2 * 32
    assert worst < 2.0


def tree(pid: int) -> list[int]:
    return [pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))]


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if is_alive(p)]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def death_of_a_server(model_folder, who: str) -> float:
    """T10, T11 from outside: kill -9 the server's process or its core. Seconds until every process of it is gone."""
    with Server(model_folder, "--max-model-len", "512") as server:
        assert server.process is not None
        server.canary()
        pids = tree(server.process.pid)
        assert len(pids) == 2
        os.kill(pids[0] if who == "server" else pids[1], signal.SIGKILL)
        start = time.monotonic()
        while alive(pids):
            assert time.monotonic() - start < 5.0, alive(pids)
            server.process.poll()
            time.sleep(0.01)
        assert server.process.wait() != 0
        return time.monotonic() - start


@pytest.mark.parametrize("who", ["server", "core"])
def test_killing_a_process_of_the_server_ends_all_of_it(model_folder, who):
    assert death_of_a_server(model_folder, who) < 5.0


def starts_and_stops(model_folder, count: int) -> None:
    """T46: servers that SIGTERM stops end with status 0 and leave no process, listener, shared memory or file."""
    before = leftovers()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            start_and_stop(model_folder, folder)
            assert leftovers() == before
            assert os.listdir(folder) == []


def shared_memory_of(pids: list[int]) -> set[str]:
    """The files in /dev/shm that these processes have mapped or open, or that bear their numbers."""
    used = {m.path for pid in pids for m in psutil.Process(pid).memory_maps()}
    used |= {f.path for pid in pids for f in psutil.Process(pid).open_files()}
    numbered = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)}
    return {path for path in used if path.startswith("/dev/shm/")} | numbered


def start_and_stop(model_folder, temporary: str) -> None:
    """One server from start to SIGTERM, whose temporary files would be in `temporary`."""
    with Server(model_folder, "--max-model-len", "512", env={"TMPDIR": temporary}) as server:
        assert server.process is not None
        server.canary()
        pids = tree(server.process.pid)
        shared = shared_memory_of(pids)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0, server.log[-2000:]
        assert not alive(pids)
        port = server.port
    assert not [path for path in shared if os.path.exists(path)]
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]
    assert port not in {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_start_and_stop_once(model_folder):
    starts_and_stops(model_folder, 1)


def test_a_stuck_step_is_unhealthy_and_then_ends_the_server(model_folder):
    """T13 from outside: /health turns to 503 while the process stands, which ends with a status other than 0."""
    times = {"VLLM_HEALTH_TIMEOUT_S": "1", "VLLM_ENGINE_ITERATION_TIMEOUT_S": "3", "VLLM_FAULTS": "forward.sleep@20:60"}
    with Server(model_folder, env=times) as server, ThreadPoolExecutor(2) as pool:
        assert server.process is not None
        pids = tree(server.process.pid)
        body = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True}
        plain = pool.submit(server.post, "/v1/completions", body)
        streamed = pool.submit(server.post, "/v1/completions", {**body, "stream": True})
        start = time.monotonic()
        while server.get("/health").status == 200:
            assert time.monotonic() - start < 60
            time.sleep(0.05)
        assert not plain.done()
        assert plain.result(20).status == 503
        assert "engine is not running" in streamed.result(20).text  # an event, or all of an answer that had not begun
        assert server.process.wait(20) == 1
        assert not alive(pids)


def test_the_end_of_its_terminal_lets_streams_finish_too(model_folder):
    body = {"prompt": "Hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
    slow = {"VLLM_FAULTS": ",".join(f"forward.sleep@{step}:0.02" for step in range(5, 100))}
    with ExitStack() as stack:
        # Under nohup the tests, and so the server, would begin with this signal ignored.
        stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL))
        server, pool = stack.enter_context(Server(model_folder, env=slow)), stack.enter_context(ThreadPoolExecutor(1))
        assert server.process is not None
        stream = pool.submit(server.post, "/v1/completions", body)
        while server.metric("vllm:num_requests_running") < 1:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGHUP)
        answer = stream.result(40).text
        assert answer.endswith("data: [DONE]\n\n") and '"error"' not in answer
        assert server.process.wait(10) == 0


def test_ctrl_c_while_the_model_loads_ends_the_server_at_once(model_folder):
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder), "--port", "0"]
    server = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    core = None
    try:
        while not (core := next(iter(server.children()), None)):
            time.sleep(0.01)
        core.suspend()  # loading lasts
        time.sleep(0.5)
        server.send_signal(signal.SIGINT)
        assert server.wait(5) == -signal.SIGINT
    finally:
        for process in filter(None, (server, core)):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.parametrize(("signals", "limit"), [(1, "30"), (2, "30"), (1, "1")])
def test_sigterm_lets_streams_finish_and_a_second_one_does_not(model_folder, signals, limit):
    """T14: SIGTERM amid 32 streams: all end whole; or each gets an error: too slow, or two signals."""
    body = {"prompt": "Hello", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    # Steps that last, so that the signals come amid the streams on any machine.
    slow = {"VLLM_FAULTS": ",".join(f"forward.sleep@{step}:0.02" for step in range(20, 300))}
    flags = ("--shutdown-timeout", limit)
    with Server(model_folder, *flags, env=slow) as server, ThreadPoolExecutor(33) as pool:
        assert server.process is not None
        streams = [pool.submit(server.post, "/v1/completions", body) for _ in range(32)]
        while server.metric("vllm:num_requests_running") < 32:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        refused = pool.submit(server.post, "/v1/completions", body)
        if signals == 1:
            assert server.get("/health").status == 503  # so that balancers send nobody here
        time.sleep(0.1)
        for _ in range(1, signals):
            server.process.send_signal(signal.SIGTERM)
        answers = [s.result(40).text for s in streams]
        assert server.process.wait(10) == 0
        with suppress(OSError):
            assert refused.result(5).status == 503
    if signals == 1 and limit == "30":
        texts = ["".join(e["choices"][0]["text"] for e in sse_events(a) if e["choices"]) for a in answers]
        assert len(set(texts)) == 1
        whole = sum('"finish_reason":"length"' in a.replace(" ", "") for a in answers)
        print(f"T14: {whole} of 32 streams whole after SIGTERM")
        assert whole == 32
    else:
        assert all('"error"' in a for a in answers), answers[0][-500:]
