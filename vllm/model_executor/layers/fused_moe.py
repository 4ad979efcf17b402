"""Mixtures of experts for models from outside the tree: the layer, and the functions beneath it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel, current_tensor_parallel
from vllm.model_executor.layers.activation import activation_kind
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec, load_weight
from vllm.ops.moe import NO_EXTRAS, Choice, ExpertExtras, expert_mlp, route, route_by_score

__all__ = ["FusedMoE", "SharedFusedMoE", "fused_experts", "fused_moe", "fused_topk", "grouped_topk"]

# What a model may choose experts with: (hidden states, router logits, top k, renormalize) -> (weights, experts).
Routing = Callable[..., tuple[Tensor, Tensor]]


def fused_topk(
    hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool, scoring_func: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """The `topk` experts of each token. gating_output: [tokens, experts] -> (weights fp32, experts int32), both
    [tokens, topk].   scoring_func: "softmax" over all experts, or each one's "sigmoid".
    """
    if _score(scoring_func) == "softmax":
        weights, experts = route(gating_output, topk, renormalize)
    else:
        weights, experts = route_by_score(gating_output, None, Choice(topk, "sigmoid", renormalize))
    return weights, experts.to(torch.int32)


def grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `fused_topk`, out of the `topk_group` best of `num_expert_group` equal groups of experts, where a group is as
    good as its best expert; with e_score_correction_bias, [experts], which is added for the choice only, as its best
    two.   routed_scaling_factor: of the weights.
    """
    groups = max(1, num_expert_group)
    choice = Choice(
        topk, _score(scoring_func), renormalize, routed_scaling_factor, groups, topk_group or groups,
        1 if e_score_correction_bias is None else 2,
    )  # fmt: skip
    weights, experts = route_by_score(gating_output, e_score_correction_bias, choice)
    return weights, experts.to(torch.int32)


def _score(scoring_func: str) -> str:
    if scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func must be 'softmax' or 'sigmoid', got {scoring_func!r}.")
    return scoring_func


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    *,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """Each token's weighted sum of its experts' gated MLPs.

    hidden_states: [tokens, hidden]; w1: [experts, 2 * inter, hidden], gate rows first; w2: [experts, hidden, inter];
    topk_weights, topk_ids: [tokens, topk] -> [tokens, hidden].   inplace: write the result to `hidden_states`.
    activation: of the gate, by Hugging Face's name.   w1_bias: [experts, 2 * inter].   w2_bias: [experts, hidden].
    apply_router_weight_on_input: weights multiply what an expert gets, not what it gives; for one expert per token.
    """
    x, weights = hidden_states, topk_weights
    if apply_router_weight_on_input:
        if topk_ids.shape[-1] != 1:
            raise ValueError(
                f"apply_router_weight_on_input is for one expert per token, but there are {topk_ids.shape[-1]}."
            )
        x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
    extras = NO_EXTRAS if w1_bias is None and w2_bias is None else ExpertExtras(w1_bias, w2_bias)
    out: Tensor = expert_mlp(x, weights, topk_ids.long(), w1, w2, activation_kind(activation), extras)
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
    custom_routing_function: Routing | None = None,
    activation: str = "silu",
) -> Tensor:
    """`fused_topk`, `grouped_topk` or a function of the model's own, and then `fused_experts`."""
    if use_grouped_topk:
        if num_expert_group is None or topk_group is None:
            raise ValueError("use_grouped_topk needs num_expert_group and topk_group.")
        weights, ids = grouped_topk(hidden_states, gating_output, topk, renormalize, num_expert_group, topk_group)
    elif custom_routing_function is not None:
        weights, ids = custom_routing_function(hidden_states, gating_output, topk, renormalize)
    else:
        weights, ids = fused_topk(hidden_states, gating_output, topk, renormalize)
    return fused_experts(hidden_states, w1, w2, weights, ids, inplace, activation)


