"""Triton kernels at both ends of a decode step: tokens in from the slot table, the most likely token out to it.

The rows of a step are given by two vectors: `slots` [rows] int32, below 0 for padding, and `positions` [rows] int32,
the index of the (first) token that the row computes. The host uploads them, or they are what the step before left, or
`resume_rows` takes them from the slots' lengths. The token's id stands in the slot table, where the step before wrote
it, perhaps while the host was planning this one.

The last kernel of every step delivers: the row's id goes to the slot table and to `out`, and the slot's length is what
it is now. An id in `out` is a token, or one of the negative numbers below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm.ops.lora import LowRank
from vllm.ops.triton.decode_linear import Folded
from vllm.ops.triton.draw import draw_rows

NOT_FINITE, IMPOSSIBLE, NOTHING = -1, -2, -3  # the logits are no numbers; masks forbid all; no token in this place

ARGMAX_BLOCK = 4096


@triton.jit(
    do_not_specialize=["stride_tokens", "stride_table", "columns", "stride_out"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def _inputs_kernel(
    slots_ptr, positions_ptr, drafts_ptr, tokens, table, token_ids, positions, seq_lens, mapping, block_table,
    stride_tokens, stride_table, columns, stride_out, BS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
    Q: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): one row's inputs for one KV group. Padding, of rows and behind drafts, computes token 0 and writes
    to the null block.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    live = slot >= 0
    position = tl.where(live, tl.load(positions_ptr + row), 0)
    home = tl.where(live, slot, 0).to(tl.int64)
    if FIRST:
        tl.store(seq_lens + row, position + Q)
    drafts = 0
    if Q > 1:
        drafts = tl.load(drafts_ptr + row)
    for j in tl.static_range(Q):
        real = live & (j <= drafts)
        if FIRST:
            token = tl.load(tokens + home * stride_tokens + position + j)
            tl.store(token_ids + row * Q + j, tl.where(real, token, 0).to(tl.int64))
            tl.store(positions + row * Q + j, (position + j).to(tl.int64))
        block = tl.load(table + home * stride_table + (position + j) // BS)
        tl.store(mapping + row * Q + j, tl.where(real, block, 0).to(tl.int64) * BS + (position + j) % BS)
    used = tl.where(live, (position + Q - 1) // BS + 1, 0)
    for first in range(0, tl.maximum(used, 1), BLOCK):
        c = first + tl.arange(0, BLOCK)
        ids = tl.load(table + home * stride_table + c, mask=c < used, other=0)
        tl.store(block_table + row.to(tl.int64) * stride_out + c, ids, mask=c < columns)


def gather_inputs(
    slots: Tensor,
    positions: Tensor,
    tokens: Tensor,
    table: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    mapping: Tensor,
    block_table: Tensor,
    block_size: int,
    first: bool,
    drafts: Tensor | None = None,
) -> None:
    """Fill the static inputs of a decode step for one KV group; with `first` also those that groups share.

    tokens, table: of the slot table, with room for every token computed.   out: token_ids, positions [tokens] int64,
    seq_lens [rows] int32.   drafts: [rows] int32, how many of a row's further tokens, which stand behind its first in
    the slot table, are real; each row computes as many tokens as `mapping` has for it.
    """
    rows = slots.shape[0]
    _inputs_kernel[(rows,)](
        slots, positions, slots if drafts is None else drafts, tokens, table, *out, mapping, block_table,
        tokens.stride(0), table.stride(0), block_table.shape[1], block_table.stride(0), BS=block_size, BLOCK=128,
        FIRST=first, Q=mapping.shape[0] // rows, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _resume_kernel(slots_ptr, positions_ptr, lengths, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + i, mask=i < rows, other=-1)
    unknown = (slot >= 0) & (tl.load(positions_ptr + i, mask=i < rows, other=0) < 0)
    tl.store(positions_ptr + i, tl.load(lengths + slot, mask=unknown, other=0) - 1, mask=unknown)


def resume_rows(slots: Tensor, positions: Tensor, lengths: Tensor) -> None:
    """Let rows whose position is below 0 compute the last token of their slot. lengths: [slots] int32."""
    rows = slots.shape[0]
    _resume_kernel[(triton.cdiv(rows, 128),)](slots, positions, lengths, rows, BLOCK=128, num_warps=4)


@triton.jit(
    do_not_specialize=["stride_tokens", "tiles", "first_row", "local_rows", "first_position", "vocabulary"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def _embed_kernel(
    slots_ptr, positions_ptr, tokens, embedding, place, weight, h, scaled, squares, adapters, low_a, low_b, ranks,
    stride_tokens, tiles, first_row, local_rows, first_position, vocabulary, scale, WIDTH: tl.constexpr,
    WP: tl.constexpr, TP: tl.constexpr, PLACES: tl.constexpr, LATE: tl.constexpr, NEXT: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the embedding of a row's token if this rank has it, else zeros; with NEXT also times the first
    norm's weight, and its sum of squares (in part 0). RANK: of adapters, which rows may have then.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    live = slot >= 0
    position = tl.load(positions_ptr + row, mask=live, other=0)
    token = tl.load(tokens + tl.where(live, slot, 0).to(tl.int64) * stride_tokens + position, mask=live, other=0)
    place_in_a = token
    token -= first_row
    mine = (token >= 0) & (token < local_rows)
    c = tl.arange(0, WP)
    in_c = c < tl.where(mine, WIDTH, 0)
    e = tl.load(embedding + tl.where(mine, token, 0).to(tl.int64) * WIDTH + c, mask=in_c, other=0.0)
    dtype = h.dtype.element_ty
    if RANK > 0:
        adapter = tl.load(adapters + row)
        rank = tl.load(ranks + adapter, mask=adapter >= 0, other=0)
        change = tl.zeros([WP], tl.float32)
        if rank > 0:
            low = low_a + (adapter.to(tl.int64) * vocabulary + place_in_a) * RANK
            for r in range(rank):
                high = low_b + (adapter.to(tl.int64) * WIDTH + c) * RANK + r
                change += tl.load(low + r).to(tl.float32) * tl.load(high, mask=c < WIDTH, other=0.0).to(tl.float32)
        e = (e.to(tl.float32) + change).to(dtype)
    if not LATE:
        e = (e.to(tl.float32) * scale).to(dtype)
    if PLACES:
        at = place + (position + first_position).to(tl.int64) * WIDTH
        e = (e.to(tl.float32) + tl.load(at + c, mask=in_c, other=0.0).to(tl.float32)).to(dtype)
    if LATE:
        e = (e.to(tl.float32) * scale).to(dtype)
    tl.store(h + row * WIDTH + c, e, mask=c < WIDTH)
    if NEXT:
        f = e.to(tl.float32)
        g = f * tl.load(weight + c, mask=c < WIDTH, other=0.0).to(tl.float32)
        tl.store(scaled + row * WIDTH + c, g.to(scaled.dtype.element_ty), mask=c < WIDTH)
        t = tl.arange(0, TP)
        tl.store(squares + row * tiles + t, tl.where(t == 0, tl.sum(f * f, 0), 0.0), mask=t < tiles)


@dataclass(frozen=True, slots=True)
class Entrance:
    """How tokens enter the stream. embedding: [rows, width] of this rank, from `first_row` on; scale: of what is read.

    places: [positions, width] is added, position p's row being p + `first_place`; late: before the scale.
    lora: what adapters add to the embeddings, on the rank that adds it.
    """

    embedding: Tensor
    first_row: int = 0
    scale: float = 1.0
    places: Tensor | None = None
    first_place: int = 0
    late: bool = False
    lora: LowRank | None = None


def embed_rows(
    slots: Tensor, positions: Tensor, tokens: Tensor, entrance: Entrance, h: Tensor,
    following: tuple[Tensor, Tensor, Tensor, int] | None = None, adapters: Tensor | None = None,
) -> None:  # fmt: skip
    """h = the embedding of each row's token, zeros where another rank has it: the ranks' sum is the embedding.

    adapters: [rows] int32, each row's adapter, -1 for none; None: no row has one.

    following: the weight of the first norm, and what a product takes: scaled = h * weight and squares [rows, tiles].
    Launched without PDL: it begins the step.
    """
    e = entrance
    rows, width = e.embedding.shape
    weight, scaled, squares, tiles = (h, h, h, 1) if following is None else following
    low_rank, rank, vocabulary = (slots, h, h, slots), 0, 0
    if adapters is not None and e.lora is not None:
        low_rank = (adapters, e.lora.a, e.lora.b, e.lora.ranks)
        _, vocabulary, rank = e.lora.a.shape
    _embed_kernel[(slots.shape[0],)](
        slots, positions, tokens, e.embedding, h if e.places is None else e.places, weight, h, scaled, squares,
        *low_rank, tokens.stride(0), tiles, e.first_row, rows, e.first_place, vocabulary, e.scale, WIDTH=width,
        WP=triton.next_power_of_2(width), TP=triton.next_power_of_2(tiles), PLACES=e.places is not None, LATE=e.late,
        NEXT=following is not None, RANK=rank, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles"])
def _normalize_kernel(
    scaled, squares, out, tiles, eps, WIDTH: tl.constexpr, WP: tl.constexpr, TP: tl.constexpr, PDL: tl.constexpr
):
    """Grid (rows,): what the next product would multiply in its epilogue, done here: the model's last hidden state."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    t = tl.arange(0, TP)
    total = tl.sum(tl.load(squares + row * tiles + t, mask=t < tiles, other=0.0), 0)
    c = tl.arange(0, WP)
    x = tl.load(scaled + row * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32) * tl.rsqrt(total / WIDTH + eps)
    tl.store(out + row * WIDTH + c, x.to(out.dtype.element_ty), mask=c < WIDTH)


