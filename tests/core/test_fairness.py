"""A user's request of many sequences beside ordinary ones: nobody waits long, and the large one is hardly slower."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.simulation import full_policy
from vllm.core.crowd import UNMEASURED_SHARE
from vllm.core.request import Request
from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.core.waiting import WaitingQueue
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreOutput, CoreRequest
from vllm.step.plan import StepPlan
from vllm.step.result import StepResult

SLOTS = 256


class Clients:
    """A scheduler whose device always says 5, by a clock of its own: a step takes `cost` milliseconds, and so many more
    for each of its tokens. `generated` tokens by account.
    """

    def __init__(
        self,
        num_blocks: int = 20_000,
        depth: int = 1,
        priority: bool = False,
        cost: tuple[float, float] = (1, 0.1),
        max_gap: float = 0.0,
    ) -> None:
        limits = SchedulerLimits(SLOTS, 2048, 1024, priority=priority, max_gap=max_gap)
        self.now, self.cost = 0.0, cost
        self.scheduler = Scheduler(limits, full_policy(16), num_blocks, clock=lambda: self.now)
        self.depth = depth
        self.steps = 0
        self.plans: deque[StepPlan] = deque()
        self.generated: dict[str, int] = {}
        self.account_of: dict[str, str] = {}
        self.ended: set[str] = set()
        self.first_token: dict[str, float] = {}

    def add(self, name: str, account: str | None, prompt: list[int], max_tokens: int, **fields: object) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.account_of[name] = account or name
        self.scheduler.add(
            CoreRequest(name, prompt, params, 0, arrival_time=float(self.steps), account=account, **fields)  # type: ignore[arg-type]
        )

    def forget(self, prefix: str) -> None:
        """Let names that begin like this be used again."""
        self.scheduler.abort([name for name in self.scheduler.requests if name.startswith(prefix)])
        self.ended = {name for name in self.ended if not name.startswith(prefix)}
        self.first_token = {name: at for name, at in self.first_token.items() if not name.startswith(prefix)}

    def step(self) -> list[CoreOutput]:
        self.steps += 1
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
        if len(self.plans) < self.depth and plan is not None:
            return []
        if not self.plans:
            self.now += 0.001  # nobody has anything to do
            return []
        plan = self.plans.popleft()
        self.now += (self.cost[0] + int(plan.num_tokens.sum()) * self.cost[1]) / 1000
        outputs = self.scheduler.apply(StepResult(plan.step_id, [5 if s else -1 for s in plan.sample.tolist()]))
        for out in outputs:
            account = self.account_of[out.request_id]
            self.generated[account] = self.generated.get(account, 0) + len(out.new_token_ids)
            if out.new_token_ids:
                self.first_token.setdefault(out.request_id, self.now)
            if out.finish_reason:
                self.ended.add(out.request_id)
        return outputs


def ordinary(clients: Clients, count: int = 8, pause: float = 0.25) -> Iterator[list[float]]:
    """`count` clients, each with one request at a time and pauses of so many seconds on average; yields the times to
    each first token so far. Who comes amid a step waits for its end.
    """
    rng = random.Random(0)
    waits: list[float] = []
    number = 0
    live: dict[int, str] = {}
    begins = [clients.now + rng.expovariate(1 / pause) for _ in range(count)]
    while True:
        for client in range(count):
            name = live.get(client)
            if name in clients.ended:
                waits.append(clients.first_token[name] - begins[client])
                del live[client]
                begins[client] = clients.now + rng.expovariate(1 / pause)
            if client not in live and clients.now >= begins[client]:
                number += 1
                live[client] = f"o{number}"
                prompt = [rng.randrange(50) for _ in range(rng.randrange(5, 40))]
                clients.add(live[client], None, prompt, rng.randrange(5, 30))
        yield waits


def many_samples(clients: Clients) -> Callable[[], bool]:
    """n = 2000 of one prompt, 30 tokens each."""
    for i in range(2000):
        clients.add(f"g{i}", "greedy", list(range(20)), 30, fork_of="g0" if i else None)
    return lambda: sum(name[0] == "g" for name in clients.ended) == 2000


def many_prompts(clients: Clients) -> Callable[[], bool]:
    """A thousand prompts in one call."""
    rng = random.Random(1)
    for i in range(1000):
        clients.add(f"g{i}", "greedy", [rng.randrange(50) for _ in range(15)], 32)
    return lambda: sum(name[0] == "g" for name in clients.ended) == 1000


def beams(clients: Clients) -> Callable[[], bool]:
    """64 beams: each step asks for one more token of all, which share the cache of those before while these end."""
    rng = random.Random(2)
    steps = 0
    live: dict[str, list[int]] = {}
    spent: list[str] = []

    def extend() -> bool:
        nonlocal steps, live, spent
        if all(name in clients.first_token for name in live):
            clients.scheduler.abort(spent)
            spent, parents, live = list(live), list(live.items()), {}
            for i in range(64):
                parent, tokens = rng.choice(parents) if parents else (None, list(range(20)))
                name = f"g{steps}.{i}"
                live[name] = [*tokens, rng.randrange(50)]
                clients.add(name, "greedy", live[name], 3, fork_of=parent, lends=True)
            steps += 1
        return steps > 100

    return extend


def pace(
    greedy: Callable[[Clients], Callable[[], bool]] | None, others: bool, cost: tuple[float, float], depth: int,
    blocks: int,
) -> tuple[float, list[float]]:  # fmt: skip
    """How many greedy requests are served in a second, one after the other, and what the others wait for their first
    tokens meanwhile.
    """
    clients = Clients(blocks, depth, cost=cost)
    ordinarily = ordinary(clients) if others else iter(lambda: [], None)
    while others and clients.now < 1:
        before = len(next(ordinarily))
        clients.step()
    begun, rounds, done = clients.now, 0, lambda: True
    while clients.now < begun + (2 if others else 0.3) or not done():
        if greedy and done():
            clients.forget("g")
            done, rounds = greedy(clients), rounds + 1
        waits = next(ordinarily)
        clients.step()
    clients.scheduler.check_invariants()
    return rounds / (clients.now - begun), waits[before:] if others else []


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


SLOW, FAST, FLAT = (1, 0.115), (1.1, 0.0155), (2.5, 0.003)  # two slow cores, two fast ones, a GPU
FRONT_END = 0.002  # seconds of a first token that are not the core's


@pytest.mark.parametrize(
    "cost, blocks, depth", [(SLOW, 20_000, 1), (FAST, 20_000, 1), (FLAT, 20_000, 2), (SLOW, 700, 1)],
    ids=["slow", "fast", "flat", "short of blocks"],
)  # fmt: skip
@pytest.mark.parametrize("greedy", [many_samples, many_prompts, beams])
def test_nobody_waits_for_one_that_asks_for_much(
    greedy: Callable[[Clients], Callable[[], bool]], blocks: int, depth: int, cost: tuple[float, float]
) -> None:
    _, alone = pace(None, True, cost, depth, blocks)
    rate_alone, _ = pace(greedy, False, cost, depth, blocks)
    rate_beside, waits = pace(greedy, True, cost, depth, blocks)
    assert len(waits) > 30
    assert FRONT_END + percentile(waits, 0.99) <= 3 * (FRONT_END + percentile(alone, 0.99))
    assert rate_beside / rate_alone >= 0.8


def running_of(clients: Clients, account: str) -> int:
    return sum(r.account == account for r in clients.scheduler.running)


def test_one_account_may_hold_everything_while_nobody_waits_and_its_share_when_others_do() -> None:
    clients = Clients()
    for i in range(600):
        clients.add(f"a{i}", "a", [i % 50] * 8, 900)
    for _ in range(3):
        clients.step()
    assert running_of(clients, "a") == SLOTS
    for i in range(600):
        clients.add(f"b{i}", "b", [i % 50] * 8, 900)
    for _ in range(12):
        clients.step()
    assert running_of(clients, "a") == running_of(clients, "b") == SLOTS // 2
    clients.add("c", "c", [1] * 8, 900)
    clients.add("d", "d", [1] * 8, 900)
    clients.step()
    assert running_of(clients, "c") == running_of(clients, "d") == 1
    clients.scheduler.abort([f"b{i}" for i in range(600)])
    for _ in range(12):
        clients.step()
    assert running_of(clients, "a") == SLOTS - 2


def test_first_sequences_go_in_the_order_of_their_arrival_before_all_further_ones() -> None:
    clients = Clients()
    clients.add("hold", "hold", [1] * 8, 5)
    for account in "abc":
        for i in range(3):
            clients.add(f"{account}{i}", account, [1] * 8, 5)
        clients.add(f"single {account}", account + "'", [1] * 8, 5)
    plan = clients.scheduler.schedule()
    assert plan is not None
    started = [n.request_id for n in plan.new]
    assert started[:7] == ["hold", "a0", "single a", "b0", "single b", "c0", "single c"]
    assert started[7:] == ["a1", "b1", "c1", "a2", "b2", "c2"]


def test_accounts_whose_sequences_end_at_once_take_turns_with_others() -> None:
    """As those of many long texts that are pooled: each takes a whole step, in which it ends."""
    clients = Clients()
    for account in "abc":
        for i in range(5):
            clients.add(f"{account}{i}", account, [i] * 1024, 1)
    order: list[str] = []
    while (plan := clients.scheduler.schedule()) is not None:
        order += [new.request_id for new in plan.new]
        clients.scheduler.apply(StepResult(plan.step_id, [5] * len(plan.sample)))
        if len(order) == 4:
            clients.add("late", "late", [1] * 8, 1)
    assert order[:6] == ["a0", "b0", "c0", "a1", "b1", "c1"]
    assert len(order) == 16 and order.index("late") < 9


@pytest.mark.parametrize("name", ("samples", "prompts"))
def test_eight_short_sequences_of_one_request_wait_little_longer_than_one_where_all_slots_are_held(name: str) -> None:
    """Beside many clients of one request each, who fill the batch and come again as soon as they are answered."""

    def steps(count: int) -> int:
        clients, number = Clients(), 0
        for i in range(2 * SLOTS):
            clients.add(f"o{i}", None, [i % 50] * 8, 20 + i % 20)
        asked = False
        while not asked or not all(f"g{i}" in clients.ended for i in range(count)):
            clients.step()
            for _ in range(2 * SLOTS - sum(name[0] == "o" for name in clients.scheduler.requests)):
                number += 1
                clients.add(f"o{2 * SLOTS + number}", None, [number % 50] * 8, 20 + number % 20)
            if clients.steps == 60:
                asked, begin = True, clients.steps
                for i in range(count):
                    forked = "g0" if i and name == "samples" else None
                    clients.add(f"g{i}", "g", [7 if forked or not i else i] * 8, 20, fork_of=forked)
        return clients.steps - begin

    assert steps(8) < steps(1) + 8 * 30  # one after the other in one slot, at most


def test_a_lower_priority_never_takes_a_slot_from_a_higher_one() -> None:
    clients = Clients(priority=True)
    for i in range(SLOTS):
        clients.add(f"a{i}", "a", [1] * 8, 100, priority=1)
    clients.step()
    clients.add("later", "later", [1] * 8, 5, priority=2)
    clients.add("equal", "equal", [1] * 8, 5, priority=1)
    clients.add("higher", "higher", [1] * 8, 5, priority=0)
    clients.step()
    assert {r.id for r in clients.scheduler.running if r.account != "a"} == {"equal", "higher"}


def test_ending_a_request_of_many_sequences_leaves_nothing_behind() -> None:
    clients = Clients()
    for i in range(2000):
        clients.add(f"a{i}", "a", [1] * 8, 50)
    clients.step()
    clients.scheduler.abort([f"a{i}" for i in range(1500)])
    clients.scheduler.abort([f"a{i}" for i in range(1500, 2000)])
    clients.scheduler.check_invariants()
    assert not clients.scheduler.has_unfinished() and clients.scheduler.num_waiting == 0
    assert not clients.scheduler._waiting.has_accounts


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_queue_gives_turns_as_a_search_through_all_requests_would(data: st.DataObject) -> None:
    """Push, take, put back, admit, leave and remove at random; the turn is always the least by the rule."""
    priority = data.draw(st.booleans())
    queue = WaitingQueue(priority, 16, 0.5)
    waiting: list[Request] = []
    held: list[Request] = []
    # the newest request when an account's turn ended, and how often one has; tokens that have left in this turn
    behind: dict[str | None, tuple[float, ...]] = {}
    work: dict[str | None, int] = {}
    newest: tuple[float, ...] = ()
    number = turns = 0

    def turn() -> Request | None:
        def rank(request: Request) -> tuple[float, ...]:
            holds = 0 if request.account is None else sum(h.account == request.account for h in held)
            same = [r for r in waiting if r.account == request.account]
            foremost = min(same, key=order) if request.account is not None else request
            further = foremost is not request
            first = (request.priority if priority else 0, bool(holds or further))
            if not (holds or further):
                return (*first, 0, *max((*arrival(request), 0), behind.get(request.account, ())))
            return (*first, 9 if further else holds, *order(request))

        return min(waiting, key=rank, default=None)

    def order(request: Request) -> tuple[float, ...]:
        return request.order() if priority else (request.sequence_number,)

    def arrival(request: Request) -> tuple[float, ...]:
        return request.order()[1:] if priority else (request.sequence_number,)

    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["push", "push", "push", "admit", "admit", "leave", "remove", "put back"]))
        if action == "push":
            account = data.draw(st.sampled_from([None, "a", "b", "c"]))
            params = SamplingParams(max_tokens=1)
            prompt = [1] * data.draw(st.sampled_from([1, 200, 300, 600]))
            level = data.draw(st.integers(0, 2))
            message = CoreRequest(str(number), prompt, params, 0, priority=level, account=account)
            waiting.append(Request(message, 1000, 1, number))
            queue.push(waiting[-1])
            newest, number = max(newest, arrival(waiting[-1])), number + 1
        elif action == "admit" and waiting:
            want = turn()
            request = queue.take()
            assert request is want and request is not None
            waiting.remove(request)
            held.append(request)
            queue.admitted(request)
        elif action == "put back" and waiting:
            request = queue.take()
            assert request is not None
            queue.put_back(request)
        elif action == "leave" and held:
            request = held.pop(data.draw(st.integers(0, len(held) - 1)))
            queue.left(request)
            work[request.account] = work.get(request.account, 0) + len(request.tokens)
            if all(other.account != request.account for other in held) and request.account is not None:
                if work[request.account] >= 512:
                    turns, work[request.account] = turns + 1, 0
                    behind[request.account] = (*newest, turns)
                if all(other.account != request.account for other in waiting):  # nothing is left of it
                    behind.pop(request.account, None)
                    del work[request.account]
            if data.draw(st.booleans()):
                waiting.append(request)
                queue.push_back_in(request)
        elif action == "remove" and waiting:
            gone = data.draw(st.lists(st.sampled_from(waiting), unique=True, max_size=3))
            waiting = [r for r in waiting if r not in gone]
            queue.remove(gone)
        here = {r.account for r in (*waiting, *held)}
        behind = {account: turn for account, turn in behind.items() if account in here}
        work = {account: tokens for account, tokens in work.items() if account in here}
        assert queue.first() is turn()
        assert len(queue) == len(waiting) and {id(r) for r in queue} == {id(r) for r in waiting}


def test_samples_that_wait_for_their_parent_hold_up_neither_their_account_nor_others() -> None:
    clients = Clients()
    for i in range(20):
        clients.add(f"a{i}", "a", [i] * 8, 5)
        clients.add(f"a{i}+", "a", [i] * 8, 5, fork_of=f"a{i}")
    clients.add("b", "b", [1] * 8, 5)
    clients.scheduler.block("a3", "its grammar")
    plan = clients.scheduler.schedule()
    assert plan is not None
    started = [n.request_id for n in plan.new]
    assert started[0] == "a0" and set(started) == {f"a{i}" for i in range(20) if i != 3} | {"b"}
    clients.scheduler.apply(StepResult(plan.step_id, [5] * len(plan.sample)))
    plan = clients.scheduler.schedule()
    assert plan is not None
    assert {n.request_id for n in plan.new} == {f"a{i}+" for i in range(20) if i != 3}
    assert clients.scheduler.num_waiting == 2
    clients.scheduler.apply(StepResult(plan.step_id, [5] * len(plan.sample)))
    clients.scheduler.unblock("a3", "its grammar")
    while clients.scheduler.has_unfinished():
        clients.step()
    clients.scheduler.check_invariants()


def test_a_sample_that_waits_for_its_parent_keeps_no_one_from_a_slot() -> None:
    clients = Clients()
    for i in range(600):
        clients.add(f"a{i}", "a", [i % 50] * 8, 900)
    clients.step()
    clients.add("b", "b", [1] * 8, 900)
    clients.add("b+", "b", [1] * 8, 900, fork_of="b")
    clients.scheduler.block("b", "its grammar")
    clients.add("c", "c", [2] * 8, 900)
    clients.step()
    assert running_of(clients, "c") == 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_was_set_aside_waits_again_where_it_stood(data: st.DataObject) -> None:
    """Random sequences of three accounts, some forks: admitted, or set aside alone or with the account."""
    queue, names = WaitingQueue(False, 8, 0.5), iter(range(1000))
    held: list[Request] = []
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 8))):
            number = next(names)
            parent = data.draw(st.sampled_from([None, "p", "q"]))
            account = data.draw(st.sampled_from(["a", "b", "c", None]))
            message = CoreRequest(f"r{number}", [1], SamplingParams(), 0, 0.0, account=account, fork_of=parent)
            queue.push(Request(message, 100, 1, number))
        before = {r.id for r in queue}
        admitted: list[Request] = []
        while (request := queue.take()) is not None:
            does = data.draw(st.sampled_from(["admit", "alone", "all", "stop"]))
            if does == "admit":
                queue.admitted(request)
                admitted.append(request)
            elif does == "stop":
                queue.put_back(request)
                break
            else:
                queue.set_aside(request, forks=does == "alone" and request.fork_of is not None)
        queue.restore()
        waiting = [r.id for r in queue]
        assert len(waiting) == len(set(waiting)) == len(queue)
        assert set(waiting) == before - {r.id for r in admitted}
        for account in ("a", "b", "c"):
            numbers = [r.sequence_number for r in queue if r.account == account]
            assert numbers == sorted(numbers)
        held += admitted
        for request in held[: data.draw(st.integers(0, len(held)))]:
            queue.left(request)
            held.remove(request)
        assert sorted(r.id for r in queue.turns(1000)) == sorted(waiting)


def test_what_lends_its_cache_computes_no_more_until_those_forked_from_it_have_come() -> None:
    clients = Clients()
    prompt = list(range(20))
    clients.add("parent", "beams", prompt, 3, lends=True)
    clients.add("other", None, prompt[:5], 50)
    clients.step()
    for _ in range(3):
        assert [o.request_id for o in clients.step()] == ["other"]
    clients.add("child", "beams", [*prompt, 7], 1, fork_of="parent")
    plan = clients.scheduler.schedule()
    assert plan is not None
    assert [(n.request_id, n.num_computed) for n in plan.new] == [("child", 20)]
    assert plan.num_tokens.tolist() == [1, 1]
    clients.scheduler.apply(StepResult(plan.step_id, [5, 5]))
    clients.scheduler.abort(["parent"])
    clients.scheduler.check_invariants()


def test_beams_that_have_their_token_keep_none_from_the_others_of_their_round() -> None:
    """They compute nothing more, so all that a crowd may have in a step is for those that have not begun."""
    clients = Clients()
    clients.add("other", None, [1] * 8, 500)
    clients.step()
    limit = int(2048 * UNMEASURED_SHARE)
    for i in range(100):
        clients.add(f"b{i}", "beams", [i % 50, i // 50], 3, lends=True)
    begun = []
    while len(clients.first_token) < 101:
        before = len(clients.first_token)
        clients.step()
        begun.append(len(clients.first_token) - before)
    assert begun == [limit // 2, 100 - limit // 2]


def test_steps_of_others_do_not_count_as_those_of_the_crowd_that_waits_meanwhile() -> None:
    clients = Clients(cost=(0.2, 0.01))
    clients.add("other", None, [1] * 8, 900)
    clients.step()
    for i in range(60):
        clients.add(f"b{i}", "beams", [i % 50, i // 50], 3, lends=True)
        clients.add(f"n{i}", None, [i], 1)
        clients.step()
    most = clients.scheduler._crowd._tokens_beside_others()
    for _ in range(20):
        clients.step()
    assert clients.scheduler._num_resting == 60
    assert clients.scheduler._crowd._tokens_beside_others() == most < 2048


def test_what_lends_its_cache_goes_on_after_a_while_or_where_others_need_its_slot() -> None:
    clients = Clients()
    clients.add("parent", "beams", [1] * 20, 3, lends=True)
    clients.step()
    clients.now += 1.0
    assert clients.step() == []  # it has begun to wait
    clients.now += 1.0
    assert [o.request_id for o in clients.step()] == ["parent"]
    clients.forget("parent")
    for i in range(SLOTS):
        clients.add(f"b{i}", "beams", [i % 50] * 8, 3, lends=True)
    for _ in range(12):
        clients.step()
    assert not clients.scheduler.has_unfinished()


def test_long_prompts_of_one_account_leave_steps_short_while_others_come_and_go() -> None:
    """They are too few to crowd the batch, and the ordinary client pauses between its requests."""
    clients = Clients(max_gap=0.06)
    for i in range(30):
        clients.add(f"long {i}", "long", [7 + i] * 900, 1)

    def longest(steps: int, beside: bool) -> float:
        found = 0.0
        for i in range(steps):
            if beside and i % 12 == 0:
                clients.add(f"short {clients.steps}", None, [5, 6], 4)
            before = clients.now
            clients.step()
            found = max(found, clients.now - before)
        return found

    assert longest(40, beside=True) < 0.065
    assert clients.generated["long"] < 25  # it was there all the time
    clients.now += 2.0
    assert longest(5, beside=False) > 0.09


def test_one_that_comes_gets_a_slot_of_calls_that_share_all_of_them() -> None:
    """None of forty calls holds much, and yet they hold everything for as long as their sequences take."""
    queue = WaitingQueue(False, 256, 0.5)
    for i in range(256 + 40):
        queue.push(Request(CoreRequest(f"r{i}", [1], SamplingParams(), 0, 0.0, account=f"call {i % 40}"), 100, 1, i))
    for _ in range(256):
        request = queue.take()
        assert request is not None
        queue.admitted(request)
    newcomer = Request(CoreRequest("new", [1], SamplingParams(), 0, 0.0), 100, 1, 1000)
    queue.push(newcomer)
    account = queue.over_share(newcomer)
    assert account is not None and queue.held(account) == 7
    alone = WaitingQueue(False, 4, 0.5)
    for i in range(4):  # as many calls as slots: each keeps its only one
        alone.push(Request(CoreRequest(f"r{i}", [1], SamplingParams(), 0, 0.0, account=f"call {i}"), 100, 1, i))
        request = alone.take()
        assert request is not None
        alone.admitted(request)
    assert alone.over_share(newcomer) is None
