"""What a row may say: allowed ids, biases, forbidden words, and no stop token before `min_tokens`.

All are lists of (row, id) pairs, so that rows without them cost nothing and no mask of the vocabulary's width is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Constraints:
    """One request's constraints.

    A bad word of several tokens forbids its last one where the output ends with the others: prefixes: [words, longest]
    int32, right-aligned; prefix_len, last_ids: [words].
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
        bias = {int(i): value for i, value in (params.logit_bias or {}).items() if 0 <= int(i) < vocab}
        words = [w for w in params.bad_words_token_ids or [] if w and min(w) >= 0 and max(w) < vocab]
        allowed = params.allowed_token_ids
        if allowed is None and not bias and not words:
            return None
        long = [w for w in words if len(w) > 1]
        width = max((len(w) - 1 for w in long), default=0)
        prefixes: np.ndarray = np.full((len(long), width), _ANY, np.int32)
        for i, word in enumerate(long):
            prefixes[i, width - len(word) + 1 :] = word[:-1]
        return cls(
            allowed=None if allowed is None else np.unique(np.array([i for i in allowed if 0 <= i < vocab], np.int64)),
            bias_ids=np.array(list(bias), np.int64),
            bias=np.array(list(bias.values()), np.float32),
            banned=np.unique(np.array([w[0] for w in words if len(w) == 1], np.int64)),
            prefixes=prefixes,
            prefix_len=np.array([len(w) - 1 for w in long], np.int64),
            last_ids=np.array([w[-1] for w in long], np.int64),
        )


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


def _flatten(pairs: list[tuple[int, np.ndarray]], vocab: int) -> np.ndarray:
    """Places of (row, ids) in the flattened logits."""
    places: np.ndarray = np.concatenate([int(row) * vocab + ids for row, ids in pairs])
    return places
