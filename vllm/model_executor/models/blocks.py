"""The modules that specs turn into: attention, feed-forward and the block that joins them.

Fusion happens here and nowhere else: one product for q, k and v, one for gate and up, norms together with the residual
addition before them, rotation together with the cache write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel
from vllm.model_executor.layers.activation import activation_kind
from vllm.model_executor.layers.alibi import alibi_slopes
from vllm.model_executor.layers.expert_method import (
    DealtExpertMethod,
    ExpertMethod,
    ExpertShape,
    UnquantizedExpertMethod,
)
from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.linear_method import Fp32OutputMethod, QuantizationConfig, UnquantizedLinearMethod
from vllm.model_executor.layers.rope_table import rope_table
from vllm.model_executor.layers.sharding import REPLICATED, Part, ShardedParameter, ShardSpec
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.model_executor.models.spec import (
    Attn,
    Block,
    BlockSpec,
    HeadNorm,
    Layout,
    LogTemperature,
    Mlp,
    Moe,
    Norm,
    RelativeBias,
    Rope,
    Temperature,
)
from vllm.ops.activation import activate, activate_gated
from vllm.ops.attention import AttentionParams, SparseBlocks, attend, write_kv
from vllm.ops.encoder_attention import attend_whole
from vllm.ops.lora import activate_gated_lora
from vllm.ops.moe import Choice, route, route_by_score, route_sparse
from vllm.ops.norm import layer_norm, rms_norm
from vllm.ops.rotary import QKNorm, rotate, rotate_and_write_kv
from vllm.step.inputs import RowView, StepInputs


@dataclass(frozen=True)
class BuildContext:
    """What every module of one model needs when it is built.

    max_positions: positions that rotary tables cover.   device: where tables go (weights are placed by the loader).
    deals_experts: every rank has some experts whole, not a share of each; other copies of the engine have the rest,
        where `tp` has an exchange.
    """

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel
    max_positions: int
    quant_config: QuantizationConfig | None = None
    deals_experts: bool = False
    _tables: dict[Rope, Tensor] = field(default_factory=dict)
    _relative: dict[tuple[RelativeBias, int], RelativeTable] = field(default_factory=dict)

    def table(self, rope: Rope) -> Tensor:
        """The rotary table of `rope`; layers with equal specs share one."""
        if rope not in self._tables:
            self._tables[rope] = rope_table(rope, self.max_positions).to(self.device)
        return self._tables[rope]

    def relative(self, spec: RelativeBias, heads: int) -> RelativeTable:
        """The one table of a bias by distance, which all layers share."""
        key = (spec, heads)
        if key not in self._relative:
            self._relative[key] = RelativeTable(spec, heads, self)
        return self._relative[key]


class RelativeTable(nn.Module):
    """A learned score of each of a rank's heads for each bucket of distances: `weight`, [buckets, heads]."""

    buckets: Tensor

    def __init__(self, spec: RelativeBias, heads: int, ctx: BuildContext) -> None:
        super().__init__()
        cut = ShardSpec(1, (Part(heads, heads),))
        self.weight = ShardedParameter.empty((spec.buckets, heads), cut, ctx.tp.rank, ctx.tp.world, ctx.dtype)
        self.register_buffer("buckets", distance_buckets(spec).to(ctx.device), persistent=False)

    def forward(self) -> Tensor:
        """As `AttentionParams.relative`."""
        return self.weight[self.buckets].T.contiguous().float()


def distance_buckets(spec: RelativeBias) -> Tensor:
    """The bucket of each distance of a key from its query, from -n to n, beyond which nothing changes: [2 * n + 1]."""
    half = spec.buckets // 2
    exact = half // 2
    away = torch.arange(spec.distance + 1, device="cpu")
    grown = (away.clamp(min=1) / exact).log() / math.log(spec.distance / exact) * (half - exact)
    bucket = torch.where(away < exact, away, (exact + grown.long()).clamp(max=half - 1))
    return torch.cat([bucket.flip(0)[:-1], bucket[:1], bucket[1:] + half])


def query_growth(spec: Temperature | LogTemperature, positions: int) -> Tensor:
    """What queries at positions 0, 1, ... are multiplied by: [positions] fp32."""
    lengths = torch.arange(1, positions + 1, dtype=torch.float32, device="cpu")
    if isinstance(spec, LogTemperature):
        return (lengths.log() / math.log(spec.known)).clamp_min(1.0)
    return torch.log1p((lengths / spec.floor).floor()) * spec.scale + 1


