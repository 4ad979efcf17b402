"""Block pool: conservation, eviction order, hash map."""

from __future__ import annotations

import random

import pytest

from vllm.core.block_pool import BlockPool


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def test_null_block_is_never_handed_out_and_exhaustion_is_an_error() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="No free blocks available"):
        pool.allocate(1)


def test_eviction_is_least_recently_used_and_worthless_blocks_go_first() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    for b in blocks[:4]:
        pool.register(b, key(b), b"x")
    pool.release([blocks[2]])
    pool.release([blocks[0]])
    pool.release([blocks[4]])  # holds nothing findable
    pool.release([blocks[1]])
    assert pool.allocate(4) == [blocks[4], blocks[2], blocks[0], blocks[1]]
    assert pool.lookup(key(blocks[0]), b"x") is None
    assert pool.lookup(key(blocks[3]), b"x") == blocks[3]


def test_a_hit_brings_a_free_block_back() -> None:
    pool = BlockPool(4)
    (b,) = pool.allocate(1)
    pool.register(b, key(1), b"tokens")
    pool.release([b])
    assert pool.lookup(key(1), b"tokens") == b
    pool.acquire([b])
    assert b not in pool.free_blocks() and pool.num_free == 2
    assert b not in pool.allocate(2)


def test_equal_hash_with_other_tokens_is_not_a_hit() -> None:
    pool = BlockPool(4)
    (b,) = pool.allocate(1)
    pool.register(b, key(1), b"tokens")
    assert pool.lookup(key(1), b"others") is None


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(4)
    (b,) = pool.allocate(1)
    pool.release([b])
    with pytest.raises(ValueError, match="more often"):
        pool.release([b])


def test_random_operations_match_a_naive_model() -> None:
    rng = random.Random(0)
    pool = BlockPool(30)
    free = list(range(1, 30))  # naive queue, front is evicted first
    refs = dict.fromkeys(range(1, 30), 0)
    keys: dict[bytes, int] = {}
    for step in range(5000):
        action = rng.random()
        held = [b for b, r in refs.items() if r]
        if action < 0.4 and free:
            n = rng.randrange(1, min(len(free), 4) + 1)
            want, free = free[:n], free[n:]
            assert pool.allocate(n) == want
            for b in want:
                refs[b] = 1
                keys = {k: v for k, v in keys.items() if v != b}
        elif action < 0.7 and held:
            b = rng.choice(held)
            pool.release([b])
            refs[b] -= 1
            if refs[b] == 0:
                free = [*free, b] if b in keys.values() else [b, *free]
        elif action < 0.85 and held:
            b = rng.choice(held)
            if b not in keys.values():
                keys[key(step)] = b
            pool.register(b, key(step), b"c")
        elif keys:
            k = rng.choice(list(keys))
            b = pool.lookup(k, b"c")
            assert b == keys[k]
            assert b is not None
            pool.acquire([b])
            if refs[b] == 0:
                free.remove(b)
            refs[b] += 1
        assert pool.free_blocks() == free and pool.num_free == len(free) and pool.num_cached == len(keys)
