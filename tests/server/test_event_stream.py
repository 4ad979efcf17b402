"""A streamed response without an engine: written to the connection directly, or through the application's layers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from vllm.engine.request_stream import MAX_APART, Apart, RequestStream, Wakeups
from vllm.engine.turns import Turns
from vllm.entrypoints.openai.connection import Outbox, connection_class
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.events import AnswerEvents, failed
from vllm.entrypoints.openai.sse import BYTES_PER_TURN, Events, EventStream
from vllm.exceptions import EngineGenerateError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind


class Lines(Events):
    """Each output is a line."""

    def feed(self, index: int, output: RequestOutput) -> bytes:
        return f"{index}:{output.outputs[0].text}\n".encode()

    def end(self) -> bytes:
        return b"end\n"

    def failure(self, error: APIError) -> bytes:
        return failed(error)


class FakePrompt:
    """What the engine would open: a stream that the test fills."""

    def __init__(self, wakeups: Wakeups, apart: Apart | None = None) -> None:
        self.closed, self.engine = 0, SimpleNamespace(turns=Turns())
        self.stream = RequestStream("r", RequestOutputKind.DELTA, wakeups, self._on_close, apart)

    def _on_close(self, stream: RequestStream) -> None:
        self.closed += 1

    async def open(self) -> RequestStream:
        return self.stream

    def put(self, text: str, reason: str | None = None) -> None:
        completion = CompletionOutput(0, text, [1], None, None, finish_reason=reason)
        self.stream.put(RequestOutput("r", None, [1], None, [completion], reason is not None))


class FakeConnection:
    """A connection that takes chunks, as `connection.ChunkWriter` says."""

    def __init__(self) -> None:
        self.paused = False
        self.chunks: list[bytes] = []
        self.on_writable: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        self.on_lost = on_lost

    def hold_head(self, scope: Any) -> None: ...

    def takes_chunks(self, scope: Any) -> bool:
        return True

    def open(self, on_writable: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self.on_writable, self.on_lost = on_writable, on_lost

    def write(self, data: bytes) -> None:
        assert data and not self.paused
        self.chunks.append(data)

    def close(self) -> None:
        self.on_writable = self.on_lost = None


class Exchange:
    """One response on its way; what passes the layers is in `messages`, what is written directly in the connection."""

    def __init__(self, prompts: int = 1, direct: bool = True, apart: Apart | None = None) -> None:
        wakeups = Wakeups()
        self.prompts = [FakePrompt(wakeups, apart) for _ in range(prompts)]
        self.response = EventStream(self.prompts, Lines())  # type: ignore[arg-type]
        self.connection = FakeConnection()
        self.scope = {"state": {"chunk_writer": self.connection} if direct else {}}
        self.messages: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    async def begin(self) -> None:
        await self.response.start(self.scope, self._receive)
        self.task = asyncio.ensure_future(self.response(self.scope, self._receive, self._send))
        await turns()

    def leave(self) -> None:
        """The client goes: a connection that writes directly says so itself, and nobody waits for the message."""
        if self.connection.on_lost is not None:
            self.connection.on_lost()
        else:
            self.left.set()

    async def end(self) -> bytes:
        assert self.task is not None
        await asyncio.wait_for(self.task, 5)
        return self.body

    @property
    def body(self) -> bytes:
        return b"".join(self.connection.chunks) + b"".join(m.get("body", b"") for m in self.messages)


async def turns(count: int = 10) -> None:
    """Let the event loop run everything that is due."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("direct", [True, False])
async def test_both_ways_send_the_same_bytes(direct):
    exchange = Exchange(prompts=2, direct=direct)
    first, second = exchange.prompts
    first.put("a")
    await exchange.begin()
    for put in (lambda: second.put("b"), lambda: first.put("c", "stop"), lambda: second.put("d")):
        put()
        await turns()
    second.put("", "length")
    assert await exchange.end() == b"0:a\n1:b\n0:c\n1:d\n1:\nend\n"
    assert exchange.messages[0]["status"] == 200 and exchange.messages[-1]["more_body"] is False
    assert [prompt.closed for prompt in exchange.prompts] == [1, 1]


