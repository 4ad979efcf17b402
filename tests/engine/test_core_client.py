"""The front end's end of the core: what a step brings is told in pieces between which others have their turn."""

from __future__ import annotations

import asyncio

from vllm.engine import wire
from vllm.engine.core_client import CorePeer, Leaving
from vllm.step.messages import CoreOutput, CoreStats


def test_what_a_step_ends_is_told_after_everything_else_and_in_parts() -> None:
    told: list[tuple[list[CoreOutput], CoreStats]] = []

    async def tell(ends: int, others: int) -> None:
        peer = CorePeer(None, 60.0)
        peer._on_outputs = lambda outputs, stats: told.append((outputs, stats))
        outputs = [CoreOutput(f"end {i}", [5], finish_reason="length") for i in range(ends)]
        outputs += [CoreOutput(f"other {i}", [5]) for i in range(others)]
        for step in range(2):
            stats = CoreStats(prompt_tokens=7, generation_tokens=ends + others, num_running=step)
            peer.on_data(wire.frame(wire.StepOutputs(outputs, stats)))
        while sum(len(outputs) for outputs, _ in told) < 2 * (ends + others):
            await asyncio.sleep(0)

    for ends, others, parts in ((100, 50, [50, 32, 32, 32, 4]), (20, 200, [220]), (33, 0, [0, 32, 1]), (0, 0, [0])):
        told.clear()
        asyncio.run(tell(ends, others))
        assert [len(outputs) for outputs, _ in told] == parts * 2
        for step in range(2):
            mine = [(outputs, stats) for outputs, stats in told if stats.num_running == step]
            names = [output.request_id for outputs, _ in mine for output in outputs]
            assert sorted(names) == sorted([f"end {i}" for i in range(ends)] + [f"other {i}" for i in range(others)])
            assert names[:others] == [f"other {i}" for i in range(others)] or len(parts) == 1
            assert sum(stats.generation_tokens for _, stats in mine) == ends + others
            assert sum(stats.prompt_tokens for _, stats in mine) == 7


def test_what_is_said_before_the_core_has_heard_of_an_end_is_of_those_that_ended() -> None:
    leaving = Leaving()

    def heard(*names: str) -> list[str]:
        return [output.request_id for output in leaving.without([CoreOutput(name, [1]) for name in names])]

    assert heard("a", "b") == ["a", "b"]
    first = leaving.begin(["a", "b"])
    assert heard("a", "b", "c") == ["c"]
    second = leaving.begin(["a", "c"])  # the name was used again, and ended again
    leaving.end(0)  # what is no answer to an end
    assert heard("a", "b", "c", "d") == ["d"]
    leaving.end(first)
    assert heard("a", "b", "c") == ["b"]
    leaving.end(second)
    assert heard("a", "b", "c") == ["a", "b", "c"]
