"""Triton kernels of a mixture of experts in a decode step of one row: two launches from the stream and back to it.

  rise   the router's product, the choice, and gate and up of every chosen expert, and of the shared one, with the
         activation; where that would be short, or weights are packed, the choice is a launch of its own, `choose`
  fall   down of all of them, weighted and added up in the order of the choices: one product whose inputs lie behind
         each other, with the ways to end of any other (`decode_linear`)

A logit becomes a key, an integer by whose order experts are chosen, which a program leaves where others wait for it.
With all keys in the registers of each warp, the next largest is one instruction and a few comparisons.

As in `decode_linear`, an RMS norm before the experts may be folded in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

MOST_EXPERTS = 256  # a warp holds the keys of all
_COPIES = 32  # of the keys: hundreds of programs ask for them until they are there, and none should wait for the others
_AHEAD = 2 << 20  # bytes of a later weight that memory brings while the experts are chosen
_PIECE = 512  # of these, a thread's
_CHOOSE_WARPS = 4
_RISE = 2, 2048, 4  # outputs, inputs at a time, warps
_RISE_FOLD = 8  # neighbours whose products are added up at once
_FALL = 8, 2048, 8, 8  # outputs, inputs at a time, warps, neighbours
_FALL_WHOLE = 4, 4096, 8, 8  # where all inputs are one tile


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """Room for what the kernels pass to each other, all static. For experts of width `inter`:

    keys: [copies, experts], zeros between two layers.   experts: [top_k] int32.   weights: [top_k] fp32.
    activated: [top_k * inter + width of the shared expert].   shares: of packed weights, as `fall_room` makes them.
    """

    keys: Tensor
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
            torch.zeros(_COPIES, experts, dtype=torch.int32 if dtype.itemsize == 2 else torch.int64, device=device),
            torch.empty(top_k, dtype=torch.int32, device=device),
            torch.empty(top_k, dtype=torch.float32, device=device),
            torch.empty(width, dtype=dtype, device=device),
            packed_experts.fall_room(down, top_k) if isinstance(down, PackedStack) else None,
        )


@dataclass(frozen=True, slots=True)
class RiseTiling:
    """How the first products are cut: outputs of a tile, inputs at a time, warps of a program, and its tiles; registers
    of a thread, if the compiler would take more than leaves room for enough programs.
    """

    outputs: int
    depth: int
    warps: int
    rounds: int = 1
    registers: int | None = None


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


@triton.jit
def _ordered(bits, BITS: tl.constexpr):
    """Bits of a number as an integer that is ordered as the numbers are, and back."""
    return bits ^ ((bits >> (BITS - 1)) & ((1 << (BITS - 1)) - 1))


@triton.jit
def _key(y, e, LOGIT: tl.constexpr, KEY: tl.constexpr):
    """Of the logit y, rounded to the type LOGIT, of expert e. The larger comes first, of equal ones the lowest expert,
    and NaN last. No key is 0.
    """
    BITS: tl.constexpr = LOGIT.primitive_bitwidth
    y = y.to(LOGIT).to(tl.float32)
    y = tl.where(y == 0.0, 0.0, y)  # -0.0 is equal
    bits = y.to(LOGIT).to(tl.int16 if BITS == 16 else tl.int32, bitcast=True).to(KEY)
    order = tl.where(y == y, _ordered(bits, BITS), -(1 << (BITS - 1)))
    return (order << 16) + (0xFFFF - e)


@triton.jit
def _expert_of(key):
    return 0xFFFF - (key & 0xFFFF).to(tl.int32)


@triton.jit
def _logit_of(key, LOGIT: tl.constexpr):
    BITS: tl.constexpr = LOGIT.primitive_bitwidth
    bits = _ordered(key >> 16, BITS).to(tl.int16 if BITS == 16 else tl.int32)
    return bits.to(LOGIT, bitcast=True).to(tl.float32)


@triton.jit
def _next_key(found, top):
    """[WARPS]: the largest of the keys [WARPS, EP] below `top`."""
    LEAST: tl.constexpr = -(1 << (found.dtype.primitive_bitwidth - 1))  # less than every key
    return tl.max(tl.where(found < top[:, None], found, LEAST), 1)


@triton.jit
def _wait_for_keys(keys, copy, E: tl.constexpr, EP: tl.constexpr, WARPS: tl.constexpr):
    """[WARPS, EP]: all keys for each warp, so that none has to ask another. A key says itself that it has come, which
    is a fence and a counter less to wait for.
    """
    LEAST: tl.constexpr = -(1 << (keys.dtype.element_ty.primitive_bitwidth - 1))
    e = tl.arange(0, EP)[None, :] + tl.zeros([WARPS, 1], tl.int32)
    at = keys + copy * E + e
    found = tl.load(at, mask=e < E, other=LEAST, volatile=True)
    while tl.max(tl.max((found == 0).to(tl.int32), 1), 0) > 0:
        found = tl.load(at, mask=e < E, other=LEAST, volatile=True)
    return found


@triton.jit
def _leave_key(
    x, router, squares, tiles, eps, keys, e, E: tl.constexpr, COPIES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    NORM: tl.constexpr, SQUARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The key of expert e, whose logit is the product of the row x [K] with one of router [E, K], rounded as x is."""
    k = tl.arange(0, KP)
    row = tl.load(router + e * K + k, mask=k < K, other=0.0)
    if PDL:
        gdc_wait()
    xv = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    parts, _ = ask_inputs(squares, tiles, x, k, k < K, 0, NORM, SQUARES)
    y = tl.sum(row.to(tl.float32) * xv, 0)
    if NORM:
        y = y * tl.rsqrt(tl.sum(parts, 0) / K + eps)
    key = _key(y, e, x.dtype.element_ty, keys.dtype.element_ty)
    tl.store(keys + tl.arange(0, COPIES) * E + e, key + tl.zeros([COPIES], keys.dtype.element_ty))