def build_norm(spec: Norm, size: int, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    """The norm layer of a spec."""
    if spec.kind == "rms":
        return RMSNorm(size, spec.eps, offset=spec.offset, has_weight=spec.weight, dtype=dtype)
    if spec.kind == "layer":
        return LayerNorm(size, spec.eps, offset=spec.offset, has_weight=spec.weight, has_bias=spec.bias, dtype=dtype)
    raise ValueError(f'Unknown norm {spec.kind!r}, expected "rms" or "layer".')


def _head_norm(spec: Attn, heads: int, first: int, local: int, ctx: BuildContext) -> RMSNorm | LayerNorm | HeadsNorm:
    """The norm of queries or keys: of `local` of `heads` heads from `first` on."""
    if spec.qk_norm is None:
        raise ValueError("These queries and keys have no norm.")
    if spec.qk_norm_over is HeadNorm.HEAD:
        return build_norm(spec.qk_norm, spec.head_dim, ctx.dtype)
    return HeadsNorm(spec.qk_norm, heads, spec.head_dim, range(first, first + local), ctx, spec.qk_norm_over)


class HeadsNorm(nn.Module):
    """Norm of a rank's heads with weights for every head, over each head (EACH) or over the heads of all ranks (ALL).

    weight, bias: of all heads on every rank, as [heads, head_dim] for EACH and [heads * head_dim] for ALL.
    """

    def __init__(self, spec: Norm, heads: int, head_dim: int, mine: range, ctx: BuildContext, over: HeadNorm) -> None:
        super().__init__()
        self.spec, self.mine, self.over, self.tp = spec, mine, over, ctx.tp
        self.shape = (heads, head_dim)
        each = over is HeadNorm.EACH
        shape: tuple[int, ...] = (heads, head_dim) if each else (heads * head_dim,)
        cut = ShardSpec(stack=1) if each else REPLICATED
        self.weight = ShardedParameter.empty(shape, cut, 0, 1, ctx.dtype) if spec.weight else None
        self.bias = ShardedParameter.empty(shape, cut, 0, 1, ctx.dtype) if spec.bias else None

    @property
    def is_joint_rms(self) -> bool:
        """Whether it is an RMS norm over all heads, and all of them are here."""
        alone = self.over is HeadNorm.ALL and self.tp.world == 1
        return alone and self.spec.kind == "rms" and self.weight is not None and self.bias is None

    def norm(self, x: Tensor) -> Tensor:
        """x: [tokens, heads on this rank, head_dim]."""
        if self.over is HeadNorm.ALL:
            out = x.float()
            count = len(self.mine) * self.shape[1] * self.tp.world  # heads that ranks share count as often in both
            if self.spec.kind == "layer":
                out = out - self.tp.all_reduce(out.sum((1, 2), keepdim=True)) / count
            squares = self.tp.all_reduce(out.square().sum((1, 2), keepdim=True))
            out = out * torch.rsqrt(squares / count + self.spec.eps)
        else:
            normalize = rms_norm if self.spec.kind == "rms" else _plain_layer_norm
            out = normalize(x.float(), None, self.spec.eps)
        mine = slice(self.mine.start, self.mine.stop)
        if self.weight is not None:
            out = out * (self.weight.view(self.shape)[mine].float() + self.spec.offset)
        if self.bias is not None:
            out = out + self.bias.view(self.shape)[mine].float()
        return out.to(x.dtype)


def _plain_layer_norm(x: Tensor, weight: None, eps: float) -> Tensor:
    out: Tensor = layer_norm(x, weight, None, eps)
    return out


class NoNorm(nn.Module):
    """Stands where a block has no norm. With `residual`: their sum, twice."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return x
        stream = x + residual
        return stream.clone(), stream  # either may be overwritten


class SelfAttention(nn.Module):
    """Self-attention: causal over the paged cache, or of whole prompts over themselves (then there is no `place`)."""

    cos_sin: Tensor
    growth: Tensor

    def __init__(
        self, spec: Attn, hidden_size: int, place: KVPlace | None, ctx: BuildContext, prefix: str, *, reduce: bool
    ) -> None:
        super().__init__()
        if (place is None) == spec.causal:
            raise ValueError(
                f"{prefix}: attention has a place in the cache if it is causal, and only then; the place is what "
                "`need` of the block's spec asks for."
            )
        if spec.alibi is not None and not spec.causal:
            raise ValueError(f"{prefix}: ALiBi is not supported where tokens see later ones.")
        if spec.relative is not None and spec.causal:
            raise ValueError(f"{prefix}: a bias by distance is only supported where tokens see later ones.")
        self.relative = None if spec.relative is None else ctx.relative(spec.relative, spec.heads)
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
            slopes = alibi_slopes(spec.heads, spec.alibi.largest_exponent) * spec.alibi.factor
            slopes = slopes.tensor_split(ctx.tp.world)[ctx.tp.rank].to(ctx.device)
        sparse = None
        if spec.sparse is not None:
            numbers = torch.arange(spec.heads, dtype=torch.int32, device="cpu") * (not spec.sparse.alike)
            numbers = numbers.tensor_split(ctx.tp.world)[ctx.tp.rank].to(ctx.device)
            sparse = SparseBlocks(spec.sparse.block, spec.sparse.local, spec.sparse.stride, numbers)
        self.params = AttentionParams(
            scale=scale,
            window=spec.window,
            softcap=spec.softcap,
            alibi_slopes=slopes,
            chunk=spec.chunk,
            sparse=sparse,
            alibi_known=None if spec.alibi is None else spec.alibi.known,
        )
        self.sinks = None
        if spec.sinks:
            cut = ShardSpec(0, (Part(spec.heads, spec.heads),))
            self.sinks = ShardedParameter.empty((spec.heads,), cut, ctx.tp.rank, ctx.tp.world, ctx.dtype)
        if spec.temperature is not None:
            growth = query_growth(spec.temperature, ctx.max_positions)
            self.register_buffer("growth", growth.to(ctx.device), persistent=False)
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None:
            first_head = ctx.tp.rank * self.heads
            first_kv_head = ctx.tp.rank * spec.kv_heads // ctx.tp.world
            self.q_norm = _head_norm(spec, spec.heads, first_head, self.heads, ctx)
            self.k_norm = _head_norm(spec, spec.kv_heads, first_kv_head, self.kv_heads, ctx)
        # what one operation does, from the product to the cache
        plain_norm = self.q_norm is None or isinstance(self.q_norm, RMSNorm)
        if isinstance(self.q_norm, HeadsNorm) and isinstance(self.k_norm, HeadsNorm):
            plain_norm = self.q_norm.is_joint_rms and self.k_norm.is_joint_rms
        unusual = spec.clip_qkv is not None or spec.temperature is not None
        unusual = unusual or (spec.qk_norm is not None and (spec.norm_after_rope or not spec.qk_norm.weight))
        self.fused = spec.rope is not None and plain_norm and not unusual
        if spec.rope is not None:
            self.register_buffer("cos_sin", ctx.table(spec.rope), persistent=False)

    def forward(self, x: Tensor, step: StepInputs, kv_caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or rows, hidden] (a partial sum if the layer does not reduce).

        rows: [rows] int64, the tokens whose output is wanted; None for all.
        """
        qkv = self.qkv.project(x, step.view(picked=False))
        if self.place is None:
            params = self.params if self.relative is None else replace(self.params, relative=self.relative())
            out = pick(attend_whole(*self._heads(qkv, step), params, step).flatten(1), rows)
            return self.o.project(out, step.view(picked=rows is not None))
        cache, group = kv_caches[self.place.tensor], step.groups[self.place.group]
        rope, p, own = self.spec.rope, self.params, None
        if rope is not None and self.fused:
            q, own = rotate_and_write_kv(
                qkv,
                self.heads,
                step.rotary_positions,
                self.cos_sin,
                rope.interleaved,
                cache,
                group.slot_mapping,
                p.k_scale,
                p.v_scale,
                self._rms_qk_norm(),
            )
        else:
            q, k, v = self._heads(qkv, step)
            write_kv(k, v, cache, group.slot_mapping, p.k_scale, p.v_scale)
        if rows is not None and not len(rows):
            return x[:0]  # the cache is written, nobody asks for more
        if self.sinks is not None:
            p = replace(p, sinks=self.sinks)
        out = pick(attend(q, cache, p, step, group, own).flatten(1), rows)
        return self.o.project(out, step.view(picked=rows is not None))

    def _heads(self, qkv: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the product, normalised and rotated: each [tokens, heads, head_dim]."""
        rope = self.spec.rope
        heads = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = qkv.view(len(qkv), -1, self.spec.head_dim).split(heads, 1)
        late = self.spec.norm_after_rope
        if self.q_norm is not None and self.k_norm is not None and not late:
            q, k = self.q_norm.norm(q), self.k_norm.norm(k)
        if self.spec.clip_qkv is not None:
            q, k, v = (t.clamp(-self.spec.clip_qkv, self.spec.clip_qkv) for t in (q, k, v))
        if rope is not None:
            q = rotate(q, step.rotary_positions, self.cos_sin, rope.interleaved)
            k = rotate(k, step.rotary_positions, self.cos_sin, rope.interleaved)
        if self.q_norm is not None and self.k_norm is not None and late:
            q, k = self.q_norm.norm(q), self.k_norm.norm(k)
        if self.spec.temperature is not None:
            q = (q * self.growth[step.positions][:, None, None]).to(q.dtype)
        return q, k, v

    def _rms_qk_norm(self) -> QKNorm | None:
        """The head norms as the fused operation takes them."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None or q_norm.weight is None or k_norm.weight is None:
            return None
        if isinstance(q_norm, HeadsNorm) and q_norm.is_joint_rms:
            return QKNorm(q_norm.weight, k_norm.weight, q_norm.spec.eps, q_norm.spec.offset, joint=True)
        if not isinstance(q_norm, RMSNorm):
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
            bias=spec.bias or spec.down_bias,
            reduce_results=reduce,
            params_dtype=ctx.dtype,
            quant_config=ctx.quant_config,
            prefix=f"{prefix}.down",
            tp=ctx.tp,
        )

    def forward(self, x: Tensor, view: RowView | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden] (a partial sum if the layer does not reduce)."""
        if self.spec.gated:
            lora, limit = self.gate_up.lora, self.spec.limit
            if view is not None and lora is not None and lora.whole:
                y = activate_gated_lora(self.gate_up.project(x), x, lora.matrices, view, self.act, limit)
            else:
                y = activate_gated(self.gate_up.project(x, view), self.act, limit)
            return self.down.project(y, view)
        return self.down.project(activate(self.up.project(x, view), self.act), view)


class Experts(nn.Module):
    """The weights of gated MLPs, stored and computed by an `ExpertMethod`.

    reduce: whether `method.combine` sums over ranks.
    """

    gate_up: ShardedParameter
    down: ShardedParameter
    gate_up_bias: ShardedParameter  # where the shape has biases
    down_bias: ShardedParameter

    def __init__(self, shape: ExpertShape, ctx: BuildContext, prefix: str, *, reduce: bool) -> None:
        super().__init__()
        self.shape, self.tp, self.reduce = shape, ctx.tp, reduce
        self.lora: Any = None  # what adapters add to the experts' products, where there are any
        method = None if ctx.quant_config is None else ctx.quant_config.get_expert_method(self, prefix)
        method = UnquantizedExpertMethod() if method is None else method
        self.method: ExpertMethod = method.dealt() if ctx.deals_experts else method
        self.method.create_weights(self, shape, ctx.dtype, ctx.tp)

    @property
    def repacks_whole(self) -> bool:
        """As the method says."""
        return self.method.repacks_whole

    def process_after_load(self) -> None:
        """Let the method repack the filled weights."""
        self.method.process_after_load(self)

    def restore(self) -> bool:
        """Nothing was repacked. Raises RuntimeError if this rank has other experts than those that it was dealt."""
        if isinstance(self.method, DealtExpertMethod) and self.method.has_moved:
            raise RuntimeError(
                "Experts have changed places between the ranks (enable_eplb): reach the model through apply_model or "
                "get_model of every worker, which bring them back."
            )
        return False

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, view: RowView | None = None) -> Tensor:
        """Each token's weighted sum of its experts' outputs. Shapes as in `ExpertMethod.dispatch`.

        view: of the tokens, which may stand for as many rows of x each.
        """
        method = self.method
        dispatched = method.dispatch(self, x, weights, experts)
        if view is None or self.lora is None or not self.lora.concerns(view):
            return method.combine(self, method.compute(self, *dispatched), len(x))
        adapters = view.adapters.repeat_interleave(len(x) // len(view.adapters))
        return method.combine(self, method.compute(self, *dispatched, adapters), len(x))

    def serve(self) -> None:
        """Compute this rank's part for other copies of the engine, in a step in which its own has no tokens."""
        choices, (dtype, device) = self.shape.choices, self.method.place(self)
        x = torch.empty(0, self.shape.hidden, dtype=dtype, device=device)
        self(x, torch.empty(0, choices, device=device), torch.empty(0, choices, dtype=torch.int64, device=device))


def experts_of(model: nn.Module) -> list[Experts]:
    """The experts of all layers, in order."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def serve_experts(model: nn.Module) -> None:
    """Take part in what copies of the engine exchange, if they do, where this one has no tokens for these experts."""
    for experts in experts_of(model):
        if experts.tp.exchange is not None:
            experts.serve()


class MixtureOfExperts(nn.Module):
    """A router and its experts. By default every rank has all experts, each cut like an MLP."""

    def __init__(self, spec: Moe, hidden_size: int, ctx: BuildContext, prefix: str, *, reduce: bool) -> None:
        super().__init__()
        self.spec, self.tp, self.reduce = spec, ctx.tp, reduce
        plain = (spec.score, spec.scale, spec.choice_bias, spec.groups) == ("softmax", 1.0, False, 1)
        self.choice = None
        if not plain:
            if spec.score not in ("softmax", "sigmoid"):
                raise ValueError(f'Unknown score of experts {spec.score!r}, expected "softmax" or "sigmoid".')
            self.choice = Choice(
                spec.top_k,
                spec.score,
                spec.renormalize,
                spec.scale,
                spec.groups,
                spec.top_groups,
                spec.group_best,
            )
        self.router = ReplicatedLinear(
            hidden_size,
            spec.experts,
            bias=spec.bias,
            params_dtype=ctx.dtype,
            linear_method=UnquantizedLinearMethod() if plain else Fp32OutputMethod(),
            prefix=f"{prefix}.router",
            tp=ctx.tp,
        )
        self.choice_bias = None
        if spec.choice_bias:
            self.choice_bias = ShardedParameter.empty((spec.experts,), REPLICATED, 0, 1, torch.float32)
        self.shared = self.shared_gate = None
        if spec.shared is not None:
            self.shared = FeedForward(spec.shared, hidden_size, ctx, f"{prefix}.shared", reduce=False)
            if spec.shared_gate:
                self.shared_gate = ReplicatedLinear(
                    hidden_size, 1, bias=False, params_dtype=ctx.dtype, prefix=f"{prefix}.shared_gate", tp=ctx.tp
                )
            reduce = False  # the sum of both is reduced once
        choices, rows = (1, spec.top_k) if spec.weigh_inputs else (spec.top_k, 1)
        act = activation_kind(spec.act)
        shape = ExpertShape(
            spec.experts, hidden_size, spec.hidden, act, spec.bias, spec.limit, choices, rows, spec.gated
        )
        self.sum_bias = None
        if spec.sum_bias:
            self.sum_bias = ShardedParameter.empty((hidden_size,), REPLICATED, 0, 1, ctx.dtype)
        self.experts = Experts(shape, ctx, f"{prefix}.experts", reduce=reduce)

    def forward(self, x: Tensor, view: RowView | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden] (a partial sum if the layer does not reduce)."""
        logits = self.router.project(x, view)
        if self.choice is not None:
            weights, chosen = route_by_score(logits, self.choice_bias, self.choice)
        elif self.spec.jitter is None:
            weights, chosen = route(logits, self.spec.top_k, self.spec.renormalize)
        else:
            weights, chosen = route_sparse(logits, self.spec.top_k, self.spec.jitter)
        if self.spec.weigh_inputs:
            rows = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
            found = self.experts(rows, torch.ones_like(weights).view(-1, 1), chosen.view(-1, 1), view)
            out: Tensor = found.unflatten(0, weights.shape).sum(1)
        else:
            out = self.experts(x, weights, chosen, view)
        if self.sum_bias is not None and (self.tp.is_first or self.experts.reduce):
            out = out + self.sum_bias
        if self.shared is None:
            return out
        shared = self.shared(x, view)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate.project(x, view).sigmoid()
        out = out + shared
        return self.tp.all_reduce(out) if self.reduce else out


class DecoderBlock(nn.Module):
    """One layer. Between blocks the stream is kept as (x, residual), their sum still to be made, so that the next norm
    can add and normalise in one pass."""

    def __init__(self, spec: Any, hidden_size: int, place: KVPlace | None, ctx: BuildContext, prefix: str) -> None:
        """spec: a `Block`, or one of another class with its fields, whose attention the subclass builds."""
        super().__init__()
        self.layout: Layout = spec.layout
        self.spec, self.tp, self.scale = spec, ctx.tp, spec.residual_scale
        # two branches that are added anyway need one reduction, not two
        reduce = spec.layout not in (Layout.PARALLEL, Layout.PARALLEL_SHARED)
        self.attn = self.build_attention(hidden_size, place, ctx, f"{prefix}.attn", reduce=reduce)
        ffn = FeedForward if isinstance(spec.ffn, Mlp) else MixtureOfExperts
        self.ffn = ffn(spec.ffn, hidden_size, ctx, f"{prefix}.ffn", reduce=reduce)
        norms: list[nn.Module] = [build_norm(spec.norm, hidden_size, ctx.dtype) for _ in range(spec.layout.num_norms)]
        if not spec.attn_norm:
            norms[0] = NoNorm()
        self.norms = nn.ModuleList(norms)

    def build_attention(
        self, hidden_size: int, place: KVPlace | None, ctx: BuildContext, prefix: str, *, reduce: bool
    ) -> Any:
        """The module of `spec.attn`, called as `SelfAttention` is; a block with other attention makes its own."""
        return SelfAttention(self.spec.attn, hidden_size, place, ctx, prefix, reduce=reduce)

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
        view = step.view(picked=rows is not None)
        if rows is not None and not len(rows):
            serve_experts(self)
            if self.layout in (Layout.POST, Layout.BRANCH):
                h = x if residual is None else x + residual
            else:
                h = add_norm(norm[0], x, residual)[0]
            return self.attn(h, step, kv_caches, rows), None
        match self.layout:
            case Layout.PRE:
                h, residual = add_norm(norm[0], x, residual)
                h = scaled(self.attn(h, step, kv_caches, rows))
                h, residual = add_norm(norm[1], h, pick(residual, rows))
                return scaled(self.ffn(h, view)), residual
            case Layout.SANDWICH:
                h, residual = add_norm(norm[0], x, residual)
                h = self.attn(h, step, kv_caches, rows)
                if self.scale == 1.0 and isinstance(norm[1], RMSNorm) and isinstance(norm[2], RMSNorm):
                    h, residual = norm[1].add_branch(h, pick(residual, rows), norm[2])
                else:
                    h, residual = add_norm(norm[2], scaled(norm[1](h)), pick(residual, rows))
                return scaled(norm[3](self.ffn(h, view))), residual
            case Layout.PARALLEL | Layout.PARALLEL_SHARED:
                h, residual = add_norm(norm[0], x, residual)
                residual = pick(residual, rows)
                h2 = norm[1](residual) if self.layout is Layout.PARALLEL else pick(h, rows)
                return scaled(self.tp.all_reduce(self.ffn(h2, view) + self.attn(h, step, kv_caches, rows))), residual
            case Layout.POST:
                x = x if residual is None else x + residual
                x, _ = add_norm(norm[0], scaled(self.attn(x, step, kv_caches, rows)), pick(x, rows))
                x, _ = add_norm(norm[1], scaled(self.ffn(x, view)), x)
                return x, None
            case Layout.BRANCH:
                x = x if residual is None else x + residual
                x = pick(x, rows) + scaled(norm[0](self.attn(x, step, kv_caches, rows)))
                return scaled(norm[1](self.ffn(x, view))), x

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.scale == 1.0 else branch * self.scale


# (spec, hidden_size, place, ctx, prefix) -> a module whose forward is that of `DecoderBlock`.
# place: where the layer's cache is, None if its spec needs none.   prefix: of its parameters' names.
BlockModule = Callable[[Any, int, KVPlace | None, BuildContext, str], nn.Module]
# a spec's class -> the module it becomes; families with a block of their own add to it (`Family.modules`)
MODULES: Mapping[type[BlockSpec], BlockModule] = {Block: DecoderBlock}


def needed(place: KVPlace | None, prefix: str) -> KVPlace:
    """The place of a layer that must have one. Raises ValueError if its spec asks for none."""
    if place is None:
        raise ValueError(
            f"{prefix} has no place in the cache: `need` of the block's spec must return a KVNeed, and returns None, "
            "as it does where the spec's class does not define it."
        )
    return place


def pick(x: Tensor, rows: Tensor | None) -> Tensor:
    """The wanted rows of x; all of them for None."""
    return x if rows is None else x.index_select(0, rows)


def add_norm(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual). Both may be overwritten."""
    if residual is None:
        return norm(x), x
    pair: tuple[Tensor, Tensor] = norm(x, residual)
    return pair
