"""Attention over a shared prefix, read once for many requests, as if every request had read all for itself."""

import numpy as np
import pytest
import torch

from tests.ops.test_shared_prefix import block_table
from tests.ops.triton.test_decode import normed_jointly
from vllm.ops import rotary as rotary_ops
from vllm.ops.attention import AttentionParams, attend
from vllm.ops.shared_prefix import SharedPlan, Tiles, cut, find_groups
from vllm.ops.triton import attention as kernels
from vllm.ops.triton.decode_attention import DecodeAttention, DecodeRows, decode_attention
from vllm.step.inputs import GroupInputs, StepInputs

EPS = 1e-5


def device_plan(work, kv_heads, tile_rows, head_dim, spare=2):
    """`work` as the kernels get it, with unused items behind it; what nobody writes is NaN."""
    items = np.concatenate([work.items, np.zeros((spare, 4), np.int32)])
    room = (len(items), kv_heads, tile_rows)
    return SharedPlan(
        torch.from_numpy(work.rows), torch.from_numpy(work.members), torch.from_numpy(items),
        torch.full((*room, head_dim), float("nan")), torch.full(room, float("nan")),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "norm", "splits", "dim", "rotated", "interleaved", "cap"),
    [
        (6, 2, False, 1, 16, 16, False, None),
        (4, 4, True, 4, 16, 16, False, None),
        (4, 2, True, 2, 24, 8, False, 1.5),
        (2, 2, False, 1, 16, 16, True, None),
        (6, 2, "joint", 2, 24, 24, False, None),
    ],
)
def test_fused_decode_attention_over_a_shared_prefix(heads, kv_heads, norm, splits, dim, rotated, interleaved, cap):
    block = 32
    a, b = list(range(1, 11)), list(range(30, 38))  # 320 and 256 tokens
    table, cached = block_table([a, b, a, [], b, a, b, a], [1, 40, 33, 100, 7, 450, 1, 64], block)
    ids, position = np.unique(table, return_inverse=True)  # numbered anew, to keep the cache small
    table = position.reshape(table.shape).astype(np.int32)
    slots = np.array([5, 1, 3, 2, 0, 6, 4, 7])
    by_slot = np.zeros_like(table)
    by_slot[slots] = table
    members = 16 // (heads // kv_heads)
    groups = find_groups(by_slot, slots, cached, block, members)
    assert [g.keys for g in groups] == [320, 256]
    work = cut(groups, len(slots), Tiles(members, 12, 5))
    assert len(work.items) > 2

    cache = torch.randn(len(ids), 2, kv_heads, block, dim)
    lengths = torch.from_numpy(cached).long()
    angle = torch.arange(1400)[:, None] * 100.0 ** (-torch.arange(rotated // 2) / (rotated / 2))
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    rows = len(slots)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    weights = rotary_ops.QKNorm(torch.randn(dim), torch.randn(dim), EPS, 1.0) if norm else None
    normal, each = qkv, weights
    if norm == "joint":
        weights = rotary_ops.QKNorm(torch.randn(heads * dim), torch.randn(kv_heads * dim), EPS, 1.0)
        normal, each = normed_jointly(qkv, weights), None
    d_table = torch.from_numpy(table)
    want_cache = cache.clone()
    home = d_table.gather(1, lengths[:, None] // block).long()[:, 0] * block + lengths % block
    rotary = (lengths, cos_sin, interleaved, want_cache, home)
    q, _ = rotary_ops.rotate_and_write_kv.reference(normal, heads, *rotary, qk_norm=each)
    starts, lens = torch.arange(rows + 1, dtype=torch.int32), (lengths + 1).to(torch.int32)
    group = GroupInputs(home, d_table)
    step = StepInputs.of(
        lengths, lengths, starts, lens, (group,), logits_rows=lengths, max_seq_len=1400,
        host_query_starts=starts.numpy(), host_seq_lens=lens.numpy(),
    )  # fmt: skip
    want = attend.reference(q, want_cache, AttentionParams(0.25, softcap=cap), step, group)

    attention = DecodeAttention(
        heads, 0.25, cache, cos_sin, None if weights is None else weights.q_weight,
        None if weights is None else weights.k_weight, EPS, 1.0, softcap=cap, interleaved=interleaved,
        joint=norm == "joint",
    )  # fmt: skip
    padded = rows + 1
    decode_rows = DecodeRows(
        torch.tensor([*slots, -1], dtype=torch.int32), torch.tensor([*cached, 0], dtype=torch.int32),
        [torch.from_numpy(by_slot)], torch.empty(padded * heads * splits, dim), torch.empty(padded * heads * splits),
        torch.zeros(padded * kv_heads, dtype=torch.int32), splits, shared=device_plan(work, kv_heads, 16, dim),
    )  # fmt: skip
    out = torch.empty(padded, heads * dim)
    decode_attention(torch.cat([qkv, qkv[:1]]), out, attention, decode_rows)
    torch.testing.assert_close(out[:rows], want.flatten(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, want_cache)
    assert not decode_rows.arrived.any()


PARAMS = {
    "plain": (6, 2, 16, torch.float32, {}),
    "odd head size": (4, 4, 24, torch.float32, {}),
    "half": (8, 2, 16, torch.float16, {}),
    "softcap": (4, 2, 16, torch.float32, {"softcap": 3.0}),
    "alibi": (4, 2, 16, torch.float32, {"alibi_slopes": torch.tensor([0.05, 0.02, 0.1, 0.07])}),
    "scaled alibi": (
        4,
        2,
        16,
        torch.float32,
        {"alibi_slopes": torch.tensor([0.05, 0.02, 0.1, 0.07]), "alibi_known": 50},
    ),
    "float8": (4, 2, 16, torch.float32, {"k_scale": 0.5, "v_scale": 3.0}),
}


@pytest.mark.parametrize(("case", "longest"), [("plain", 300), *((case, 100) for case in PARAMS)])
def test_attention_of_a_decode_batch_over_a_shared_prefix(case, longest):
    heads, kv_heads, dim, dtype, options = PARAMS[case]
    block, params = 32, AttentionParams(0.25, **options)
    a, b = list(range(1, 11)), list(range(30, 38))  # 320 and 256 tokens
    table, cached = block_table([a, b, a, [], b, a, b], [1, 40, 33, 50, 7, 150, 1], block)
    ids, position = np.unique(table, return_inverse=True)
    table = position.reshape(table.shape).astype(np.int32)
    rows, members = len(table), 16 // (heads // kv_heads)
    work = cut(find_groups(table, np.arange(rows), cached, block, members), rows, Tiles(members, 12, 5))
    assert len(set(work.rows[:, 0].tolist())) == 3
    shared = device_plan(work, kv_heads, 16, dim)
    cache = torch.randn(len(ids), 2, kv_heads, block, dim).to(torch.float8_e5m2 if case == "float8" else dtype)
    q = torch.randn(rows, heads, dim).to(dtype)
    starts, lens = np.arange(rows + 1, dtype=np.int32), cached + 1
    nothing = torch.zeros(0)

    def step_with(plan, longest):
        group = GroupInputs(nothing, torch.from_numpy(table), plan)
        return StepInputs.of(
            nothing, nothing, torch.from_numpy(starts), torch.from_numpy(lens), (group,), logits_rows=nothing,
            max_seq_len=longest, host_query_starts=starts, host_seq_lens=lens,
        )  # fmt: skip

    step = step_with(shared, longest)
    got = kernels.attend(q, cache, params, step, step.groups[0])
    step = step_with(None, 1400)
    want = attend.reference(q.float(), cache.float(), params, step, step.groups[0])
    assert (got.float() - want).norm() < 2e-3 * want.norm()
