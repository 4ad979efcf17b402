"""How many blocks there are, and the tensors that hold them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch

from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.worker import kv_memory
from vllm.worker.kv_memory import CacheRequest, allocate, count_blocks, cpu_available

FULL = KVLayout.alike((KVGroup(KVKind.FULL, (0, 1)),), 16, 2, 8, 4)
MIXED = KVLayout.alike((KVGroup(KVKind.FULL, (0, 2)), KVGroup(KVKind.SLIDING, (1, 3), 40)), 16, 2, 8, 4)
REQUEST = CacheRequest(max_model_len=100, max_num_seqs=3, max_num_batched_tokens=64)
BLOCK = 2 * 2 * 2 * 16 * 8 * 4


def test_as_many_as_fit_but_on_the_cpu_no_more_than_can_be_used() -> None:
    assert FULL.bytes_per_block == BLOCK
    assert count_blocks(FULL, REQUEST, 50 * BLOCK + 5, "", bounded=False) == 50
    # 7 blocks per request, the null block
    assert count_blocks(FULL, REQUEST, 50 * BLOCK, "", bounded=True) == 3 * 7 + 1
    assert count_blocks(FULL, REQUEST, 20 * BLOCK, "", bounded=True) == 20


def test_a_sliding_group_needs_its_window_only() -> None:
    long = replace(REQUEST, max_model_len=1600)
    # full: 100 blocks; sliding: a window of 40 tokens and a chunk of 64
    needed = kv_memory.blocks_per_request(MIXED, 1600, 64)
    assert 100 + -(-(39 + 64) // 16) <= needed <= 100 + -(-(39 + 64) // 16) + 2
    assert count_blocks(MIXED, long, (needed + 1) * BLOCK, "", bounded=False) == needed + 1
    with pytest.raises(ValueError, match="KV cache is needed"):
        count_blocks(MIXED, long, needed * BLOCK, "", bounded=False)


def test_the_user_may_fix_the_number_or_the_size() -> None:
    assert count_blocks(FULL, replace(REQUEST, override=9), 0, "", bounded=True) == 10
    assert count_blocks(FULL, replace(REQUEST, fixed_bytes=30 * BLOCK), 0, "", bounded=True) == 30


GIB = kv_memory.GIB


@pytest.mark.parametrize(
    "utilization, gone, weights, free, allowed, left",
    [
        (0.9, 11, 10, 89, 78.5, 87),  # alone: weights, half a GiB for the context, one for libraries
        (0.4, 11, 10, 49, 28.5, 47),  # beside another one of 0.4
        (0.9, 11, 10, 49, 78.5, 47),  # which leaves less than that
        (0.4, 60, 10, 40, 25.5, 38),  # others have come meanwhile: that is no library of ours
        (0.4, 5, 10, 95, 29.5, 93),  # others have left
        (0.1, 11, 10, 89, -1.5, 87),
    ],
)
def test_a_share_of_a_device_is_an_engines_own(utilization, gone, weights, free, allowed, left) -> None:
    found = kv_memory.cache_bytes(100 * GIB, utilization, gone * GIB, weights * GIB, free * GIB)
    assert [pytest.approx(x / GIB) for x in found] == [allowed, left]


def test_no_memory_at_all() -> None:
    expected = (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
        "engine."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        count_blocks(FULL, REQUEST, 0, "", bounded=False)
    with pytest.raises(ValueError, match=f"^{re.escape(expected)} Hint.$"):
        count_blocks(FULL, REQUEST, -5, " Hint.", bounded=False)


def test_too_little_memory_for_one_request() -> None:
    request = replace(REQUEST, max_model_len=10_000_000)
    expected = (
        "To serve at least one request with the models's max seq len (10000000), (2.38 GiB KV cache is needed, which "
        "is larger than the available KV cache memory (1.00 GiB). Based on the available memory, the estimated maximum "
        "model length is 4194288. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
        "initializing the engine."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        count_blocks(FULL, request, 1 << 30, "", bounded=False)
    fits = replace(request, max_model_len=4194288)
    assert count_blocks(FULL, fits, 1 << 30, "", bounded=False) == (1 << 30) // BLOCK
    with pytest.raises(ValueError, match="is needed"):
        count_blocks(FULL, replace(request, max_model_len=4194289), 1 << 30, "", bounded=False)


def test_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_available(3, 2) == (3 << 30, False)  # of each rank, as the guide says
    monkeypatch.setattr(kv_memory, "_free_host_memory", lambda: 100 << 30)
    assert cpu_available(0, 1) == (4 << 30, True)
    assert cpu_available(0, 4) == (1 << 30, True)
    monkeypatch.setattr(kv_memory, "_free_host_memory", lambda: 5 << 30)
    assert cpu_available(0, 1) == (2 << 30, True)
    monkeypatch.undo()
    assert 0 < cpu_available(0, 1)[0] <= 4 << 30


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_large_cache_is_zero_and_costs_nothing_before_it_is_used(dtype: torch.dtype) -> None:
    before = resident()
    layout = replace(FULL, page_bytes=(BLOCK // 8 * dtype.itemsize,) * 2)
    caches = allocate(layout, 500_000, 0, dtype, torch.device("cpu")).tensors
    assert resident() - before < 20 << 20
    assert len(caches) == 2
    for cache in caches:
        assert cache.shape == (500_000, 2, 2, 16, 8) and cache.dtype is dtype and cache.is_contiguous()
        for block in (0, 250_000, 499_999):
            assert not cache[block].float().any()
        cache[499_999, 1] = 1.0
        assert cache[499_999, 1].float().eq(1.0).all()
    del caches, cache
    assert resident() - before < 20 << 20


def test_the_log_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(kv_memory.logger, "info", lambda text, *args: lines.append(text % args))
    kv_memory.log_cache("cpu", FULL, REQUEST, 15)
    kv_memory.log_cache("cuda", FULL, REQUEST, 8)
    assert lines[0] == "# CPU blocks: 14" and lines[2] == "# GPU blocks: 7"
    assert lines[1].endswith("maximum concurrency for 100 tokens per request: 2.00x")
    assert logging.getLogger("vllm.worker.kv_memory") is kv_memory.logger


def test_more_than_the_machine_can_give_is_refused_with_what_to_lower() -> None:
    with pytest.raises(ValueError, match=r"GiB for a part of the KV cache.*Lower VLLM_CPU_KVCACHE_SPACE"):
        allocate(FULL, 2**50, 0, torch.float32, torch.device("cpu"))


def test_states_take_their_part_of_the_memory() -> None:
    state = KVGroup(KVKind.RECURRENT, (2,))
    policy = replace(FULL.policy, groups=(*FULL.groups, state), snapshots=2)
    layout = replace(FULL, policy=policy, state_bytes=(BLOCK * 2,))  # 1 + 3 + 2 states of two blocks
    assert count_blocks(layout, REQUEST, 50 * BLOCK, "", bounded=False) == 38
    assert count_blocks(layout, replace(REQUEST, override=9), 0, "", bounded=True) == 10
    with pytest.raises(ValueError, match="recurrent states of max_num_seqs=3 requests and of 2 cached prefixes"):
        count_blocks(layout, REQUEST, 12 * BLOCK, "", bounded=False)
    only = replace(layout, policy=replace(policy, groups=(state,)), page_bytes=())
    assert count_blocks(only, REQUEST, 50 * BLOCK, "", bounded=True) == 2
