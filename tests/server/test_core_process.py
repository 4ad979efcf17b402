"""Death, freezing and starting of the core process: every request ends, health is true, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import psutil
import pytest

from tests.server.engines import PROMPTS, assert_idle, core_pid, final, greedy, leftovers, make, running, settle
from tests.tiny_models import save_llama
from vllm.engine import async_llm_engine, wire
from vllm.engine.async_llm_engine import AsyncEngineDeadError
from vllm.engine.core_client import CoreProcess
from vllm.engine.unread import look_at, read
from vllm.exceptions import EngineDeadError
from vllm.ipc import frames
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats

LONG = 480


@pytest.fixture(scope="module", autouse=True)
def strict():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_STRICT", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def flood(engine, count: int = 32) -> list[asyncio.Task]:
    """Requests in progress, the core in the middle of them."""
    tasks = [asyncio.ensure_future(final(engine, PROMPTS[i], greedy(LONG), f"f{i}")) for i in range(count)]
    seen = engine.metrics.generation_tokens
    await settle(lambda: engine.metrics.generation_tokens > seen + count)
    return tasks


async def test_a_loop_that_was_held_up_does_not_take_the_core_for_dead(model_folder, monkeypatch):
    """As by the imports of a server that has loaded its adapters already."""
    engine = make(model_folder)
    await engine.check_health()
    monkeypatch.setattr(async_llm_engine, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(CoreProcess, "PULSE_GRACE_SECONDS", 0.5)
    await asyncio.sleep(1.0)
    time.sleep(0.8)
    await engine.check_health()
    await engine.shutdown(0.0)


def test_a_core_is_killed_while_the_interpreter_ends(monkeypatch):
    """The thread that waited for the process is gone then, maybe with the lock of `Popen.wait`."""
    core = CoreProcess({}, "")
    core._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    with core._process._waitpid_lock:
        monkeypatch.setattr(sys, "is_finalizing", lambda: True)
        killing = threading.Thread(target=core.kill, daemon=True)
        killing.start()
        killing.join(10.0)
        assert not killing.is_alive()
    assert core._process.wait(10.0) == -signal.SIGKILL


async def test_killed_core_ends_every_request_at_once(model_folder):
    """T10: within two seconds every generator has raised, health says so, new requests are refused, nothing is left."""
    before = leftovers()
    engine = make(model_folder)
    await engine.check_health()
    tasks = await flood(engine)
    os.kill(core_pid(engine), signal.SIGKILL)
    start = time.monotonic()
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2.0)
    assert time.monotonic() - start < 2.0
    assert all(isinstance(e, AsyncEngineDeadError) for e in ends)
    assert "EngineCore encountered an issue. See stack trace (above) for the root cause." in str(ends[0])
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    with pytest.raises(EngineDeadError):
        await final(engine, "Hello", greedy(), "later")
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()
    assert engine.errored
    assert engine.is_stopped
    assert engine.get_num_unfinished_requests() == 0
    await engine.shutdown(0)
    assert leftovers() == before


async def test_a_killed_rank_is_named_without_repetitions(tmp_path):
    async with running(save_llama(tmp_path, intermediate_size=76), tensor_parallel_size=2) as engine:
        (rank,) = [
            child
            for child in psutil.Process(core_pid(engine)).children()
            if "worker_process" in " ".join(child.cmdline())
        ]
        tasks = await flood(engine, 2)
        rank.kill()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10.0)
        await settle(lambda: engine.errored)
        text = str(engine.dead_error)
    assert f"Rank 1 (pid {rank.pid}) was killed by signal 9" in text
    assert text.count("EngineCore encountered an issue") == 1 and "EngineDeadError" not in text


async def test_frozen_core_is_noticed_and_given_up(model_folder, monkeypatch):
    """T13: a stopped process fails health within two seconds, and its requests end when the time for a step is over."""
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "3")
    async with running(model_folder) as engine:
        pid = core_pid(engine)
        tasks = await flood(engine)
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        while True:
            try:
                await engine.check_health()
            except EngineDeadError as error:
                assert "sign of life" in str(error)
                break
            await asyncio.sleep(0.02)
        assert time.monotonic() - start < 2.0
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5.0)
        assert time.monotonic() - start < 3 + 2.0
        assert all(isinstance(e, AsyncEngineDeadError) for e in ends)
        await settle(lambda: gone(pid))


@pytest.mark.parametrize("separate", [True, False])
async def test_stuck_step_is_noticed_and_given_up(model_folder, monkeypatch, separate):
    """T13: the very first step after idling hangs; the process lives and sends its pulse all the while."""
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "1")
    monkeypatch.setenv("VLLM_FAULTS", "forward.sleep@1:6" if separate else "forward.sleep@1:3")
    async with running(model_folder, separate=separate) as engine:
        start = time.monotonic()
        with pytest.raises(AsyncEngineDeadError, match="not finished a step"):
            await final(engine, "Hello", greedy(), "stuck")
        assert time.monotonic() - start < 1 + 2.0
        with pytest.raises(EngineDeadError):
            await engine.check_health()


@pytest.mark.parametrize("separate", [True, False])
async def test_health_fails_long_before_a_step_is_given_up(model_folder, monkeypatch, separate):
    """T13: the two limits are two; a step that ends after all makes the engine healthy again, and loses nothing."""
    monkeypatch.setenv("VLLM_HEALTH_TIMEOUT_S", "1")
    monkeypatch.setenv("VLLM_FAULTS", "forward.sleep@5:3")
    async with running(model_folder, separate=separate) as engine:
        request = asyncio.ensure_future(final(engine, "Hello", greedy(), "slow"))
        seen = []
        while not request.done():
            try:
                await engine.check_health()
                seen.append(True)
            except EngineDeadError as error:
                assert "not finished a step" in str(error)
                seen.append(False)
            await asyncio.sleep(0.02)
        assert seen[0]
        assert False in seen
        assert len((await request).outputs[0].token_ids) == 24
        await settle(lambda: engine._core._busy_seconds == 0.0 if separate else engine._core._busy_since is None)
        await engine.check_health()


def test_a_large_step_may_take_longer(monkeypatch):
    """On a CPU a prompt of thousands of tokens takes longer than a stuck step is waited for."""
    from tests.engine.test_core import new_core, request
    from vllm.engine.core_process import Heart

    core, _ = new_core()
    core.add_requests([request("a", length=50)])
    core.step()
    assert core.step_allowance == 0.5
    core.step()
    assert core.step_allowance == 0.01
    now = 100.0
    monkeypatch.setattr("vllm.engine.core_process.time.monotonic", lambda: now)
    heart = Heart()
    assert heart.busy_seconds(0.0) == 0.0
    heart.beat(True)
    now = 107.0
    assert heart.busy_seconds(0.0) == 7.0
    assert heart.busy_seconds(5.0) == 2.0
    assert heart.busy_seconds(20.0) == 0.0
    heart.beat(False)
    assert heart.busy_seconds(0.0) == 0.0


@pytest.mark.parametrize("sent", [wire.frame(wire.Fatal("x")), b"\xff\xff\xff\xff"])
def test_a_core_that_cannot_hear_ends(sent):
    """What it was sent makes no sense: it does not stay and look healthy."""
    from tests.engine.test_core import new_core
    from vllm.engine.core_process import CoreServer

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        with pytest.raises((ValueError, msgspec.DecodeError)):
            CoreServer(theirs, new_core()[0]).serve()


def test_a_core_without_a_front_end_ends(monkeypatch):
    from tests.engine.test_core import new_core
    from vllm.engine import core_process

    class EndedError(BaseException):
        pass

    def end():
        raise EndedError

    monkeypatch.setattr(core_process, "_end_all_processes", end)
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(EndedError):
        core_process.CoreServer(theirs, new_core()[0]).serve()


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.server.engines import make, core_pid, greedy, final, PROMPTS
async def main():
    engine = make(Path(sys.argv[1]))
    await engine.check_health()
    tasks = [asyncio.ensure_future(final(engine, p, greedy(480), p)) for p in PROMPTS]
    await asyncio.sleep(0.05)
    print(core_pid(engine), flush=True)
    for i in range(10**6):
        await asyncio.gather(*tasks)
        tasks = [asyncio.ensure_future(final(engine, p, greedy(480), p)) for p in PROMPTS]
asyncio.run(main())
"""


