"""Logprobs of raw logits: the chosen token's, its rank, and the most likely ones.

Raw: as the model gave them, before temperature, penalties, masks and processors.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.ops.draw import mass
from vllm.ops.registry import op
from vllm.step.result import TokenLogprobs

_CPU_CHUNK = 1 << 18
_CHUNK = 1 << 24
_SPARE = 16  # more candidates than asked for, so that ties at the end are broken by id and not by chance


@op
def top_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row the given token and the `count` most likely ones (-1: all of the vocabulary).

    logits: [rows, vocab] fp32; token_ids: [rows] int64 -> (ids [rows, 1 + count] int64, logprobs fp32 alike, ranks
        [rows]). Column 0 is the given token; rank 1 is the most likely; a token's rank is 1 + the number of more likely
        ones.
    """
    vocab = logits.shape[1]
    count = vocab if count < 0 else min(count, vocab)
    step = max(1, (_CPU_CHUNK if logits.device.type == "cpu" else _CHUNK) // vocab)
    parts = [
        _top_logprobs(logits[i : i + step], token_ids[i : i + step, None], count) for i in range(0, len(logits), step)
    ]
    if len(parts) == 1:
        return parts[0]
    ids, logprobs, ranks = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(ranks)


def _top_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    peak = logits.amax(-1, keepdim=True)
    norm = peak.double() + torch.log(mass(logits, peak).sum(-1, keepdim=True).double() * 2.0**-40)
    own = logits.gather(1, token_ids)
    ranks = (logits > own).sum(-1) + 1
    if count == 0:
        return token_ids, (own - norm).float(), ranks
    values, ids = _largest(logits, count)
    return torch.cat((token_ids, ids), -1), (torch.cat((own, values), -1) - norm).float(), ranks


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row in the order (logit descending, id ascending)."""
    candidates = count + _SPARE
    if candidates >= logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    values, ids = logits.topk(candidates, -1)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order)[:, :count]


def to_messages(ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> list[TokenLogprobs]:
    """Rows of `top_logprobs`, on the host, as messages."""
    return [TokenLogprobs(i, p, r) for i, p, r in zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)]
