"""Requests with many prompts begin them in turns, between which others work."""

from __future__ import annotations

import pytest

from vllm.entrypoints.openai import context
from vllm.entrypoints.openai.context import BEGUN_AT_ONCE, BEGUN_PER_TURN, LONGEST_REST_SECONDS, Turns

WORK = 1 / 8192  # seconds a prompt


class Clock:
    """A clock that goes on with sleeping alone, whose sleeps are noted."""

    def __init__(self) -> None:
        self.now, self.rests = 0.0, list[float]()

    async def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(context.asyncio, "sleep", made.sleep)
    monkeypatch.setattr(context.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(Turns, "_rested", 0.0)
    return made


async def a_turn(turns: Turns, clock: Clock) -> None:
    for _ in range(BEGUN_PER_TURN):
        clock.now += WORK
        await turns.begun()


async def test_others_have_their_turn_and_after_the_first_prompts_a_rest(clock: Clock) -> None:
    turns = Turns()
    for i in range(8):
        clock.now += 2 * LONGEST_REST_SECONDS if i == 6 else 0.0
        await a_turn(turns, clock)
    first, worked = BEGUN_AT_ONCE // BEGUN_PER_TURN, BEGUN_PER_TURN * WORK
    want = [0.0] * first + [worked] * (6 - first) + [LONGEST_REST_SECONDS] * 2
    assert clock.rests == pytest.approx(want)


async def test_several_requests_rest_one_after_the_other(clock: Clock) -> None:
    requests = [Turns() for _ in range(5)]
    for turns in requests:
        for _ in range(BEGUN_AT_ONCE // BEGUN_PER_TURN):
            await a_turn(turns, clock)
    clock.rests.clear()
    begun, worked = clock.now, BEGUN_PER_TURN * WORK
    for turns in requests:
        clock.now = begun  # all at the same time
        turns._since = begun
        await a_turn(turns, clock)
    want = [worked * (1 + 2 * i) for i in range(5)]
    assert clock.rests == pytest.approx(want), "each next turn has a time of its own"
