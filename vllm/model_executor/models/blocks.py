"""The modules that specs turn into: attention, feed-forward and the block that joins them.

Fusion happens here and nowhere else: one product for q, k and v, one for gate and up, norms together with the residual
addition before them, rotation together with the cache write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel
from vllm.model_executor.layers.activation import activation_kind
from vllm.model_executor.layers.alibi import alibi_slopes
from vllm.model_executor.layers.expert_method import ExpertMethod, ExpertShape, UnquantizedExpertMethod
from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.linear_method import QuantizationConfig
from vllm.model_executor.layers.rope_table import rope_table
from vllm.model_executor.layers.sharding import ShardedParameter
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.model_executor.models.spec import Attn, Block, BlockSpec, Layout, Mlp, Moe, Norm, Rope
from vllm.ops.activation import activate, activate_gated
from vllm.ops.attention import AttentionParams, attend, write_kv
from vllm.ops.moe import route
from vllm.ops.rotary import QKNorm, rotate, rotate_and_write_kv
from vllm.step.inputs import StepInputs


@dataclass(frozen=True)
class BuildContext:
    """What every module of one model needs when it is built.

    max_positions: positions that rotary tables cover.   device: where tables go (weights are placed by the loader).
    """

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel
    max_positions: int
    quant_config: QuantizationConfig | None = None
    _tables: dict[Rope, Tensor] = field(default_factory=dict)

    def table(self, rope: Rope) -> Tensor:
        """The rotary table of `rope`; layers with equal specs share one."""
        if rope not in self._tables:
            self._tables[rope] = rope_table(rope, self.max_positions).to(self.device)
        return self._tables[rope]


def build_norm(spec: Norm, size: int, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    """The norm layer of a spec."""
    if spec.kind == "rms":
        return RMSNorm(size, spec.eps, offset=spec.offset, has_weight=spec.weight, dtype=dtype)
    if spec.kind == "layer":
        return LayerNorm(size, spec.eps, offset=spec.offset, has_weight=spec.weight, has_bias=spec.bias, dtype=dtype)
    raise ValueError(f'Unknown norm {spec.kind!r}, expected "rms" or "layer".')


class SelfAttention(nn.Module):
    """Causal self-attention over the paged cache."""

    cos_sin: Tensor

    def __init__(
        self, spec: Attn, hidden_size: int, place: KVPlace, ctx: BuildContext, prefix: str, *, reduce: bool
    ) -> None:
        super().__init__()
        self.spec, self.place = spec, place
        self.qkv = QKVParallelLinear(
            hidden_size,
            spec.head_dim,
            spec.heads,
            spec.kv_heads,
            bias=spec.qkv_bias,
            params_dtype=ctx.dtype,
            quant_config=ctx.quant_config,
            prefix=f"{prefix}.qkv",
            tp=ctx.tp,
        )
        self.o = RowParallelLinear(
            spec.heads * spec.head_dim,
            hidden_size,
            bias=spec.out_bias,
            reduce_results=reduce,
            units=spec.heads,
            params_dtype=ctx.dtype,
            quant_config=ctx.quant_config,
            prefix=f"{prefix}.o",
            tp=ctx.tp,
        )
        self.heads, self.kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        slopes = None
        if spec.alibi is not None:
            slopes = alibi_slopes(spec.heads, spec.alibi).tensor_split(ctx.tp.world)[ctx.tp.rank].to(ctx.device)
        self.params = AttentionParams(scale=scale, window=spec.window, softcap=spec.softcap, alibi_slopes=slopes)
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None:
            self.q_norm = build_norm(spec.qk_norm, spec.head_dim, ctx.dtype)
            self.k_norm = build_norm(spec.qk_norm, spec.head_dim, ctx.dtype)
        if spec.rope is not None:
            self.register_buffer("cos_sin", ctx.table(spec.rope), persistent=False)

    def forward(self, x: Tensor, step: StepInputs, kv_caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or rows, hidden] (a partial sum if the layer does not reduce).

        rows: [rows] int64, the tokens whose output is wanted; None for all.
        """
        cache, group = kv_caches[self.place.tensor], step.groups[self.place.group]
        qkv = self.qkv.project(x)
        rope, p, own = self.spec.rope, self.params, None
        if rope is not None and not isinstance(self.q_norm, LayerNorm):
            q, own = rotate_and_write_kv(
                qkv,
                self.heads,
                step.positions,
                self.cos_sin,
                rope.interleaved,
                cache,
                group.slot_mapping,
                p.k_scale,
                p.v_scale,
                self._rms_qk_norm(),
            )
        else:
            heads = [self.heads, self.kv_heads, self.kv_heads]
            q, k, v = qkv.view(len(qkv), -1, self.spec.head_dim).split(heads, 1)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm.norm(q), self.k_norm.norm(k)
            if rope is not None:
                q = rotate(q, step.positions, self.cos_sin, rope.interleaved)
                k = rotate(k, step.positions, self.cos_sin, rope.interleaved)
            write_kv(k, v, cache, group.slot_mapping, p.k_scale, p.v_scale)
        if rows is not None and not len(rows):
            return x[:0]  # the cache is written, nobody asks for more
        return self.o.project(_pick(attend(q, cache, p, step, group, own).flatten(1), rows))

    def _rms_qk_norm(self) -> QKNorm | None:
        """The head norms as the fused operation takes them."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None or q_norm.weight is None or k_norm.weight is None:
            return None
        return QKNorm(q_norm.weight, k_norm.weight, q_norm.variance_epsilon, q_norm.offset)


class FeedForward(nn.Module):
    """An MLP, gated (one product for gate and up) or plain."""

    def __init__(self, spec: Mlp, hidden_size: int, ctx: BuildContext, prefix: str, *, reduce: bool) -> None:
        super().__init__()
        self.spec, self.act = spec, activation_kind(spec.act)
        if spec.gated:
            self.gate_up = MergedColumnParallelLinear(
                hidden_size,
                [spec.hidden, spec.hidden],
                bias=spec.bias,
                part_names=("gate", "up"),
                params_dtype=ctx.dtype,
                quant_config=ctx.quant_config,
                prefix=f"{prefix}.gate_up",
                tp=ctx.tp,
            )
        else:
            self.up = ColumnParallelLinear(
                hidden_size,
                spec.hidden,
                bias=spec.bias,
                params_dtype=ctx.dtype,
                quant_config=ctx.quant_config,
                prefix=f"{prefix}.up",
                tp=ctx.tp,
            )
        self.down = RowParallelLinear(
            spec.hidden,
            hidden_size,
            bias=spec.bias,
            reduce_results=reduce,
            params_dtype=ctx.dtype,
            quant_config=ctx.quant_config,
            prefix=f"{prefix}.down",
            tp=ctx.tp,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden] (a partial sum if the layer does not reduce)."""
        if self.spec.gated:
            return self.down.project(activate_gated(self.gate_up.project(x), self.act))
        return self.down.project(activate(self.up.project(x), self.act))


