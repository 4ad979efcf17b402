"""Mixture of experts: choosing experts for each token, and the experts' gated MLPs on their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.activation import activate_gated
from vllm.ops.registry import op


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


@op
def expert_mlp(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, act: str) -> Tensor:
    """Each token's weighted sum of its experts' outputs, down(act(gate x) * up x).

    x: [tokens, hidden]; weights, experts: [tokens, top_k] as `route` gives them; gate_up: [experts, 2 * inter, hidden],
    gate rows first; down: [experts, hidden, inter]; act: as in `ops.activation` -> [tokens, hidden].
    """
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # (token, choice) pairs, grouped by expert
    tokens = order // top_k
    counts = experts.flatten().bincount(minlength=gate_up.shape[0]).tolist()
    outputs = []
    for expert, rows in enumerate(x[tokens].split(counts)):
        if len(rows):
            h = activate_gated(rows @ gate_up[expert].T, act)
            outputs.append(h @ down[expert].T)
    if not outputs:
        return torch.zeros_like(x)
    weighted = torch.cat(outputs).float() * weights.flatten()[order, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, tokens, weighted).to(x.dtype)
