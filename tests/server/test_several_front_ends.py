"""One core and several front ends: each gets its own answers, one that goes or lags takes nobody along."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.engine.test_core import new_core, request
from tests.server.engines import OPTIONS, PROMPTS, final, greedy, leftovers, settle
from vllm import SamplingParams
from vllm.engine import core_process, wire
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncEngineDeadError, AsyncLLMEngine
from vllm.engine.core_client import CorePeer, CoreProcess
from vllm.engine.core_process import CoreServer
from vllm.ipc.frames import FrameReader, frame, read_frames
from vllm.step.messages import CoreOutput


@asynccontextmanager
async def engines(folder: Path) -> AsyncIterator[list[AsyncLLMEngine]]:
    """Three engines that share a core; the first has started it."""
    before = leftovers()
    args = AsyncEngineArgs(model=str(folder), **OPTIONS)
    config = args.create_engine_config()
    process = CoreProcess(config.to_dict(), 30.0, further=2)
    found = [AsyncLLMEngine(config, core=process, log_requests=False)]
    found += [AsyncLLMEngine(config, core=CorePeer(end, 30.0), log_requests=False) for end in process.further]
    try:
        yield found
    finally:
        for engine in reversed(found):
            engine.shutdown_background_loop()
            await engine.shutdown()
        await settle(lambda: leftovers() == before)


async def test_each_front_end_gets_the_answers_to_its_own_requests(model_folder: Path, monkeypatch) -> None:
    """Under names that others use, too, with several samples, ends of all kinds, and aborts."""
    monkeypatch.setenv("VLLM_STRICT", "1")
    async with engines(model_folder) as (first, *others):
        alone = [await final(first, prompt, greedy(12 + i), f"r{i}") for i, prompt in enumerate(PROMPTS[:6])]
        want = [output.outputs[0].token_ids for output in alone]
        everybody = [first, *others]
        asked = [
            final(engine, prompt, greedy(12 + i), f"r{i}")
            for engine in everybody
            for i, prompt in enumerate(PROMPTS[:6])
        ]
        several = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=9)
        samples = [final(engine, PROMPTS[7], several, "several") for engine in everybody]
        long = [asyncio.ensure_future(final(engine, "Hello", greedy(400), "long")) for engine in everybody]
        found = await asyncio.gather(*asked, *samples)
        assert [output.outputs[0].token_ids for output in found[:18]] == want * 3
        texts = [sorted(completion.text for completion in output.outputs) for output in found[18:]]
        assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 3
        await others[0].abort("long")
        assert (await long[1]).outputs[0].finish_reason == "abort"
        assert [len((await long[i]).outputs[0].token_ids) for i in (0, 2)] == [400, 400]
        await settle(lambda: len({engine.metrics.generation_tokens for engine in everybody}) == 1)
        assert others[0].metrics.generation_tokens > 1000, "each hears of all that the core does"
        for engine in everybody:
            await engine.check_health()
            assert await engine.reset_prefix_cache()


async def test_a_front_end_that_goes_takes_its_requests_along_and_nobody_elses(model_folder: Path) -> None:
    async with engines(model_folder) as (first, second, third):
        theirs = [asyncio.ensure_future(final(second, PROMPTS[i], greedy(480), f"r{i}")) for i in range(4)]
        ours = asyncio.ensure_future(final(first, "Hello", greedy(300), "r0"))
        await settle(lambda: second.metrics.generation_tokens > 20)
        second._core._transport.abort()  # as its process would by ending
        ends = await asyncio.gather(*theirs, return_exceptions=True)
        assert all(isinstance(end, AsyncEngineDeadError) for end in ends)
        assert len((await ours).outputs[0].token_ids) == 300
        assert len((await final(third, "Hello", greedy(5), "r0")).outputs[0].token_ids) == 5
        report = await first._core.call("idle_report")
        assert report["requests"] == 0 and report["blocks_free"] == report["blocks_total"]


async def test_nobody_outlives_the_front_end_that_started_the_core(model_folder: Path) -> None:
    async with engines(model_folder) as (first, second, _):
        waiting = asyncio.ensure_future(final(second, "Hello", greedy(480), "r"))
        await settle(lambda: second.metrics.generation_tokens > 5)
        await first.shutdown(0)
        with pytest.raises(AsyncEngineDeadError):
            await waiting


class Ends:
    """A server in this process, and the far ends of its sockets."""

    def __init__(self, count: int) -> None:
        self.core, _ = new_core()
        pairs = [socket.socketpair() for _ in range(count)]
        self.far = [ours for ours, _ in pairs]
        self.near = [theirs for _, theirs in pairs]
        self.readers = [FrameReader() for _ in pairs]
        self.running = [-1] * count  # requests, as each was told last
        self.server = CoreServer(self.near[0], self.core, self.near[1:])

    def said(self, i: int) -> list[CoreOutput]:
        """What front end `i` has been told since."""
        found: list[CoreOutput] = []
        self.far[i].setblocking(False)
        try:
            while bodies := read_frames(self.far[i], self.readers[i]):
                for message in map(wire.decode_from_core, bodies):
                    if isinstance(message, wire.StepOutputs):
                        found += message.outputs
                        self.running[i] = message.stats.num_running
        except BlockingIOError:
            pass
        return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends(3)
    yield made
    for end in (*made.far, *made.near):
        end.close()


def test_names_are_those_that_each_front_end_gave(ends: Ends) -> None:
    for i in (0, 1):
        forked = request("b")
        forked.fork_of = "a"
        ends.far[i].sendall(wire.frame(wire.AddRequests([request("a"), forked, request("a")])))
    ends.server._take_in(0.1)
    assert sorted(ends.core.request_ids()) == ["0/a", "0/b", "1/a", "1/b"]
    assert {r.fork_of for r in ends.core.scheduler.requests.values()} == {None, "0/a", "1/a"}
    for i in (0, 1):
        (refused,) = ends.said(i)
        assert refused.request_id == "a" and refused.finish_reason == "error"
    while ends.core.has_unfinished():
        ends.server._report(ends.core.step())
    told = [ends.said(i) for i in range(3)]
    assert [sorted({o.request_id for o in outputs}) for outputs in told] == [["a", "b"], ["a", "b"], []]
    assert sum(len(o.new_token_ids) for o in told[0]) == sum(len(o.new_token_ids) for o in told[1]) == 12


def test_all_are_told_of_what_others_have_ended_before_it_is_quiet(ends: Ends) -> None:
    for i in (0, 1):
        ends.far[i].sendall(wire.frame(wire.AddRequests([request("a", max_tokens=50)])))
    ends.server._take_in(0.1)
    for _ in range(3):
        ends.server._report(ends.core.step())
    for i in (0, 1):
        ends.far[i].sendall(wire.frame(wire.Abort(["a"])))
    ends.server._take_in(0.1)
    for _ in range(2):
        ends.server._tell_bystanders()
        for i in range(3):
            ends.said(i)
        assert ends.running == [0, 0, 0]
    ends.running = [-1] * 3
    ends.server._tell_bystanders()
    assert not any(ends.said(i) for i in range(3)) and ends.running == [-1] * 3, "there is nothing new"


@pytest.mark.parametrize("apart", [False, True])
def test_many_requests_at_once_hold_up_nobody(ends: Ends, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read between the steps of others, some at a time and in turns with what comes later."""
    server, core, far = ends.server, ends.core, ends.far
    far[1].sendall(wire.frame(wire.AddRequests([request("mine", max_tokens=50)])))
    server._take_in(0.1)
    monkeypatch.setattr(core_process, "BESIDE_SECONDS", 0.0)
    monkeypatch.setattr(core_process, "LEAST_SECONDS", 0.0)
    many = [request(str(i), max_tokens=30, account="many") for i in range(20)]
    many[10].seed = "none"  # type: ignore[assignment]
    many[11].params = "none"  # type: ignore[assignment]
    unwanted = [str(i) for i in range(20) if i not in (1, 10, 11, 19)]
    call = wire.Call(1, "list_loras")
    all_of_them = [wire.AddRequests([r]) for r in many] if apart else [wire.AddRequests(many)]
    far[2].sendall(b"".join(map(wire.frame, (*all_of_them, wire.AddRequests([request("new")]), call))))
    far[0].sendall(wire.frame(wire.AddRequests([request("late")])))
    for _ in range(4):
        server._take_in(0.0)
    assert {"1/mine", "2/0", "2/new", "0/late"} <= set(core.request_ids()) and len(server._unread) >= 15
    assert server._stats(server._first).num_waiting == len(server._unread) + core.stats().num_waiting
    far[2].sendall(wire.frame(wire.Abort(unwanted)))
    server._take_in(0.0)
    assert len(server._unread) <= 2
    assert set(core.request_ids()) == {"1/mine", "2/new", "0/late", "2/1"}
    while core.has_unfinished() or server._unread:
        server._take_in(0.0)
        server._report(core.step())
    ended = {output.request_id: output.finish_reason for output in ends.said(2) if output.finish_reason is not None}
    assert ended == {"1": "length", "19": "length", "10": "error", "11": "error", "new": "length"}
    assert ends.said(0)[-1].finish_reason == ends.said(1)[-1].finish_reason == "length"


