"""What a row may say: allowed ids, biases, forbidden words, and no stop token before `min_tokens`.

All are lists of (row, id) pairs, so that rows without them cost nothing and no mask of the vocabulary's width is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm.worker.device import DeviceContext
from vllm.worker.slot_table import SlotTable

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

_ANY = -1  # in a bad word's prefix: padding that matches everything
NEVER = float("-inf")
# Beyond so many bad words in a step, comparing all of them takes longer than waiting for the newest tokens, which tell
# the few that can match.
MANY_WORDS = 4096


@dataclass(frozen=True, slots=True)
class Constraints:
    """One request's constraints.

    A bad word of several tokens forbids its last one where the output ends with the others: prefixes: [words, longest]
    int32, right-aligned, ordered by the last of each; prefix_len, last_ids: [words].
    """

    allowed: np.ndarray | None
    bias_ids: np.ndarray
    bias: np.ndarray
    banned: np.ndarray
    prefixes: np.ndarray
    prefix_len: np.ndarray
    last_ids: np.ndarray

    @classmethod
    def of(cls, params: SamplingParams, vocab: int) -> Constraints | None:
        """The constraints in `params`, None if there are none.

        Ids are below `vocab` when they come here; any other would reach into the next row, and is dropped.
        """
        bias, words, allowed = params.logit_bias or {}, params.bad_words_token_ids or [], params.allowed_token_ids
        if allowed is None and not bias and not words:
            return None
        bias_ids: np.ndarray = np.fromiter(map(int, bias), np.int64, len(bias))
        known = _below(bias_ids, vocab)
        sizes: np.ndarray = np.fromiter(map(len, words), np.int64, len(words))
        ids: np.ndarray = np.fromiter(chain.from_iterable(words), np.int64, int(sizes.sum()))
        ends = np.cumsum(sizes)
        usable = sizes > 0
        usable[np.repeat(np.arange(len(words)), sizes)[~_below(ids, vocab)]] = False
        ends, sizes = ends[usable], sizes[usable]
        single, long = sizes == 1, sizes > 1
        banned, last_ids = np.unique(ids[ends[single] - 1]), ids[ends[long] - 1]
        prefix_len = sizes[long] - 1
        width = int(prefix_len.max(initial=0))
        columns = np.arange(-width, 0)
        places = ends[long, None] - 1 + columns
        prefixes = np.where(columns >= -prefix_len[:, None], ids[np.maximum(places, 0)], _ANY).astype(np.int32)
        order = np.argsort(prefixes[:, -1], kind="stable") if width else slice(0)
        return cls(
            allowed=None if allowed is None else _distinct(allowed, vocab),
            bias_ids=bias_ids[known],
            bias=np.fromiter(bias.values(), np.float32, len(bias))[known],
            banned=banned,
            prefixes=prefixes[order],
            prefix_len=prefix_len[order],
            last_ids=last_ids[order],
        )

    def ended_by(self, recent: np.ndarray, output: int) -> np.ndarray:
        """Last ids of the words of several tokens whose others the output ends with. recent: its last tokens, at least
        as many as the longest prefix. output: how many tokens it has.
        """
        if not len(self.last_ids) or not output:
            return self.last_ids[:0]
        newest = self.prefixes[:, -1]
        which = slice(np.searchsorted(newest, recent[-1]), np.searchsorted(newest, recent[-1], "right"))
        prefixes = self.prefixes[which]
        equal = ((prefixes == recent[-prefixes.shape[1] :]) | (prefixes == _ANY)).all(-1)
        found: np.ndarray = self.last_ids[which][equal & (self.prefix_len[which] <= output)]
        return found


def apply_constraints(logits: Tensor, rows: np.ndarray, items: Sequence[Constraints], context: DeviceContext) -> None:
    """Allowed ids, biases, bad words of one token, in this order, in place. logits: [rows, vocab]; rows: of `items`."""
    vocab = logits.shape[1]
    flat = logits.view(-1)
    limited = [(r, c.allowed) for r, c in zip(rows, items, strict=True) if c.allowed is not None]
    if limited:
        places, which = context.upload([_flatten(limited, vocab), np.array([r for r, _ in limited], np.int64)])
        kept = flat[places]
        logits[which] = NEVER
        flat[places] = kept
    biased = [(r, c.bias_ids) for r, c in zip(rows, items, strict=True) if len(c.bias_ids)]
    if biased:
        places, values = context.upload(
            [_flatten(biased, vocab), np.concatenate([c.bias for c in items if len(c.bias_ids)])]
        )
        flat[places] += values
    banned = [(r, c.banned) for r, c in zip(rows, items, strict=True) if len(c.banned)]
    if banned:
        (places,) = context.upload([_flatten(banned, vocab)])
        flat[places] = NEVER


def forbid(logits: Tensor, pairs: list[tuple[int, np.ndarray]], context: DeviceContext) -> None:
    """Make ids impossible, in place. pairs: (row, ids)."""
    (places,) = context.upload([_flatten(pairs, logits.shape[1])])
    logits.view(-1)[places] = NEVER


def apply_bad_words(
    logits: Tensor,
    rows: np.ndarray,
    items: Sequence[Constraints],
    slots: np.ndarray,
    lengths: np.ndarray,
    table: SlotTable,
    context: DeviceContext,
) -> None:
    """Bad words of several tokens, in place. slots, lengths: of the rows in `items`.

    Reads the output from the device's table.
    """
    outputs = lengths - table.num_prompt[slots]
    if sum(len(c.last_ids) for c in items) > MANY_WORDS:
        _apply_many_bad_words(logits, rows, items, slots, lengths, table, context)
        return
    possible = [c.prefix_len <= n for c, n in zip(items, outputs, strict=True)]
    total = int(sum(p.sum() for p in possible))
    if not total:
        return
    width = max(c.prefixes.shape[1] for c in items)
    prefixes = np.full((total, width), _ANY, np.int32)
    owner: np.ndarray = np.repeat(np.arange(len(items)), [int(p.sum()) for p in possible])
    at = 0
    for c, p in zip(items, possible, strict=True):
        n = int(p.sum())
        prefixes[at : at + n, width - c.prefixes.shape[1] :] = c.prefixes[p]
        at += n
    last = np.concatenate([c.last_ids[p] for c, p in zip(items, possible, strict=True)])
    positions = np.maximum(lengths[owner, None] + np.arange(-width, 0), 0)
    where = table.token_index(slots[owner, None], positions)
    places = rows[owner].astype(np.int64) * logits.shape[1] + last
    d_where, d_prefixes, d_places = context.upload([where.reshape(-1), prefixes, places])
    recent = table.read_tokens(d_where).view(total, width)
    matches = ((recent == d_prefixes) | (d_prefixes == _ANY)).all(-1)
    # Added rather than assigned: two words may end in the same token, of which one matches.
    logits.view(-1).index_add_(0, d_places, torch.where(matches, NEVER, 0.0))


def _apply_many_bad_words(
    logits: Tensor,
    rows: np.ndarray,
    items: Sequence[Constraints],
    slots: np.ndarray,
    lengths: np.ndarray,
    table: SlotTable,
    context: DeviceContext,
) -> None:
    """As `apply_bad_words`; waits for the newest tokens."""
    width = max(c.prefixes.shape[1] for c in items)
    where = table.token_index(slots[:, None], np.maximum(lengths[:, None] + np.arange(-width, 0), 0))
    (d_where,) = context.upload([where.reshape(-1)])
    recent = table.read_tokens(d_where).cpu().numpy().reshape(len(items), width)
    outputs = (lengths - table.num_prompt[slots]).tolist()
    ended = [c.ended_by(tokens, n) for c, tokens, n in zip(items, recent, outputs, strict=True)]
    pairs = [(row, ids) for row, ids in zip(rows.tolist(), ended, strict=True) if len(ids)]
    if pairs:
        forbid(logits, pairs, context)


def _below(ids: np.ndarray, vocab: int) -> np.ndarray:
    """Which of the ids there are."""
    known: np.ndarray = (ids >= 0) & (ids < vocab)
    return known


def _distinct(ids: Sequence[int], vocab: int) -> np.ndarray:
    """Those that there are, each once, in order."""
    given: np.ndarray = np.array(ids, np.int64)
    found: np.ndarray = np.unique(given[_below(given, vocab)])
    return found


def _flatten(pairs: list[tuple[int, np.ndarray]], vocab: int) -> np.ndarray:
    """Places of (row, ids) in the flattened logits."""
    places: np.ndarray = np.concatenate([int(row) * vocab + ids for row, ids in pairs])
    return places
