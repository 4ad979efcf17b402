"""Triton kernels of the mixture of experts: routing, sorting by expert, grouped products, the weighted sum.

The (token, choice) pairs are sorted by expert on the device. Each expert's rows are cut into tiles of at most BM rows;
the number of tiles is known to the device only, so that the grid is made for the most there can be and programs without
a tile end at once. Nothing is read back, and no sum depends on the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.ops import moe as ops
from vllm.ops.moe import NO_EXTRAS, Choice, ExpertExtras
from vllm.ops.triton.activation import KINDS, apply_activation, gated
from vllm.ops.triton.decode_parts import has_tma, processors
from vllm.ops.triton.packed_experts import PackedStack, grouped_mlp, tile_rows

_SORT_BLOCK = 1024
_PIECE = 128  # pairs that one program sorts where there are more than a block
_SUM_BLOCK = 1024
_ROUTED = 2048  # rows times experts that one program routes and sorts
_GROUP = 16  # tiles of rows that go through the weights together, so that both stay in the cache


@triton.jit
def _route_kernel(
    logits, weights, experts, stride, E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr
):
    """Grid (tokens,): softmax over all experts, then the largest one after another, of equal ones the lowest."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    x = tl.load(logits + token * stride + e, mask=e < E, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 0))
    p = tl.where(e < E, p / tl.sum(p, 0), -1.0)
    left, chosen = p, 0.0
    for _ in tl.static_range(TOP_K):
        chosen += tl.max(left, 0)
        left = tl.where(e == tl.argmax(left, 0), -1.0, left)
    for j in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(p, 0), E - 1)  # NaN may be found anywhere
        weight = tl.max(p, 0)
        if RENORMALIZE:
            weight = weight / chosen
        tl.store(weights + token * TOP_K + j, weight)
        tl.store(experts + token * TOP_K + j, best.to(tl.int64))
        p = tl.where(e == best, -1.0, p)


