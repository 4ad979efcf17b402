"""The modules of blocks with a selective state space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.sharding import ShardedParameter, ShardSpec, whole
from vllm.model_executor.models.blocks import (
    BuildContext,
    FeedForward,
    MixtureOfExperts,
    add_norm,
    build_norm,
    pick,
)
from vllm.model_executor.models.families.mamba import Mamba, MambaBlock
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.model_executor.models.spec import Mlp
from vllm.ops.ssm import causal_conv, selective_scan
from vllm.step.inputs import StepInputs


class MambaMixer(nn.Module):
    """The mixer on one rank, which has a share of the channels.

    a: log of -A as checkpoints have it, and, once loaded, A itself; both fp32.
    """

    def __init__(self, spec: Mamba, hidden_size: int, place: KVPlace, ctx: BuildContext, prefix: str) -> None:
        super().__init__()
        self.spec, self.place, self.tp = spec, place, ctx.tp
        options: dict[str, Any] = {"params_dtype": ctx.dtype, "quant_config": ctx.quant_config, "tp": ctx.tp}
        inner = spec.inner
        self.inp = MergedColumnParallelLinear(
            hidden_size, [inner, inner], bias=spec.bias, part_names=("x", "gate"), prefix=f"{prefix}.inp", **options
        )
        self.select = RowParallelLinear(
            inner, spec.rank + 2 * spec.state, bias=False, prefix=f"{prefix}.select", **options
        )
        self.dt = ColumnParallelLinear(spec.rank, inner, bias=False, prefix=f"{prefix}.dt", **options)
        self.out = RowParallelLinear(inner, hidden_size, bias=spec.bias, prefix=f"{prefix}.out", **options)

        def channels(*shape: int, dtype: torch.dtype = torch.float32) -> ShardedParameter:
            cut = ShardSpec(0, (whole(inner, "the mixer's channels"),))
            return ShardedParameter.empty((inner, *shape), cut, ctx.tp.rank, ctx.tp.world, dtype)

        self.conv = channels(1, spec.conv, dtype=ctx.dtype)
        self.conv_bias = channels(dtype=ctx.dtype) if spec.conv_bias else None
        self.a, self.d, self.dt_bias = channels(spec.state), channels(), channels()
        self.norms = nn.ModuleList()
        if spec.norm is not None:
            sizes = (spec.rank, spec.state, spec.state)
            self.norms.extend(build_norm(spec.norm, size, ctx.dtype) for size in sizes)

    def process_after_load(self) -> None:
        """A from its logarithm."""
        self.a = self.a.over(-self.a.data.exp())

    def forward(self, x: Tensor, step: StepInputs, kv_caches: Sequence[Tensor], rows: Tensor | None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or rows, hidden]. rows: as in `DecoderBlock.forward`."""
        spec, view, group = self.spec, step.view(picked=False), step.groups[self.place.group]
        conv_states, states = (kv_caches[i] for i in self.place.tensors)
        u, gate = self.inp.project(x, view).chunk(2, -1)
        u = causal_conv(u, self.conv[:, 0], self.conv_bias, conv_states, step, group)
        parts: list[Tensor] = list(self.select.project(u, view).split([spec.rank, spec.state, spec.state], -1))
        if spec.norm is not None:
            parts = [norm(part.contiguous()) for norm, part in zip(self.norms, parts, strict=True)]
        dt = self.dt.project(parts[0].contiguous(), view)
        y = selective_scan(u, dt, self.dt_bias, self.a, parts[1], parts[2], self.d, gate, states, step, group)
        return self.out.project(pick(y, rows), step.view(picked=rows is not None))


class MambaLayer(nn.Module):
    """A mixer, and a feed-forward layer if there is one."""

    def __init__(
        self, spec: MambaBlock, hidden_size: int, place: KVPlace | None, ctx: BuildContext, prefix: str
    ) -> None:
        super().__init__()
        if place is None:
            raise ValueError(f"{prefix} has no place in the cache.")
        self.mixer = MambaMixer(spec.mixer, hidden_size, place, ctx, f"{prefix}.mixer")
        self.ffn: FeedForward | MixtureOfExperts | None = None
        if spec.ffn is not None:
            kind = FeedForward if isinstance(spec.ffn, Mlp) else MixtureOfExperts
            self.ffn = kind(spec.ffn, hidden_size, ctx, f"{prefix}.ffn", reduce=True)  # type: ignore[arg-type]
        self.norms = nn.ModuleList(build_norm(spec.norm, hidden_size, ctx.dtype) for _ in range(1 + bool(spec.ffn)))

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
        h, stream = self.mixer(h, step, kv_caches, rows), pick(stream, rows)
        if self.ffn is None or not len(h):
            return h, stream
        h, stream = add_norm(self.norms[1], h, stream)
        return self.ffn(h, step.view(picked=rows is not None)), stream


MODULES = {MambaBlock: MambaLayer}