def normalize_rows(x: Folded, out: Tensor, pdl: bool = False) -> None:
    """out = x.scaled / rms."""
    width = x.scaled.shape[1]
    extra = {"launch_pdl": True} if pdl else {}
    _normalize_kernel[(out.shape[0],)](
        x.scaled, x.squares, out, x.tiles, x.eps, WIDTH=width, WP=triton.next_power_of_2(width),
        TP=triton.next_power_of_2(x.tiles), PDL=pdl, num_warps=4, **extra,
    )  # fmt: skip


@triton.jit
def _argmax_kernel(
    logits, index, bits, best, best_at, sums, stride, tiles, words, MASKED: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles): the maximum of one tile, its lowest index, and the tile's sum. MASKED: the maximum of what
    the row's mask allows."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    c = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + c, mask=c < VOCAB, other=-float("inf")).to(tl.float32)
    tl.store(sums + row * tiles + tile, tl.sum(tl.where(c < VOCAB, x, 0.0), 0))
    if MASKED:
        mask = tl.load(index + row)
        if mask >= 0:
            word = tl.load(bits + mask.to(tl.int64) * words + c // 32, mask=c < VOCAB, other=0)
            x = tl.where(((word >> (c % 32)) & 1) == 0, -float("inf"), x)
    top, at = tl.max(x, 0, return_indices=True)
    tl.store(best + row * tiles + tile, top)
    tl.store(best_at + row * tiles + tile, at + tile * BLOCK)


def argmax_tiles(
    logits: Tensor, best: Tensor, best_at: Tensor, sums: Tensor, masks: tuple[Tensor, Tensor] | None = None
) -> int:
    """First half of an argmax over [rows, vocab]; returns the number of tiles, the second dimension of the outputs.

    masks: index [rows] int32, the row's mask, -1 for none, and bits [masks, ceil(vocab / 32)] int32, as in `RowMasks`;
    the logits stay, and `sums` are of all of them.
    """
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, ARGMAX_BLOCK)
    index, bits = (best_at, best_at) if masks is None else masks
    _argmax_kernel[(rows, tiles)](
        logits, index, bits, best, best_at, sums, logits.stride(0), tiles, bits.shape[1], MASKED=masks is not None,
        VOCAB=vocab, BLOCK=ARGMAX_BLOCK, num_warps=4,
    )  # fmt: skip
    return tiles


