"""Calls with many prompts begin them in turns, between which others work."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.engine import turns as module
from vllm.engine.turns import AT_ONCE, LONGEST_SECONDS, PER_TURN, Turns

WORK = 1 / 8192  # seconds a prompt


class Loop(asyncio.SelectorEventLoop):
    """Whose clock goes on with work alone, and when there is nothing to do."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(work: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    loop = Loop()
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "perf_counter", loop.time)
        try:
            return loop.run_until_complete(work(loop))
        finally:
            loop.close()


async def begin(loop: Loop, turns: Turns, count: int, begun: list[Any], name: str = "", work: float = WORK) -> None:
    call = turns.call()
    for _ in range(count):
        await call.next()
        begun.append((name, loop.now))
        loop.now += work


def test_others_have_their_turn_and_after_the_first_prompts_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(loop: Loop) -> None:
        for each in (WORK, LONGEST_SECONDS):
            loop.now, begun = 0.0, list[Any]()
            await begin(loop, Turns(), 8 * PER_TURN, begun, work=each)
            turn = PER_TURN * each
            rests = [begun[i][1] - begun[i - 1][1] - each for i in range(PER_TURN, len(begun), PER_TURN)]
            first = AT_ONCE // PER_TURN
            assert rests == pytest.approx([0.0] * first + [min(turn, LONGEST_SECONDS)] * (7 - first))

    run(work, monkeypatch)


def test_calls_have_their_turns_in_rounds_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(loop: Loop) -> None:
        turns, begun = Turns(), list[Any]()
        await asyncio.gather(*(begin(loop, turns, 10 * PER_TURN, begun, f"{i}") for i in range(5)))
        order = [name for name, _ in begun[::PER_TURN]]
        assert order == [f"{i}" for _ in range(10) for i in range(5)]
        assert all(name == order[i // PER_TURN] for i, (name, _) in enumerate(begun)), "nobody in between"
        rested = begun[8 * 5 * PER_TURN : 9 * 5 * PER_TURN]
        gaps = [rested[i][1] - rested[i - 1][1] - WORK for i in range(PER_TURN, len(rested), PER_TURN)]
        assert gaps == pytest.approx([PER_TURN * WORK] * 4)

    run(work, monkeypatch)


def test_a_call_that_is_given_up_begins_nothing_more_and_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(loop: Loop) -> None:
        turns, begun = Turns(), list[Any]()
        tasks = [asyncio.ensure_future(begin(loop, turns, 1000, begun, f"{i}")) for i in range(40)]
        while len(begun) < 45 * PER_TURN:
            await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        count, since = len(begun), loop.now
        await tasks[0]
        assert {name for name, _ in begun[count:]} == {"0"}
        assert loop.now - since < 2.1 * 1000 * WORK + LONGEST_SECONDS

    run(work, monkeypatch)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.floats(0.0, 0.02), st.one_of(st.none(), st.integers(1, 200))), max_size=9
    )
)
def test_every_call_comes_to_its_end(calls: list[tuple[int, float, int | None]]) -> None:
    """Also beside those that stop, or wait for something else in the middle of a turn."""

    async def work(loop: Loop) -> None:
        turns, ended = Turns(), list[int]()

        async def one(number: int, count: int, pause: float, stops: int | None) -> None:
            call = turns.call()
            for i in range(count):
                await call.next()
                loop.now += WORK
                if i == stops:
                    return
                if i % 50 == 7:
                    await asyncio.sleep(pause)
            ended.append(number)

        waiting: list[Coroutine[Any, Any, None]] = [one(i, *call) for i, call in enumerate(calls)]
        await asyncio.wait_for(asyncio.gather(*waiting), 3600.0)
        assert set(ended) >= {i for i, (_, _, stops) in enumerate(calls) if stops is None}

    with pytest.MonkeyPatch.context() as patch:
        run(work, patch)