class FusedMoE(nn.Module):
    """Experts whose inner width is dealt to ranks: `w13_weight` [experts, 2 * inter, hidden] (gate rows first) and
    `w2_weight` [experts, hidden, inter] of this rank; with has_bias `w13_bias` and `w2_bias`, too.

    reduce_results: sum over ranks (else the caller does).   tp_size: must be that of the model, if it is given.
    use_grouped_topk, scoring_func, routed_scaling_factor, e_score_correction_bias: as of `grouped_topk`.
    custom_routing_function: as of `fused_moe`.   activation, apply_router_weight_on_input: as of `fused_experts`.
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
        ep_size: int | None = None,
        dp_size: int | None = None,
        prefix: str = "",
        custom_routing_function: Routing | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        has_bias: bool = False,
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
        for name, size in (("ep_size", ep_size), ("dp_size", dp_size)):
            if size not in (None, 1):
                raise ValueError(f"{name}={size}: experts of a model from outside the tree are not dealt out whole.")
        self.num_experts, self.top_k, self.prefix = num_experts, top_k, prefix
        self.reduce_results, self.renormalize = reduce_results, renormalize
        self.use_grouped_topk, self.num_expert_group, self.topk_group = use_grouped_topk, num_expert_group, topk_group
        self.custom_routing_function, self.scoring_func = custom_routing_function, _score(scoring_func)
        self.routed_scaling_factor, self.e_score_correction_bias = routed_scaling_factor, e_score_correction_bias
        self.apply_router_weight_on_input, self.activation = apply_router_weight_on_input, activation
        activation_kind(activation)
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
        self.w13_bias = self.w2_bias = None
        if has_bias:
            self.w13_bias = ShardedParameter.empty(
                (num_experts, 2 * intermediate_size), ShardSpec(1, halves, stack=1), *rank
            )
            whole = (Part(hidden_size, hidden_size),)
            self.w2_bias = ShardedParameter.empty((num_experts, hidden_size), ShardSpec(None, whole, stack=1), *rank)
        for parameter in self.parameters():
            parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(
        self,
        param: ShardedParameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Take one expert's full matrix, or bias, of a checkpoint: shard_id "w1" (gate), "w3" (up) or "w2" (down)."""
        if shard_id not in ("w1", "w2", "w3"):
            raise ValueError(f"{weight_name}: shard_id must be w1, w2 or w3, got {shard_id!r}.")
        load_weight(param, loaded_weight, None if shard_id == "w2" else shard_id, expert_id)
        return True if return_success else None

    def select_experts(self, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """(weights fp32, experts), both [tokens, top_k]."""
        if self.custom_routing_function is not None:
            return self.custom_routing_function(hidden_states, router_logits, self.top_k, self.renormalize)
        groups = (self.num_expert_group or 1, self.topk_group or 1) if self.use_grouped_topk else (1, 1)
        return grouped_topk(
            hidden_states, router_logits, self.top_k, self.renormalize, *groups, self.scoring_func,
            self.routed_scaling_factor, self.e_score_correction_bias,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Any:
        """[tokens, hidden], [tokens, experts] -> [tokens, hidden]."""
        weights, ids = self.select_experts(hidden_states, router_logits)
        one = self.w2_bias is None or self.tp.rank == 0  # of the ranks adds what each has whole
        out = fused_experts(
            hidden_states, self.w13_weight, self.w2_weight, weights, ids, False, self.activation,
            self.apply_router_weight_on_input, w1_bias=self.w13_bias, w2_bias=self.w2_bias if one else None,
        )  # fmt: skip
        return self.tp.all_reduce(out) if self.reduce_results else out

    @staticmethod
    def make_expert_params_mapping(
        model: Any = None,
        ckpt_gate_proj_name: str = "",
        ckpt_down_proj_name: str = "",
        ckpt_up_proj_name: str | int = "",
        num_experts: int = 0,
        num_redundant_experts: int = 0,
    ) -> list[tuple[str, str, int, str]]:
        """(part of the parameter's name, part of the checkpoint's name, expert, shard id) of every expert's matrix.

        model: given first by newer models, and not needed; older ones begin with the name of the gate.
        """
        gate, down, up, count = ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name, num_experts
        if isinstance(model, str):
            gate, down, up, count = model, gate, down, int(up or num_experts)
        if num_redundant_experts:
            raise ValueError("num_redundant_experts must be 0: every expert is there once.")
        names = {"w1": gate, "w2": down, "w3": up}
        return [
            (f"experts.{'w2' if shard == 'w2' else 'w13'}_", f"experts.{expert}.{name}.", expert, shard)
            for expert in range(count)
            for shard, name in names.items()
        ]


class SharedFusedMoE(FusedMoE):
    """`FusedMoE` beside an MLP that sees every token: `forward` gives (that one's output, the experts').

    shared_experts: None for none.   gate: a router that makes the logits here, in place of those that are given.
    """

    def __init__(self, shared_experts: nn.Module | None, gate: nn.Module | None = None, **options: Any) -> None:
        options.pop("use_overlapped", None)  # whether both run beside each other, which changes no result
        super().__init__(**options)
        self._shared, self._gate = [shared_experts], [gate]  # modules of the model, under their names there

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor | None, Tensor]:
        shared, gate = self._shared[0], self._gate[0]
        if gate is not None:
            made = gate(hidden_states)
            router_logits = made[0] if isinstance(made, tuple) else made
        out = None if shared is None else shared(hidden_states)
        if out is not None and self.reduce_results:
            out = self.tp.all_reduce(out)
        return out, super().forward(hidden_states, router_logits)