def test_requests_of_one_who_leaves_are_not_taken_in(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "TAKE_SECONDS", 0.0)
    monkeypatch.setattr(core_process, "LEAST_SECONDS", 0.0)
    for i in (1, 2):
        ends.far[i].sendall(wire.frame(wire.AddRequests([request("a"), request("b")])))
    ends.server._take_in(0.1)
    assert len(ends.core.request_ids()) == 1 and len(ends.server._unread) == 3
    ends.server._leave(ends.server._by_prefix["2/"])
    for _ in range(3):
        ends.server._take_in(0.0)
    assert ends.core.request_ids() == ["1/a", "1/b"]


def test_a_name_that_is_not_read_yet_is_in_use(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "TAKE_SECONDS", 0.0)
    monkeypatch.setattr(core_process, "LEAST_SECONDS", 0.0)
    ends.far[1].sendall(wire.frame(wire.AddRequests([request("a"), request("b"), request("b")])))
    ends.server._take_in(0.1)
    (refused,) = ends.said(1)
    assert refused.request_id == "b" and "already exists" in str(refused.error)
    assert ends.core.request_ids() == ["1/a"] and len(ends.server._unread) == 1


def test_a_request_without_a_name_ends_its_front_end_alone(ends: Ends) -> None:
    sent = msgspec.msgpack.encode({"type": "add", "requests": [7]})
    ends.far[1].sendall(wire.frame(wire.AddRequests([request("a")])))
    ends.far[2].sendall(frame(sent))
    ends.server._take_in(0.1)
    ends.server._take_in(0.1)
    assert ends.core.request_ids() == ["1/a"] and len(ends.server._peers) == 2