class Experts(nn.Module):
    """The weights of gated MLPs, stored and computed by an `ExpertMethod`.

    reduce: whether `method.combine` sums over ranks.
    """

    gate_up: ShardedParameter
    down: ShardedParameter

    def __init__(self, shape: ExpertShape, ctx: BuildContext, prefix: str, *, reduce: bool) -> None:
        super().__init__()
        self.shape, self.tp, self.reduce = shape, ctx.tp, reduce
        method = None if ctx.quant_config is None else ctx.quant_config.get_expert_method(self, prefix)
        self.method: ExpertMethod = UnquantizedExpertMethod() if method is None else method
        self.method.create_weights(self, shape, ctx.dtype, ctx.tp)

    @property
    def repacks_whole(self) -> bool:
        """As the method says."""
        return self.method.repacks_whole

    def process_after_load(self) -> None:
        """Let the method repack the filled weights."""
        self.method.process_after_load(self)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Each token's weighted sum of its experts' outputs. Shapes as in `ExpertMethod.dispatch`."""
        method = self.method
        return method.combine(self, method.compute(self, *method.dispatch(self, x, weights, experts)))


class MixtureOfExperts(nn.Module):
    """A router and its experts. By default every rank has all experts, each cut like an MLP."""

    def __init__(self, spec: Moe, hidden_size: int, ctx: BuildContext, prefix: str, *, reduce: bool) -> None:
        super().__init__()
        self.spec = spec
        self.router = ReplicatedLinear(
            hidden_size, spec.experts, bias=False, params_dtype=ctx.dtype, prefix=f"{prefix}.router", tp=ctx.tp
        )
        shape = ExpertShape(spec.experts, hidden_size, spec.hidden, activation_kind(spec.act))
        self.experts = Experts(shape, ctx, f"{prefix}.experts", reduce=reduce)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden] (a partial sum if the layer does not reduce)."""
        weights, chosen = route(self.router.project(x), self.spec.top_k, self.spec.renormalize)
        out: Tensor = self.experts(x, weights, chosen)
        return out


