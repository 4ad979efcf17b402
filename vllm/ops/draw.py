"""Temperature, min-p, top-k, top-p and the draw: one uniform per row, inverted through the CDF in vocabulary order.

Probability mass is counted in integers (multiples of 2**-40 of the most likely token). Integer sums do not depend on
the order of additions, so that a row's token is the same bit for bit alone, in any batch, with any number of threads
and along each of the paths below.

The filters, in order, each on what the one before left:
  min_p   keeps tokens with at least `min_p` times the probability of the most likely one.
  top_k   keeps the first k in the order (logit descending, id ascending): exactly k, ties go to the lower id.
  top_p   keeps the shortest prefix of the same order whose mass is at least `top_p` of what is left; never empty.
So `top_k=1` and a tiny `top_p` are greedy decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.ops.greedy import finite_rows
from vllm.ops.registry import op

_UNIT = float(2**40)  # mass of the most likely token
_CANDIDATES = 1024  # a nucleus up to this size is found without looking at the order of the whole row
_BUCKETS_PER_NAT = 16.0
_BUCKETS = 512  # reach beyond exp(-27.7), below which a token's mass is 0
_CPU_CHUNK = 1 << 18  # logits handled at once: temporaries stay in the cache
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class DrawParams:
    """One entry per row. top_k: 0 for off; top_p: 1 for off; min_p: 0 for off; uniform: [0, 1).

    The host's copies of top_k and top_p choose the path without asking the device.
    """

    temperature: Tensor  # [rows] fp32, > 0
    min_p: Tensor  # [rows] fp32
    top_k: Tensor  # [rows] int32
    top_p: Tensor  # [rows] fp32
    uniform: Tensor  # [rows] fp32
    host_top_k: np.ndarray
    host_top_p: np.ndarray

    def take(self, rows: np.ndarray) -> DrawParams:
        """The parameters of some rows. rows: [n] int64."""
        index = torch.from_numpy(rows).to(self.temperature.device)
        return DrawParams(
            self.temperature[index],
            self.min_p[index],
            self.top_k[index],
            self.top_p[index],
            self.uniform[index],
            self.host_top_k[rows],
            self.host_top_p[rows],
        )


@op
def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """Draw one token per row. logits: [rows, vocab] fp32, not changed; a finite maximum in each row -> [rows] int64.

    Rows without a finite maximum give some id below `vocab`.
    """
    rows, vocab = logits.shape
    step = max(1, (_CPU_CHUNK if logits.device.type == "cpu" else _CHUNK) // vocab)
    filtered = ((params.host_top_k > 0) & (params.host_top_k < vocab)) | (params.host_top_p < 1.0)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    for kind in (False, True):
        members = np.flatnonzero(filtered == kind)
        for start in range(0, len(members), step):
            chunk = members[start : start + step]
            p = params if len(chunk) == rows else params.take(chunk)
            index = torch.from_numpy(chunk).to(logits.device)
            x = (logits if len(chunk) == rows else logits[index]) / p.temperature[:, None]
            if kind:
                out[index] = _draw_from_candidates(x, p)
            else:
                out[index] = _invert(_masses(x, x.amax(-1, keepdim=True), p.min_p[:, None]), p.uniform)
    return out.clamp_(0, vocab - 1)


@op
def draw_and_finite(logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """`draw` and `finite_rows` of the same logits; a kernel may read them once for both."""
    return draw(logits, params), finite_rows(logits)


def mass(x: Tensor, peak: Tensor) -> Tensor:
    """exp(x - peak) in units of 2**-40, rounded down, as int64. x: [rows, n]; peak: [rows, 1], at least every x."""
    return (torch.exp(x - peak) * _UNIT).to(torch.int64)


def _masses(x: Tensor, peak: Tensor, min_p: Tensor) -> Tensor:
    w = torch.exp(x - peak)
    return torch.where(w >= min_p, w * _UNIT, 0.0).to(torch.int64)


def _invert(masses: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the running sum exceeds `uniform` times the total. masses: [rows, n] int64 -> [rows]."""
    cdf = masses.cumsum(-1)
    total = cdf[:, -1]
    target = torch.minimum((uniform.double() * total.double()).long(), total - 1)
    return torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)