@triton.jit
def _deliver(
    row, slot, token, id, positions_ptr, tokens, lengths, out, stride_tokens, turns, stride_out, turn_count
):  # fmt: skip
    """The end of a row's step: its token to the slot table, its id to `out`, its slot's length. With turn_count > 0,
    `out` is a ring of so many vectors, and the row's position and turn go on by one for the next step."""
    position = tl.load(positions_ptr + row)
    tl.store(tokens + slot.to(tl.int64) * stride_tokens + position + 1, token)
    tl.store(lengths + slot, position + 2)
    turn = 0
    if turn_count > 0:
        turn = tl.load(turns + row)
        tl.store(positions_ptr + row, position + 1)
        tl.store(turns + row, (turn + 1) % turn_count)
    tl.store(out + turn * stride_out + row, id)


@triton.jit(
    do_not_specialize=["stride_tokens", "tiles", "vocab", "stride_out", "turn_count"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "turns"],
)
def _choose_kernel(
    slots_ptr, positions_ptr, best, best_at, sums, tokens, lengths, out, turns, stride_tokens, tiles, vocab, stride_out,
    turn_count, NONE_LEFT: tl.constexpr, TP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the lowest index of the maximum is delivered; -1 where `finite_rows` is False, but NONE_LEFT where
    the maximum is -inf."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    t = tl.arange(0, TP)
    live = t < tiles
    value = tl.load(best + row * tiles + t, mask=live, other=-float("inf"))
    where = tl.load(best_at + row * tiles + t, mask=live, other=0)
    total = tl.sum(tl.load(sums + row * tiles + t, mask=live, other=0.0), 0)
    token = tl.min(tl.where(live & (value == tl.max(value, 0)), where, 2147483647), 0)
    token = tl.minimum(token, vocab - 1)  # NaN equals nothing; the id must stay inside the vocabulary all the same
    id = tl.where(tl.max(value, 0) > -float("inf"), token, NONE_LEFT)
    id = tl.where(total < float("inf"), id, -1)
    _deliver(row, slot, token, id, positions_ptr, tokens, lengths, out, stride_tokens, turns, stride_out, turn_count)


def choose_tokens(
    slots: Tensor, positions: Tensor, best: Tensor, best_at: Tensor, sums: Tensor, tiles: int, vocab: int,
    tokens: Tensor, lengths: Tensor, out: Tensor, turns: Tensor | None = None, pdl: bool = False, masked: bool = False,
) -> None:  # fmt: skip
    """Second half of the argmax. out: [rows] int32 receives the ids; they are also written behind each row's tokens.

    lengths: [slots] int32.   turns: [rows] int32. If given, `out` is a ring [n, rows or more] (it may be pinned host
    memory), a row's id goes to the vector that its turn names, and turns and positions are left as the next step will
    need them.   masked: what is -inf was forbidden by masks; `sums` are of what was there before.
    """
    extra = {"launch_pdl": True} if pdl else {}
    width = triton.next_power_of_2(tiles)
    _choose_kernel[(slots.shape[0],)](
        slots, positions, best, best_at, sums, tokens, lengths, out, positions if turns is None else turns,
        tokens.stride(0), tiles, vocab, *_ring(turns, out), NONE_LEFT=IMPOSSIBLE if masked else NOT_FINITE, TP=width,
        PDL=pdl, num_warps=min(16, max(4, width // 512)), **extra,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawing:
    """How each row's token is drawn, at fixed addresses: as in `DrawParams`, but for the numbers, which the device
    makes from the starts [rows] int64 of the rows' streams (`step.rng.stream_start`) and their positions.
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    starts: Tensor


@triton.jit
def _mix(z):
    """As in `step.rng`."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions_ptr"])
def _uniform_kernel(positions_ptr, starts, out, rows, BLOCK: tl.constexpr):
    """`step.rng.uniform` for the token behind each row's position."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + i, mask=i < rows, other=0).to(tl.uint64, bitcast=True)
    index = (tl.load(positions_ptr + i, mask=i < rows, other=0) + 2).to(tl.uint64)
    z = _mix(start + index * 0x9E3779B97F4A7C15)
    tl.store(out + i, (z >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08, mask=i < rows)


@triton.jit(
    do_not_specialize=["stride_tokens", "tiles", "stride_out", "turn_count"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "turns"],
)
def _deliver_kernel(
    slots_ptr, positions_ptr, drawn, sums, logits, tokens, lengths, out, turns, stride_logits, stride_tokens, tiles,
    stride_out, turn_count, TP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): delivers what was drawn; -1 if the logits hold NaN or +inf, -2 if masks forbid what was drawn."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    t = tl.arange(0, TP)
    total = tl.sum(tl.load(sums + row * tiles + t, mask=t < tiles, other=0.0), 0)
    token = tl.load(drawn + row).to(tl.int32)
    id = token
    if MASKED:
        x = tl.load(logits + row.to(tl.int64) * stride_logits + token)
        id = tl.where(x > -float("inf"), token, -2)
    id = tl.where(total < float("inf"), id, -1)  # -inf: tokens that the model bars
    _deliver(row, slot, token, id, positions_ptr, tokens, lengths, out, stride_tokens, turns, stride_out, turn_count)


def _draw(
    logits: Tensor, positions: Tensor, d: Drawing, masks: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens [rows] drawn behind the rows' positions, and sums of pieces of the logits, [rows, pieces]."""
    rows = logits.shape[0]
    uniform = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _uniform_kernel[(triton.cdiv(rows, 128),)](positions, d.starts, uniform, rows, BLOCK=128, num_warps=4)
    drawn: tuple[Tensor, Tensor] = draw_rows(logits, d.temperature, d.min_p, d.top_k, d.top_p, uniform, masks)
    return drawn


def draw_tokens(
    logits: Tensor, slots: Tensor, positions: Tensor, drawing: Drawing, tokens: Tensor, lengths: Tensor, out: Tensor,
    turns: Tensor | None = None, masks: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Draw each row's token from its logits [rows, vocab] fp32 and deliver it as `choose_tokens` does.

    masks: index and bits as for `draw_rows`, which writes -inf into contiguous logits.
    """
    logits = logits if masks is None else logits.contiguous()
    drawn, sums = _draw(logits, positions, drawing, masks)
    tiles = sums.shape[1]
    _deliver_kernel[(slots.shape[0],)](
        slots, positions, drawn, sums, logits, tokens, lengths, out, positions if turns is None else turns,
        logits.stride(0), tokens.stride(0), tiles, *_ring(turns, out), TP=triton.next_power_of_2(tiles),
        MASKED=masks is not None, num_warps=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["stride_tokens", "tiles", "vocab", "stride_out", "turn_count"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "drafts_ptr", "turns"],
)
def _verify_kernel(
    slots_ptr, positions_ptr, drafts_ptr, best, best_at, sums, tokens, lengths, out, turns, stride_tokens, tiles, vocab,
    stride_out, turn_count, Q: tl.constexpr, QP: tl.constexpr, TP: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): of a row's Q samples those are delivered whose drafts before them all hold.

    The samples: the lowest index of each maximum, as for `_choose_kernel`, or with DRAWN those in `best_at`.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    j = tl.arange(0, QP)
    t = tl.arange(0, TP)
    own = (row * Q + j).to(tl.int64)
    live = (j[:, None] < Q) & (t[None, :] < tiles)
    total = tl.sum(tl.load(sums + own[:, None] * tiles + t[None, :], mask=live, other=0.0), 1)
    if DRAWN:
        token = tl.load(best_at + own, mask=j < Q, other=0).to(tl.int32)
        finite = total < float("inf")
    else:
        value = tl.load(best + own[:, None] * tiles + t[None, :], mask=live, other=-float("inf"))
        where = tl.load(best_at + own[:, None] * tiles + t[None, :], mask=live, other=0)
        top = tl.max(value, 1)
        token = tl.min(tl.where(live & (value == top[:, None]), where, 2147483647), 1)
        token = tl.minimum(token, vocab - 1)
        finite = (total < float("inf")) & (top > -float("inf"))
    id = tl.where(finite, token, -1)
    position = tl.load(positions_ptr + row)
    home = tokens + slot.to(tl.int64) * stride_tokens + position + 1
    drafts = tl.load(drafts_ptr + row)
    draft = tl.load(home + j, mask=j < drafts, other=-9)
    accepted = tl.min(tl.where((j < drafts) & (id == draft), QP, j), 0)  # nothing holds behind one that does not
    tl.store(home + j, token, mask=j <= accepted)
    tl.store(lengths + slot, position + 2 + accepted)
    turn = tl.load(turns + row)
    tl.store(positions_ptr + row, position + 1 + accepted)
    tl.store(turns + row, (turn + 1) % turn_count)
    tl.store(out + turn * stride_out + own, tl.where(j <= accepted, id, -3), mask=j < Q)


def verify_tokens(
    logits: Tensor, slots: Tensor, positions: Tensor, drafts: Tensor, tokens: Tensor, lengths: Tensor, out: Tensor,
    turns: Tensor, *, places: Tensor, drawing: Drawing | None = None,
) -> None:  # fmt: skip
    """Sample behind each token of rows that compute as many tokens each, and deliver what drafts allow: samples as long
    as every draft before them is what was sampled in its place.

    logits: [rows * query, vocab] fp32.   drafts: [rows] int32, real drafts behind each row's first token.
    out: a ring [n, rows * query or more] of ids, NOTHING behind the last.   places: [rows * query] int64, each logit
    row's own position.   drawing: parameters of each row of logits; None takes maxima.
    """
    rows = slots.shape[0]
    query = logits.shape[0] // rows
    vocab, device = logits.shape[1], logits.device
    if drawing is not None:
        drawn, sums = _draw(logits, places, drawing)
        tiles, best, best_at = sums.shape[1], sums, drawn
    else:
        tiles = triton.cdiv(vocab, ARGMAX_BLOCK)
        best, sums = (torch.empty(rows * query, tiles, dtype=torch.float32, device=device) for _ in range(2))
        best_at = torch.empty(rows * query, tiles, dtype=torch.int32, device=device)
        argmax_tiles(logits, best, best_at, sums)
    _verify_kernel[(rows,)](
        slots, positions, drafts, best, best_at, sums, tokens, lengths, out, turns, tokens.stride(0), tiles, vocab,
        *_ring(turns, out), Q=query, QP=triton.next_power_of_2(query), TP=triton.next_power_of_2(tiles),
        DRAWN=drawing is not None, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "first_row"])
def _nominate_kernel(best, best_at, sums, out, tiles, first_row, TP: tl.constexpr):
    """Grid (rows,): the maximum of all tiles, its lowest index in the whole vocabulary, and the sum."""
    row = tl.program_id(0)
    t = tl.arange(0, TP)
    live = t < tiles
    value = tl.load(best + row * tiles + t, mask=live, other=-float("inf"))
    where = tl.load(best_at + row * tiles + t, mask=live, other=0)
    top = tl.max(value, 0)
    at = tl.min(tl.where(live & (value == top), where, 0x3FFFFFFF), 0) + first_row
    tl.store(out + row * 3, top)
    tl.store(out + row * 3 + 1, at.to(tl.float32))
    tl.store(out + row * 3 + 2, tl.sum(tl.load(sums + row * tiles + t, mask=live, other=0.0), 0))


def nominate(best: Tensor, best_at: Tensor, sums: Tensor, tiles: int, first_row: int, out: Tensor) -> None:
    """What a rank says of its part of the vocabulary, which begins at `first_row`.

    out: [rows, 3] fp32: maximum, index (fp32 counts to 2^24, vocabularies do not), sum.
    """
    _nominate_kernel[(out.shape[0],)](
        best, best_at, sums, out, tiles, first_row, TP=triton.next_power_of_2(tiles), num_warps=4
    )


@triton.jit(
    do_not_specialize=["stride_tokens", "rows", "vocab", "stride_out", "turn_count"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "turns"],
)
def _elect_kernel(
    slots_ptr, positions_ptr, nominees, tokens, lengths, out, turns, stride_tokens, rows, vocab, stride_out, turn_count,
    WORLD: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): as `_choose_kernel`, from what the ranks nominated."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    r = tl.arange(0, WP)
    live = r < WORLD
    entry = nominees + (r * rows + row) * 3
    value = tl.load(entry, mask=live, other=-float("inf"))
    where = tl.load(entry + 1, mask=live, other=0.0).to(tl.int32)
    total = tl.sum(tl.load(entry + 2, mask=live, other=0.0), 0)
    token = tl.min(tl.where(live & (value == tl.max(value, 0)), where, 2147483647), 0)
    token = tl.minimum(token, vocab - 1)
    id = tl.where(tl.abs(total) < float("inf"), token, -1)
    _deliver(row, slot, token, id, positions_ptr, tokens, lengths, out, stride_tokens, turns, stride_out, turn_count)


def elect(
    slots: Tensor, positions: Tensor, nominees: Tensor, world: int, vocab: int, tokens: Tensor, lengths: Tensor,
    out: Tensor, turns: Tensor | None = None,
) -> None:  # fmt: skip
    """As `choose_tokens`, from [world * rows, 3] of `nominate`: every rank comes to the same token."""
    rows = slots.shape[0]
    _elect_kernel[(rows,)](
        slots, positions, nominees, tokens, lengths, out, positions if turns is None else turns, tokens.stride(0), rows,
        vocab, *_ring(turns, out), WORLD=world, WP=max(2, triton.next_power_of_2(world)), num_warps=1,
    )  # fmt: skip


def _ring(turns: Tensor | None, out: Tensor) -> tuple[int, int]:
    """The stride and the number of the vectors that ids go to in turn; 0 and 0 if there is only one."""
    return (0, 0) if turns is None else (out.stride(0), out.shape[0])