async def test_direct_writes_pass_no_layer_but_for_the_first_and_the_last():
    exchange = Exchange()
    exchange.prompts[0].put("a")
    await exchange.begin()
    exchange.prompts[0].put("b")
    await turns()
    assert exchange.connection.chunks == [b"0:a\n", b"0:b\n"]
    exchange.prompts[0].put("c", "stop")
    await exchange.end()
    assert [m.get("body") for m in exchange.messages] == [None, b"0:c\nend\n"]


async def test_what_comes_in_one_turn_is_one_output_and_one_chunk():
    exchange = Exchange()
    exchange.prompts[0].put("a")
    await exchange.begin()
    for text in "bcd":
        exchange.prompts[0].put(text)
    await turns()
    assert exchange.connection.chunks == [b"0:a\n", b"0:bcd\n"]
    exchange.leave()
    await exchange.end()
    assert exchange.prompts[0].closed == 1


async def test_a_client_that_is_behind_finds_outputs_merged():
    exchange = Exchange()
    exchange.prompts[0].put("a")
    await exchange.begin()
    exchange.connection.paused = True
    for text in "bcd":
        exchange.prompts[0].put(text)
        await turns()
    assert exchange.connection.chunks == [b"0:a\n"]
    exchange.connection.paused = False
    assert exchange.connection.on_writable is not None
    exchange.connection.on_writable()
    assert exchange.connection.chunks == [b"0:a\n", b"0:bcd\n"]
    exchange.prompts[0].put("e", "stop")
    assert await exchange.end() == b"0:a\n0:bcd\n0:e\nend\n"


@pytest.mark.parametrize("direct", [True, False])
async def test_what_many_prompts_have_kept_is_written_in_many_turns(direct):
    """Others have theirs in between; every output comes, those of a prompt in order."""
    prompts, outputs, text = 100, 20, "x" * 500
    exchange = Exchange(prompts, direct, Apart())
    exchange.prompts[0].put("a")
    await exchange.begin()
    exchange.connection.paused = True
    for number in range(outputs):
        for prompt in exchange.prompts:
            prompt.put(f"{number}{text}")
    before, sizes = len(exchange.body), []
    exchange.connection.paused = False
    if exchange.connection.on_writable is not None:
        exchange.connection.on_writable()
    while len(exchange.body) < before + prompts * outputs * len(text):
        sizes.append(len(exchange.body))
        await asyncio.sleep(0)
        assert len(sizes) < 1000
    sizes.append(len(exchange.body))
    assert max(b - a for a, b in pairwise(sizes)) < 2 * BYTES_PER_TURN
    for prompt in exchange.prompts:
        prompt.put("", "stop")
    lines = (await exchange.end()).split(b"\n")
    for index in range(prompts):
        found = b"".join(line.split(b":")[1] for line in lines if line.startswith(b"%d:" % index))
        assert found.replace(text.encode(), b" ").split()[-outputs:] == [
            (b"a0" if not index and not n else b"%d" % n) for n in range(outputs)
        ]


async def test_what_many_prompts_bring_in_a_turn_is_one_chunk():
    exchange = Exchange(prompts=3)
    exchange.prompts[0].put("a")
    await exchange.begin()
    for prompt in exchange.prompts:
        prompt.put("b")
    await turns()
    assert exchange.connection.chunks == [b"0:a\n", b"0:b\n1:b\n2:b\n"]
    exchange.leave()
    await exchange.end()


