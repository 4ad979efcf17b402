"""Sums of a few rows over the GPUs of one host, with the residual addition and the norm that follow folded in.

Every rank writes its row into all the others' memory. A word of 8 bytes holds 4 bytes of the row and the number of the
exchange, and GPUs write it whole: who reads the number that it waits for has the data too, without a fence or a flag of
its own. Rows alternate between two places: when a rank writes into one again, everybody has sent, and so has read
before, what came in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True, slots=True)
class Exchange:
    """The memory in which the ranks meet.

    inboxes: [world] int64, addresses of every rank's inbox: int64 [2, world, rows, words], zeros at first.
    epochs: [rows] int32 on this rank: in how many exchanges a row took part, zeros at first.
    stopped: [1] int32 on this rank: not 0 lets waiting kernels run to their end, with a wrong result.
    words: of 4 bytes in a row.
    """

    rank: int
    world: int
    rows: int
    words: int
    inboxes: Tensor
    epochs: Tensor
    stopped: Tensor


@triton.jit
def _lower(word, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """The first number in a word of 32 bits, or the only one, as fp32."""
    return (word.to(tl.int16) if PAIRS else word).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _upper(word, DTYPE: tl.constexpr):
    """The second of two."""
    return (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _word(lower, upper, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """One or two numbers, rounded to DTYPE, as a word of 32 bits."""
    if PAIRS:
        word = lower.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word |= upper.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        word = lower.to(tl.int32, bitcast=True)
    return word


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    x_ptr, out_ptr, residual_ptr, weight_ptr, inboxes, epochs, stopped, rows, eps, WORDS: tl.constexpr,
    WP: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows of x,). rows: that an inbox has room for, from each rank."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0)
    w = tl.arange(0, WP)
    keep = w < WORDS
    at = row.to(tl.int64) * WORDS + w
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(epochs + row) + 1
    mine = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + at, mask=keep, other=0)
    letter = (epoch.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    share = rows.to(tl.int64) * WORDS  # what one rank writes
    place = (epoch & 1) * WORLD * share + at
    for step in tl.static_range(1, WORLD):
        inbox = tl.load(inboxes + (RANK + step) % WORLD).to(tl.pointer_type(tl.int64))
        tl.store(inbox + place + RANK * share, letter, mask=keep)
    each: tl.constexpr = 2 if PAIRS else 1
    if NORM:  # while the words are on their way
        stream = residual_ptr.to(tl.pointer_type(tl.int32)) + at
        before = tl.load(stream, mask=keep, other=0)
        lower_weight = tl.load(weight_ptr + each * w, mask=keep, other=0.0).to(tl.float32)
        upper_weight = tl.load(weight_ptr + each * w + each - 1, mask=keep, other=0.0).to(tl.float32)
    inbox = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64))
    lower = tl.zeros([WP], tl.float32)
    upper = tl.zeros([WP], tl.float32)
    missing = 1
    while missing > 0:  # the sum of what is there; the last time, that is everything
        lower = tl.zeros([WP], tl.float32)
        upper = tl.zeros([WP], tl.float32)
        wrong = tl.zeros([WP], tl.int32)
        for sender in tl.static_range(WORLD):
            if sender == RANK:
                word = mine
            else:
                letter = tl.load(inbox + place + sender * share, mask=keep, other=0, volatile=True)
                wrong |= (letter >> 32).to(tl.int32) ^ epoch
                word = letter.to(tl.int32)
            lower += _lower(word, dtype, PAIRS)
            if PAIRS:
                upper += _upper(word, dtype)
        missing = tl.max((keep & (wrong != 0)).to(tl.int32), 0) - tl.load(stopped, volatile=True)
    tl.store(epochs + row, epoch)
    total = _word(lower, upper, dtype, PAIRS)
    if NORM:
        # as `add_rms_norm` does: the sum over the ranks is rounded, then the sum with the residual
        lower = _lower(total, dtype, PAIRS) + _lower(before, dtype, PAIRS)
        if PAIRS:
            upper = _upper(total, dtype) + _upper(before, dtype)
        total = _word(lower, upper, dtype, PAIRS)
        tl.store(stream, total, mask=keep)
        lower = _lower(total, dtype, PAIRS)
        squares = tl.sum(lower * lower, 0)
        if PAIRS:
            upper = _upper(total, dtype)
            squares += tl.sum(upper * upper, 0)
        scale = tl.rsqrt(squares / (each * WORDS) + eps)
        lower = lower * scale * lower_weight
        if PAIRS:
            upper = upper * scale * upper_weight
        total = _word(lower, upper, dtype, PAIRS)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + at, total, mask=keep)


def sum_ranks(
    exchange: Exchange, x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """The sum of every rank's x, in the order of ranks, in fp32, rounded to x's dtype.

    x: [..., width], contiguous: up to `exchange.rows` rows of `exchange.words` words, fp32, bf16 or fp16, the same
    number of rows on every rank.   residual: like x; the sum is added to it in place, and the result is its RMS norm
    times weight [width].   pdl: as for `add_rms_norm`.
    """
    out = torch.empty_like(x)
    count = x.numel() * x.element_size() // (4 * exchange.words)
    norm = residual is not None and weight is not None
    width = triton.next_power_of_2(exchange.words)
    _sum_kernel[(count,)](
        x, out, residual if norm else out, weight if norm else out, exchange.inboxes, exchange.epochs,
        exchange.stopped, exchange.rows, eps, WORDS=exchange.words, WP=width, WORLD=exchange.world,
        RANK=exchange.rank, PAIRS=x.element_size() == 2, NORM=norm, PDL=pdl,
        num_warps=min(8, max(1, width // 128)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
