"""The modules of blocks with a selective state space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec, whole
from vllm.model_executor.models.blocks import (
    BuildContext,
    FeedForward,
    MixtureOfExperts,
    add_norm,
    build_norm,
    needed,
    pick,
)
from vllm.model_executor.models.families.mamba import Mamba, Mamba2, MambaBlock
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.model_executor.models.spec import Mlp
from vllm.ops.ssm import causal_conv, selective_scan
from vllm.step.inputs import StepInputs


class MambaMixer(nn.Module):
    """The mixer on one rank, which has a share of the channels.

    a: log of -A as checkpoints have it.   negative: A, once it is loaded.   Both fp32.
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
        self.negative: Tensor | None = None
        self.norms = nn.ModuleList()
        if spec.norm is not None:
            sizes = (spec.rank, spec.state, spec.state)
            self.norms.extend(build_norm(spec.norm, size, ctx.dtype) for size in sizes)

    def process_after_load(self) -> None:
        """A from its logarithm, in the same memory each time: graphs read it there."""
        negative = -self.a.data.exp()
        self.negative = negative if self.negative is None else self.negative.copy_(negative)

    def restore(self) -> bool:
        """The weights are as they came; what is made of them is to be made again."""
        return True

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
        a = -self.a.data.exp() if self.negative is None else self.negative
        y = selective_scan(u, dt, self.dt_bias, a, parts[1], parts[2], self.d, gate, states, step, group)
        return self.out.project(pick(y, rows), step.view(picked=rows is not None))


class Mamba2Mixer(nn.Module):
    """The mixer on one rank, which has a share of the heads and their groups; ranks may have a group in common.

    expanded: A, D and the step sizes' offset for every channel, once they are loaded.
    """

    def __init__(self, spec: Mamba2, hidden_size: int, place: KVPlace, ctx: BuildContext, prefix: str) -> None:
        super().__init__()
        self.spec, self.place, self.tp = spec, place, ctx.tp
        heads, inner, states = spec.heads, spec.inner, spec.groups * spec.state
        if ctx.tp.world > spec.groups > 1 and spec.groups % ctx.tp.world:
            raise ValueError(
                f"{spec.groups} groups of states cannot be normalised on {ctx.tp.world} ranks. Choose a "
                f"tensor_parallel_size that divides {spec.groups}."
            )
        mixed = (Part(inner, heads, "x"), Part(states, spec.groups, "b"), Part(states, spec.groups, "c"))
        self.inp = ColumnParallelLinear(
            hidden_size, 0, bias=spec.bias, parts=(Part(inner, heads, "gate"), *mixed, whole(heads, "dt")),
            prefix=f"{prefix}.inp", params_dtype=ctx.dtype, quant_config=ctx.quant_config, tp=ctx.tp,
        )  # fmt: skip
        self.out = RowParallelLinear(
            inner, hidden_size, bias=spec.bias, units=heads, prefix=f"{prefix}.out", params_dtype=ctx.dtype,
            quant_config=ctx.quant_config, tp=ctx.tp,
        )  # fmt: skip

        def cut(*shape: int, parts: tuple[Part, ...], dtype: torch.dtype = ctx.dtype) -> ShardedParameter:
            rows = sum(part.size for part in parts)
            return ShardedParameter.empty((rows, *shape), ShardSpec(0, parts), ctx.tp.rank, ctx.tp.world, dtype)

        self.conv = cut(1, spec.conv, parts=mixed)
        self.conv_bias = cut(parts=mixed) if spec.conv_bias else None
        per_head = (whole(heads, "the mixer's heads"),)
        self.a, self.d, self.dt_bias = (cut(parts=per_head, dtype=torch.float32) for _ in range(3))
        self.norm_weight = cut(parts=(Part(inner, heads),))
        self.expanded: tuple[Tensor, Tensor, Tensor] | None = None

    def process_after_load(self) -> None:
        """Repeat what heads have for their channels, in the same memory each time: graphs read it there."""
        if self.expanded is None:
            self.expanded = self._expand()
        else:
            for kept, value in zip(self.expanded, self._expand(), strict=True):
                kept.copy_(value)

    def restore(self) -> bool:
        """As `MambaMixer.restore`."""
        return True

    def _expand(self) -> tuple[Tensor, Tensor, Tensor]:
        a, d, offset = (t.data.repeat_interleave(self.spec.head_dim) for t in (self.a, self.d, self.dt_bias))
        return (-a.exp())[:, None].repeat(1, self.spec.state), d, offset

    def forward(self, x: Tensor, step: StepInputs, kv_caches: Sequence[Tensor], rows: Tensor | None) -> Tensor:
        """As `MambaMixer.forward`."""
        spec, group = self.spec, step.groups[self.place.group]
        conv_states, states = (kv_caches[i] for i in self.place.tensors)
        a, d, offset = self._expand() if self.expanded is None else self.expanded
        inner, mixed = len(d), self.conv.shape[0]
        gate, u, dt = self.inp.project(x, step.view(picked=False)).split([inner, mixed, inner // spec.head_dim], -1)
        u = causal_conv(u, self.conv[:, 0], self.conv_bias, conv_states, step, group)
        u, b, c = u.split([inner, (mixed - inner) // 2, (mixed - inner) // 2], -1)
        y = selective_scan(
            u, dt.repeat_interleave(spec.head_dim, 1), offset, a, b, c, d, None, states, step, group
        )  # fmt: skip
        y = self._gated_norm(pick(y, rows), pick(gate, rows))
        return self.out.project(y, step.view(picked=rows is not None))

    def _gated_norm(self, y: Tensor, gate: Tensor) -> Tensor:
        """y * silu(gate), divided by its root mean square over the channels of each group."""
        h = y.float() * nn.functional.silu(gate.float())
        groups = max(1, self.spec.groups // self.tp.world)
        grouped = h.view(len(h), groups, h.shape[1] // groups)
        squares = grouped.square().sum(-1, keepdim=True)
        if self.spec.groups < self.tp.world:
            squares = self.tp.all_reduce(squares)
        scale = torch.rsqrt(squares * (self.spec.groups / self.spec.inner) + self.spec.norm.eps)
        return self.norm_weight * (grouped * scale).view(h.shape).to(y.dtype)


class MambaLayer(nn.Module):
    """A mixer, and a feed-forward layer if there is one."""

    def __init__(
        self, spec: MambaBlock, hidden_size: int, place: KVPlace | None, ctx: BuildContext, prefix: str
    ) -> None:
        super().__init__()
        place = needed(place, prefix)
        mixer = MambaMixer if isinstance(spec.mixer, Mamba) else Mamba2Mixer
        self.mixer: nn.Module = mixer(spec.mixer, hidden_size, place, ctx, f"{prefix}.mixer")  # type: ignore[arg-type]
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
