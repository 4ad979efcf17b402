"""A request with many prompts begins them in turns, between which others work."""

from __future__ import annotations

import asyncio
import time

import pytest

from vllm.entrypoints.openai import context
from vllm.entrypoints.openai.context import BEGUN_AT_ONCE, BEGUN_PER_TURN, Turns


async def test_others_have_their_turn_and_after_the_first_prompts_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        rests.append(seconds)
        await sleep(0)

    monkeypatch.setattr(context.asyncio, "sleep", note)
    turns = Turns()
    for i in range(8 * BEGUN_PER_TURN):
        if i == 6 * BEGUN_PER_TURN:
            time.sleep(2 * context.LONGEST_REST_SECONDS)
        await turns.begun()
    first = BEGUN_AT_ONCE // BEGUN_PER_TURN
    assert len(rests) == 8 and rests[:first] == [0.0] * first
    assert all(0.0 < rest <= context.LONGEST_REST_SECONDS for rest in rests[first:])
    assert rests[6] == context.LONGEST_REST_SECONDS