class DecoderBlock(nn.Module):
    """One layer. Between blocks the stream is kept as (x, residual), their sum still to be made, so that the next norm
    can add and normalise in one pass."""

    def __init__(self, spec: Block, hidden_size: int, place: KVPlace | None, ctx: BuildContext, prefix: str) -> None:
        super().__init__()
        if place is None:
            raise ValueError(f"{prefix} has no place in the cache.")
        self.spec, self.layout, self.tp, self.scale = spec, spec.layout, ctx.tp, spec.residual_scale
        # two branches that are added anyway need one reduction, not two
        reduce = spec.layout not in (Layout.PARALLEL, Layout.PARALLEL_SHARED)
        self.attn = SelfAttention(spec.attn, hidden_size, place, ctx, f"{prefix}.attn", reduce=reduce)
        ffn = FeedForward if isinstance(spec.ffn, Mlp) else MixtureOfExperts
        self.ffn = ffn(spec.ffn, hidden_size, ctx, f"{prefix}.ffn", reduce=reduce)  # type: ignore[arg-type]
        self.norms = nn.ModuleList(build_norm(spec.norm, hidden_size, ctx.dtype) for _ in range(spec.layout.num_norms))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepInputs,
        kv_caches: Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden], the stream is x + residual (x alone if residual is None).

        rows: [rows] int64, the tokens whose output is wanted; None for all. The others take part in the attention only.
        """
        norm, scaled = self.norms, self._scaled
        if rows is not None and not len(rows):
            h = x if self.layout is Layout.POST else add_norm(norm[0], x, residual)[0]
            return self.attn(h, step, kv_caches, rows), None
        match self.layout:
            case Layout.PRE:
                h, residual = add_norm(norm[0], x, residual)
                h = scaled(self.attn(h, step, kv_caches, rows))
                h, residual = add_norm(norm[1], h, _pick(residual, rows))
                return scaled(self.ffn(h)), residual
            case Layout.SANDWICH:
                h, residual = add_norm(norm[0], x, residual)
                h = scaled(norm[1](self.attn(h, step, kv_caches, rows)))
                h, residual = add_norm(norm[2], h, _pick(residual, rows))
                return scaled(norm[3](self.ffn(h))), residual
            case Layout.PARALLEL | Layout.PARALLEL_SHARED:
                h, residual = add_norm(norm[0], x, residual)
                residual = _pick(residual, rows)
                h2 = norm[1](residual) if self.layout is Layout.PARALLEL else _pick(h, rows)
                return scaled(self.tp.all_reduce(self.ffn(h2) + self.attn(h, step, kv_caches, rows))), residual
            case Layout.POST:
                x, _ = add_norm(norm[0], scaled(self.attn(x, step, kv_caches, rows)), _pick(x, rows))
                x, _ = add_norm(norm[1], scaled(self.ffn(x)), x)
                return x, None

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.scale == 1.0 else branch * self.scale


# (spec, hidden_size, place, ctx, prefix) -> a module whose forward is that of `DecoderBlock`.
# place: where the layer's cache is, None if its spec needs none.   prefix: of its parameters' names.
BlockModule = Callable[[Any, int, KVPlace | None, BuildContext, str], nn.Module]
# a spec's class -> the module it becomes; families with a block of their own add to it (`Family.modules`)
MODULES: Mapping[type[BlockSpec], BlockModule] = {Block: DecoderBlock}


def _pick(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def add_norm(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual). Both may be overwritten."""
    if residual is None:
        return norm(x), x
    pair: tuple[Tensor, Tensor] = norm(x, residual)
    return pair
