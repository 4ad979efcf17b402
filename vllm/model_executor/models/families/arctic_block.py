"""The module of Arctic's own block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vllm.model_executor.models.blocks import (
    BuildContext,
    FeedForward,
    MixtureOfExperts,
    SelfAttention,
    add_norm,
    build_norm,
    needed,
    pick,
    serve_experts,
)
from vllm.model_executor.models.families.arctic import ArcticBlock
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.step.inputs import StepInputs


class ArcticLayer(nn.Module):
    """A layer of Arctic. norms: before attention, experts and dense MLP."""

    def __init__(
        self, spec: ArcticBlock, hidden_size: int, place: KVPlace | None, ctx: BuildContext, prefix: str
    ) -> None:
        super().__init__()
        place = needed(place, prefix)
        self.tp = ctx.tp
        self.attn = SelfAttention(spec.attn, hidden_size, place, ctx, f"{prefix}.attn", reduce=True)
        self.dense = FeedForward(spec.dense, hidden_size, ctx, f"{prefix}.dense", reduce=False)
        self.ffn = MixtureOfExperts(spec.experts, hidden_size, ctx, f"{prefix}.ffn", reduce=False)
        self.norms = nn.ModuleList(build_norm(spec.norm, hidden_size, ctx.dtype) for _ in range(3))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepInputs,
        kv_caches: Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `DecoderBlock.forward`."""
        h, stream = add_norm(self.norms[0], x, residual)
        out = self.attn(h, step, kv_caches, rows)
        if rows is not None and not len(rows):
            serve_experts(self)
            return out, None
        entered, view = pick(stream, rows), step.view(picked=rows is not None)
        experts = self.ffn(self.norms[1](entered), view)
        h, stream = add_norm(self.norms[2], out, entered)
        return self.tp.all_reduce(self.dense(h, view) + experts), stream


MODULES = {ArcticBlock: ArcticLayer}