@triton.jit
def _score_kernel(
    logits, bias, weights, experts, stride, scale, G: tl.constexpr, GP: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr,
    SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,): `route_by_score` of G groups of S experts; of equal ones the lowest."""
    token = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GP)[:, None]
    j = tl.arange(0, SP)[None, :]
    e = g * S + j
    real = (g < G) & (j < S)
    x = tl.load(logits + token * stride + e, mask=real, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(x)
    else:
        score = tl.exp(x - tl.max(tl.max(x, 1), 0))
        score = score / tl.sum(tl.sum(tl.where(real, score, 0.0), 1), 0)
    rank = score
    if BIAS:
        rank += tl.load(bias + e, mask=real, other=0.0)
    rank = tl.where(rank == rank, rank, -3.0e38)  # NaN, so that experts are chosen that exist
    rank = tl.where(real, rank, -float("inf"))
    if G > 1:
        left = rank
        worth = tl.zeros([GP], tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            worth += tl.max(left, 1)
            left = tl.where(j == tl.argmax(left, 1)[:, None], -float("inf"), left)
        groups = tl.arange(0, GP)
        worth = tl.where(groups < G, worth, -float("inf"))
        kept = groups < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.argmax(worth, 0)
            kept = kept | (groups == best)
            worth = tl.where(groups == best, -float("inf"), worth)
        rank = tl.where(kept[:, None], rank, -float("inf"))
    t = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.float32)
    names = tl.zeros([KP], tl.int64)
    for k in tl.static_range(TOP_K):
        best_group = tl.argmax(tl.max(rank, 1), 0)
        row = tl.max(tl.where(g == best_group, rank, -float("inf")), 0)
        best = best_group * S + tl.argmax(row, 0)
        best = tl.minimum(best, G * S - 1)  # NaN may be found anywhere
        weight = tl.sum(tl.sum(tl.where((e == best) & real, score, 0.0), 1), 0)
        chosen = tl.where(t == k, weight, chosen)
        names = tl.where(t == k, best.to(tl.int64), names)
        rank = tl.where((e == best) & real, -float("inf"), rank)
    if RENORMALIZE:
        chosen = chosen / (tl.sum(chosen, 0) + 1e-20)
    tl.store(weights + token * TOP_K + t, chosen * scale, mask=t < TOP_K)
    tl.store(experts + token * TOP_K + t, names, mask=t < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(experts, counts, pairs, BLOCK: tl.constexpr):
    """Grid (experts,): how many pairs chose this one."""
    e = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        p = first + tl.arange(0, BLOCK)
        total += (tl.load(experts + p, mask=p < pairs, other=-1) == e).to(tl.int32)
    tl.store(counts + e, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pairs", "most"])
def _place_kernel(
    experts, counts, order, home, tiles, pairs, most, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (experts,): give this expert's pairs their rows, in the order of tokens, and describe its tiles.

    order: pair of each row; home: row of each pair; tiles: [3, most] expert, first row and end, then their number.
    """
    e = tl.program_id(0)
    j = tl.arange(0, EP)
    before = tl.load(counts + j, mask=j < e, other=0)
    mine = tl.load(counts + e)
    start = tl.sum(before, 0)
    tile = tl.sum((before + BM - 1) // BM, 0)
    row = start
    for first in range(0, pairs, BLOCK):
        p = first + tl.arange(0, BLOCK)
        hit = tl.load(experts + p, mask=p < pairs, other=-1) == e
        one = hit.to(tl.int32)
        at = row + tl.cumsum(one, 0) - 1
        tl.store(order + at, p, mask=hit)
        tl.store(home + p, at, mask=hit)
        row += tl.sum(one, 0)
    own = (mine + BM - 1) // BM
    for i in range(0, own):
        tl.store(tiles + tile + i, e)
        tl.store(tiles + most + tile + i, start + i * BM)
        tl.store(tiles + 2 * most + tile + i, start + mine)
    if e == E - 1:
        tl.store(tiles + 3 * most, tile + own)


@triton.jit(do_not_specialize=["pairs"])
def _count_pieces_kernel(experts, counts, pairs, E: tl.constexpr, EP: tl.constexpr, PIECE: tl.constexpr):
    """Grid (pieces,): counts [pieces, E] of those in this piece that chose each expert."""
    p = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    e = tl.arange(0, EP)
    chosen = tl.load(experts + p, mask=p < pairs, other=-1)
    hits = (chosen[:, None] == e[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * E + e, tl.sum(hits, 0), mask=e < E)


@triton.jit(do_not_specialize=["pieces"])
def _sum_pieces_kernel(counts, totals, pieces, E: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (experts,): in place of each piece's count the sum of those before it; the sum of all to totals [E]."""
    e = tl.program_id(0)
    total = 0
    for first in range(0, pieces, BLOCK):
        p = first + tl.arange(0, BLOCK)
        own = tl.load(counts + p * E + e, mask=p < pieces, other=0)
        tl.store(counts + p * E + e, total + tl.cumsum(own, 0) - own, mask=p < pieces)
        total += tl.sum(own, 0)
    tl.store(totals + e, total)


@triton.jit(do_not_specialize=["pairs", "pieces", "most"])
def _place_pieces_kernel(
    experts, counts, totals, order, home, tiles, pairs, pieces, most, E: tl.constexpr, EP: tl.constexpr,
    BM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Grid (the larger of pieces and experts,): what `_place_kernel` does, of a piece its pairs and of an expert its
    tiles.
    """
    pid = tl.program_id(0)
    e = tl.arange(0, EP)
    total = tl.load(totals + e, mask=e < E, other=0)
    start = tl.cumsum(total, 0) - total
    if pid < pieces:
        p = pid * PIECE + tl.arange(0, PIECE)
        chosen = tl.load(experts + p, mask=p < pairs, other=-1)
        hit = chosen[:, None] == e[None, :]
        first = start + tl.load(counts + pid * E + e, mask=e < E, other=0)
        at = tl.sum(tl.where(hit, tl.cumsum(hit.to(tl.int32), 0) - 1 + first[None, :], 0), 1)
        mine = (chosen >= 0) & (chosen < E)
        tl.store(order + at, p, mask=mine)
        tl.store(home + p, at, mask=mine)
    if pid < E:
        own = (total + BM - 1) // BM
        tile = tl.sum(tl.where(e < pid, own, 0), 0)
        begin = tl.sum(tl.where(e == pid, start, 0), 0)
        count = tl.sum(tl.where(e == pid, total, 0), 0)
        for i in range(0, (count + BM - 1) // BM):
            tl.store(tiles + tile + i, pid)
            tl.store(tiles + most + tile + i, begin + i * BM)
            tl.store(tiles + 2 * most + tile + i, begin + count)
        if pid == E - 1:
            tl.store(tiles + 3 * most, tl.sum(own, 0))


@triton.jit(do_not_specialize=["stride", "rows", "most"])
def _route_and_sort_kernel(
    logits, weights, home, order, tiles, stride, rows, most, E: tl.constexpr, EP: tl.constexpr, RP: tl.constexpr,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for up to RP rows: what `_route_kernel`, `_count_kernel` and `_place_kernel` do. A row chooses an
    expert once, so that a pair's place among its expert's is the number of rows before it that chose it too.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.arange(0, RP)
    e = tl.arange(0, EP)
    in_r = r < rows
    valid = in_r[:, None] & (e < E)[None, :]
    x = tl.load(logits + r.to(tl.int64)[:, None] * stride + e[None, :], mask=valid, other=-float("inf")).to(tl.float32)
    p = tl.where(valid, tl.exp(x - tl.where(in_r, tl.max(x, 1), 0.0)[:, None]), 0.0)
    p = tl.where(valid, p / tl.where(in_r, tl.sum(p, 1), 1.0)[:, None], -1.0)
    chosen = tl.zeros([RP, EP], tl.int32)
    total = tl.zeros([RP], tl.float32)
    left = p
    for _ in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(left, 1), E - 1)  # NaN may be found anywhere
        total += tl.max(left, 1)
        hit = e[None, :] == best[:, None]
        chosen = tl.where(hit & valid, 1, chosen)
        left = tl.where(hit, -1.0, left)
    count = tl.sum(chosen, 0)
    start = tl.cumsum(count, 0) - count
    place = tl.cumsum(chosen, 0) - chosen + start[None, :]
    for j in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(p, 1), E - 1)
        weight = tl.max(p, 1)
        if RENORMALIZE:
            weight = weight / total
        hit = e[None, :] == best[:, None]
        at = tl.sum(tl.where(hit, place, 0), 1)
        pair = r * TOP_K + j
        tl.store(weights + pair, weight, mask=in_r)
        tl.store(home + pair, at, mask=in_r)
        tl.store(order + at, pair, mask=in_r)
        p = tl.where(hit, -1.0, p)
    own = (count + BM - 1) // BM
    tile = tl.cumsum(own, 0) - own
    for i in tl.static_range((RP + BM - 1) // BM):
        here = own > i
        tl.store(tiles + tile + i, e, mask=here)
        tl.store(tiles + most + tile + i, start + i * BM, mask=here)
        tl.store(tiles + 2 * most + tile + i, start + count, mask=here)
    tl.store(tiles + 3 * most, tl.sum(own, 0))


@triton.jit(do_not_specialize=["most", "group"])
def _grouped_kernel(
    x, w, bias, out, order, tiles, most, group, limit, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr, PDL: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """One tile of rows times one tile of its expert's weight [N (2 x N if GATED), K].

    FIRST: row r of the product is that of token order[r] // TOP_K, and what is stored is act(gate) * up, each rounded
    to the model's dtype first, or act(up) if not GATED. Otherwise x is in sorted order already.
    TMA: w, and x if not FIRST, are descriptors of matrices [all rows, K].
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    TILES_N: tl.constexpr = (N + BN - 1) // BN
    band = tl.program_id(0) // (group * TILES_N)
    inside = tl.program_id(0) % (group * TILES_N)
    tile = band * group + inside % group
    if tile >= tl.load(tiles + 3 * most):
        return
    expert = tl.load(tiles + tile).to(tl.int64)
    first_row = tl.load(tiles + most + tile)
    row = first_row + tl.arange(0, BM)
    in_m = row < tl.load(tiles + 2 * most + tile)
    n = (inside // group) * BN + tl.arange(0, BN)
    in_n = n < N
    source = row
    if FIRST:
        source = tl.load(order + row, mask=in_m, other=0) // TOP_K
    if FIRST or not TMA:
        x_rows = x + source[:, None].to(tl.int64) * K
    if TMA:
        first_n = expert.to(tl.int32) * (N * (2 if GATED else 1)) + (inside // group) * BN
    else:
        w_rows = w + expert * (K * N * (2 if GATED else 1)) + n[None, :].to(tl.int64) * K
    acc = tl.zeros([BM, BN], tl.float32)
    if GATED:
        up = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        in_k = k < K
        if TMA and not FIRST:
            a = x.load([first_row, start])
        elif K % BK == 0:
            a = tl.load(x_rows + k[None, :], mask=in_m[:, None], other=0.0)
        else:
            a = tl.load(x_rows + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
        if TMA:
            b = w.load([first_n, start]).T
        elif K % BK == 0:
            b = tl.load(w_rows + k[:, None], mask=in_n[None, :], other=0.0)
        else:
            b = tl.load(w_rows + k[:, None], mask=in_n[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if GATED:
            if TMA:
                c = w.load([first_n + N, start]).T
            elif K % BK == 0:
                c = tl.load(w_rows + N * K + k[:, None], mask=in_n[None, :], other=0.0)
            else:
                c = tl.load(w_rows + N * K + k[:, None], mask=in_n[None, :] & in_k[:, None], other=0.0)
            up = tl.dot(a, c, up, input_precision="ieee")
    dtype = out.dtype.element_ty
    if BIAS:
        own = bias + expert * (N * (2 if GATED else 1)) + n
        acc += tl.load(own, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(own + N, mask=in_n, other=0.0).to(tl.float32)[None, :]
    y = acc.to(dtype)
    if GATED:
        y = gated(y, up.to(dtype), limit, KIND, LIMITED)
    elif FIRST:
        y = apply_activation(y.to(tl.float32), KIND).to(dtype)
    tl.store(out + row[:, None].to(tl.int64) * N + n[None, :], y, mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _sum_kernel(outputs, weights, home, out, H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, blocks): a token's outputs times their weights, added up in the order of its choices, in fp32."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + j)
        row = tl.load(home + token * TOP_K + j).to(tl.int64)
        # a choice without weight may be another rank's, and then it has no row
        y = tl.load(outputs + row * H + c, mask=c < tl.where(weight != 0.0, H, 0), other=0.0).to(tl.float32)
        total += y * weight
    tl.store(out + token * H + c, total.to(out.dtype.element_ty), mask=c < H)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """BM, BN, BK, warps and stages of the two products."""

    rows: int
    gated: tuple[int, int, int, int]
    plain: tuple[int, int, int, int]


_DEEP = (32, 256, 4, 3)  # where few rows have most weights read, and the pieces divide the inputs
_SHORT = (32, 256, 4, 2)  # the same with few pieces
_FEWEST = _Tiling(16, (32, 128, 4, 4), (32, 128, 4, 4))  # where wider tiles are too few for the device
_FEW = _Tiling(16, (64, 128, 4, 4), (64, 128, 4, 4))
_SOME = _Tiling(64, (64, 64, 4, 4), (128, 64, 4, 4))
_MANY = _Tiling(128, (128, 64, 8, 4), (256, 64, 8, 4))
_EXACT = _Tiling(16, (32, 32, 4, 2), (32, 32, 4, 2))  # fp32, on the ordinary cores


def _choose_tiling(pairs: int, experts: int, hidden: int, inner: int, dtype: torch.dtype) -> _Tiling:
    if dtype == torch.float32:
        return _EXACT
    each = pairs / experts
    if each <= 16:
        if min(pairs, experts) * inner // 64 < 2 * processors():
            return _FEWEST
        first, second = (
            _FEW.plain if each > 8 or n % 256 else _SHORT if n <= most else _DEEP
            for n, most in ((hidden, 1536), (inner, 512))
        )
        return _Tiling(16, first, second)
    return _SOME if each <= 64 else _MANY


@dataclass(frozen=True, slots=True)
class Sorted:
    """The pairs sorted by expert, on the device.

    order: [pairs], the pair of each row.   home: [pairs], the row of each pair.
    tiles: [3 * most + 1], as `_place_kernel` describes them.   most: tiles there can be.
    """

    order: Tensor
    home: Tensor
    tiles: Tensor
    most: int


def sort_pairs(experts: Tensor, num_experts: int, tile_rows: int) -> Sorted:
    """Sort the (token, choice) pairs by expert, stably. experts: [tokens, top_k] int64."""
    pairs = experts.numel()
    experts = experts.contiguous()
    most = pairs // tile_rows + min(num_experts, pairs)  # every expert may have one tile that is not full
    counts, order, home, tiles = (
        torch.empty(n, dtype=torch.int32, device=experts.device) for n in (num_experts, pairs, pairs, 3 * most + 1)
    )
    wide = triton.next_power_of_2(num_experts)
    if pairs > _SORT_BLOCK and wide <= 256:  # pieces times experts must fit into a processor
        pieces = triton.cdiv(pairs, _PIECE)
        each = torch.empty(pieces, num_experts, dtype=torch.int32, device=experts.device)
        sizes = {"E": num_experts, "EP": wide, "PIECE": _PIECE, "num_warps": 4 if wide <= 64 else 8}
        _count_pieces_kernel[(pieces,)](experts, each, pairs, **sizes)
        _sum_pieces_kernel[(num_experts,)](each, counts, pieces, E=num_experts, BLOCK=512, num_warps=4)
        _place_pieces_kernel[(max(pieces, num_experts),)](
            experts, each, counts, order, home, tiles, pairs, pieces, most, BM=tile_rows, **sizes
        )
        return Sorted(order, home, tiles, most)
    block = _SORT_BLOCK if pairs > 128 else 128  # few variants, which are compiled ahead
    _count_kernel[(num_experts,)](experts, counts, pairs, BLOCK=block, num_warps=4)
    _place_kernel[(num_experts,)](
        experts, counts, order, home, tiles, pairs, most, E=num_experts, EP=wide,
        BM=tile_rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return Sorted(order, home, tiles, most)


def route_and_sort(
    logits: Tensor, top_k: int, renormalize: bool, tile_rows: int, pdl: bool = False
) -> tuple[Tensor, Sorted]:
    """`route` and `sort_pairs`: the weights [rows, top_k], and the sorted pairs; in one kernel for few rows."""
    rows, num_experts = logits.shape
    padded, wide = triton.next_power_of_2(rows), triton.next_power_of_2(num_experts)
    if padded * wide > _ROUTED:
        weights, experts = route(logits, top_k, renormalize)
        return weights, sort_pairs(experts, num_experts, tile_rows)
    pairs = rows * top_k
    most = pairs // tile_rows + min(num_experts, pairs)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    home, order, tiles = (torch.empty(n, dtype=torch.int32, device=logits.device) for n in (pairs, pairs, 3 * most + 1))
    _route_and_sort_kernel[(1,)](
        logits, weights, home, order, tiles, logits.stride(0), rows, most, E=num_experts, EP=wide, RP=padded,
        TOP_K=top_k, RENORMALIZE=renormalize, BM=tile_rows, PDL=pdl, num_warps=min(16, max(1, padded * wide // 256)),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return weights, Sorted(order, home, tiles, most)


def _grouped(
    x: Tensor, w: Tensor, bias: Tensor | None, s: Sorted, out: Tensor, rows: int, cut: tuple[int, int, int, int],
    top_k: int, kind: int, limit: float | None = None, pdl: bool = False, has_gate: bool = True,
) -> None:  # fmt: skip
    """One grouped product; kind: of the activation behind it (between gate and up, if has_gate), below 0 for none."""
    bn, bk, warps, stages = cut
    group = min(_GROUP, triton.next_power_of_2(s.most))
    grid = (triton.cdiv(s.most, group) * group * triton.cdiv(out.shape[1], bn),)
    inputs, first = w.shape[2], kind >= 0
    depth = min(bk, max(16, triton.next_power_of_2(inputs)))
    # with tiles of fewer rows not measured; slower for Mixtral's first product, and with few inputs no faster
    tma = rows >= 128 and (inputs <= 2048 if first else inputs > 512) and inputs % 8 == 0 and has_tma()
    given: tuple = (x, w)
    if tma:
        stack = w.view(-1, inputs)
        given = (
            x if first else TensorDescriptor(x, list(x.shape), [inputs, 1], [rows, depth]),
            TensorDescriptor(stack, list(stack.shape), [inputs, 1], [bn, depth]),
        )
    _grouped_kernel[grid](
        *given, out if bias is None else bias, out, s.order, s.tiles, s.most, group, limit or 0.0,
        N=out.shape[1], K=inputs, TOP_K=top_k, BM=rows, BN=bn, BK=depth, STAGES=stages, FIRST=first,
        GATED=first and has_gate, KIND=max(kind, 0), BIAS=bias is not None, LIMITED=limit is not None, PDL=pdl,
        TMA=tma, num_warps=warps, num_stages=stages,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """`vllm.ops.moe.route` for CUDA; of equal experts it takes the lowest."""
    tokens, num_experts = router_logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=router_logits.device)
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device=router_logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            router_logits, weights, experts, router_logits.stride(0), E=num_experts,
            EP=triton.next_power_of_2(num_experts), TOP_K=top_k, RENORMALIZE=renormalize, num_warps=1,
        )  # fmt: skip
    return weights, experts


def route_by_score(router_logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """`vllm.ops.moe.route_by_score` for CUDA; of equal experts it takes the lowest."""
    tokens, num_experts = router_logits.shape
    weights = torch.empty(tokens, choice.top_k, dtype=torch.float32, device=router_logits.device)
    experts = torch.empty(tokens, choice.top_k, dtype=torch.int64, device=router_logits.device)
    if tokens:
        size = num_experts // choice.groups
        _score_kernel[(tokens,)](
            router_logits, router_logits if bias is None else bias, weights, experts, router_logits.stride(0),
            choice.scale, G=choice.groups, GP=triton.next_power_of_2(choice.groups), S=size,
            SP=triton.next_power_of_2(size), TOP_GROUPS=choice.top_groups, GROUP_BEST=choice.group_best,
            TOP_K=choice.top_k, KP=triton.next_power_of_2(choice.top_k), SIGMOID=choice.score == "sigmoid",
            BIAS=bias is not None, RENORMALIZE=choice.renormalize, num_warps=1,
        )  # fmt: skip
    return weights, experts


def expert_mlp(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor | PackedStack, down: Tensor | PackedStack, act: str,
    extras: ExpertExtras = NO_EXTRAS,
) -> Tensor:  # fmt: skip
    """`vllm.ops.moe.expert_mlp` for CUDA."""
    tokens, top_k = experts.shape
    if not tokens:
        return torch.empty_like(x)
    if act not in KINDS:
        return ops.expert_mlp.reference(x, weights, experts, gate_up, down, act, extras)
    if extras is NO_EXTRAS and isinstance(gate_up, PackedStack) and isinstance(down, PackedStack):
        rows = tile_rows(tokens * top_k, gate_up, down, x.dtype)
        if rows:
            s = sort_pairs(experts, len(gate_up), rows)
            outputs = grouped_mlp(x.contiguous(), s, rows, gate_up, down, top_k, act, False)
            return sum_chosen(outputs, weights, s.home)
    gate_up, down = (w if isinstance(w, Tensor) else w.numbers() for w in (gate_up, down))
    if not gate_up.is_contiguous() or not down.is_contiguous():
        return ops.expert_mlp.reference(x, weights, experts, gate_up, down, act, extras)
    cut = _choose_tiling(tokens * top_k, len(gate_up), down.shape[1], down.shape[2], x.dtype)
    s = sort_pairs(experts, len(gate_up), cut.rows)
    outputs = _apply(x.contiguous(), s, cut, gate_up, down, top_k, act, extras, pdl=False)
    return sum_chosen(outputs, weights, s.home)


def _apply(
    x: Tensor, s: Sorted, cut: _Tiling, gate_up: Tensor, down: Tensor, top_k: int, act: str, extras: ExpertExtras,
    pdl: bool,
) -> Tensor:  # fmt: skip
    """[pairs, hidden]: the outputs of the experts, in sorted order."""
    pairs = len(x) * top_k
    h, outputs = x.new_empty(pairs, down.shape[2]), x.new_empty(pairs, down.shape[1])
    kind, bias = KINDS[act], extras.gate_up_bias
    _grouped(x, gate_up, bias, s, h, cut.rows, cut.gated, top_k, kind, extras.limit, pdl, extras.gated)
    _grouped(h, down, extras.down_bias, s, outputs, cut.rows, cut.plain, top_k, -1, None, pdl)
    return outputs


def sum_chosen(outputs: Tensor, weights: Tensor, home: Tensor) -> Tensor:
    """Each token's outputs times their weights, added up. outputs, home: as `routed_mlp` gives them."""
    weights = weights.contiguous()
    (tokens, top_k), hidden = weights.shape, outputs.shape[1]
    out = outputs.new_empty(tokens, hidden)
    _sum_kernel[(tokens, triton.cdiv(hidden, _SUM_BLOCK))](
        outputs, weights, home, out, H=hidden, TOP_K=top_k, BLOCK=_SUM_BLOCK, num_warps=4
    )
    return out


def routed_mlp(
    x: Tensor, router_logits: Tensor, gate_up: Tensor | PackedStack, down: Tensor | PackedStack, top_k: int,
    renormalize: bool, act: str, pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`route` and `expert_mlp` but for the last sum: (outputs [tokens * top_k, hidden], weights [tokens, top_k] fp32,
    home [tokens * top_k], the row of `outputs` that belongs to each choice of each token).

    All tensors contiguous; pdl: as in `decode_linear`.
    """
    if isinstance(gate_up, PackedStack) and isinstance(down, PackedStack):
        rows = tile_rows(len(x) * top_k, gate_up, down, x.dtype)
        if rows:
            weights, s = route_and_sort(router_logits, top_k, renormalize, rows, pdl)
            return grouped_mlp(x, s, rows, gate_up, down, top_k, act, pdl), weights, s.home
    gate_up, down = (w if isinstance(w, Tensor) else w.numbers() for w in (gate_up, down))
    cut = _choose_tiling(len(x) * top_k, len(gate_up), down.shape[1], down.shape[2], x.dtype)
    weights, s = route_and_sort(router_logits, top_k, renormalize, cut.rows, pdl)
    return _apply(x, s, cut, gate_up, down, top_k, act, NO_EXTRAS, pdl), weights, s.home


def register(device_type: str) -> None:
    ops.route.register(device_type, route)
    ops.route_by_score.register(device_type, route_by_score)
    ops.expert_mlp.register(device_type, expert_mlp)