@pytest.mark.parametrize("core_is", ["working", "frozen"])
def test_killed_front_end_takes_the_core_with_it(model_folder, core_is):
    """T11: nothing of the core is left five seconds after its front end was killed, not even if it was frozen."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        if core_is == "frozen":
            os.kill(pid, signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    start = time.monotonic()
    while not gone(pid):
        assert time.monotonic() - start < 5.0
        time.sleep(0.01)


async def test_start_and_stop_leave_nothing(model_folder):
    """T46 in small: processes, descriptors, threads and names are as before."""
    before = leftovers()
    descriptors = None
    for i in range(3):
        engine = make(model_folder)
        assert (await final(engine, "Hello", greedy(2), "a")).finished
        await engine.shutdown(5)
        assert engine._core._process.returncode == 0
        del engine
        gc.collect()
        assert leftovers() == before
        now = psutil.Process().num_fds()
        if i == 1:
            descriptors = now
        elif i == 2:
            assert now <= descriptors


async def test_core_that_cannot_start_says_why(model_folder, tmp_path):
    before = leftovers()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    with pytest.raises(RuntimeError, match="failed to start: .*(safetensors|weights)"):
        make(tmp_path)
    assert leftovers() == before


def test_a_core_that_lacks_ray_says_so_in_one_line(model_folder, tmp_path, monkeypatch, capfd):
    (tmp_path / "ray.py").write_text("raise ImportError('not installed')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"failed to start: .*needs Ray on every node: pip install 'vllm\[ray\]'"):
        make(model_folder, distributed_executor_backend="ray")
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_requests_the_core_cannot_read_end_with_an_error(model_folder):
    """What passes the front end and not the schema fails alone; the core goes on."""
    async with running(model_folder) as engine:
        neighbour = asyncio.ensure_future(final(engine, "Hello", greedy(LONG), "neighbour"))
        await settle(lambda: "neighbour" in engine.output_processor)
        process = engine.input_processor.process

        def smuggle(request):
            done = process(request)
            if request.request_id == "smuggled":
                done.children[0].params.top_k = "many"
            return done

        engine.input_processor.process = smuggle
        with pytest.raises(Exception, match="cannot be read"):
            await final(engine, "Hello", greedy(), "smuggled")
        assert len((await neighbour).outputs[0].token_ids) == LONG
        await assert_idle(engine)


def test_the_core_refuses_calls_that_are_not_on_its_list():
    from vllm.engine.core_process import CoreServer

    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = CoreServer(theirs, core=None)
        for method in ("shutdown", "__class__", "scheduler", "add_requests", "kill_workers"):
            result = server._call(wire.Call(1, method))
            assert "no method" in result.error


def test_frames_survive_any_cutting():
    messages = [
        wire.AddRequests([CoreRequest("a", [1, 2, 3], greedy(), 2**64 - 1)]),
        wire.Abort(["a", "b"]),
        wire.Call(3, "reset_prefix_cache"),
        wire.Stop(),
    ]
    stream = b"".join(wire.frame(m) for m in messages)
    for size in (1, 2, 3, 7, 64, len(stream)):
        reader = frames.FrameReader()
        bodies = [b for i in range(0, len(stream), size) for b in reader.feed(stream[i : i + size])]
        added, *others = [wire.decode_to_core(b) for b in bodies]
        found = [read(look_at(raw, {})) for raw in added.requests]
        assert msgspec.to_builtins(found) == msgspec.to_builtins(messages[0].requests) and others == messages[1:]
    with pytest.raises(ValueError, match="exceeds the limit"):
        frames.FrameReader().feed(b"\xff\xff\xff\xff")
    for bad in (b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "evil"}), wire.frame(wire.Fatal("x"))[4:]):
        with pytest.raises(msgspec.DecodeError):
            wire.decode_to_core(bad)


def test_outputs_survive_the_wire():
    outputs = [CoreOutput("a", [1, 2]), CoreOutput("b", [], finish_reason="error", error="no \u4e16 \x00")]
    for sent in (
        wire.StepOutputs(outputs, CoreStats(1, 2, 3, prompt_tokens=5)),
        wire.StepOutputs([], CoreStats(), aborted=7),
    ):
        assert wire.decode_from_core(wire.frame(sent)[4:]) == sent


def test_tokens_travel_together_while_the_front_end_is_behind():
    from tests.engine.test_core import new_core
    from vllm.engine.core_process import CoreServer
    from vllm.step.result import TokenLogprobs

    ours, theirs = socket.socketpair()
    reader = frames.FrameReader()

    def received() -> list[list[CoreOutput]]:
        ours.setblocking(False)
        try:
            return [wire.decode_from_core(body).outputs for body in frames.read_frames(ours, reader)]
        except BlockingIOError:
            return []

    def logprobs(token: int) -> list[TokenLogprobs]:
        return [TokenLogprobs([token], [-1.0], 1)]

    with ours, theirs:
        server = CoreServer(theirs, new_core()[0])
        first = CoreOutput("a", [1], num_cached_tokens=0, first_scheduled_time=5.0)
        server._report([first])
        server._report([CoreOutput("b", [6], num_cached_tokens=0)])  # a first token waits for nothing
        server._report([CoreOutput("a", [2], logprobs=logprobs(2)), CoreOutput("b", [7])])
        server._report([CoreOutput("a", [3], logprobs=logprobs(3))])
        assert received() == [[first], [CoreOutput("b", [6], num_cached_tokens=0)]]  # the reader was behind
        server._report([CoreOutput("a", [4]), CoreOutput("b", [8])])  # and is not any more
        every = [p for t in (2, 3) for p in logprobs(t)]
        assert received() == [[CoreOutput("a", [2, 3, 4], logprobs=every), CoreOutput("b", [7, 8])]]
        server._report([CoreOutput("b", [9])])
        server._report([CoreOutput("b", [10])])
        server._send_held()  # as before what may take long, and before the core sleeps
        server._report([CoreOutput("b", [11])])
        server._report([CoreOutput("b", [12], "stop", 12)])  # an end waits for nothing
        ends = [CoreOutput("b", [11, 12], "stop", 12)]
        assert received() == [[CoreOutput("b", [9])], [CoreOutput("b", [10])], ends]
        server._first.singly = {"a"}
        server._report([CoreOutput("a", [5])])
        server._report([CoreOutput("a", [6])])
        server._report([CoreOutput("a", [7], "length")])
        assert received() == [[CoreOutput("a", [5])], [CoreOutput("a", [6])], [CoreOutput("a", [7], "length")]]
        assert not server._first.singly
        server._report([])
        server._send_held()
        assert received() == []
        server._report([CoreOutput("c", [1])])
        server._report([CoreOutput("c", [2])])  # held, when the request is ended
        server._handle(server._first, wire.Abort(["c"], 3))
        server._report([CoreOutput("c", [8], num_cached_tokens=0)])  # another one of that name
        assert received() == [[CoreOutput("c", [1])], [], [CoreOutput("c", [8], num_cached_tokens=0)]]


@pytest.mark.parametrize("further", [{}, {"stop": ["x"]}, {"logprobs": 1}, {"output_kind": RequestOutputKind.DELTA}])
def test_tokens_that_nobody_looks_at_before_the_last_one_are_told_rarely(monkeypatch, further):
    from tests.engine.test_core import new_core, request
    from vllm.engine import core_process

    params = SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY, "max_tokens": 6, **further})
    now = [100.0]
    monkeypatch.setattr(core_process.time, "monotonic", lambda: now[0])
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    reader, told = frames.FrameReader(), []

    def report(*outputs: CoreOutput) -> int:
        server._report(list(outputs))
        with contextlib.suppress(BlockingIOError):
            for body in frames.read_frames(ours, reader):
                told.append(wire.decode_from_core(body).outputs)
        return len(told)

    with ours, theirs:
        server = core_process.CoreServer(theirs, new_core()[0])
        server._first.take(msgspec.structs.replace(request("a"), params=params))
        server._first.take(request("b"))
        assert report(CoreOutput("a", [1], num_cached_tokens=0)) == 1, "the first token waits for nothing"
        sent = report(CoreOutput("a", [2]))
        if further:  # somebody looks: for a stop string, to count what is kept, to show it
            assert sent == 2
            return
        assert sent == 1
        now[0] += 1.1 * core_process.WHOLE_SECONDS
        assert report(CoreOutput("a", [3])) == 2, "statistics are told all the while"
        assert report(CoreOutput("a", [4])) == 2
        assert report(CoreOutput("a", [5]), CoreOutput("b", [9])) == 3, "others wait for nothing"
        assert report(CoreOutput("a", [6], "length")) == 4
        assert not server._first.whole
        tokens = [output.new_token_ids for outputs in told for output in outputs if output.request_id == "a"]
        assert tokens == [[1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize("prompt", [True, False])
def test_held_tokens_wait_for_no_prompt(prompt):
    """A step with a new prompt in it may be a long one: what is held goes out before."""
    from tests.engine.test_core import new_core, request
    from vllm.engine.core_process import CoreServer

    core, _ = new_core()
    core.add_requests([request("a")])
    if not prompt:
        core.step()
    held = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = CoreServer(theirs, core)
        server._first.held = {"x": CoreOutput("x", [1])}

        def step() -> list[CoreOutput]:
            held.extend(server._first.held)
            server._stopping = True
            return [CoreOutput("a", [2])]

        core.step = step
        server.serve()
    assert held == ([] if prompt else ["x"])


def test_strict_core_stops_with_a_report():
    """With VLLM_STRICT an idle core that holds a block ends with what it knows, as JSON."""
    from tests.engine.test_core import new_core, request

    core, _ = new_core()
    core._strict = True
    core.add_requests([request("a")])
    while core.has_unfinished():
        core.step()
    core.check_idle()
    core._submitted = 1
    with pytest.raises(RuntimeError, match="holds what it should not") as caught:
        core.check_idle()
    assert json.loads(str(caught.value).split(": ", 1)[1])["in_flight"] == 1


def test_an_idle_core_prepares_later_steps_and_lets_requests_go_first():
    from tests.engine.test_core import new_core, request
    from vllm.engine.core_process import CoreServer

    core, device = new_core()
    steps_before: list[int] = []
    ours, theirs = socket.socketpair()

    def prepare() -> bool:
        """A request arrives during the first piece of three; the last one fails, which stops this and nothing else."""
        assert not core.has_unfinished()
        steps_before.append(device.steps)
        if len(steps_before) == 1:
            ours.sendall(wire.frame(wire.AddRequests([request("a", max_tokens=4)])))
        if len(steps_before) == 3:
            ours.sendall(wire.frame(wire.Stop()))
            raise RuntimeError("no graph")
        return True

    device.prepare = prepare
    with ours, theirs:
        CoreServer(theirs, core).serve()
    assert steps_before == [0, 4, 4]


@pytest.mark.parametrize("dies", ["in a step", "while idle"])
def test_core_without_its_executor_ends(dies):
    """Ranks that die take the core with them, also when no request is left to notice."""
    from tests.engine.test_core import new_core, request
    from vllm.engine.core_process import CoreServer

    core, device = new_core()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = CoreServer(theirs, core)
        if dies == "in a step":
            device.fails_at[2] = RuntimeError("rank lost")
            core.add_requests([request("a"), request("b")])
        device.dead = True
        with pytest.raises(EngineDeadError, match="rank lost|gone"):
            server.serve()
