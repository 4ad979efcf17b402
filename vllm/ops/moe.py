"""Mixture of experts: choosing experts for each token, and the experts' gated MLPs on their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.ops.activation import activate, activate_gated
from vllm.ops.lora import LowRank, add_lora
from vllm.ops.registry import op
from vllm.step.inputs import RowView


@op
def route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token and their weights: softmax in fp32 over all experts, then the largest.

    router_logits: [tokens, experts] -> (weights [tokens, top_k] fp32, experts [tokens, top_k] int64).
    renormalize: the chosen weights are divided by their sum.
    """
    weights, experts = router_logits.float().softmax(-1).topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen by their scores, and weighted.

    score: "softmax" over all experts, or each one's "sigmoid".   renormalize: the chosen weights sum to 1.
    scale: of the weights, behind that.
    groups: experts stand in so many equal groups, of which the `top_groups` best may be chosen from; a group is as good
    as the sum of its `group_best` best experts.
    """

    top_k: int
    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1


@op
def route_by_score(router_logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, in fp32. Shapes as of `route`.

    bias: [experts] fp32, added to the scores by which groups and experts are chosen, but not to the weights.
    """
    logits = router_logits.float()
    scores = logits.softmax(-1) if choice.score == "softmax" else logits.sigmoid()
    rank = scores if bias is None else scores + bias.float()
    if choice.groups > 1:
        by_group = rank.unflatten(-1, (choice.groups, -1))
        best = by_group.topk(choice.group_best, -1).values.sum(-1).topk(choice.top_groups, -1).indices
        kept = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=rank.device).scatter_(-1, best, True)
        rank = by_group.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    experts = rank.topk(choice.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if choice.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * choice.scale, experts


@op
def route_sparse(router_logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token, chosen one after the other (SparseMixer, arXiv 2409.12136, as at inference).

    Each is the best one left; its weight is its share in the softmax over those that are left and not further below it
    than 2 * jitter times the larger of its logit and their own size. Shapes as of `route`.
    """
    logits = router_logits.float()
    left, weights, experts = logits, [], []
    for _ in range(top_k):
        best, chosen = left.max(-1, keepdim=True)
        near = (best - logits) / torch.maximum(logits.abs(), best) <= 2 * jitter
        weights.append(left.masked_fill(~near, float("-inf")).softmax(-1).gather(-1, chosen))
        experts.append(chosen)
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(weights, -1), torch.cat(experts, -1)


@dataclass(frozen=True, slots=True)
class ExpertExtras:
    """What some experts have beyond their weights.

    gate_up_bias: [experts, 2 * inter].   down_bias: [experts, hidden].   limit: as of `activate_gated`.
    gated: if not, experts are down(act(up x)), and `up` [experts, inter, hidden] stands where `gate_up` does.
    """

    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float | None = None
    gated: bool = True

    def activated(self, h: Tensor, act: str) -> Tensor:
        """What `down` takes in, of the first product."""
        out: Tensor = activate_gated(h, act, self.limit) if self.gated else activate(h, act)
        return out


NO_EXTRAS = ExpertExtras()


@op
def expert_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    act: str,
    extras: ExpertExtras = NO_EXTRAS,
) -> Tensor:
    """Each token's weighted sum of its experts' outputs, down(act(gate x) * up x).

    x: [tokens, hidden]; weights, experts: [tokens, top_k] as `route` gives them; gate_up: [experts, 2 * inter, hidden],
    gate rows first; down: [experts, hidden, inter]; act: as in `ops.activation` -> [tokens, hidden].
    A choice of expert number `len(gate_up)` is another rank's: its weight must be 0, and it adds nothing.
    """
    order, tokens, counts = _by_expert(experts, gate_up.shape[0])
    outputs = []
    for expert, rows in enumerate(x[tokens].split(counts.tolist())):
        if len(rows):
            h = rows @ gate_up[expert].T
            if extras.gate_up_bias is not None:
                h = h + extras.gate_up_bias[expert]
            y = extras.activated(h, act) @ down[expert].T
            outputs.append(y if extras.down_bias is None else y + extras.down_bias[expert])
    return _weighted_sum(x, torch.cat(outputs) if outputs else x[:0], weights, order, tokens)


def expert_mlp_lora(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    act: str,
    extras: ExpertExtras,
    changes: Sequence[tuple[LowRank, LowRank]],
    adapters: Tensor,
) -> Tensor:
    """`expert_mlp` with what adapters add to each expert's products. The host learns how the tokens are dealt.

    changes: of each expert, to gate and up, and to down.   adapters: [tokens] int32, the slot of each token's adapter,
    -1 for none.
    """
    order, tokens, counts = _by_expert(experts, gate_up.shape[0])
    outputs = []
    for expert, rows in enumerate(tokens.split(counts.tolist())):
        if not len(rows):
            continue
        inner, outer = changes[expert]
        own, view = x[rows], RowView(adapters[rows], ())
        h = own @ gate_up[expert].T
        if extras.gate_up_bias is not None:
            h = h + extras.gate_up_bias[expert]
        add_lora(h, own, inner, view)
        activated = extras.activated(h, act)
        y = activated @ down[expert].T
        add_lora(y, activated, outer, view)
        outputs.append(y if extras.down_bias is None else y + extras.down_bias[expert])
    return _weighted_sum(x, torch.cat(outputs) if outputs else x[:0], weights, order, tokens)


def _by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, tokens, counts): the (token, choice) pairs sorted by expert, their tokens, and pairs for each expert."""
    pairs = experts.flatten()
    order = pairs.argsort(stable=True)
    counts = (pairs[:, None] == torch.arange(num_experts, device=pairs.device)).sum(0)
    order = order[: int(counts.sum())]  # the last ones are other ranks'
    return order, order // experts.shape[1], counts


def _weighted_sum(x: Tensor, outputs: Tensor, weights: Tensor, order: Tensor, tokens: Tensor) -> Tensor:
    """Add up each token's outputs, which stand in `order`, in fp32."""
    weighted = outputs.float() * weights.flatten()[order, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, tokens, weighted).to(x.dtype)
