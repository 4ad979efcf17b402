"""Attention of long prompts on Hopper GPUs, with the roles of warps written out: one warp copies tiles of keys and
values through TMA, two groups of four warps take 64 queries each. While a group's weights of one tile are multiplied
with its values, the group computes those of the next tile.

What is computed is that of `prefill._prefill_kernel`, where heads are as wide as the kernel's tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm.ops.attention import GatherPlan
from vllm.step.inputs import StepInputs

_FORMS = {128: (128, 2), 256: (64, 2)}  # by head size: keys of a tile, and tiles under way, from times on an H200
_SHARED_FORM = (64, 4)  # where keys in common are whole tiles of 64 (`shared_prefix.ALIGN`), for heads of 128
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # the name before Triton 3.7


def takes(head_dim: int) -> bool:
    """Whether the kernel is for heads of this size."""
    return head_dim in _FORMS


@gluon.jit
def _copy_tiles(
    k_desc, v_desc, k_tiles, v_tiles, k_full, v_full, k_free, v_free, kv_start, common, common_row, column, begin, end,
    TILE: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """The copying warp: tiles of keys and values of [begin, end), as places for them become free."""
    BYTES: gl.constexpr = TILE * k_tiles.shape[2] * 2
    for i in range(gl.cdiv(end - begin, TILE)):
        key = begin + i * TILE
        at = kv_start + key
        if SHARED:
            at = gl.where(key < common, common_row + key, at)
        place = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_free.index(place), phase ^ 1)
        mbarrier.expect(k_full.index(place), BYTES)
        _copy(k_desc, [at, column], k_full.index(place), k_tiles.index(place))
        mbarrier.wait(v_free.index(place), phase ^ 1)
        mbarrier.expect(v_full.index(place), BYTES)
        _copy(v_desc, [at, column], v_full.index(place), v_tiles.index(place))


@gluon.jit
def _weigh(
    s, m, z, q_pos, key, inner, outer, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    TILE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The weights of a tile's keys, from `key` on, by their products with queries, the new maximum and sum, and what
    results so far are to be multiplied with. The arguments are those of `prefill._attend_tile`.
    """
    if SOFTCAP:
        s = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [s * inner], dtype=gl.float32, is_pure=True, pack=1
        )
    k_pos = key + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
    if CAUSAL:
        s = gl.where(q_pos[:, None] >= k_pos[None, :], s, -float("inf"))
    if WINDOW > 0:
        s = gl.where(q_pos[:, None] - k_pos[None, :] < WINDOW, s, -float("inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * outer)
    w = gl.exp2(s * outer - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return w, m_new, z * alpha + gl.sum(w, 1), alpha


@gluon.jit
def _attend_range(
    acc, p, m, z, i, q, k_tiles, v_tiles, k_full, v_full, k_free, v_free, q_pos, begin, end,
    inner, outer, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tiles [begin, end) of keys, of which the first is number i. p: weights of the tile before, whose values are not
    in acc yet; so it is with what is returned.
    """
    zeros = gl.zeros([64, TILE], gl.float32, S_LAYOUT)
    for key in range(begin, end, TILE):
        place = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(k_full.index(place), (i // STAGES) & 1)
        s = warpgroup_mma(q, k_tiles.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(place), count=1)
        w, m, z, alpha = _weigh(s, m, z, q_pos, key, inner, outer, CAUSAL, WINDOW, SOFTCAP, TILE, S_LAYOUT)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(w.to(v_tiles.dtype), P_LAYOUT)
        i += 1
    return acc, p, m, z, i


@gluon.jit
def _attend_group(
    GROUP: gl.constexpr, first, head, q_tiles, q_full, k_tiles, v_tiles, k_full, v_full, k_free, v_free, out_ptr,
    sinks_ptr, start, query_len, prefix, begin, edge, bare, end, inner, outer, stride_o, D: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """A group of warps: 64 queries from number `first` of the request on, of one head."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    q_pos = prefix + first + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    q = q_tiles.index(GROUP)
    m = gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    z = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if SINKS:
        m = m * 0.0 + gl.load(sinks_ptr + head).to(gl.float32) * 1.4426950408889634
        z += 1.0
    acc = gl.zeros([64, D], gl.float32, O_LAYOUT)
    zeros = gl.zeros([64, TILE], gl.float32, S_LAYOUT)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(0), count=1)
    w, m, z, alpha = _weigh(s, m, z, q_pos, begin, inner, outer, True, WINDOW, SOFTCAP, TILE, S_LAYOUT)
    p = gl.convert_layout(w.to(v_tiles.dtype), P_LAYOUT)
    i = 1
    key = begin + TILE
    if WINDOW > 0:
        acc, p, m, z, i = _attend_range(
            acc, p, m, z, i, q, k_tiles, v_tiles, k_full, v_full, k_free, v_free, q_pos, key, edge, inner,
            outer, False, WINDOW, SOFTCAP, TILE, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip
        key = gl.maximum(key, edge)
    acc, p, m, z, i = _attend_range(
        acc, p, m, z, i, q, k_tiles, v_tiles, k_full, v_full, k_free, v_free, q_pos, key, bare, inner,
        outer, False, 0, SOFTCAP, TILE, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
    )  # fmt: skip
    acc, p, m, z, i = _attend_range(
        acc, p, m, z, i, q, k_tiles, v_tiles, k_full, v_full, k_free, v_free, q_pos,
        gl.maximum(key, bare), end, inner, outer, True, WINDOW, SOFTCAP, TILE, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
    )  # fmt: skip
    last = (i - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((i - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_tiles.index(last), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    out = (acc / gl.convert_layout(z, gl.SliceLayout(1, O_LAYOUT))[:, None]).to(out_ptr.dtype.element_ty)
    row = first + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
    d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    at = (start + row).to(gl.int64) * stride_o + head * D
    gl.store(out_ptr + at[:, None] + d[None, :], out, mask=(row < query_len)[:, None] & (d < D)[None, :])


@gluon.jit(do_not_specialize=["requests", "fresh"])
def _hopper_kernel(
    q_desc, k_desc, v_desc, out_ptr, sinks_ptr, starts_ptr, lens_ptr, places, requests, fresh, inner, outer, stride_o,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Grid (heads, tiles), heavy tiles first; else as `prefill._prefill_kernel`."""
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    head = gl.program_id(0)
    left = 0
    right = requests
    while left < right:
        mid = (left + right) // 2
        if gl.load(starts_ptr + mid) // 128 + mid <= tile:
            left = mid + 1
        else:
            right = mid
    r = left - 1
    start = gl.load(starts_ptr + r)
    query_len = gl.load(starts_ptr + r + 1) - start
    first = (tile - start // 128 - r) * 128
    kv_start = gl.load(places + r * 3)
    if fresh != 0:
        kv_start = start
    common = gl.load(places + r * 3 + 1)
    common_row = gl.load(places + r * 3 + 2)
    prefix = gl.load(lens_ptr + r) - query_len
    column = (head // (HEADS // KV_HEADS)) * D
    if (first < query_len) & (common >= 0):
        bare = (prefix + first + 1) // TILE * TILE  # keys below this are as early as any row's
        end = prefix + gl.minimum(first + 128, query_len)
        edge = 0  # keys from here on are in the window of every row
        begin = 0
        if WINDOW > 0:
            edge = gl.minimum(gl.cdiv(gl.maximum(end - WINDOW, 0), TILE) * TILE, bare)
            begin = gl.maximum(prefix + first - WINDOW + 1, 0) // TILE * TILE
        q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 64, D], q_desc.layout)
        k_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, TILE, D], k_desc.layout)
        v_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, TILE, D], v_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        fence_async_shared()
        mbarrier.expect(q_full, 2 * 64 * D * 2)
        _copy(q_desc, [start + first, head * D], q_full, q_tiles.index(0))
        _copy(q_desc, [start + first + 64, head * D], q_full, q_tiles.index(1))
        gl.warp_specialize(
            [
                (_attend_group, (
                    0, first, head, q_tiles, q_full, k_tiles, v_tiles, k_full, v_full, k_free, v_free, out_ptr,
                    sinks_ptr, start, query_len, prefix, begin, edge, bare, end, inner, outer, stride_o, D, TILE,
                    STAGES, WINDOW, SOFTCAP, SINKS,
                )),
                (_attend_group, (
                    1, first + 64, head, q_tiles, q_full, k_tiles, v_tiles, k_full, v_full, k_free, v_free,
                    out_ptr, sinks_ptr, start, query_len, prefix, begin, edge, bare, end, inner, outer, stride_o, D,
                    TILE, STAGES, WINDOW, SOFTCAP, SINKS,
                )),
                (_copy_tiles, (
                    k_desc, v_desc, k_tiles, v_tiles, k_full, v_full, k_free, v_free, kv_start, common, common_row,
                    column, begin, end, TILE, STAGES, SHARED,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, step: StepInputs, plan: GatherPlan, fresh: bool,
    scales: tuple[float, float], window: int, softcap: bool, out: Tensor,
) -> None:  # fmt: skip
    """Attention of the requests that `plan` gathers, in their rows of `out` [tokens, heads, head_dim].

    q: [tokens, heads, head_dim] in 16 bits; k, v: [rows, kv_heads, head_dim], where `plan` says, or with `fresh` the
    step's own; of all three the heads of a row are next to each other.   scales: inner and outer, as for
    `prefill._attend_tile`.   window: 0 for none.
    """
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    tile, stages = _SHARED_FORM if plan.shared and head_dim == 128 else _FORMS[head_dim]
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16

    def describe(x: Tensor, rows: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([rows, head_dim], dtype)
        return TensorDescriptor(x, [x.shape[0], x.shape[1] * head_dim], [x.stride(0), 1], [rows, head_dim], layout)

    requests = step.seq_lens.shape[0]
    _hopper_kernel[(heads, q.shape[0] // 128 + requests)](
        describe(q, 64), describe(k, tile), describe(v, tile), out, out if sinks is None else sinks, step.query_starts,
        step.seq_lens, plan.requests, requests, int(fresh), *scales, heads * head_dim,
        HEADS=heads, KV_HEADS=kv_heads, D=head_dim, TILE=tile, STAGES=stages, SHARED=plan.shared, WINDOW=window,
        SOFTCAP=softcap, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
