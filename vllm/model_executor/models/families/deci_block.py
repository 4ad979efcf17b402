"""The module of a layer of which a branch is missing, or a single product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.blocks import (
    BuildContext,
    FeedForward,
    SelfAttention,
    add_norm,
    build_norm,
    needed,
    pick,
)
from vllm.model_executor.models.families.deci import Map, SearchedBlock
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.model_executor.models.spec import Attn
from vllm.step.inputs import StepInputs


class SearchedLayer(nn.Module):
    """norms: "0" before attention and "1" before the MLP, where these are."""

    def __init__(
        self, spec: SearchedBlock, hidden_size: int, place: KVPlace | None, ctx: BuildContext, prefix: str
    ) -> None:
        super().__init__()
        norms: dict[str, nn.Module] = {}
        self.attn: Any = None
        self.ffn: Any = None

        def product(name: str) -> nn.Module:
            return ReplicatedLinear(
                hidden_size,
                hidden_size,
                bias=False,
                params_dtype=ctx.dtype,
                quant_config=ctx.quant_config,
                prefix=f"{prefix}.{name}",
                tp=ctx.tp,
            )

        if spec.attn is not None:
            norms["0"] = build_norm(spec.norm, hidden_size, ctx.dtype)
            if isinstance(spec.attn, Attn):
                self.attn = SelfAttention(
                    spec.attn, hidden_size, needed(place, prefix), ctx, f"{prefix}.attn", reduce=True
                )
            else:
                self.attn = product("attn")
        if spec.ffn is not None:
            norms["1"] = build_norm(spec.norm, hidden_size, ctx.dtype)
            if isinstance(spec.ffn, Map):
                self.ffn = product("ffn")
            else:
                self.ffn = FeedForward(spec.ffn, hidden_size, ctx, f"{prefix}.ffn", reduce=True)
        self.norms = nn.ModuleDict(norms)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepInputs,
        kv_caches: Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `DecoderBlock.forward`."""
        view = step.view(picked=rows is not None)
        if isinstance(self.attn, SelfAttention):
            h, residual = add_norm(self.norms["0"], x, residual)
            x, residual = self.attn(h, step, kv_caches, rows), pick(residual, rows)
        else:
            x, residual = pick(x, rows), residual if residual is None else pick(residual, rows)
            if self.attn is not None and len(x):
                h, residual = add_norm(self.norms["0"], x, residual)
                x = self.attn.project(h, view)
        if not len(x) or self.ffn is None:
            return x, residual
        h, residual = add_norm(self.norms["1"], x, residual)
        return (self.ffn(h, view) if isinstance(self.ffn, FeedForward) else self.ffn.project(h, view)), residual


MODULES = {SearchedBlock: SearchedLayer}