def _needed(kept: Tensor, top_p: Tensor) -> Tensor:
    """The mass that a nucleus must reach, of `kept` [rows] int64; at least 1 unit, so that it is never empty."""
    share = (top_p.double() * kept.double()).ceil().long()
    return torch.minimum(share, kept).clamp_(min=1)


def _draw_from_candidates(x: Tensor, p: DrawParams) -> Tensor:
    """Sort only the largest logits of a row; rows whose nucleus may reach beyond them are done again."""
    vocab = x.shape[1]
    unlimited = (p.host_top_k <= 0) | (p.host_top_k > _CANDIDATES)
    count = min(vocab, _CANDIDATES if unlimited.any() else int(p.host_top_k.max()) + 1)
    values, ids = x.topk(count, -1)  # values descending; the order of ties does not matter to sums of their masses
    peak = values[:, :1]
    masses = _masses(values, peak, p.min_p[:, None])
    sums = masses.cumsum(-1)
    limit = torch.where(p.top_k > 0, p.top_k, count).long().clamp_(max=count)
    kept = sums.gather(1, limit[:, None] - 1).squeeze(-1)
    if unlimited.any():
        total = _masses(x, peak, p.min_p[:, None]).sum(-1)
        kept = torch.where(torch.from_numpy(unlimited & (p.host_top_k <= 0)), total, kept)
    needed = _needed(kept, p.top_p)
    last = torch.searchsorted(sums, needed[:, None]).clamp_(max=count - 1)  # the prefix ends here
    edge = values.gather(1, last)
    outside = (edge.squeeze(-1) <= values[:, -1]) | (sums[:, -1] < needed)
    if count == vocab:
        outside = torch.zeros_like(outside)
    elif unlimited.any():  # a top_k beyond the candidates leaves `kept` unknown
        outside |= torch.from_numpy(p.host_top_k > _CANDIDATES)
    ties_kept = last + 1 - (values > edge).sum(-1, keepdim=True)
    ids, order = ids.sort(-1)
    masses, values = masses.gather(1, order), values.gather(1, order)
    tie = values == edge
    keep = (values > edge) | (tie & (tie.cumsum(-1) <= ties_kept))
    found = ids.gather(1, _invert(masses.masked_fill_(~keep, 0), p.uniform)[:, None].clamp_(0, count - 1)).squeeze(-1)
    for i in outside.nonzero().flatten().tolist():
        found[i] = _draw_from_row(x[i], int(p.host_top_k[i]), float(p.host_top_p[i]), p.min_p[i], p.uniform[i : i + 1])
    return found


def _draw_from_row(x: Tensor, top_k: int, top_p: float, min_p: Tensor, uniform: Tensor) -> Tensor:
    """The draw from one row, however many tokens are kept; only tokens near a cut are sorted. x: [vocab] -> scalar."""
    peak = x.amax()
    if not torch.isfinite(peak):
        return torch.zeros((), dtype=torch.int64, device=x.device)
    masses = _masses(x[None], peak, min_p)[0]
    # Tokens of a bucket are all less likely than those of the buckets before; those without mass are in the last.
    bucket = ((peak - x) * _BUCKETS_PER_NAT).clamp_(max=_BUCKETS - 1).to(torch.int64)
    if 0 < top_k < len(x):
        masses = torch.where(_prefix(x, bucket, torch.ones_like(masses), masses.new_tensor(top_k)), masses, 0)
    if top_p < 1.0:
        needed = _needed(masses.sum()[None], torch.tensor([top_p], device=x.device))[0]
        masses = torch.where(_prefix(x, bucket, masses, needed), masses, 0)
    return _invert(masses[None], uniform)[0]


def _prefix(x: Tensor, bucket: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    """The shortest prefix, in the order (logit descending, id ascending), whose weights sum up to `needed` or more.

    x, bucket, weights: [n]; needed: scalar, at least 1 and at most the sum of all weights -> [n] bool.
    """
    sums = weights.new_zeros(_BUCKETS).scatter_add_(0, bucket, weights).cumsum(0)
    last = torch.searchsorted(sums, needed)  # the prefix ends in this bucket
    before = torch.where(last > 0, sums[last - 1], 0)
    members = (bucket == last).nonzero().squeeze(-1)
    members = members[x[members].sort(descending=True, stable=True).indices]
    count = torch.searchsorted(before + weights[members].cumsum(0), needed) + 1
    keep = bucket < last
    keep[members[:count]] = True
    return keep
