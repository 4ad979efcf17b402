"""The sum over shared memory: what it needs besides GPUs (tests/gpu has the sum itself)."""

import threading
from datetime import timedelta

import torch.distributed as dist

from vllm.distributed.one_shot import _FromZero


def exchange(store: dist.Store, rank: int, first: int, answers: dict[int, list]) -> None:
    """Three exchanges under the keys that symmetric memory uses, numbered from `first` in this process."""
    for n in range(first, first + 3):
        store.set(f"CUDASymmetricMemory/{n}/{rank}", f"{rank}: {n - first}")
        answers[rank].append(store.multi_get([f"CUDASymmetricMemory/{n}/{r}" for r in (0, 1)]))


def test_ranks_that_number_their_exchanges_differently_meet():
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=20))
    stores = [_FromZero(dist.PrefixStore("group", shared)) for _ in range(2)]
    answers: dict[int, list] = {0: [], 1: []}
    younger = threading.Thread(target=exchange, args=(stores[1], 1, 0, answers))
    younger.start()
    exchange(stores[0], 0, 17, answers)
    younger.join()
    assert answers[0] == answers[1] == [[f"{r}: {n}".encode() for r in (0, 1)] for n in range(3)]


def test_counters_waits_and_other_keys_go_through():
    shared = dist.HashStore()
    store = _FromZero(shared)
    assert store.add("barrier/5", 1) == 1
    assert shared.add("barrier/0", 1) == 2
    store.wait(["barrier/5"], timedelta(seconds=1))
    store.wait(["barrier/5"])
    store.set("plain", "x")
    assert store.get("plain") == shared.get("plain") == b"x"
