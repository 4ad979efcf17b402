"""Handlers that end with their client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request

from vllm.entrypoints.serve.utils.api_utils import with_cancellation


def request(*messages: str) -> tuple[Request, asyncio.Queue[dict[str, Any]]]:
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    for kind in messages:
        queue.put_nowait({"type": kind})
    return Request({"type": "http", "headers": []}, queue.get), queue


def test_an_answer_and_an_error_come_through() -> None:
    @with_cancellation
    async def half(self: object, value: int, raw_request: Request) -> int:
        await asyncio.sleep(0)
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value // 2

    async def main() -> None:
        raw, _ = request("http.request")
        assert await half(None, 8, raw_request=raw) == 4
        assert await half(None, 10, raw) == 5
        with pytest.raises(ValueError, match="7 is odd"):
            await half(None, 7, raw)
        with pytest.raises(TypeError, match=r"expected a fastapi\.Request"):
            await half(None, 8, raw_request=None)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_handler_is_cancelled_when_its_client_goes() -> None:
    ended = []

    @with_cancellation
    async def forever(raw_request: Request) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return "never"

    async def main() -> None:
        raw, queue = request("http.request")
        answer = asyncio.ensure_future(forever(raw_request=raw))
        await asyncio.sleep(0.01)
        assert not answer.done()
        queue.put_nowait({"type": "http.disconnect"})
        assert await answer is None

        waiting = asyncio.ensure_future(forever(raw_request=raw))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert ended == ["cancelled", "cancelled"]