def test_one_that_reads_nothing_holds_up_nobody(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "SEND_SECONDS", 0.05)
    monkeypatch.setattr(core_process, "MOST_UNREAD", 4096)
    for step in range(3000):
        ends.server._report([CoreOutput(f"{i}/{step}", [1], "stop", num_cached_tokens=0) for i in (0, 1)])
        assert len(ends.said(0)) == 1
    lagging = ends.server._by_prefix["1/"]
    assert not lagging.gone and len(lagging.held) > 1000
    assert len(ends.said(1)) + len(lagging.held) == 3000
    ends.server._send_held()
    assert not lagging.held, "it reads again, and has lost nothing"


@pytest.mark.parametrize("sent", [wire.frame(wire.Fatal("x")), b"\xff\xff\xff\xff", wire.frame(wire.Stop()), b""])
def test_one_that_makes_no_sense_or_leaves_ends_alone(ends: Ends, sent: bytes) -> None:
    ends.far[1].sendall(wire.frame(wire.AddRequests([request("a")])))
    ends.far[2].sendall(wire.frame(wire.AddRequests([request("a")])))
    ends.server._take_in(0.1)
    ends.far[1].sendall(sent)
    if not sent:
        ends.far[1].close()
    ends.server._take_in(0.1)
    assert ends.core.request_ids() == ["2/a"] and len(ends.server._peers) == 2 and not ends.server._stopping
    while ends.core.has_unfinished():
        ends.server._report(ends.core.step())
    assert ends.said(2)[-1].finish_reason == "length"
    ends.server.send(wire.Pulse(0.0))
