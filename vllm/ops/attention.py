"""Paged attention over a mixed batch, and the cache write. The heart of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm.ops.registry import op
from vllm.ops.shared_prefix import Group, find_groups
from vllm.step.inputs import GroupInputs, StepInputs


@dataclass(frozen=True, slots=True)
class SparseBlocks:
    """Queries see the keys of the last `local` blocks of `block` tokens, their own included, and of every block kb of
    which (kb + head + 1) % stride is 0.   heads: [heads] int32, the numbers of this rank's heads in that sum.
    """

    block: int
    local: int
    stride: int
    heads: Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What is fixed per layer. `window`: tokens each query sees, itself included. `alibi_slopes`: [heads] fp32.

    sinks: [heads], a further score of each head in the softmax, whose value is zero.
    chunk: queries see keys of their own `chunk` tokens only, which begin at multiples of it.
    relative: [heads, 2 * n + 1] fp32, added to the scores of keys by their distance from the query, -n to n; what is
        farther counts as n. Only where tokens see later ones (`encoder_attention`).
    alibi_known: slopes of a query at position p >= alibi_known are divided by (p + 1) / alibi_known.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    k_scale: float = 1.0  # fp8 cache: stored = value / scale
    v_scale: float = 1.0
    sinks: Tensor | None = None
    chunk: int | None = None
    sparse: SparseBlocks | None = None
    relative: Tensor | None = None
    alibi_known: int | None = None

    @property
    def is_unusual(self) -> str | None:
        """What of it libraries and some of our kernels do not know, in words; None if nothing."""
        if self.sinks is not None:
            return "attention sinks"
        if self.chunk is not None:
            return "attention within chunks"
        if self.alibi_known is not None:
            return "ALiBi beyond the length it was trained with"
        return None if self.sparse is None else "block-sparse attention"


OwnKV = tuple[Tensor, Tensor]  # keys and values of a step's tokens, in the model's dtype: [tokens, kv_heads, head_dim]


class DenseRun(NamedTuple):
    """Neighbouring prompts of one length that are computed from their first token on: plain causal attention.

    first_token: in the step.   first_row: in the gathered keys.   padded: `length` rounded up to whole _DENSE_STEPs.
    """

    first_token: int
    first_row: int
    prompts: int
    length: int
    padded: int


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """`GroupInputs.plan` of a batch whose long queries are worth copying their keys to consecutive rows.

    pieces: [pieces, 4] int32, what is copied: request, its first key, number of keys, first row that receives them.
    requests: [requests, 3] int32, where a request's keys then stand: those below `common` from row `common_row` on, key
        k of the others at row `base + k`; as (base, common, common_row). common is below 0 if nothing is copied.
    rows: their number in total.   longest: keys of a piece.   runs: all long queries as `dense_runs`, or empty.
    shared: whether some requests have keys in common.   fresh: whether all keys of long queries are the step's own,
        so that nothing need be copied if the step's keys and values are at hand.
    """

    pieces: Tensor
    requests: Tensor
    rows: int
    longest: int
    runs: tuple[DenseRun, ...] = ()
    shared: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Gathering:
    """Host side of a `GatherPlan`: its arrays and numbers."""

    pieces: np.ndarray
    requests: np.ndarray
    rows: int
    longest: int
    shared: bool
    fresh: bool

    def on_device(self, pieces: Tensor, requests: Tensor, runs: tuple[DenseRun, ...] = ()) -> GatherPlan:
        """The plan, its arrays uploaded."""
        return GatherPlan(pieces, requests, self.rows, self.longest, runs, self.shared, self.fresh)


_DENSE_STEP = 1024  # lengths of dense attention: libraries prepare each anew, so there should be few
_DENSE_WASTE = 1.07  # at most so much longer than the prompt
_QUERY_TILE, _TILE_WASTE = 128, 1.25  # queries a program of the gathered form takes, and how few of them may be padding
GATHERED_ABOVE = 16  # queries; requests with at most so many keep to the paged kernels


def plan_gathering(query_lens: np.ndarray, seq_lens: np.ndarray, groups: Sequence[Group] = ()) -> Gathering | None:
    """What to gather for a batch, or None if it does not gain. groups: requests with cached keys in common.

    A batch with much more cached than new does not gain, unless most of what is cached is common.
    """
    long: np.ndarray = query_lens > GATHERED_ABOVE
    common: np.ndarray = np.where(long, 0, -1).astype(np.int32)
    for group in groups:
        common[group.rows] = np.where(long[group.rows], group.keys, -1)
    own = np.where(long, seq_lens - common, 0)
    own_rows = int(own.sum())
    rows = own_rows + sum(group.keys for group in groups)
    if own_rows == 0 or rows > 4 * int(query_lens.sum()):
        return None
    padded = (-(-query_lens[long] // _QUERY_TILE) * _QUERY_TILE).sum()
    if int(query_lens.max()) < 256 and not (groups and padded <= _TILE_WASTE * query_lens[long].sum()):
        return None
    index = np.flatnonzero(long)
    first_rows = np.cumsum(own[index]) - own[index]
    requests: np.ndarray = np.stack([np.zeros_like(common), common, np.zeros_like(common)], 1)
    requests[index, 0] = first_rows - common[index]
    pieces = [np.stack([index, common[index], own[index], first_rows], 1)]
    row = own_rows
    for group in groups:
        requests[group.rows, 2] = row
        pieces.append(np.array([[group.rows[0], 0, group.keys, row]]))
        row += group.keys
    table = np.concatenate(pieces).astype(np.int32)
    fresh = not groups and bool((query_lens[long] == seq_lens[long]).all())
    return Gathering(table, requests, rows, int(table[:, 2].max()), bool(groups), fresh)


def dense_runs(query_lens: np.ndarray, seq_lens: np.ndarray) -> tuple[DenseRun, ...]:
    """The gathered requests as runs of 8, 4, 2 or 1 equal prompts; empty unless all of them are long and fresh."""
    runs: list[DenseRun] = []
    token = row = r = 0
    while r < len(seq_lens):
        length = int(query_lens[r])
        if length <= GATHERED_ABOVE:
            token, r = token + length, r + 1
            continue
        padded = -(-length // _DENSE_STEP) * _DENSE_STEP
        if length != int(seq_lens[r]) or length < 1536 or padded > _DENSE_WASTE * length:
            return ()
        alike = (query_lens[r : r + 8] == length) & (seq_lens[r : r + 8] == length)
        count = len(alike) if alike.all() else int(alike.argmin())
        count = 1 if padded != length else 1 << (count.bit_length() - 1)
        runs.append(DenseRun(token, row, count, length, padded))
        token, row, r = token + count * length, row + count * length, r + count
    return tuple(runs)


class HostBatch(msgspec.Struct, frozen=True):
    """What an attention backend may know of a step before anything is uploaded.

    query_lens, cached, seq_lens: [requests] int32, tokens of each request in this step, before it, and together.
        Where steps overlap, `cached` and `seq_lens` may be upper bounds.
    slots: [requests] int32.   tables: per KV group [slots, blocks], the blocks of every slot.
    device: where the step runs.
    """

    query_lens: np.ndarray
    cached: np.ndarray
    seq_lens: np.ndarray
    slots: np.ndarray
    tables: Sequence[np.ndarray]
    block_size: int
    device: torch.device


class Planned(NamedTuple):
    """A backend's plan of a batch: `arrays` to upload together with the step's own, and what makes of them, once they
    are on the device, each group's `GroupInputs.plan`.
    """

    arrays: Sequence[np.ndarray]
    make: Callable[[Sequence[Tensor]], Sequence[Any]]


@op
def plan_batch(batch: HostBatch) -> Planned | None:
    """The plan of the backend that does attention on the batch's device; None where it has none to make."""
    return None