def test_streams_of_one_call_keep_few_outputs_apart_in_all():
    apart = Apart()
    prompts = [FakePrompt(Wakeups(), apart) for _ in range(10)]
    for number in range(MAX_APART):
        for prompt in prompts:
            prompt.put(f"{number} ")
    assert apart.held == MAX_APART
    everything = "".join(f"{number} " for number in range(MAX_APART))
    taken = list(iter(prompts[0].stream.take, None))
    assert "".join(output.outputs[0].text for output in taken) == everything
    assert apart.held == MAX_APART - len(taken) + 1
    for prompt in prompts:
        prompt.stream.close()
    assert apart.held == 0


@pytest.mark.parametrize("direct", [True, False])
async def test_an_error_after_the_first_event_is_the_last_event(direct):
    exchange = Exchange(direct=direct)
    exchange.prompts[0].put("a")
    await exchange.begin()
    exchange.prompts[0].put("b")
    exchange.prompts[0].stream.fail(TimeoutError("too long"))
    body = await exchange.end()
    assert body.startswith(b"0:a\n0:b\n") and b"too long" in body and body.endswith(b"data: [DONE]\n\n")
    assert exchange.prompts[0].closed == 1


async def test_an_output_that_failed_is_shown_before_its_error():
    exchange = Exchange()
    exchange.prompts[0].put("a")
    await exchange.begin()
    exchange.prompts[0].put("b", "error")
    exchange.prompts[0].stream.fail(EngineGenerateError("broken"))
    body = await exchange.end()
    assert body.startswith(b"0:a\n0:b\n") and b"broken" in body and b"end\n" not in body


async def test_an_error_before_the_first_event_is_raised_by_start():
    exchange = Exchange(prompts=2)
    exchange.prompts[1].stream.fail(TimeoutError("too long"))
    with pytest.raises(TimeoutError, match="too long"):
        await exchange.response.start(exchange.scope, exchange._receive)
    assert [prompt.closed for prompt in exchange.prompts] == [1, 1]


@pytest.mark.parametrize("direct", [True, False])
async def test_a_client_that_leaves_ends_its_requests(direct):
    exchange = Exchange(prompts=2, direct=direct)
    exchange.prompts[0].put("a")
    await exchange.begin()
    exchange.leave()
    await exchange.end()
    assert [prompt.closed for prompt in exchange.prompts] == [1, 1]
    exchange.prompts[1].put("late")  # nobody is called any more
    await turns()
    assert exchange.body == b"0:a\n"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("opened", [True, False])
async def test_a_client_that_leaves_before_the_first_event_ends_its_requests(direct, opened):
    exchange = Exchange(prompts=2, direct=direct)
    if not opened:  # the second request waits to be accepted
        exchange.prompts[1].open = asyncio.Event().wait  # type: ignore[assignment,method-assign]
    starting = asyncio.ensure_future(exchange.response.start(exchange.scope, exchange._receive))
    await turns()
    exchange.leave()
    with pytest.raises(APIError, match="has left") as found:
        await asyncio.wait_for(starting, 5)
    assert found.value.status == 499
    assert [prompt.closed for prompt in exchange.prompts] == [1, int(opened)]
    assert exchange.connection.on_lost is None
    assert not hasattr(starting, "cancelling") or not starting.cancelling()


async def test_a_connection_that_has_ended_says_so_at_once():
    made: Any = connection_class(5.0, 10, direct=True)
    protocol = made(config=uvicorn.Config(lambda: None), server_state=ServerState(), app_state={})
    transport = FakeTransport()
    protocol.connection_made(transport)
    lost: list[int] = []
    protocol.watch(lambda: lost.append(1))
    assert lost == []
    transport.is_closing = lambda: True  # type: ignore[method-assign]
    protocol.watch(lambda: lost.append(2))
    assert lost == [2]
    protocol.connection_lost(None)
    assert lost == [2, 2]


