"""Triton kernels of a mixture of experts in a decode step of one row: three launches from the stream and back to it.

  choose   the router's product, and by the last of its programs the choice
  rise     gate and up of every chosen expert, and of the shared one, with the activation
  fall     down of all of them, weighted and added up in the order of the choices: one product whose inputs lie behind
           each other, with the ways to end of any other (`decode_linear`)

As in `decode_linear`, an RMS norm before the experts may be folded in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

from vllm.ops.triton import packed_experts
from vllm.ops.triton.activation import KINDS, gated
from vllm.ops.triton.decode_linear import RESIDUAL, STORE, Folded, Stream
from vllm.ops.triton.decode_parts import ask_constants, ask_inputs, finish_row, processors
from vllm.ops.triton.packed_experts import PackedStack

MOST_EXPERTS = 256  # each is held against each other
MISSING = 0x7FC0DEAD  # of a logit: no 16-bit number has these bits
_AHEAD = 2 << 20  # bytes of a later weight that memory brings while the experts are chosen
_PIECE = 512  # of these, a thread's
_ROUTED = 4  # logits of a program of `choose`
_RISE = 2, 2048, 4  # outputs, inputs at a time, warps
_RISE_2048 = (4, 1024, 8), (8, 512, 4)  # the same of 2048 inputs, where there are few outputs and where many
_RISE_FOLD = 8  # neighbours whose products are added up at once
_FALL = 8, 2048, 8, 8  # outputs, inputs at a time, warps, neighbours
_FALL_WHOLE = 4, 4096, 8, 8  # where all inputs are one tile


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """Room for what the kernels pass to each other, all static. For experts of width `inter`:

    logits: [experts] int32, the bits of fp32, or MISSING.   experts: [top_k] int32.   weights: [top_k] fp32.
    activated: [top_k * inter + width of the shared expert].   shares: of packed weights, as `fall_room` makes them.
    """

    logits: Tensor
    experts: Tensor
    weights: Tensor
    activated: Tensor
    shares: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls, experts: int, top_k: int, width: int, dtype: torch.dtype, device: torch.device,
        down: Tensor | PackedStack | None = None,
    ) -> ChosenExperts:  # fmt: skip
        """With new memory. width: of `activated`.   down: the weights, which matter if they are packed."""
        return cls(
            torch.full((experts,), MISSING, dtype=torch.int32, device=device),
            torch.empty(top_k, dtype=torch.int32, device=device),
            torch.empty(top_k, dtype=torch.float32, device=device),
            torch.empty(width, dtype=dtype, device=device),
            packed_experts.fall_room(down, top_k) if isinstance(down, PackedStack) else None,
        )


@triton.jit
def _ask_ahead(weight, program, PIECE: tl.constexpr):
    """Bring the program's part of a weight into the L2, a piece a thread, to stay there while experts pass through."""
    thread = tl.arange(0, num_threads())
    at = weight.to(tl.pointer_type(tl.int8)) + (program * num_threads() + thread).to(tl.int64) * PIECE
    tl.inline_asm_elementwise(
        "{ .reg .b64 p; createpolicy.fractional.L2::evict_last.b64 p, 1.0; "
        "cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], $2, p; mov.u32 $0, 0; }",
        "=r,l,r", [at, tl.full([num_threads()], PIECE, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles"])
def _select_kernel(
    x, w, squares, tiles, eps, logits, experts, weights, ahead, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, BE: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, NORM: tl.constexpr,
    SQUARES: tl.constexpr, GIVEN: tl.constexpr, MISSING: tl.constexpr, AHEAD: tl.constexpr, PIECE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (E / BE + AHEAD,): logits of the row x [K] with w [E, K], rounded as x is; then softmax over all, and the
    largest, of equal ones the lowest. GIVEN: grid (1,), x are the logits.

    AHEAD: programs that meanwhile bring the beginning of a weight into the L2, which is needed soon.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    e = tl.arange(0, EP)
    if GIVEN:
        if PDL:
            gdc_wait()
        value = tl.load(x + e, mask=e < E, other=-float("inf")).to(tl.float32)
    else:
        PROGRAMS: tl.constexpr = (E + BE - 1) // BE
        if AHEAD > 0:  # noqa: SIM102 (what is inside is not compiled without)
            if pid >= PROGRAMS:
                gdc_wait()
                _ask_ahead(ahead, pid - PROGRAMS, PIECE)
                return
        here = pid * BE + tl.arange(0, BE)
        k = tl.arange(0, KP)
        keep = (here < E)[:, None] & (k < K)[None, :]
        rows = tl.load(w + here[:, None] * K + k[None, :], mask=keep, other=0.0)
        if PDL:
            gdc_wait()
        xv = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        parts, _ = ask_inputs(squares, tiles, x, e, e < E, 0, NORM, SQUARES)
        y = tl.sum(rows.to(tl.float32) * xv[None, :], 1)
        if NORM:
            y = y * tl.rsqrt(tl.sum(parts, 0) / K + eps)
        y = y.to(x.dtype.element_ty).to(tl.float32)
        tl.store(logits + here, y.to(tl.int32, bitcast=True), mask=here < E)
        if pid != PROGRAMS - 1:
            return
        # A logit says itself that it has come, which is a fence and a counter less to wait for.
        bits = tl.load(logits + e, mask=e < E, other=0, volatile=True)
        while tl.max((bits == MISSING).to(tl.int32), 0) > 0:
            bits = tl.load(logits + e, mask=e < E, other=0, volatile=True)
        tl.debug_barrier()
        value = tl.load(
            logits.to(tl.pointer_type(tl.float32)) + e, mask=e < E, other=-float("inf"), cache_modifier=".cg"
        )
    # an expert's rank is the number of those before it; NaN comes last, but before experts that do not exist
    order = tl.where(e < E, tl.where(value > -3.0e38, value, -3.0e38), -float("inf"))
    other = tl.reshape(order, (EP, 1))
    mine = tl.reshape(order, (1, EP))
    f = tl.reshape(e, (EP, 1))
    g = tl.reshape(e, (1, EP))
    rank = tl.sum(((other > mine) | ((other == mine) & (f < g))).to(tl.int32), 0)
    p = tl.exp(value - tl.max(value, 0))
    p = p / tl.sum(tl.where(rank < TOP_K, p, 0.0) if RENORMALIZE else p, 0)
    tl.store(experts + rank, e, mask=rank < TOP_K)
    tl.store(weights + rank, p, mask=rank < TOP_K)
    if not GIVEN:
        tl.debug_barrier()
        tl.store(logits + e, MISSING, mask=e < E)


@triton.jit
def _products(a, x, BN: tl.constexpr, BK: tl.constexpr, FOLD: tl.constexpr):
    """a [BN, BK] times x [1, BK], FOLD neighbours added up: a thread has as many, so that it keeps one sum for them."""
    p = a.to(tl.float32) * x
    return p if FOLD == 1 else tl.sum(tl.reshape(p, (BN, BK // FOLD, FOLD)), 2)


@triton.jit
def _pair(rows, apart, k, in_n, K: tl.constexpr, WHOLE: tl.constexpr):
    """Columns k of rows of gate and of up, which stand so far apart."""
    if WHOLE:
        a = tl.load(rows + k[None, :], eviction_policy="evict_first")
        b = tl.load(rows + apart + k[None, :], eviction_policy="evict_first")
    else:
        keep = in_n[:, None] & (k < K)[None, :]
        a = tl.load(rows + k[None, :], mask=keep, other=0.0, eviction_policy="evict_first")
        b = tl.load(rows + apart + k[None, :], mask=keep, other=0.0, eviction_policy="evict_first")
    return a, b


@triton.jit(do_not_specialize=["tiles"])
def _rise_kernel(
    x, w, shared, squares, tiles, eps, experts, out, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FOLD: tl.constexpr, KIND: tl.constexpr,
    NORM: tl.constexpr, SQUARES: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N / BN, SHARED / N + TOP_K): act(gate) * up of the row x [K]. w: [experts, 2 * N, K]; shared: [2 * SHARED,
    K], of which a program has outputs like an expert's. WHOLE: tiles divide N, K and SHARED.

    The shared expert comes first: its weights are loaded while the others are being chosen.
    """
    ALIKE: tl.constexpr = (SHARED + N - 1) // N
    chosen = tl.program_id(1) - ALIKE
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_n = n < N
    to = chosen * N + n
    apart = N
    first = w
    if chosen < 0:
        to = TOP_K * N + (chosen + ALIKE) * N + n
        in_n = in_n & (to < TOP_K * N + SHARED)
        first = shared + (chosen + ALIKE) * (N * K)
        apart = SHARED
    else:
        if PDL:
            gdc_wait()
        first = w + tl.load(experts + chosen).to(tl.int64) * (2 * N * K)
    rows = first + n[:, None].to(tl.int64) * K
    a, b = _pair(rows, apart * K, k, in_n, K, WHOLE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # `fall` reads which experts were chosen before it waits
    xv = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    parts, _ = ask_inputs(squares, tiles, x, n, in_n, 0, NORM, SQUARES)
    acc = _products(a, xv, BN, BK, FOLD)
    up = _products(b, xv, BN, BK, FOLD)
    for start in tl.range(BK, K, BK):
        a, b = _pair(rows, apart * K, start + k, in_n, K, WHOLE)
        xv = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)[None, :]
        acc += _products(a, xv, BN, BK, FOLD)
        up += _products(b, xv, BN, BK, FOLD)
    y = tl.sum(acc, 1)
    u = tl.sum(up, 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(parts, 0) / K + eps)
        y *= factor
        u *= factor
    dtype = out.dtype.element_ty
    tl.store(out + to, gated(y.to(dtype), u.to(dtype), 0.0, KIND, False), mask=in_n)


@triton.jit
def _falling(w, experts, weights, n, in_n, at, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr):
    """Columns `at` of the chosen experts' matrices beside each other, and each column's weight."""
    live = at < TOP_K * K
    choice = tl.minimum(at // K, TOP_K - 1)
    inside = at - choice * K
    expert = tl.load(experts + choice, cache_modifier=".cg").to(tl.int64)
    if K % 8 == 0:  # eight neighbours are one expert's, which the compiler does not see
        inside = tl.max_contiguous(tl.multiple_of(inside, 8), 8)
        expert = tl.max_constancy(expert, 8)
    weight = tl.load(weights + choice, cache_modifier=".cg")
    a = tl.load(
        w + (expert * (N * K) + inside)[None, :] + n[:, None] * K, mask=in_n[:, None] & live[None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    return a, weight


@triton.jit
def _falling_shared(shared, n, in_n, at, SHARED: tl.constexpr):
    """Columns `at` of the shared expert's matrix."""
    live = in_n[:, None] & (at < SHARED)[None, :]
    return tl.load(shared + n[:, None] * SHARED + at[None, :], mask=live, other=0.0, eviction_policy="evict_first")


@triton.jit
def _fall_kernel(
    x, w, shared, experts, weights, out, h, next_weight, scaled, squares_out, scale: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FOLD: tl.constexpr,
    MODE: tl.constexpr, NEXT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N / BN,). x: [TOP_K * K + SHARED], what `_rise_kernel` left; w: [experts, N, K]; shared: [N, SHARED].

    Each tile's weights are asked for before the one before it is used, the first before `_rise_kernel` has ended: that
    lets this one begin when the experts have been chosen.
    """
    pid = tl.program_id(0)
    n = pid * BN + tl.arange(0, BN)
    in_n = n < N
    k = tl.arange(0, BK)
    if PDL:
        gdc_launch_dependents()
    first_bias, second_bias, next_part = ask_constants(out, next_weight, n, in_n, N, MODE, NEXT, False)
    a, weight = _falling(w, experts, weights, n, in_n, k, N, K, TOP_K)
    if PDL:
        gdc_wait()
    parts, before = ask_inputs(squares_out, 1, h, n, in_n, MODE, False, 2)
    acc = tl.zeros([BN, BK // FOLD], tl.float32)
    for start in tl.range(0, TOP_K * K, BK):
        at = start + k
        after, next_one = _falling(w, experts, weights, n, in_n & (start + BK < TOP_K * K), at + BK, N, K, TOP_K)
        xv = tl.load(x + at, mask=at < TOP_K * K, other=0.0).to(tl.float32) * weight
        acc += _products(a, xv[None, :], BN, BK, FOLD)
        a = after
        weight = next_one
    if SHARED > 0:
        a = _falling_shared(shared, n, in_n, k, SHARED)
        for start in tl.range(0, SHARED, BK):
            at = start + k
            after = _falling_shared(shared, n, in_n, at + BK, SHARED)
            xv = tl.load(x + TOP_K * K + at, mask=at < SHARED, other=0.0).to(tl.float32)
            acc += _products(a, xv[None, :], BN, BK, FOLD)
            a = after
    y = tl.sum(acc, 1)
    finish_row(
        y, y, n, in_n, pid, first_bias, second_bias, next_part, parts, before, 0.0, out, h, scaled, squares_out, out,
        out, out, None, None, scale, N, BN, MODE, -1, False, NEXT, False, False,
    )  # fmt: skip


def choose_experts(
    x: Tensor | Folded, router: Tensor, room: ChosenExperts, renormalize: bool, ahead: Tensor | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """The experts of one row and their weights. x: [1, hidden]; router: [experts, hidden].

    ahead: a weight that will be needed soon, and may be read while there is nothing else to read.
    """
    rows, squares, tiles, eps, norm = _unfolded(x)
    experts, inputs = router.shape
    pieces = 0
    if pdl and ahead is not None and ahead.is_contiguous():
        pieces = min(_AHEAD, ahead.numel() * ahead.element_size()) // (_PIECE * 32 * 8)
    _select_kernel[(triton.cdiv(experts, _ROUTED) + pieces,)](
        rows, router, squares, tiles, eps, room.logits, room.experts, room.weights, rows if ahead is None else ahead,
        E=experts, EP=triton.next_power_of_2(experts), K=inputs, KP=triton.next_power_of_2(inputs), BE=_ROUTED,
        TOP_K=len(room.experts), RENORMALIZE=renormalize, NORM=norm, SQUARES=_padded(tiles), GIVEN=False, PDL=pdl,
        MISSING=MISSING, AHEAD=pieces, PIECE=_PIECE,
        num_warps=8, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def choose_by_logits(logits: Tensor, room: ChosenExperts, renormalize: bool, pdl: bool = False) -> None:
    """The same where the router's product was computed before. logits: [1, experts]."""
    experts = logits.shape[1]
    _select_kernel[(1,)](
        logits, logits, logits, 1, 0.0, room.logits, room.experts, room.weights, logits,
        E=experts, EP=triton.next_power_of_2(experts), K=1, KP=1, BE=_ROUTED, TOP_K=len(room.experts),
        RENORMALIZE=renormalize, NORM=False, SQUARES=2, GIVEN=True, MISSING=MISSING, AHEAD=0, PIECE=_PIECE, PDL=pdl,
        num_warps=8, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def rise(
    x: Tensor | Folded, gate_up: Tensor | PackedStack, shared: Tensor | None, act: str, room: ChosenExperts,
    pdl: bool = False,
) -> None:  # fmt: skip
    """The first products of the chosen experts and the shared one. gate_up: [experts, 2 * inter, hidden]; shared:
    [2 * width, hidden], not beside packed weights.
    """
    rows, squares, tiles, eps, norm = _unfolded(x)
    if isinstance(gate_up, PackedStack):
        behind = (squares, tiles, eps) if norm else None
        packed_experts.rise(rows, behind, gate_up, act, room.experts, room.activated, pdl)
        return
    top_k, inter, inputs = len(room.experts), gate_up.shape[1] // 2, gate_up.shape[2]
    width = 0 if shared is None else shared.shape[0] // 2
    groups = top_k + triton.cdiv(width, inter)
    outputs, depth, warps = _rise_tiling(groups, inter, inputs)
    _rise_kernel[(triton.cdiv(inter, outputs), groups)](
        rows, gate_up, gate_up if shared is None else shared, squares, tiles, eps, room.experts, room.activated,
        N=inter, K=inputs, TOP_K=top_k, SHARED=width, BN=outputs, BK=depth, FOLD=_RISE_FOLD, KIND=KINDS[act],
        NORM=norm, SQUARES=_padded(tiles),
        WHOLE=inter % outputs == 0 and inputs % depth == 0 and width % inter == 0, PDL=pdl, num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _rise_tiling(groups: int, inter: int, inputs: int) -> tuple[int, int, int]:
    """Outputs, inputs at a time and warps of a program, from whole-step times on an H200. groups: experts and what is
    as large as one.
    """
    if inputs == 2048:
        few, many = _RISE_2048
        return many if groups * inter // many[0] >= 8 * processors() else few
    outputs, depth, warps = _RISE
    while inputs % depth and depth > 256:
        outputs, depth = outputs * 2, depth // 2
    return min(outputs, 4) if depth == 512 else outputs, depth, warps


def fall(
    down: Tensor | PackedStack, shared: Tensor | None, room: ChosenExperts, s: Stream, out: Tensor | None = None,
    scale: float = 1.0, next_weight: Tensor | None = None, pdl: bool = False,
) -> int:  # fmt: skip
    """The second products, times `scale` to the stream, or without it to `out` [1, hidden]. next_weight: as of
    `run_product`; then the squares have as many parts as is returned.   down: [experts, hidden, inter]; shared:
    [hidden, width].
    """
    if isinstance(down, PackedStack):
        if room.shares is None:
            raise RuntimeError("Packed experts need room for their shares.")
        stream = (s.h, s.scaled, s.squares)
        packed_experts.fall(
            room.activated, down, room.experts, room.weights, room.shares, out, stream, scale, next_weight, pdl
        )
        return packed_experts.fall_tiles(down.shape[1])
    hidden, inter, top_k = down.shape[1], down.shape[2], len(room.experts)
    width = 0 if shared is None else shared.shape[1]
    outputs, depth, warps, fold = _FALL_WHOLE if width == 0 and top_k * inter <= _FALL_WHOLE[1] else _FALL
    tiles = triton.cdiv(hidden, outputs)
    to, none = s.h if out is None else out, s.h
    _fall_kernel[(tiles,)](
        room.activated, down, down if shared is None else shared, room.experts, room.weights, to, s.h,
        none if next_weight is None else next_weight, s.scaled, s.squares, scale, N=hidden, K=inter, TOP_K=top_k,
        SHARED=width, BN=outputs, BK=min(depth, triton.next_power_of_2(top_k * inter)), FOLD=fold,
        MODE=RESIDUAL if out is None else STORE, NEXT=next_weight is not None, PDL=pdl, num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return tiles


def fall_tiles(hidden: int) -> int:
    """The most programs of `fall`, each of which leaves a part of the squares."""
    return -(-hidden // min(_FALL[0], _FALL_WHOLE[0]))


def _unfolded(x: Tensor | Folded) -> tuple[Tensor, Tensor, int, float, bool]:
    """(rows, their squares, parts of these, eps, whether there is a norm)."""
    if isinstance(x, Folded):
        return x.scaled, x.squares, x.tiles, x.eps, True
    return x, x, 1, 0.0, False


def _padded(tiles: int) -> int:
    return int(triton.next_power_of_2(max(tiles, 2)))