def plan_gathered(batch: HostBatch) -> Planned | None:
    """`plan_batch` of kernels that read a `GatherPlan`: the step's long queries gather; with one KV group it is also
    found out which of them share cached keys.
    """
    long: np.ndarray = np.flatnonzero(batch.query_lens > GATHERED_ABOVE)
    if not len(long):
        return None
    groups: list[Group] = []
    if len(batch.tables) == 1:
        found = find_groups(batch.tables[0], batch.slots[long], batch.cached[long], batch.block_size, members=len(long))
        groups = [Group(long[group.rows], group.keys) for group in found]
    gathered = plan_gathering(batch.query_lens, batch.seq_lens, groups)
    if gathered is None:
        return None
    runs = () if gathered.shared else dense_runs(batch.query_lens, batch.seq_lens)
    count = len(batch.tables)
    return Planned(
        [gathered.pieces, gathered.requests],
        lambda device: (gathered.on_device(device[0], device[1], runs),) * count,
    )


def to_cache_dtype(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale in the cache's dtype; float8 saturates at its largest finite value, for want of an infinity."""
    if not dtype.is_floating_point or dtype.itemsize > 1:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


@op
def write_kv(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Store keys and values of the step's tokens; the scales matter to a float8 cache only.

    k, v: [tokens, kv_heads, head_dim]; kv_cache: [blocks, 2, kv_heads, block_size, head_dim], keys and
    then values in every block; slot_mapping: [tokens] int64.
    """
    block_size = kv_cache.shape[3]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[:, 0][block, :, offset] = to_cache_dtype(k, k_scale, kv_cache.dtype)
    kv_cache[:, 1][block, :, offset] = to_cache_dtype(v, v_scale, kv_cache.dtype)


@op
def attend(
    q: Tensor,
    kv_cache: Tensor,
    params: AttentionParams,
    step: StepInputs,
    group: GroupInputs,
    own: OwnKV | None = None,
) -> Tensor:
    """Causal attention of every request's new tokens over its cached tokens (the step's own included, already written).

    q: [tokens, heads, head_dim]; kv_cache: [blocks, 2, kv_heads, block_size, head_dim] -> [tokens, heads, head_dim].
    own: keys and values of the step's tokens, which a kernel may read in place of the same numbers in the cache.
    Token t of request r sits at position seq_len - query_len + t and sees positions p with 0 <= position - p < window.
    Query head h reads kv head h // (heads / kv_heads). Tokens behind the last request's are nobody's; zeros for them.
    """
    starts, lens = step.host_query_starts, step.host_seq_lens
    out = torch.empty_like(q) if starts[-1] == len(q) else torch.zeros_like(q)
    query_lens = starts[1:] - starts[:-1]
    single = np.flatnonzero(query_lens == 1)
    if len(single) > 1:
        rows = torch.from_numpy(starts[single].astype(np.int64)).to(q.device)
        requests = torch.from_numpy(single).to(q.device)
        seq_lens = torch.from_numpy(lens[single].astype(np.int64)).to(q.device)
        blocks = -(-int(lens[single].max()) // kv_cache.shape[3])
        out[rows] = _attend_single(q[rows], kv_cache, params, group.block_table[requests, :blocks].long(), seq_lens)
    for r in np.flatnonzero(query_lens > (1 if len(single) > 1 else 0)):
        lo, hi = int(starts[r]), int(starts[r + 1])
        out[lo:hi] = _attend_request(q[lo:hi], kv_cache, params, group.block_table[r], int(lens[r]))
    return out


def _attend_single(q: Tensor, kv_cache: Tensor, params: AttentionParams, table: Tensor, seq_lens: Tensor) -> Tensor:
    """One new token per request, all requests at once, padded to the longest.

    q: [requests, heads, head_dim]; table: [requests, blocks]; seq_lens: [requests] -> [requests, heads, head_dim].
    """
    requests, heads, head_dim = q.shape
    kv_heads = kv_cache.shape[2]
    # [requests, kv_heads, keys, head_dim]
    k = kv_cache[:, 0][table].transpose(1, 2).reshape(requests, kv_heads, -1, head_dim).float() * params.k_scale
    v = kv_cache[:, 1][table].transpose(1, 2).reshape(requests, kv_heads, -1, head_dim).float() * params.v_scale
    q_pos, k_pos = seq_lens[:, None] - 1, torch.arange(k.shape[2], device=q.device)[None]
    hidden = _out_of_reach(q_pos, k_pos, params)
    # unwritten cache may hold anything, NaN included, and 0 * NaN is NaN
    v = v.masked_fill(hidden[:, None, :, None], 0.0)
    scores = torch.matmul(q.float().view(requests, kv_heads, -1, head_dim), k.transpose(2, 3))
    scores = scores.view(requests, heads, 1, -1) * params.scale
    scores = _cap_and_bias(scores, params, q_pos[:, None, None], k_pos)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if params.sparse is not None:
        left_out = _left_out(q_pos[:, None, :, None], k_pos, params.sparse, params.sparse.heads[:, None, None])
        scores = scores.masked_fill(left_out, float("-inf"))
    probs = _softmax(scores, params)
    out = torch.matmul(probs.view(requests, kv_heads, -1, probs.shape[-1]), v)
    return out.view(requests, heads, head_dim).to(q.dtype)


def _attend_request(q: Tensor, kv_cache: Tensor, params: AttentionParams, table: Tensor, seq_len: int) -> Tensor:
    """The new tokens of one request. q: [m, heads, head_dim]; table: [max_blocks] -> [m, heads, head_dim]."""
    m, heads, head_dim = q.shape
    kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    first = 0 if params.window is None else max(0, seq_len - m - params.window + 1) // block_size
    if params.chunk is not None:
        first = max(first, (seq_len - m) // params.chunk * params.chunk // block_size)
    table = table[first : -(-seq_len // block_size)].long()
    keys = seq_len - first * block_size
    # [kv_heads, keys, head_dim]
    k = kv_cache[:, 0][table].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :keys].float() * params.k_scale
    v = kv_cache[:, 1][table].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :keys].float() * params.v_scale
    # the query heads of one kv head are extra rows: [kv_heads, group * m, head_dim]
    rows = q.float().transpose(0, 1).reshape(kv_heads, -1, head_dim)
    q_pos = torch.arange(seq_len - m, seq_len, device=q.device)[:, None]
    k_pos = torch.arange(first * block_size, seq_len, device=q.device)[None]
    scores = torch.matmul(rows, k.transpose(1, 2)).view(heads, m, -1) * params.scale
    scores = _cap_and_bias(scores, params, q_pos, k_pos)
    scores = scores.masked_fill(_out_of_reach(q_pos, k_pos, params), float("-inf"))
    if params.sparse is not None:
        left_out = _left_out(q_pos, k_pos, params.sparse, params.sparse.heads[:, None, None])
        scores = scores.masked_fill(left_out, float("-inf"))
    probs = _softmax(scores, params)
    out = torch.matmul(probs.view(kv_heads, -1, keys), v).view(heads, m, head_dim)
    return out.transpose(0, 1).to(q.dtype)


def _out_of_reach(q_pos: Tensor, k_pos: Tensor, params: AttentionParams) -> Tensor:
    """Whether a query's window, or chunk, or the order of tokens hides a key; what stands there need not be finite."""
    hidden = k_pos > q_pos
    if params.window is not None:
        hidden = hidden | (q_pos - k_pos >= params.window)
    if params.chunk is not None:
        hidden = hidden | (k_pos < q_pos // params.chunk * params.chunk)
    return hidden


def _left_out(q_pos: Tensor, k_pos: Tensor, sparse: SparseBlocks, heads: Tensor) -> Tensor:
    """Whether a head skips a key."""
    k_block = k_pos // sparse.block
    return (q_pos // sparse.block - k_block >= sparse.local) & ((k_block + heads + 1) % sparse.stride != 0)


def _softmax(scores: Tensor, params: AttentionParams) -> Tensor:
    """scores: [..., heads, m, keys]."""
    if params.sinks is None:
        return scores.softmax(-1)
    sinks = params.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def _cap_and_bias(scores: Tensor, params: AttentionParams, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Soft-cap, then ALiBi. scores: [..., heads, m, keys]; the positions of queries [..., m, 1] and keys [1, keys]."""
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if params.alibi_slopes is not None:
        offset = k_pos - q_pos
        if params.alibi_known is not None:
            offset = offset * (params.alibi_known / (q_pos + 1)).clamp(max=1.0)
        scores = scores + params.alibi_slopes.float()[:, None, None] * offset
    return scores


@op
def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks within one cache tensor (copy-on-write). src, dst: [n] int64 block ids, disjoint."""
    kv_cache[dst] = kv_cache[src]
