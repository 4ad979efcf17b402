"""Whose turn it is to be read by the core, and that what many requests have in common is read once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from vllm.engine import wire
from vllm.engine.unread import Common, Unread, look_at, read
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreRequest
from vllm.structured_output.spec import GrammarSpec

OWNERS = st.sampled_from(["0/", "1/"])
ACCOUNTS = st.sampled_from([None, "a", "b", "c"])


class Rounds(RuleBasedStateMachine):
    """Any coming and going, against lists of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = Unread()
        self.there: list[tuple[str, str | None, int]] = []  # owner, account, number; in the order of arrival
        self.passed: dict[int, list[Any]] = {}  # by number: whose turns it has seen
        self.behind: list[tuple[str, int]] = []  # owner, number of a call
        self.count = 0

    def line(self, item: tuple[str, str | None, int]) -> Any:
        return item[:2] if item[1] is not None else item

    @rule(owner=OWNERS, account=ACCOUNTS, many=st.integers(1, 5))
    def come(self, owner: str, account: str | None, many: int) -> None:
        for _ in range(many):
            self.count += 1
            assert self.unread.add(owner, str(self.count), account, self.count)
            assert not self.unread.add(owner, str(self.count), account, self.count)
            self.there.append((owner, account, self.count))
            self.passed[self.count] = []

    @rule(owner=OWNERS)
    def call(self, owner: str) -> None:
        self.count += 1
        self.unread.put_behind(owner, self.count)
        self.behind.append((owner, self.count))

    @precondition(lambda self: self.unread)
    @rule()
    def take(self) -> None:
        owner, number = self.unread.take()  # type: ignore[misc]
        if (owner, number) in self.behind:
            self.behind.remove((owner, number))
            assert all(o != owner or n > number for o, _, n in self.there), "nothing before it is left"
            return
        (item,) = (item for item in self.there if item[2] == number)
        assert owner == item[0]
        mine = [other for other in self.there if self.line(other) == self.line(item)]
        assert item == mine[0], "of an account the first that has come"
        self.there.remove(item)
        for other in self.there:
            if self.line(other) != self.line(item):
                self.passed[other[2]].append(self.line(item))
        for line in set(map(self.line, self.there)):
            foremost = next(other for other in self.there if self.line(other) == line)
            seen = self.passed[foremost[2]]
            assert len(seen) == len(set(seen)) or line == self.line(item), "no account twice while another waits"
        for other in mine[1:2]:
            self.passed[other[2]] = []  # its account's next turn

    @rule(owner=OWNERS, numbers=st.sets(st.integers(1, 60), max_size=20))
    def discard(self, owner: str, numbers: set[int]) -> None:
        before = {self.line(item): item for item in reversed(self.there)}
        self.unread.discard(owner, map(str, numbers))
        self.there = [item for item in self.there if item[0] != owner or item[2] not in numbers]
        for line, foremost in before.items():  # who follows it has waited as long
            following = next((item for item in self.there if self.line(item) == line), None)
            if following is not None:
                self.passed[following[2]] = self.passed[foremost[2]]

    @rule(owner=OWNERS)
    def forget(self, owner: str) -> None:
        self.unread.forget(owner)
        self.there = [item for item in self.there if item[0] != owner]
        self.behind = [call for call in self.behind if call[0] != owner]

    def teardown(self) -> None:
        assert len(self.unread) == len(self.there)
        while self.unread:
            self.take()
        assert (self.there, self.behind, len(self.unread), self.unread.take()) == ([], [], 0, None)


class TestRounds(Rounds.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_a_request_by_itself_waits_for_one_of_each_account() -> None:
    found = Unread()
    for i in range(1000):
        found.add("", f"a{i}", "a", f"a{i}")
        found.add("", f"b{i}", "b", f"b{i}")
    found.take()
    found.add("", "alone", None, "alone")
    assert [found.take()[1] for _ in range(3)] == ["b0", "a1", "alone"]  # type: ignore[index]


def core_request(params: Any, account: str | None = None, grammar: GrammarSpec | None = None) -> CoreRequest:
    return CoreRequest("r", [5, 6], params, 3, account=account, grammar=grammar, lends=True)


class Wire:
    """Both ends of it."""

    def __init__(self) -> None:
        self.sharing, self.common = wire.Sharing(), dict[int, Common]()
        self.sent = 0  # parameters and grammars

    def over(self, *requests: CoreRequest) -> list[wire.UnreadRequest]:
        added = wire.decode_to_core(msgspec.msgpack.encode(self.sharing.message(list(requests))))
        assert isinstance(added, wire.Added)
        self.sent += len(added.common)
        self.common.update((number, Common(raw)) for number, raw in added.common)
        return [look_at(raw, self.common) for raw in added.requests]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(stop=["a"], logit_bias={3: 200.0}, bad_words=["b"], temperature=0.0, top_k=4),
        PoolingParams(dimensions=4),
    ],
)
@pytest.mark.parametrize("grammar", [None, GrammarSpec("regex", "a+", "xgrammar")])
@pytest.mark.parametrize("account", [None, "a"])
def test_what_is_read_is_what_was_sent(params: Any, grammar: GrammarSpec | None, account: str | None) -> None:
    sent = core_request(params, account, grammar)
    (found,) = Wire().over(sent)
    found = read(found)
    assert isinstance(found.params, type(params)) and sent.params is params
    assert msgspec.to_builtins(found) == msgspec.to_builtins(sent)


def test_what_requests_have_in_common_is_sent_and_read_once_and_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    both, params, grammar = Wire(), SamplingParams(max_tokens=7), GrammarSpec("regex", "a+", "xgrammar")
    monkeypatch.setattr(SamplingParams, "verify", lambda self: pytest.fail("checked again"))
    found = [read(x) for _ in range(3) for x in both.over(*[core_request(params, "a", grammar)] * 4)]
    assert both.sent == 2
    assert len({id(request.params) for request in found}) == len({id(request.grammar) for request in found}) == 1
    both.over(core_request(params), core_request(params))
    assert both.sent == 2, "who is alone has nothing in common"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3 * wire.MAX_SHARED), max_size=3 * wire.MAX_SHARED), max_size=6), st.booleans())
def test_numbers_mean_the_same_at_both_ends(messages: list[list[int]], fails: bool) -> None:
    all_params = [SamplingParams(max_tokens=i + 1) for i in range(3 * wire.MAX_SHARED + 1)]
    both, waiting = Wire(), list[tuple[int, wire.UnreadRequest]]()
    for message in messages:
        if fails:
            with pytest.raises(TypeError):
                both.sharing.message([core_request(all_params[0], "a"), core_request(object(), "a")])
        waiting += zip(message, both.over(*(core_request(all_params[i], "a") for i in message)), strict=True)
    assert [read(request).params.max_tokens for _, request in waiting] == [i + 1 for i, _ in waiting]  # type: ignore[union-attr]
    assert len(both.common) <= wire.MAX_SHARED


def test_a_number_that_nobody_knows_is_an_error() -> None:
    sent = wire.Sharing().message([core_request(SamplingParams(), "a")])
    with pytest.raises(msgspec.ValidationError, match=r"number 0 .*params"):
        look_at(msgspec.Raw(msgspec.msgpack.encode(sent.requests[0])), {})
