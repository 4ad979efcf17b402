"""Triton kernels of the draw: `vllm.ops.draw.draw` without sorting and, as a rule, in two passes over the
logits.

The first kernel finds the maximum of every group of 64 neighbouring logits. The k-th largest of these maxima is a
lower bound of the k-th largest logit, so that all of the first k stand in the few groups that reach it: 64 groups fit
into the registers of one program, which cuts by top-k and top-p there, by bisection over the values. A nucleus that
does not fit is found by the same bisection over the whole row.

Masses are integers, as in the reference, so that a row's token does not depend on the path, the batch or the order
of sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops import draw as ops
from vllm.ops.draw import DrawParams

_GROUP = 64
_GROUPS = 64  # groups that one program holds
_TILE = 64  # groups of one program of the first kernel
_CHUNK = 4096


@triton.jit
def _key(x):
    """An int32 that is ordered as the float is; both zeros get one key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mass(x, peak, min_p):
    """exp(x - peak) in units of 2**-40; 0 below min_p."""
    w = tl.exp(x - peak)
    return tl.where(w >= min_p, w * 1099511627776.0, 0.0).to(tl.int64)


@triton.jit
def _needed(kept, top_p):
    """The mass that a nucleus must reach: never more than there is, never nothing."""
    share = tl.ceil(top_p.to(tl.float64) * kept.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(share, kept), 1)


@triton.jit
def _load(logits, at, vocab, temperature):
    x = tl.load(logits + at, mask=at < vocab, other=-float("inf"))
    return tl.div_rn(x, temperature)