@triton.jit
def _take_first(
    found, experts, weights, LOGIT: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, TP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """The TOP_K first experts, and their part of a softmax over all, or over these."""
    t = tl.arange(0, TP)
    top = tl.max(found, 1)
    peak = _logit_of(tl.max(top, 0), LOGIT)
    chosen = tl.zeros([TP], found.dtype)
    for i in tl.static_range(TOP_K):
        chosen = tl.where(t == i, tl.max(top, 0), chosen)
        top = _next_key(found, top)
    p = tl.exp(_logit_of(chosen, LOGIT) - peak)
    if RENORMALIZE:
        total = tl.sum(tl.where(t < TOP_K, p, 0.0), 0)
    else:
        real = tl.arange(0, found.shape[1])[None, :] < E
        total = tl.max(tl.sum(tl.where(real, tl.exp(_logit_of(found, LOGIT) - peak), 0.0), 1), 0)
    tl.store(experts + t, _expert_of(chosen), mask=t < TOP_K)
    tl.store(weights + t, p / total, mask=t < TOP_K)


@triton.jit(do_not_specialize=["tiles"])
def _choose_kernel(
    x, router, squares, tiles, eps, keys, experts, weights, ahead, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, TOP_K: tl.constexpr, TP: tl.constexpr, RENORMALIZE: tl.constexpr, NORM: tl.constexpr,
    SQUARES: tl.constexpr, GIVEN: tl.constexpr, PIECE: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (E + 1 + programs that meanwhile bring the beginning of a weight into the L2, which is needed soon,).

    GIVEN: grid (1,), x are the logits.
    """
    pid = tl.program_id(0)
    LOGIT: tl.constexpr = x.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    if GIVEN:
        if PDL:
            gdc_wait()
        e = tl.arange(0, EP)[None, :] + tl.zeros([WARPS, 1], tl.int32)
        key = _key(tl.load(x + e, mask=e < E, other=0.0), e, LOGIT, keys.dtype.element_ty)
        found = tl.where(e < E, key, -(1 << (key.dtype.primitive_bitwidth - 1)))
        _take_first(found, experts, weights, LOGIT, E, TOP_K, TP, RENORMALIZE)
    elif pid < E:
        _leave_key(x, router, squares, tiles, eps, keys, pid, E, 1, K, KP, NORM, SQUARES, PDL)
    elif pid == E:
        if PDL:
            gdc_wait()
        found = _wait_for_keys(keys, 0, E, EP, WARPS)
        _take_first(found, experts, weights, LOGIT, E, TOP_K, TP, RENORMALIZE)
        tl.debug_barrier()
        e = tl.arange(0, EP)
        tl.store(keys + e, tl.zeros([EP], keys.dtype.element_ty), mask=e < E)
    elif PDL:
        gdc_wait()
        _ask_ahead(ahead, pid - E - 1, PIECE)


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
    x, w, shared, squares, tiles, eps, router, keys, experts, weights, ahead, out, N: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FOLD: tl.constexpr,
    KIND: tl.constexpr, NORM: tl.constexpr, SQUARES: tl.constexpr, WHOLE: tl.constexpr, ROUNDS: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, RENORMALIZE: tl.constexpr,
    COPIES: tl.constexpr, AHEAD: tl.constexpr, PIECE: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs that choose + N / BN / ROUNDS * (SHARED / N + TOP_K),): act(gate) * up of the row x [K], ROUNDS
    tiles of outputs a program. w: [experts, 2 * N, K]; shared: [2 * SHARED, K], of which a program has outputs like an
    expert's. WHOLE: tiles divide N, K and SHARED.

    E > 0: programs that leave the keys come first, then one that writes what `fall` reads, then AHEAD as of `choose`;
    others find their expert by themselves. The shared expert comes before these: its weights are loaded meanwhile.
    """
    ALIKE: tl.constexpr = (SHARED + N - 1) // N
    TILES: tl.constexpr = (N + BN - 1) // BN // ROUNDS
    FIRST: tl.constexpr = (E + 1 + AHEAD) if E > 0 else 0
    pid = tl.program_id(0) - FIRST
    if E > 0:  # noqa: SIM102 (what is inside is not compiled without)
        if pid < 0:
            e = pid + FIRST
            if e < E:
                _leave_key(x, router, squares, tiles, eps, keys, e, E, COPIES, K, KP, NORM, SQUARES, PDL)
            elif e == E:
                if PDL:
                    gdc_wait()
                found = _wait_for_keys(keys, 0, E, EP, WARPS)
                _take_first(found, experts, weights, x.dtype.element_ty, E, TOP_K, TP, RENORMALIZE)
                tl.debug_barrier()
                tl.atomic_add(experts, 0, sem="acq_rel")  # a fence: `fall` reads them when this program has ended
            elif PDL:
                gdc_wait()
                _ask_ahead(ahead, e - E - 1, PIECE)
            return
    chosen = pid // TILES - ALIKE
    n = pid % TILES * BN + tl.arange(0, BN)
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
        if E > 0:
            found = _wait_for_keys(keys, pid % COPIES, E, EP, WARPS)
            top = tl.max(found, 1)
            for _ in tl.range(0, chosen):
                top = _next_key(found, top)
            expert = _expert_of(tl.max(top, 0))
        else:
            expert = tl.load(experts + chosen)
        first = w + expert.to(tl.int64) * (2 * N * K)
    rows = first + n[:, None].to(tl.int64) * K
    a, b = _pair(rows, apart * K, k, in_n, K, WHOLE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # `fall` reads which experts were chosen before it waits
    parts, _ = ask_inputs(squares, tiles, x, n, in_n, 0, NORM, SQUARES)
    for r in tl.static_range(ROUNDS):
        xv = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        acc = _products(a, xv, BN, BK, FOLD)
        up = _products(b, xv, BN, BK, FOLD)
        for start in tl.range(BK, K, BK):
            a, b = _pair(rows, apart * K, start + k, in_n, K, WHOLE)
            xv = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)[None, :]
            acc += _products(a, xv, BN, BK, FOLD)
            up += _products(b, xv, BN, BK, FOLD)
        if r + 1 < ROUNDS:  # the next tile is on its way while this one is added up
            rows += TILES * BN * K
            a, b = _pair(rows, apart * K, k, in_n, K, WHOLE)
        y = tl.sum(acc, 1)
        u = tl.sum(up, 1)
        if NORM:
            factor = tl.rsqrt(tl.sum(parts, 0) / K + eps)
            y *= factor
            u *= factor
        dtype = out.dtype.element_ty
        # in this order, or the compiler keeps a register more than there are
        tl.store(out + to + r * (TILES * BN), gated(y.to(dtype), u.to(dtype), 0.0, KIND, False), mask=in_n)


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
    x, w, shared, keys, experts, weights, out, h, next_weight, scaled, squares_out, scale: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, FOLD: tl.constexpr, MODE: tl.constexpr, NEXT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N / BN,). x: [TOP_K * K + SHARED], what `_rise_kernel` left; w: [experts, N, K]; shared: [N, SHARED].
    keys: [KEYS], which are nobody's any more.

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
    for start in tl.range(pid * 128, KEYS, tl.num_programs(0) * 128):
        key = start + tl.arange(0, 128)
        tl.store(keys + key, tl.zeros([128], keys.dtype.element_ty), mask=key < KEYS)
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


@dataclass(frozen=True, slots=True)
class Router:
    """How experts are chosen. weight: [experts, hidden].   ahead: a weight that will be needed soon, and may be read
    while there is nothing else to read.
    """

    weight: Tensor
    renormalize: bool
    ahead: Tensor | None = None


def choose_experts(x: Tensor | Folded, router: Router, room: ChosenExperts, pdl: bool = False) -> None:
    """The experts of one row and their weights. x: [1, hidden]."""
    rows, squares, tiles, eps, norm = _unfolded(x)
    constants, pieces = _choosing(router, room, _CHOOSE_WARPS, pdl)
    _choose_kernel[(len(router.weight) + 1 + pieces,)](
        rows, router.weight, squares, tiles, eps, room.keys, room.experts, room.weights,
        rows if router.ahead is None else router.ahead, K=router.weight.shape[1], TOP_K=len(room.experts), NORM=norm,
        SQUARES=_padded(tiles), GIVEN=False, PDL=pdl, **constants, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def choose_by_logits(logits: Tensor, room: ChosenExperts, renormalize: bool, pdl: bool = False) -> None:
    """The same where the router's product was computed before. logits: [1, experts]."""
    constants, _ = _choosing(Router(logits.T, renormalize), room, _CHOOSE_WARPS, pdl)
    _choose_kernel[(1,)](
        logits, logits, logits, 1, 0.0, room.keys, room.experts, room.weights, logits, K=1, TOP_K=len(room.experts),
        NORM=False, SQUARES=2, GIVEN=True, PDL=pdl, **constants, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _choosing(router: Router, room: ChosenExperts, warps: int, pdl: bool) -> tuple[dict[str, Any], int]:
    """Constants of kernels that choose, and how many of their programs read ahead."""
    experts, inputs = router.weight.shape
    pieces = 0
    if pdl and router.ahead is not None and router.ahead.is_contiguous():
        pieces = min(_AHEAD, router.ahead.numel() * router.ahead.element_size()) // (_PIECE * 32 * warps)
    padded = {"EP": experts, "KP": inputs, "TP": len(room.experts)}
    constants = {name: triton.next_power_of_2(n) for name, n in padded.items()}
    constants |= {"E": experts, "RENORMALIZE": router.renormalize, "PIECE": _PIECE, "WARPS": warps, "num_warps": warps}
    return constants, pieces


def rise(
    x: Tensor | Folded, gate_up: Tensor | PackedStack, shared: Tensor | None, act: str, room: ChosenExperts,
    pdl: bool = False, router: Router | None = None,
) -> None:  # fmt: skip
    """The first products of the chosen experts and the shared one. gate_up: [experts, 2 * inter, hidden]; shared:
    [2 * width, hidden], not beside packed weights.   router: None if they have been chosen.
    """
    rows, squares, tiles, eps, norm = _unfolded(x)
    top_k, inter, inputs = len(room.experts), gate_up.shape[1] // 2, gate_up.shape[2]
    width = 0 if shared is None else shared.shape[0] // 2
    groups = top_k + triton.cdiv(width, inter)
    t = None
    if router is not None:
        if not isinstance(gate_up, PackedStack) and room.shares is None and width % inter == 0:
            t = _tiling_of_choosers(groups, inter, inputs)
        if t is None:
            choose_experts(x, router, room, pdl)
            router = None
    if isinstance(gate_up, PackedStack):
        behind = (squares, tiles, eps) if norm else None
        packed_experts.rise(rows, behind, gate_up, act, room.experts, room.activated, pdl)
        return
    t = _rise_tiling(groups, inter, inputs) if t is None else t
    first, ahead, weight = 0, rows, rows
    constants: dict[str, Any] = {"E": 0, "EP": 2, "KP": 2, "TP": 2, "RENORMALIZE": False, "AHEAD": 0, "PIECE": 0}
    constants["WARPS"] = t.warps
    if router is not None:
        constants, pieces = _choosing(router, room, t.warps, pdl)
        weight, ahead = router.weight, rows if router.ahead is None else router.ahead
        first = len(weight) + 1 + pieces
        constants["AHEAD"] = pieces
    constants |= {"num_warps": t.warps, "maxnreg": t.registers} | ({"launch_pdl": True} if pdl else {})
    _rise_kernel[(first + triton.cdiv(inter, t.outputs) // t.rounds * groups,)](
        rows, gate_up, gate_up if shared is None else shared, squares, tiles, eps, weight, room.keys, room.experts,
        room.weights, ahead, room.activated,
        N=inter, K=inputs, TOP_K=top_k, SHARED=width, BN=t.outputs, BK=t.depth, FOLD=_RISE_FOLD, KIND=KINDS[act],
        NORM=norm, SQUARES=_padded(tiles),
        WHOLE=inter % t.outputs == 0 and inputs % t.depth == 0 and width % inter == 0, ROUNDS=t.rounds, COPIES=_COPIES,
        PDL=pdl, **constants,
    )  # fmt: skip


def _tiling_of_choosers(groups: int, inter: int, inputs: int) -> RiseTiling | None:
    """Of programs that find their expert first, which takes each a while: so two or three on every processor, all under
    way at once, or else many. None: the choice had better be made before. groups: experts and what is as large as one.
    """
    if inputs != 2048 or inter % 16:
        return None
    for each, registers in ((2, None), (3, 80)):
        for rounds in (2, 3, 4):
            programs = groups * inter // (8 * rounds)
            if inter % (8 * rounds) == 0 and 0.95 * each * processors() <= programs <= each * processors():
                return RiseTiling(8, 1024, 8, rounds, registers)
    return RiseTiling(8, 512, 8, rounds=2) if groups * inter // 16 >= 4 * processors() else None


def _rise_tiling(groups: int, inter: int, inputs: int) -> RiseTiling:
    """Where the choice has been made. Like the others from whole-step times on an H200."""
    if inputs == 2048:
        return RiseTiling(8, 512, 4) if groups * inter // 8 >= 8 * processors() else RiseTiling(8, 1024, 8)
    outputs, depth, warps = _RISE
    while inputs % depth and depth > 256:
        outputs, depth = outputs * 2, depth // 2
    return RiseTiling(min(outputs, 4) if depth == 512 else outputs, depth, warps)


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
        return packed_experts.fall(
            room.activated, down, room.experts, room.weights, room.shares, out, stream, scale, next_weight, pdl
        )
    hidden, inter, top_k = down.shape[1], down.shape[2], len(room.experts)
    width = 0 if shared is None else shared.shape[1]
    outputs, depth, warps, fold = _FALL_WHOLE if width == 0 and top_k * inter <= _FALL_WHOLE[1] else _FALL
    tiles = triton.cdiv(hidden, outputs)
    to, none = s.h if out is None else out, s.h
    _fall_kernel[(tiles,)](
        room.activated, down, down if shared is None else shared, room.keys, room.experts, room.weights, to, s.h,
        none if next_weight is None else next_weight, s.scaled, s.squares, scale, N=hidden, K=inter, TOP_K=top_k,
        SHARED=width, KEYS=room.keys.numel(), BN=outputs, BK=min(depth, triton.next_power_of_2(top_k * inter)),
        FOLD=fold, MODE=RESIDUAL if out is None else STORE, NEXT=next_weight is not None, PDL=pdl, num_warps=warps,
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
