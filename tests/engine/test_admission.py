"""The waiting queue: what may enter, what one account may have in it, and that all of it is given back."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.engine.admission import Account, Admission
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError


def new(slots: int = 4, sequences: int | None = None, tokens: int | None = None) -> Admission:
    settings: Any = SimpleNamespace(max_num_seqs=slots, max_num_queued_reqs=sequences, max_num_queued_tokens=tokens)
    return Admission(settings)


def messages(names: list[str], length: int = 3) -> list[Any]:
    return [SimpleNamespace(request_id=name, prompt_token_ids=[5] * length) for name in names]


@pytest.mark.parametrize(("slots", "sequences", "share"), [(4, None, 4), (256, None, 256), (8, 8, 2), (8, 1, 1)])
def test_an_account_has_a_share_of_the_queue(slots, sequences, share):
    admission = new(slots, sequences)
    assert admission.share == share
    account = Account()
    assert admission.room(account, 3) == share
    admission.enter(messages([f"{i}" for i in range(share)]), account)
    assert admission.room(account, 3) == 0
    assert admission.leave("0") is None  # nothing is held back
    admission.hold_back(account, "r")
    assert admission.room(account, 3) == min(1, share)
    if share > 1:
        assert admission.leave("1") is account


def test_an_account_has_a_share_of_the_tokens_but_always_one_sequence():
    admission, account = new(slots=64, tokens=400), Account()
    assert admission.share_of_tokens == 100
    assert admission.room(account, 30) == 3
    assert admission.room(account, 1000) == 1
    admission.enter(messages(["a"], 90), account)
    assert admission.room(account, 30) == 0


def test_others_find_room_beside_an_account_that_wants_everything():
    admission, greedy = new(slots=4), Account()
    admission.check(16384, 3)  # an empty queue takes anything
    admission.enter(messages([f"{i}" for i in range(admission.room(greedy, 3))]), greedy)
    for i in range(admission.max_sequences - admission.share):
        admission.check(1, 3)
        admission.enter(messages([f"other {i}"]))
    with pytest.raises(QueueOverflowError, match="is full"):
        admission.check(1, 3)


def test_many_accounts_leave_half_of_the_queue_to_others():
    admission, accounts = new(slots=4), [Account() for _ in range(20)]
    for i, account in enumerate(accounts):
        found = messages([f"{i}-{j}" for j in range(admission.room(account, 3))])
        assert found  # each has a place at least
        admission.enter(found, account)
    assert admission.waiting == 16 + 16  # four with all of their share, and a place for each of the others
    assert [admission.room(account, 3) for account in accounts] == [0] * 20
    admission.check(admission.max_sequences - admission.waiting, 3)


def test_many_short_prompts_need_room_for_one_and_for_the_others_to_be_held_back():
    admission, account = new(slots=1, sequences=6), Account()
    admission.enter(messages(["a"]))
    admission.check(24, 9, short=True)
    for i in range(4):
        admission.hold_back(account, f"{i}")
    admission.check(20, 9, short=True)
    with pytest.raises(QueueOverflowError, match="4 prompts are held back .* at most 24 may be"):
        admission.check(21, 9, short=True)
    for i in (2, 2, 0, 3, 1):
        admission.let_go(account, f"{i}")
    admission.check(24, 9, short=True)
    admission.enter(messages(["b", "c", "d", "e", "f"]))
    with pytest.raises(QueueOverflowError, match="is full"):
        admission.check(2, 9, short=True)


def test_one_call_may_be_larger_than_the_queue():
    """A place for its first sequence is enough, as long as no other call has some held back."""
    admission, account = new(slots=2, sequences=6, tokens=100), Account()
    admission.enter(messages(["a"]))
    admission.check(1000, 9)
    admission.hold_back(account, "large")
    admission.check(5, 9)
    with pytest.raises(QueueOverflowError, match="1 sequences wait, this request has 6, and at most 6 may"):
        admission.check(6, 9)
    admission.let_go(account, "large")
    admission.check(1000, 9)
    admission.enter(messages(["b", "c", "d", "e", "f"]))
    with pytest.raises(QueueOverflowError, match="6 sequences wait, this request has 1000, and at most 6 may"):
        admission.check(1000, 9)


def test_what_waits_for_a_free_slot_needs_no_place():
    """Those that have just come have no token yet, although nothing keeps them from running."""
    settings: Any = SimpleNamespace(max_num_seqs=4, max_num_queued_reqs=2, max_num_queued_tokens=None)
    inside: list[str] = []
    admission = Admission(settings, in_core=lambda: len(inside))

    def come(name: str) -> None:
        admission.check()
        inside.append(name)
        admission.enter(messages([name]))

    for name in "abcdef":
        come(name)
    with pytest.raises(QueueOverflowError, match="6 sequences wait, this request has 1, and at most 6 may"):
        admission.check()
    for name in "abcd":
        admission.leave(name)
    with pytest.raises(QueueOverflowError, match="2 sequences wait, this request has 1, and at most 2 may"):
        admission.check()
    inside.remove("a")
    come("g")
    with pytest.raises(QueueOverflowError):
        admission.check()


def test_n_counts_as_n():
    admission = new(slots=2, sequences=6, tokens=100)
    admission.enter(messages(["a"]))
    admission.hold_back(Account(), "b")
    admission.check(5, 9)
    with pytest.raises(QueueOverflowError, match="1 sequences wait, this request has .*, and at most 6 may"):
        admission.check(6, 9)
    with pytest.raises(MaxQueuedTokensError):
        admission.check(2, 98)


def test_everything_that_enters_leaves():
    rng = random.Random(5)
    admission, accounts, inside = new(slots=16), [Account() for _ in range(3)], []
    for step in range(2000):
        account = rng.choice([*accounts, None])
        if rng.random() < 0.5:
            found = messages([f"{step}-{i}" for i in range(rng.randrange(3))], rng.randrange(1, 9))
            admission.enter(found, account)
            inside += [m.request_id for m in found]
        elif inside:
            admission.leave(inside.pop(rng.randrange(len(inside))))
            admission.leave("unknown")
        assert admission.waiting == len(inside)
    for name in inside:
        admission.leave(name)
    assert (admission.waiting, admission.waiting_tokens) == (0, 0)
    assert [(account.waiting, account.tokens) for account in accounts] == [(0, 0)] * 3