@triton.jit
def _edge(keys, weights, needed):
    """The largest key whose weight together with all above reaches `needed`, and the weight above it."""
    low = tl.min(keys, 0).to(tl.int64)
    high = tl.max(keys, 0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        enough = tl.sum(tl.where(keys >= middle, weights, 0), 0) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low, tl.sum(tl.where(keys > low, weights, 0), 0)


@triton.jit
def _target(u, total):
    return tl.minimum((u.to(tl.float64) * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _draw_plain(logits, vocab, temperature, peak, min_p, u, CHUNK: tl.constexpr):
    """No top-k, no top-p: sum the row, then find the chunk and the token at which the running sum passes the target."""
    c = tl.arange(0, CHUNK)
    total = tl.zeros([], tl.int64)
    for start in range(0, vocab, CHUNK):
        total += tl.sum(_mass(_load(logits, start + c, vocab, temperature), peak, min_p), 0)
    target = _target(u, total)
    before = tl.zeros([], tl.int64)
    start = 0
    here = tl.sum(_mass(_load(logits, c, vocab, temperature), peak, min_p), 0)
    while (before + here <= target) & (start + CHUNK < vocab):
        before += here
        start += CHUNK
        here = tl.sum(_mass(_load(logits, start + c, vocab, temperature), peak, min_p), 0)
    cdf = before + tl.cumsum(_mass(_load(logits, start + c, vocab, temperature), peak, min_p), 0)
    return start + tl.sum((cdf <= target).to(tl.int32), 0)


@triton.jit
def _row_mass(logits, vocab, temperature, peak, min_p, CHUNK: tl.constexpr):
    c = tl.arange(0, CHUNK)
    total = tl.zeros([], tl.int64)
    for start in range(0, vocab, CHUNK):
        total += tl.sum(_mass(_load(logits, start + c, vocab, temperature), peak, min_p), 0)
    return total


@triton.jit
def _draw_few(
    logits, maxima, scratch, groups, vocab, temperature, peak, min_p, k, top_p, u, CHUNK: tl.constexpr,
    NP: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The draw within the groups of the largest maxima. Returns (token, 1), or (0, 0) if they may not hold all of
    it.
    """
    g = tl.arange(0, NP)
    in_row = g < groups
    tops = _key(tl.load(maxima + g, mask=in_row, other=-float("inf")))
    wanted = tl.where(k > 0, tl.minimum(k, GROUPS), GROUPS)
    bound, _above = _edge(tops, in_row.to(tl.int32), tl.minimum(wanted, groups))
    chosen = in_row & (tops >= bound)
    count = tl.sum(chosen.to(tl.int32), 0)
    if groups <= GROUPS:  # everything fits
        chosen = in_row
        count = groups
        bound = tl.full([], -2147483648, tl.int64)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(scratch + place, g, mask=chosen & (place < GROUPS))
    tl.debug_barrier()
    j = tl.arange(0, GROUPS)
    ids = tl.load(scratch + j, mask=j < count, other=0)
    at = ids[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = tl.where((j < count)[:, None], at, vocab)  # past the end: loaded as -inf
    at = tl.reshape(at, [GROUPS * GROUP])
    x = _load(logits, at, vocab, temperature)
    keys = _key(x)
    # what stands below the bound is not all here: it takes no part
    masses = tl.where(keys >= bound, _mass(x, peak, min_p), 0)
    if k > 0:
        cut, above = _edge(keys, (at < vocab).to(tl.int32), k)
        at_cut = tl.max(tl.where(keys == cut, masses, 0), 0)
        kept = tl.sum(tl.where(keys > cut, masses, 0), 0) + (k - above) * at_cut
    else:
        kept = _row_mass(logits, vocab, temperature, peak, min_p, CHUNK)
    needed = _needed(kept, top_p)
    fits = (count <= GROUPS) & ((k == 0) | (k <= GROUPS) | (groups <= GROUPS)) & (tl.sum(masses, 0) >= needed)
    cut, above = _edge(keys, masses, tl.minimum(needed, tl.maximum(tl.sum(masses, 0), 1)))
    tie = keys == cut
    at_cut = tl.maximum(tl.max(tl.where(tie, masses, 0), 0), 1)
    ties_kept = (needed - above + at_cut - 1) // at_cut
    keep = (keys > cut) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= ties_kept))
    cdf = tl.cumsum(tl.where(keep, masses, 0), 0)
    target = _target(u, tl.max(cdf, 0))
    index = tl.sum((cdf <= target).to(tl.int32), 0)
    token = tl.sum(tl.where(tl.arange(0, GROUPS * GROUP) == index, at, 0), 0)
    return token, fits.to(tl.int32)


@triton.jit
def _row_edge(logits, vocab, temperature, peak, min_p, lowest, needed, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """`_edge` over a whole row, by count or by mass."""
    c = tl.arange(0, CHUNK)
    low = lowest
    high = _key(peak).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        weight = tl.zeros([], tl.int64)
        for start in range(0, vocab, CHUNK):
            x = _load(logits, start + c, vocab, temperature)
            inside = (_key(x) >= middle) & (start + c < vocab)
            if COUNT:
                weight += tl.sum(inside.to(tl.int64), 0)
            else:
                weight += tl.sum(tl.where(inside, _mass(x, peak, min_p), 0), 0)
        enough = weight >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    above = tl.zeros([], tl.int64)
    mass_above = tl.zeros([], tl.int64)
    at_edge = tl.zeros([], tl.int64)
    for start in range(0, vocab, CHUNK):
        x = _load(logits, start + c, vocab, temperature)
        keys = _key(x)
        masses = tl.where(start + c < vocab, _mass(x, peak, min_p), 0)
        above += tl.sum(((keys > low) & (start + c < vocab)).to(tl.int64), 0)
        mass_above += tl.sum(tl.where(keys > low, masses, 0), 0)
        at_edge = tl.maximum(at_edge, tl.max(tl.where(keys == low, masses, 0), 0))
    return low, above, mass_above, at_edge


@triton.jit
def _draw_many(logits, vocab, temperature, peak, min_p, k, top_p, u, CHUNK: tl.constexpr):
    """The draw by bisection over the whole row, for a nucleus of any size."""
    c = tl.arange(0, CHUNK)
    # -inf is a value like any other: the lowest key of a float
    lowest = tl.full([], -2139095041, tl.int64)
    if k > 0:
        cut, above, mass_above, at_cut = _row_edge(logits, vocab, temperature, peak, min_p, lowest, k, True, CHUNK)
        kept = mass_above + (k - above) * at_cut
    else:
        kept = _row_mass(logits, vocab, temperature, peak, min_p, CHUNK)
    needed = _needed(kept, top_p)
    cut, above, mass_above, at_cut = _row_edge(logits, vocab, temperature, peak, min_p, lowest, needed, False, CHUNK)
    at_cut = tl.maximum(at_cut, 1)
    ties_kept = (needed - mass_above + at_cut - 1) // at_cut
    total = mass_above + ties_kept * at_cut
    target = _target(u, total)
    before = tl.zeros([], tl.int64)
    ties = tl.zeros([], tl.int32)
    token = 0
    for start in range(0, vocab, CHUNK):
        x = _load(logits, start + c, vocab, temperature)
        keys = _key(x)
        tie = (keys == cut) & (start + c < vocab)
        keep = (keys > cut) | (tie & (ties + tl.cumsum(tie.to(tl.int32), 0) <= ties_kept))
        masses = tl.where(keep & (start + c < vocab), _mass(x, peak, min_p), 0)
        cdf = before + tl.cumsum(masses, 0)
        token += tl.sum(((cdf <= target) & (start + c < vocab)).to(tl.int32), 0)
        before += tl.sum(masses, 0)
        ties += tl.sum(tie.to(tl.int32), 0)
    return token


@triton.jit(do_not_specialize=["groups"])
def _maxima_kernel(
    logits, temperatures, maxima, sums, index, bits, words, groups, VOCAB: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles): the maxima of TILE groups, and the sum of their logits. MASKED: what the row's mask forbids
    becomes -inf behind the sum, in memory too.
    """
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=-float("inf"))
    total = tl.sum(tl.sum(tl.where(at < VOCAB, x, 0.0), 1), 0)
    tl.store(sums + row * tl.num_programs(1) + tl.program_id(1), total)
    if MASKED:
        mask = tl.load(index + row)
        if mask >= 0:
            w = g[:, None] * (GROUP // 32) + tl.arange(0, GROUP // 32)[None, :]
            word = tl.load(bits + mask.to(tl.int64) * words + w, mask=w < words, other=0)
            bit = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
            forbidden = tl.reshape(bit, [TILE, GROUP]) == 0
            x = tl.where(forbidden, -float("inf"), x)
            tl.store(logits + row * VOCAB + at, x, mask=forbidden & (at < VOCAB))
    x = tl.div_rn(x, tl.load(temperatures + row))
    tl.store(maxima + row * groups + g, tl.max(x, 1), mask=g < groups)


@triton.jit(do_not_specialize=["groups"])
def _draw_kernel(
    logits, maxima, scratch, temperatures, min_ps, top_ks, top_ps, uniforms, out, groups,
    VOCAB: tl.constexpr, NP: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the token, or -1 if `_draw_rest_kernel` must look at the whole row. A top_k below 0 marks a row of
    which nothing is wanted.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_ks + row)
    if k < 0:
        tl.store(out + row, 0)
        return
    temperature = tl.load(temperatures + row)
    min_p = tl.load(min_ps + row)
    k = tl.where(k >= VOCAB, 0, k)
    top_p = tl.load(top_ps + row)
    u = tl.load(uniforms + row)
    g = tl.arange(0, NP)
    peak = tl.max(tl.load(maxima + row * groups + g, mask=g < groups, other=-float("inf")), 0)
    mine = logits + row * VOCAB
    token = 0
    if (k == 0) & (top_p >= 1.0):
        token = tl.maximum(_draw_plain(mine, VOCAB, temperature, peak, min_p, u, CHUNK), 0)
    else:
        fits = 0
        if (k <= GROUPS) | (groups <= GROUPS):
            token, fits = _draw_few(
                mine, maxima + row * groups, scratch + row * GROUPS, groups, VOCAB, temperature, peak, min_p, k,
                top_p, u, CHUNK, NP, GROUP, GROUPS,
            )  # fmt: skip
        if fits == 0:
            token = -1
    tl.store(out + row, tl.minimum(token, VOCAB - 1).to(tl.int64))


@triton.jit(do_not_specialize=["groups"])
def _draw_rest_kernel(
    logits, maxima, temperatures, min_ps, top_ks, top_ps, uniforms, out, groups, VOCAB: tl.constexpr, NP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the token of every row that `_draw_kernel` left. As one kernel the two compile for twice as long,
    which a server waits for before it is ready.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) >= 0:
        return
    k = tl.load(top_ks + row)
    k = tl.where(k >= VOCAB, 0, k)
    g = tl.arange(0, NP)
    peak = tl.max(tl.load(maxima + row * groups + g, mask=g < groups, other=-float("inf")), 0)
    token = _draw_many(
        logits + row * VOCAB, VOCAB, tl.load(temperatures + row), peak, tl.load(min_ps + row), k,
        tl.load(top_ps + row), tl.load(uniforms + row), CHUNK,
    )  # fmt: skip
    tl.store(out + row, tl.minimum(tl.maximum(token, 0), VOCAB - 1).to(tl.int64))


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """`vllm.ops.draw.draw` for CUDA."""
    p = params
    return draw_rows(logits, p.temperature, p.min_p, p.top_k, p.top_p, p.uniform)[0]


def draw_and_finite(logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """`vllm.ops.draw.draw_and_finite` for CUDA."""
    p = params
    drawn, sums = draw_rows(logits, p.temperature, p.min_p, p.top_k, p.top_p, p.uniform)
    chosen = logits.gather(1, drawn[:, None]).squeeze(1)  # -inf: of a row that is nothing else
    return drawn, (sums.sum(-1) < torch.inf) & (chosen > -torch.inf)


def draw_rows(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor,
    masks: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tokens [rows] int64, and sums of the logits in parts [rows, tiles]: below +inf without NaN and +inf.

    masks: index [rows] int32, the row's mask, -1 for none, and bits [masks, ceil(vocab / 32)] int32, as in `RowMasks`.
    What they forbid becomes -inf in the logits, which are contiguous then; the sums are of what was there before.

    The parameters are those of `DrawParams`; a top_k below 0 marks a row of which nothing is wanted (what stands there
    may be anything, and take long). Asks the host for nothing, so that it can be captured.
    """
    rows, vocab = logits.shape
    if masks is not None and not logits.is_contiguous():
        raise ValueError("Logits to be masked in place are not contiguous.")
    logits = logits.contiguous()
    groups = triton.cdiv(vocab, _GROUP)
    tiles = triton.cdiv(groups, _TILE)
    maxima, sums = (torch.empty(rows, n, dtype=torch.float32, device=logits.device) for n in (groups, tiles))
    scratch = torch.empty(rows, _GROUPS, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out, sums
    # always less than the vocabulary: Triton 3.6 fails on loops that it sees to run just once
    chunk = min(_CHUNK, triton.next_power_of_2(vocab) // 2)
    index, bits, words = (None, None, None) if masks is None else (*masks, masks[1].shape[1])
    _maxima_kernel[(rows, tiles)](
        logits, temperature, maxima, sums, index, bits, words, groups, VOCAB=vocab, GROUP=_GROUP, TILE=_TILE,
        MASKED=masks is not None, num_warps=4,
    )  # fmt: skip
    const = {"VOCAB": vocab, "NP": triton.next_power_of_2(groups), "CHUNK": chunk, "num_warps": 8}
    const["maxnreg"] = 128  # two programs a processor: they mostly wait
    _draw_kernel[(rows,)](
        logits, maxima, scratch, temperature, min_p, top_k, top_p, uniform, out, groups, GROUP=_GROUP, GROUPS=_GROUPS,
        **const,
    )  # fmt: skip
    _draw_rest_kernel[(rows,)](logits, maxima, temperature, min_p, top_k, top_p, uniform, out, groups, **const)
    return out, sums


def register(device_type: str) -> None:
    ops.draw.register(device_type, draw)
    ops.draw_and_finite.register(device_type, draw_and_finite)