async def test_a_listener_that_fails_harms_no_other(caplog):
    wakeups = Wakeups()
    broken, sound = FakePrompt(wakeups), FakePrompt(wakeups)
    called: list[str] = []
    broken.stream.listen(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    sound.stream.listen(lambda: called.append("sound"))
    broken.put("x")
    sound.put("y")
    await turns()
    assert called == ["sound"]


class FakeTransport(asyncio.Transport):
    """A connection to a client; `writes` is what was written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


async def answer_of(prompt: FakePrompt, direct: bool, later: Callable[[], None]) -> list[bytes]:
    """What is written to a client that asks for a stream of `prompt`; `later` is called after the first output."""
    response = EventStream([prompt], Lines())  # type: ignore[arg-type, list-item]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await response.start(scope, receive)
        await response(scope, receive, send)

    transport = FakeTransport()
    made: Any = connection_class(5.0, 10, direct=direct)
    protocol = made(config=uvicorn.Config(app), server_state=ServerState(), app_state={})
    protocol.connection_made(transport)
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await turns()
    later()
    await turns()
    protocol.connection_lost(None)
    return transport.writes


async def test_head_and_first_event_are_one_write():
    """A write wakes the client and costs as much as all else that is done for an event."""
    prompt = FakePrompt(Wakeups())
    prompt.put("a")
    writes = await answer_of(prompt, True, lambda: prompt.put("b", "stop"))
    assert len(writes) == 2
    head, _, body = writes[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body == b"4\r\n0:a\n\r\n"
    assert writes[1] == b"8\r\n0:b\nend\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("reason", [None, "stop"])
async def test_held_head_is_written_whatever_comes_of_the_stream(reason):
    """Through the layers and past them the same bytes, also where the first output is the last one."""
    found = []
    for direct in (True, False):
        prompt = FakePrompt(Wakeups())
        prompt.put("a", reason)
        writes = await answer_of(prompt, direct, lambda: None if reason else prompt.put("b", "stop"))  # noqa: B023
        found.append(b"".join(line for line in b"".join(writes).split(b"\r\n") if not line.startswith(b"date:")))
    assert found[0] == found[1] and found[0].startswith(b"HTTP/1.1 200 OK") and b"end" in found[0]


async def test_outbox_writes_in_order_and_one_failure_harms_no_other(caplog):
    class Broken(FakeTransport):
        aborted = 0

        def write(self, data: bytes) -> None:
            raise RuntimeError("no more")

        def abort(self) -> None:
            self.aborted += 1

    outbox, broken, first, second = Outbox(), Broken(), FakeTransport(), FakeTransport()
    loop = asyncio.get_running_loop()
    for transport, data in ((first, b"1"), (broken, b"2"), (second, b"3"), (first, b"4")):
        outbox.put(loop, transport, data)
    assert first.writes == []
    await turns()
    assert (first.writes, second.writes, broken.aborted) == ([b"1", b"4"], [b"3"], 1)
    assert "does not take what is written" in caplog.text
    outbox.put(loop, first, b"5")
    outbox.flush()  # before its turn; then there is nothing left
    await turns()
    assert first.writes == [b"1", b"4", b"5"]


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("parsed", [True, False])
def test_what_an_engine_says_of_an_error_is_told_by_the_last_event_alone(is_plain, parsed):
    class Endings(AnswerEvents):
        def _events(self, choice: int, result: RequestOutput, output: CompletionOutput, deltas: Any) -> str:
            return f"{choice} {output.finish_reason} {output.stop_reason}\n"

        def end(self) -> bytes:
            return b""

    events = Endings(1, 2, is_plain, (lambda choice, output: ()) if parsed else None)
    traceback = 'Traceback (most recent call last):\n  File "worker_process.py", line 107'
    outputs = [
        CompletionOutput(0, "", [], None, None, finish_reason="error", stop_reason=traceback),
        CompletionOutput(1, "", [], None, None, finish_reason="stop", stop_reason="END"),
    ]
    assert events.feed(0, RequestOutput("r", None, [1], None, outputs, True)) == b"0 error None\n1 stop END\n"
    assert outputs[0].stop_reason == traceback  # the operator's log has it
