"""Mixtures of experts for models from outside the tree: the layer, and the functions beneath it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel, current_tensor_parallel
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec, load_weight
from vllm.ops.moe import Choice, expert_mlp, route, route_by_score

__all__ = ["FusedMoE", "fused_experts", "fused_moe", "fused_topk", "grouped_topk"]


def fused_topk(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `topk` experts of each token by softmax. gating_output: [tokens, experts] -> (weights fp32, experts int32),
    both [tokens, topk].
    """
    weights, experts = route(gating_output, topk, renormalize)
    return weights, experts.to(torch.int32)


def grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
) -> tuple[Tensor, Tensor]:
    """As `fused_topk`, out of the `topk_group` best of `num_expert_group` equal groups of experts, where a group is as
    good as its best expert.
    """
    groups = max(1, num_expert_group)
    choice = Choice(topk, renormalize=renormalize, groups=groups, top_groups=topk_group or groups)
    weights, experts = route_by_score(gating_output, None, choice)
    return weights, experts.to(torch.int32)


def fused_experts(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, inplace: bool = False
) -> Tensor:
    """Each token's weighted sum of its experts' gated MLPs with SiLU.

    hidden_states: [tokens, hidden]; w1: [experts, 2 * inter, hidden], gate rows first; w2: [experts, hidden, inter];
    topk_weights, topk_ids: [tokens, topk] -> [tokens, hidden].   inplace: write the result to `hidden_states`.
    """
    out: Tensor = expert_mlp(hidden_states, topk_weights, topk_ids.long(), w1, w2, "silu")
    return hidden_states.copy_(out) if inplace else out


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    inplace: bool = False,
    use_grouped_topk: bool = False,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
) -> Tensor:
    """`fused_topk` or `grouped_topk`, and then `fused_experts`."""
    if use_grouped_topk:
        if num_expert_group is None or topk_group is None:
            raise ValueError("use_grouped_topk needs num_expert_group and topk_group.")
        weights, ids = grouped_topk(hidden_states, gating_output, topk, renormalize, num_expert_group, topk_group)
    else:
        weights, ids = fused_topk(hidden_states, gating_output, topk, renormalize)
    return fused_experts(hidden_states, w1, w2, weights, ids, inplace)


class FusedMoE(nn.Module):
    """Experts whose inner width is dealt to ranks: `w13_weight` [experts, 2 * inter, hidden] (gate rows first) and
    `w2_weight` [experts, hidden, inter] of this rank.

    reduce_results: sum over ranks (else the caller does).   tp_size: must be that of the model, if it is given.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(
                "FusedMoE of a model from outside the tree cannot be quantized: quant_config must be None."
            )
        if use_grouped_topk and (num_expert_group is None or topk_group is None):
            raise ValueError("use_grouped_topk needs num_expert_group and topk_group.")
        self.tp: TensorParallel = current_tensor_parallel()
        if tp_size not in (None, self.tp.world):
            raise ValueError(f"tp_size={tp_size}, but {self.tp.world} ranks share the model.")
        self.num_experts, self.top_k, self.prefix = num_experts, top_k, prefix
        self.reduce_results, self.renormalize = reduce_results, renormalize
        self.use_grouped_topk, self.num_expert_group, self.topk_group = use_grouped_topk, num_expert_group, topk_group
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        inner = Part(intermediate_size, intermediate_size)
        halves = tuple(Part(intermediate_size, intermediate_size, name) for name in ("w1", "w3"))
        rank = (self.tp.rank, self.tp.world, dtype)
        self.w13_weight = ShardedParameter.empty(
            (num_experts, 2 * intermediate_size, hidden_size), ShardSpec(1, halves, stack=1), *rank
        )
        self.w2_weight = ShardedParameter.empty(
            (num_experts, hidden_size, intermediate_size), ShardSpec(2, (inner,), stack=1), *rank
        )
        for parameter in (self.w13_weight, self.w2_weight):
            parameter.weight_loader = self.weight_loader  # type: ignore[assignment, method-assign]

    def weight_loader(
        self, param: ShardedParameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        """Take one expert's full matrix of a checkpoint: shard_id "w1" (gate), "w3" (up) or "w2" (down)."""
        if shard_id not in ("w1", "w2", "w3"):
            raise ValueError(f"{weight_name}: shard_id must be w1, w2 or w3, got {shard_id!r}.")
        load_weight(param, loaded_weight, None if shard_id == "w2" else shard_id, expert_id)

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """[tokens, hidden], [tokens, experts] -> [tokens, hidden]."""
        out = fused_moe(
            hidden_states, self.w13_weight, self.w2_weight, router_logits, self.top_k, self.renormalize,
            use_grouped_topk=self.use_grouped_topk, num_expert_group=self.num_expert_group, topk_group=self.topk_group,
        )  # fmt: skip
        return self.tp.all_reduce(out) if self.reduce_results else out

    @staticmethod
    def make_expert_params_mapping(
        ckpt_gate_proj_name: str, ckpt_down_proj_name: str, ckpt_up_proj_name: str, num_experts: int
    ) -> list[tuple[str, str, int, str]]:
        """(part of the parameter's name, part of the checkpoint's name, expert, shard id) of every expert's matrix."""
        names = {"w1": ckpt_gate_proj_name, "w2": ckpt_down_proj_name, "w3": ckpt_up_proj_name}
        return [
            (f"experts.{'w2' if shard == 'w2' else 'w13'}_", f"experts.{expert}.{name}.", expert, shard)
            for expert in range(num_experts)
            for shard, name in names.items()
        ]
