import asyncio
import gc
import weakref

import pytest

from vllm.utils import collector
from vllm.utils.collector import collector_paused, what_exists_frozen


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_old_cycles_outlive_the_block_and_new_ones_do_not() -> None:
    gc.unfreeze()  # what another test has frozen
    gc.collect()
    old = Node()
    gone = weakref.ref(old)
    with what_exists_frozen():
        assert gc.get_freeze_count()
        del old
        gc.collect()
        assert gone() is not None
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
    assert not gc.get_freeze_count()
    gc.collect()
    assert gone() is None


def test_what_a_process_froze_for_itself_stays_frozen() -> None:
    gc.freeze()
    try:
        with what_exists_frozen():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_the_collector_is_on_again_after_a_pause_also_after_an_error() -> None:
    try:
        with collector_paused():
            assert not gc.isenabled()
            raise ValueError
    except ValueError:
        assert gc.isenabled()
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()
    gc.enable()


def test_full_collections_wait_for_idle_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_LOOK_SECONDS", 0.01)
    thresholds, busy, full = gc.get_threshold(), True, 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal full
        full += phase == "stop" and info["generation"] == 2

    async def allocate() -> tuple[int, int]:
        nonlocal busy
        task = asyncio.ensure_future(collector.collect_when_idle(lambda: not busy))
        await asyncio.sleep(0.02)
        kept = [[i] for i in range(300_000)]
        await asyncio.sleep(0.05)
        while_busy, busy = full, False
        kept += [[i] for i in range(20_000)]
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return while_busy, full

    gc.callbacks.append(count)
    try:
        while_busy, in_all = asyncio.run(allocate())
    finally:
        gc.callbacks.remove(count)
    assert while_busy == 0
    assert in_all >= 1
    assert gc.get_threshold() == thresholds


def test_memory_that_was_in_use_for_long_is_given_back_when_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests hold it, there is nothing to give back, which says nothing of later; nor is it tried all along."""
    monkeypatch.setattr(collector, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(collector, "_AGAIN_SECONDS", 0.2)
    resident, freed, tries = 100 << 20, 0, 0

    def give_back() -> None:
        nonlocal resident, freed, tries
        resident, freed, tries = resident - freed, 0, tries + 1

    monkeypatch.setattr(collector, "resident_bytes", lambda: resident)
    monkeypatch.setattr(collector, "give_back_freed_memory", give_back)

    async def serve() -> int:
        nonlocal resident, freed
        task = asyncio.ensure_future(collector.give_back_memory(lambda: False, lambda: None))
        await asyncio.sleep(0.01)
        resident += 1 << 30
        await asyncio.sleep(0.7)
        in_vain, freed = tries, 1 << 30
        for _ in range(500):
            await asyncio.sleep(0.01)
            if resident == 100 << 20:
                break
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return in_vain

    assert 1 <= asyncio.run(serve()) <= 6
    assert resident == 100 << 20


def test_an_idle_process_gives_back_once_what_it_has_more_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now, resident, given = 0.0, 1 << 30, []
    monkeypatch.setattr(collector.time, "monotonic", lambda: now)
    monkeypatch.setattr(collector, "resident_bytes", lambda: resident)
    monkeypatch.setattr(collector, "give_back_freed_memory", lambda: given.append(now))
    memory = collector.IdleMemory()
    for busy, grown in ((False, 0), (True, 0), (True, 1 << 28), (True, 0)):
        resident += grown
        for _ in range(20):
            memory.look(not busy)
            now += 0.2
        for _ in range(40):
            memory.look(idle=True)
            now += 0.2
    assert len(given) == 1
