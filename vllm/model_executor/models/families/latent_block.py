"""The module of latent attention (MLA), and the block that has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.model_executor.layers.linear_method import LinearShape
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec, whole
from vllm.model_executor.models.blocks import BuildContext, DecoderBlock, build_norm, needed, pick
from vllm.model_executor.models.families.deepseek import LatentAttn, LatentBlock
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.ops.latent_attention import attend_latent, rotate_and_write_latent
from vllm.step.inputs import StepInputs


class Expansion(nn.Module):
    """What makes keys and values of latents: weight [heads on this rank * (nope_dim + v_dim), rank]. It is multiplied
    from either side, so it is always plain numbers.
    """

    def __init__(self, spec: LatentAttn, ctx: BuildContext) -> None:
        super().__init__()
        rows = spec.heads * (spec.nope_dim + spec.v_dim)
        cut = ShardSpec(0, (Part(rows, spec.heads),))
        self.weight = ShardedParameter.empty((rows, spec.rank), cut, ctx.tp.rank, ctx.tp.world, ctx.dtype)


class LatentAttention(nn.Module):
    """Causal self-attention over the paged latents. Ranks share the heads; every rank keeps all latents."""

    cos_sin: Tensor

    def __init__(
        self, spec: LatentAttn, hidden_size: int, place: KVPlace, ctx: BuildContext, prefix: str, *, reduce: bool
    ) -> None:
        super().__init__()
        self.spec, self.place = spec, place
        query = spec.heads * (spec.nope_dim + spec.rope_dim)
        latent = Part(spec.rank + spec.rope_dim, 1, "kv_a")  # one unit: the same on every rank
        # one product for all that reads the hidden states
        if spec.q_rank is None:
            shape = LinearShape(whole(hidden_size), (Part(query, spec.heads, "q"), latent), "out")
            self.widths = [query // ctx.tp.world, latent.size]
        else:
            shape = LinearShape(whole(hidden_size), (whole(spec.q_rank, "q_a"), whole(latent.size, "kv_a")), "none")
            self.widths = [spec.q_rank, latent.size]
        options: dict[str, Any] = {"params_dtype": ctx.dtype, "quant_config": ctx.quant_config, "tp": ctx.tp}
        self.into = LinearBase(shape, bias=spec.bias, prefix=f"{prefix}.into", **options)
        self.q_norm = self.q_b = None
        if spec.q_rank is not None:
            self.q_norm = build_norm(spec.norm, spec.q_rank, ctx.dtype)
            self.q_b = ColumnParallelLinear(
                spec.q_rank, query, bias=False, parts=(Part(query, spec.heads),), prefix=f"{prefix}.q_b", **options
            )
        self.kv_norm = build_norm(spec.norm, spec.rank, ctx.dtype)
        self.kv_b = Expansion(spec, ctx)
        self.o = RowParallelLinear(
            spec.heads * spec.v_dim,
            hidden_size,
            bias=spec.bias,
            reduce_results=reduce,
            units=spec.heads,
            prefix=f"{prefix}.o",
            **options,
        )
        self.register_buffer("cos_sin", ctx.table(spec.rope), persistent=False)

    def forward(self, x: Tensor, step: StepInputs, kv_caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """As `SelfAttention.forward`."""
        cache, group = kv_caches[self.place.tensor], step.groups[self.place.group]
        spec, view = self.spec, step.view(picked=False)
        q, latent = self.into.project(x, view).split(self.widths, -1)
        if self.q_norm is not None and self.q_b is not None:
            q = self.q_b.project(self.q_norm.norm(q), view)
        q = q.unflatten(-1, (-1, spec.nope_dim + spec.rope_dim))
        weight = self.kv_norm.weight
        assert weight is not None  # of an RMS norm that has one
        eps, rope = self.kv_norm.variance_epsilon, spec.rope
        q = rotate_and_write_latent(
            q, latent, weight, eps, step.positions, self.cos_sin, rope.interleaved, cache, group.slot_mapping
        )
        if rows is not None and not len(rows):
            return x[:0]  # the cache is written, nobody asks for more
        kv_b = self.kv_b.weight.view(-1, spec.nope_dim + spec.v_dim, spec.rank)
        out: Tensor = attend_latent(q, cache, kv_b, spec.nope_dim, spec.scale, step, group)
        return self.o.project(pick(out.flatten(1), rows), step.view(picked=rows is not None))


class LatentLayer(DecoderBlock):
    """A layer with latent attention."""

    def build_attention(
        self, hidden_size: int, place: KVPlace | None, ctx: BuildContext, prefix: str, *, reduce: bool
    ) -> Any:
        return LatentAttention(self.spec.attn, hidden_size, needed(place, prefix), ctx, prefix, reduce=reduce)


MODULES = {LatentBlock: LatentLayer}
