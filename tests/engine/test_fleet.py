"""Several cores behind one client: who gets a request, and that none is lost or answered twice when a core dies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from vllm import SamplingParams
from vllm.engine import fleet as fleet_module
from vllm.engine.core_client import EngineSilentError
from vllm.engine.fleet import PREFIX_UNIT, Fleet, PrefixMemory, prefix_units
from vllm.engine.joined_fleet import JoinedFleet
from vllm.exceptions import EngineDeadError
from vllm.sampling_params import RequestOutputKind
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats


class Client:
    """A core without a process: the test says what it answers and when it dies."""

    def __init__(self, index: int, fails: bool = False) -> None:
        self.index, self.fails = index, fails
        self.info = {"num_blocks": 1000, "block_size": 16}
        self.added: list[str] = []
        self.messages: dict[str, CoreRequest] = {}
        self.aborted: list[str] = []
        self.killed = False
        self.problem: str | None = None  # of a core that is stuck
        self.silent = False

    def launch(self) -> None:
        if self.fails:
            raise RuntimeError("no room")

    async def attach(self, on_outputs: Any, on_death: Any) -> None:
        self.outputs, self.die = on_outputs, on_death

    def add(self, requests: list[CoreRequest]) -> None:
        self.added += [r.request_id for r in requests]
        self.messages.update({r.request_id: r for r in requests})

    def abort(self, ids: list[str]) -> None:
        self.aborted += ids

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        first = self.index == 0
        return {"list_loras": [1, 2 + self.index], "collective_rpc": [self.index], "reset_prefix_cache": first,
                "adapter_state": "ready" if first else "cannot"}[method]  # fmt: skip

    def check_health(self) -> None:
        if self.silent:
            raise EngineSilentError("It is silent.")
        if self.problem:
            raise EngineDeadError(self.problem)

    def stall(self) -> str | None:
        return self.problem

    def excuse(self) -> None: ...

    async def stop(self) -> None: ...

    def kill(self) -> None:
        self.killed = True


class Bench:
    """A fleet, the clients that it has made in order, and what has come out."""

    def __init__(self, size: int = 2, fails: frozenset[int] = frozenset()) -> None:
        self.made: list[Client] = []
        self.tokens: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.errors: dict[str, str] = {}
        self.again: list[str] = []
        self.deaths: list[str] = []
        self.stats: list[CoreStats] = []

        def make(index: int) -> Client:
            self.made.append(Client(index, len(self.made) in fails))
            return self.made[-1]

        self.fleet = Fleet(make, size)
        self.fleet.launch()

    async def attach(self) -> Bench:
        await self.fleet.attach(self.take, self.deaths.append)
        return self

    def take(self, outputs: list[CoreOutput], stats: CoreStats) -> None:
        self.stats.append(stats)
        for output in outputs:
            self.tokens[output.request_id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] += 1
            if output.error is not None:
                self.errors[output.request_id] = output.error
            if output.again:
                self.again.append(output.request_id)


def request(name: str, tokens: list[int] | int = 8, **more: Any) -> CoreRequest:
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    return CoreRequest(name, ids, SamplingParams(), 0, **more)


def token(name: str, finish: str | None = None) -> CoreOutput:
    return CoreOutput(name, [5], finish)


async def settle(bench: Bench, count: int) -> None:
    """Until so many clients were made and the last one listens."""
    for _ in range(400):
        if len(bench.made) >= count and hasattr(bench.made[count - 1], "outputs"):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{len(bench.made)} clients")


async def test_requests_go_where_the_least_is_to_be_done() -> None:
    bench = await Bench().attach()
    for i in range(10):
        bench.fleet.add([request(str(i), [i] * 8)])
    assert [len(c.added) for c in bench.made] == [5, 5]
    long, other = bench.made if "8" in bench.made[0].added else bench.made[::-1]
    for name in list(long.added):
        long.outputs([token(name, "stop")], CoreStats())
    bench.fleet.add([request(f"x{i}", [i] * 8) for i in range(4)])
    assert [name for name in long.added if name.startswith("x")] == [f"x{i}" for i in range(4)]
    assert not any(name.startswith("x") for name in other.added)


async def test_a_prompt_goes_where_its_prefix_is_cached_unless_too_much_waits_there() -> None:
    bench = await Bench().attach()
    common = list(range(20 * PREFIX_UNIT))
    bench.fleet.add([request("first", [*common, 1])])
    home = next(c for c in bench.made if c.added)
    home.outputs([token("first", "stop")], CoreStats())
    for i in range(15):
        bench.fleet.add([request(str(i), [*common, i + 2])])
        home.outputs([token(str(i))], CoreStats())  # its prompt is computed, it runs on
    assert len(home.added) == 16
    bench.fleet.add([request(f"y{i}", [*common, i + 2]) for i in range(20)])
    assert 0 < len(next(c for c in bench.made if c is not home).added) < 20


async def test_a_prompt_that_waits_counts_by_what_has_to_be_computed_of_it() -> None:
    """Else cached prompts would drive each other from the copy that has their prefix."""
    bench = await Bench().attach()
    common = list(range(8 * PREFIX_UNIT))
    bench.fleet.add([request("first", common)])
    home = next(client for client in bench.made if client.added)
    home.outputs([token("first", "stop")], CoreStats())
    for i in range(4):  # each of which would otherwise count as much as computing the prefix elsewhere
        bench.fleet.add([request(str(i), [*common, i])])
    assert home.added == ["first", "0", "1", "2", "3"]
    for i in range(4):
        home.outputs([token(str(i), "stop")], CoreStats())
    assert all(replica.tokens == 0 for replica in bench.fleet._replicas)


async def test_salts_and_adapters_have_prefixes_of_their_own() -> None:
    ids = list(range(3 * PREFIX_UNIT + 5))
    plain = prefix_units(request("a", ids))
    assert len(plain) == 3 and prefix_units(request("b", ids[: 2 * PREFIX_UNIT])) == plain[:2]
    for other in (request("c", ids, cache_salt="x"), request("d", ids, lora_id=1)):
        assert not set(prefix_units(other)) & set(plain)
    memory = PrefixMemory(4)
    memory.add(plain)
    memory.add(prefix_units(request("e", ids, cache_salt="x"))[:2])
    assert memory.match(plain) == 2 * PREFIX_UNIT  # the longest prefix had to go


async def test_siblings_stay_together() -> None:
    bench = await Bench().attach()
    bench.fleet.add([request("0_r", [1] * 8), *(request(f"{i}_r", [1] * 8, fork_of="0_r") for i in range(1, 6))])
    assert sorted(len(c.added) for c in bench.made) == [0, 6]


async def test_nothing_is_lost_or_doubled_when_a_core_dies() -> None:
    bench = await Bench().attach()
    bench.fleet.add([request(str(i), [i] * 8) for i in range(10)])
    first, second = bench.made
    begun, fresh = first.added[:2], first.added[2:]
    first.outputs([token(name) for name in begun], CoreStats(prefix_cache_hits=7))
    first.die("gone")
    first.outputs([token(name, "stop") for name in fresh], CoreStats())  # a dead core's last words count for nothing
    assert set(bench.errors) == set(begun) and "has ended" in bench.errors[begun[0]]
    assert second.added[5:] == fresh and not bench.deaths
    second.outputs([token(name, "stop") for name in second.added], CoreStats())
    assert bench.ends == {str(i): 1 for i in range(10)}
    await settle(bench, 3)
    bench.fleet.add([request("new")])
    third = bench.made[2]
    assert third.index == 0 and third.added == ["new"]
    third.outputs([token("new", "stop")], CoreStats(prefix_cache_hits=2))
    assert bench.stats[-1].prefix_cache_hits == 9 and bench.stats[-1].engine == 0
    await bench.fleet.stop()


async def test_an_answer_that_is_given_as_a_whole_begins_again_elsewhere() -> None:
    bench = await Bench().attach()
    whole, stream = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
    kinds = {"whole": {}, "stop": {"stop": ["x"]}, "logprobs": {"logprobs": 1}, "stream": {"output_kind": stream}}
    first, second = bench.made
    for name, more in kinds.items():
        params = SamplingParams(**{"output_kind": whole, **more})  # type: ignore[arg-type]
        bench.fleet.add([CoreRequest(f"{name}{i}", [i] * 8, params, 0) for i in range(2)])
    assert len(first.added) == 4
    first.outputs([token(name) for name in first.added], CoreStats())
    first.die("gone")
    moved = [name for name in first.added if name[:-1] != "stream"]
    assert bench.again == moved and second.added[4:] == moved and set(bench.errors) == set(first.added) - set(moved)
    second.outputs([token(name, "stop") for name in moved], CoreStats())
    assert bench.ends == dict.fromkeys(first.added, 1)
    assert all(not replica.tokens for replica in bench.fleet._replicas if not replica.held)
    await bench.fleet.stop()


async def test_requests_wait_while_no_core_is_left() -> None:
    bench = await Bench(1).attach()
    bench.fleet.add([request("a"), request("b")])
    bench.made[0].die("gone")
    bench.fleet.add([request("c")])
    bench.fleet.abort(["b"])
    with pytest.raises(EngineDeadError, match="being started again"):
        bench.fleet.check_health()
    await settle(bench, 2)
    assert bench.made[1].added == ["a", "c"] and not bench.ends
    bench.fleet.check_health()
    await bench.fleet.stop()


async def test_a_request_that_kills_cores_is_not_passed_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "RESTART_SECONDS", 0.0)
    bench = await Bench(3).attach()
    bench.fleet.add([request("poison")])
    for turn in range(3):
        victim = next(c for c in bench.made if "poison" in c.added and not c.killed)
        victim.killed = True
        victim.die("crash")
        await settle(bench, 4 + turn)
    assert bench.ends == {"poison": 1} and "has ended" in bench.errors["poison"]
    assert sum("poison" in c.added for c in bench.made) == 3
    await bench.fleet.stop()


async def test_siblings_of_a_failed_sequence_do_not_move() -> None:
    bench = await Bench().attach()
    take = bench.take

    def abort_siblings(outputs: list[CoreOutput], stats: CoreStats) -> None:
        take(outputs, stats)
        if any(output.error for output in outputs):
            bench.fleet.abort(["1_r"])  # as the front end does

    await bench.fleet.attach(abort_siblings, bench.deaths.append)
    bench.fleet.add([request("0_r"), request("1_r", fork_of="0_r")])
    home, other = bench.made if bench.made[0].added else bench.made[::-1]
    home.outputs([token("0_r")], CoreStats())
    home.die("gone")
    assert bench.ends == {"0_r": 1} and not other.added
    await bench.fleet.stop()


async def test_the_fleet_is_dead_when_nothing_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "RESTART_SECONDS", 0.0)
    bench = await Bench(1, fails=frozenset(range(1, 20))).attach()
    bench.fleet.add([request("a")])
    bench.made[0].die("gone")
    for _ in range(400):
        if bench.deaths:
            break
        await asyncio.sleep(0.005)
    assert len(bench.deaths) == 1 and "no room" in bench.deaths[0]
    with pytest.raises(EngineDeadError, match="no room"):
        bench.fleet.add([request("b")])


async def test_a_copy_is_tried_again_ever_more_rarely_while_another_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await turn(0)

    turn = asyncio.sleep
    bench = await Bench(2, fails=frozenset(range(2, 14))).attach()
    monkeypatch.setattr(fleet_module.asyncio, "sleep", sleep)
    bench.made[0].die("gone")
    while len(bench.made) < 15 or not hasattr(bench.made[14], "outputs"):
        await turn(0.001)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60] and not bench.deaths
    bench.fleet.add([request(str(i), [i] * 8) for i in range(4)])
    assert len(bench.made[14].added) == 2


async def test_a_copy_that_has_ended_reports_itself_and_an_empty_cache_until_it_is_back() -> None:
    bench = await Bench().attach()
    assert [(s.engine, s.alive) for s in bench.stats] == [(0, True), (1, True)]
    bench.made[1].outputs([], CoreStats(num_running=2, kv_blocks_total=10, kv_blocks_free=3, running_adapters=[1]))
    bench.made[1].die("gone")
    last = bench.stats[-1]
    assert (last.engine, last.alive, last.num_running, last.kv_blocks_free, last.running_adapters) == (
        1,
        False,
        0,
        10,
        [],
    )
    await settle(bench, 3)
    await asyncio.sleep(0)
    last = bench.stats[-1]
    assert (last.engine, last.alive, last.kv_blocks_free) == (1, True, 10)


def test_a_start_that_fails_leaves_no_core() -> None:
    bench = Bench.__new__(Bench)
    made: list[Client] = []

    def make(index: int) -> Client:
        made.append(Client(index, fails=index == 1))
        return made[-1]

    bench.fleet = Fleet(make, 2)
    with pytest.raises(RuntimeError, match="no room"):
        bench.fleet.launch()
    assert made[0].killed


async def test_a_stuck_core_is_given_up_by_itself() -> None:
    bench = await Bench().attach()
    bench.fleet.add([request(str(i), [i] * 8) for i in range(4)])
    stuck, other = bench.made
    stuck.problem = "no step for 61 s"
    bench.fleet.check_health()  # one is well
    assert bench.fleet.stall() is None
    assert stuck.killed and len(other.added) == 4 and not bench.ends
    await bench.fleet.stop()


async def test_a_core_that_gives_no_sign_of_life_gets_no_new_requests(caplog: pytest.LogCaptureFixture) -> None:
    bench = await Bench().attach()
    bench.made[0].stall = lambda: None  # type: ignore[method-assign]
    bench.made[0].problem = "It is silent."
    assert bench.fleet.stall() is None and bench.fleet.stall() is None
    bench.fleet.add([request("a"), request("b"), request("c")])
    assert bench.made[1].added == ["a", "b", "c"]
    assert [(stats.engine, stats.alive) for stats in bench.stats[2:]] == [(0, False)]
    assert caplog.text.count("Replica 0: It is silent. New requests go to others.") == 1
    bench.made[1].problem = "So is this one."
    bench.made[1].stall = lambda: None  # type: ignore[method-assign]
    bench.fleet.stall()
    bench.fleet.add([request("d"), request("e")])
    assert bench.made[0].added == ["d", "e"]  # with the least to do: nobody is turned away
    bench.made[0].problem = None
    bench.fleet.stall()
    bench.fleet.add([request("f")])
    assert bench.made[0].added == ["d", "e", "f"] and bench.stats[-1].alive


async def test_what_a_silent_copy_has_not_begun_moves_and_what_it_says_later_is_nobodys() -> None:
    bench = await Bench().attach()
    first, second = bench.made
    bench.fleet.add([request(str(i), [i] * 8) for i in range(6)])
    begun, *fresh = first.added
    first.outputs([token(begun)], CoreStats())
    first.stall = lambda: None  # type: ignore[method-assign]
    first.problem = "It has not finished a step."
    bench.fleet.stall()
    assert not first.aborted  # one of them may be the reason
    first.silent = True
    bench.fleet.stall()
    moved = second.added[3:]
    assert first.aborted == fresh and [second.messages[name].prompt_token_ids for name in moved] == [
        first.messages[name].prompt_token_ids for name in fresh
    ]
    bench.fleet.stall()
    assert second.added[3:] == moved  # once
    late = [token(name) for name in fresh] + [token(name, "abort") for name in fresh]
    first.outputs([*late, token(begun, "stop")], CoreStats())
    assert bench.ends == {begun: 1} and bench.tokens == {begun: 2}
    first.problem, first.silent, second.silent = None, False, True
    second.outputs([token(name) for name in second.added[:3]], CoreStats())
    bench.fleet.stall()
    back = first.added[3:]
    assert second.aborted == moved and len(back) == len({*back, *fresh, *moved}) / 3 == 2
    first.outputs([token(name, "stop") for name in (*fresh, *moved)], CoreStats())  # from before it was silent
    second.outputs([token(name, "stop") for name in moved], CoreStats())
    assert bench.ends == {begun: 1}
    bench.fleet.abort(fresh[:1])
    assert first.aborted[-1:] == back[:1]
    first.outputs([token(back[1], "stop")], CoreStats())
    assert bench.ends == {begun: 1, fresh[1]: 1} and bench.tokens[fresh[1]] == 1 and not bench.tokens[fresh[0]]
    assert not set(bench.fleet._owner) - set(second.added[:3]) and bench.fleet._replicas[0].tokens == 0
    await bench.fleet.stop()


async def test_sequences_that_move_are_forked_from_the_one_that_has_moved_with_them() -> None:
    bench = await Bench().attach()
    bench.fleet.add([request("0_r"), request("1_r", fork_of="0_r"), request("0_s"), request("1_s", fork_of="0_s")])
    home, other = bench.made if "0_r" in bench.made[0].added else bench.made[::-1]
    assert home.added == ["0_r", "1_r"]
    home.silent = True
    bench.fleet.stall()
    bench.fleet.add([request("2_r", fork_of="0_r")])
    parent, child, later = other.added[2:]
    assert other.messages[child].fork_of == other.messages[later].fork_of == parent != "0_r" and later == "2_r"
    await bench.fleet.stop()


async def test_sequences_leave_a_silent_copy_without_the_one_that_has_begun_there() -> None:
    bench = await Bench().attach()
    bench.fleet.add([request("0_r"), request("1_r", fork_of="0_r")])
    home, other = bench.made if bench.made[0].added else bench.made[::-1]
    home.outputs([token("0_r")], CoreStats())
    home.silent = True
    bench.fleet.stall()
    bench.fleet.add([request("2_r", fork_of="0_r")])
    assert home.added == ["0_r", "1_r"] and home.aborted == ["1_r"] and len(other.added) == 2
    await bench.fleet.stop()


async def test_nothing_moves_between_copies_that_wait_for_each_other() -> None:
    made: list[Client] = []

    def make(index: int, meeting: str) -> Client:
        made.append(Client(index))
        return made[-1]

    fleet = JoinedFleet(make, 2)
    fleet.launch()
    await fleet.attach(lambda outputs, stats: None, lambda reason: None)
    fleet.add([request("a"), request("b", [1] * 8)])
    made[0].silent = True
    fleet.stall()
    assert sorted(made[0].added + made[1].added) == ["a", "b"] and not made[0].aborted
    await fleet.stop()


async def test_calls_reach_all_cores() -> None:
    bench = await Bench().attach()
    assert await bench.fleet.call("collective_rpc", "x") == [0, 1]
    assert await bench.fleet.call("list_loras") == [1]
    assert await bench.fleet.call("reset_prefix_cache") is False
    assert await bench.fleet.call("adapter_state", 1) == "cannot"


async def test_twenty_shared_prefixes_are_found_where_they_are() -> None:
    """With routing by prefix, nearly every prompt meets its prefix; by turns, half of the first ones do not."""
    bench = await Bench(4).attach()
    rng = random.Random(0)
    prefixes = [[rng.randrange(1000) for _ in range(8 * PREFIX_UNIT)] for _ in range(20)]
    seen: list[set[int]] = [set() for _ in range(4)]
    hits = 0
    for i in range(400):
        which = rng.randrange(20)
        bench.fleet.add([request(str(i), prefixes[which] + [rng.randrange(1000) for _ in range(20)])])
        client = next(c for c in bench.made if str(i) in c.added)
        hits += which in seen[client.index]
        seen[client.index].add(which)
        client.outputs([token(str(i))], CoreStats())
        if i >= 16:
            done = str(i - 16)
            next(c for c in bench.made if done in c.added).outputs([token(done, "stop")], CoreStats())
    assert hits >= 360  # by turns: 400 - 80 or so, the first of each prefix on each core
    assert min(len(c.added) for c in bench.made) > 40
