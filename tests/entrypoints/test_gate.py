"""Requests that come at the same moment share the event loop with answers in progress."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from vllm.entrypoints.openai import routes
from vllm.entrypoints.openai.gate import PER_TURN, Gate
from vllm.entrypoints.openai.limits import KeyChecker, Limits, LimitsMiddleware
from vllm.entrypoints.openai.protocol import TokenizeRequest

COUNT = 100


def turns_of(begin: Any) -> Counter[int]:
    """How many of COUNT requests go on in each turn of the event loop; begin(number, note) is one request."""
    found: Counter[int] = Counter()

    async def main() -> None:
        turn = 0

        def count() -> None:
            nonlocal turn
            turn += 1
            asyncio.get_running_loop().call_soon(count)

        count()
        await asyncio.gather(*(begin(i, lambda: found.update([turn])) for i in range(COUNT)))

    asyncio.run(main())
    assert found.total() == COUNT
    return found


def request_with(body: bytes, app: Any, leaves: asyncio.Event) -> Request:
    """A request whose client has sent its body, and is gone when `leaves` is set."""
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body}
        await leaves.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")], "app": app}
    return Request(scope, receive)


def test_few_pass_per_turn_in_order_and_who_has_left_takes_no_place():
    order: list[int] = []

    async def main() -> None:
        gate = Gate()

        async def enter(number: int) -> None:
            await gate.enter()
            order.append(number)

        tasks = [asyncio.ensure_future(enter(i)) for i in range(COUNT)]
        await asyncio.sleep(0)
        assert order == list(range(PER_TURN))
        for task in tasks[PER_TURN : COUNT // 2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [*range(PER_TURN), *range(COUNT // 2, COUNT)]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(gate.enter(), 1.0)

    asyncio.run(main())


def test_few_bodies_are_read_per_turn(monkeypatch: pytest.MonkeyPatch):
    notes: dict[bytes, Any] = {}

    def parse(model: Any, body: bytes) -> Any:
        notes[body]()
        return SimpleNamespace(model_extra=None)

    monkeypatch.setattr(routes, "_parse", parse)
    app = SimpleNamespace(state=SimpleNamespace(context=SimpleNamespace(gate=Gate())))

    async def begin(number: int, note: Any) -> None:
        body = str(number).encode()
        notes[body] = note

        await routes.read(request_with(body, app, asyncio.Event()), TokenizeRequest)

    assert max(turns_of(begin).values()) <= 2 * PER_TURN


def test_nobody_waits_for_the_bodies_of_those_who_have_left(monkeypatch: pytest.MonkeyPatch):
    read: list[bytes] = []

    def parse(model: Any, body: bytes) -> Any:
        read.append(body)
        return SimpleNamespace(model_extra=None)

    monkeypatch.setattr(routes, "_parse", parse)
    app = SimpleNamespace(state=SimpleNamespace(context=SimpleNamespace(gate=Gate())))

    async def main() -> list[Any]:
        leaves = asyncio.Event()
        requests = [request_with(b"%d" % i, app, leaves) for i in range(COUNT)]
        requests.append(request_with(b"last", app, asyncio.Event()))
        tasks = [asyncio.ensure_future(routes.read(request, TokenizeRequest)) for request in requests]
        while not read:
            await asyncio.sleep(0)
        leaves.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(main())
    assert len(read) <= 5 * PER_TURN and read[-1] == b"last"
    assert Counter(getattr(one, "status", 200) for one in found) == {200: len(read), 499: COUNT + 1 - len(read)}


@pytest.mark.parametrize(("path", "waits"), [("/v1/models", True), ("/health", False)])
def test_few_requests_without_a_body_begin_per_turn_and_health_never_waits(path: str, waits: bool):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["note"]()

    server = LimitsMiddleware(app, Limits(), KeyChecker(()))

    async def begin(number: int, note: Any) -> None:
        scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"a")], "note": note}
        await server(scope, None, None)  # type: ignore[arg-type]

    assert (max(turns_of(begin).values()) <= 2 * PER_TURN) == waits
