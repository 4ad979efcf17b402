"""Which decoders the fused decode step computes, and all that it reads of one: weights, norms, attention's constants.

What is covered is said by equality: a spec is rebuilt from the fields that the step reads, and covered if the result
equals it, so that a field which nobody here knows refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.activation import ACTIVATIONS
from vllm.model_executor.layers.expert_method import UnquantizedExpertMethod
from vllm.model_executor.layers.linear_method import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.method import QuantizedExpertMethod, QuantizedLinearMethod
from vllm.model_executor.models.families.deepseek import LatentAttn, LatentBlock
from vllm.model_executor.models.spec import (
    Attn,
    Block,
    BlockSpec,
    Decoder,
    HeadNorm,
    Layout,
    LearnedPositions,
    Mlp,
    Moe,
    Norm,
    Rope,
)
from vllm.model_executor.models.traits import Model
from vllm.ops.lora import LowRank
from vllm.ops.triton.attention import fp8_limit
from vllm.ops.triton.decode_attention import DecodeAttention
from vllm.ops.triton.decode_join import NormWeights
from vllm.ops.triton.decode_latent import MOST_ROWS, LatentDecode
from vllm.ops.triton.decode_linear import ARGMAX, DTYPES, GATED, RESIDUAL, STORE, Weight, supports
from vllm.ops.triton.decode_lora import MOST_RANK
from vllm.ops.triton.decode_step import Entrance
from vllm.ops.triton.float8 import Float8Weight
from vllm.ops.triton.packed_experts import PackedStack
from vllm.ops.triton.packed_linear import PackedWords

if TYPE_CHECKING:
    from vllm.model_executor.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True)
class Linear:
    """weight: [out, in], packed or not.   bias: [out], None for none, also where another rank adds it.

    lora: the adapters' matrices, None where there are no adapters.
    """

    weight: Weight
    bias: Tensor | None = None
    lora: LowRank | None = None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """up: gate and up in one if `gated`.   act: as in `ops.activation`."""

    up: Linear
    down: Linear
    act: str
    gated: bool


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """router: [experts, hidden]; gate_up, down: as `ops.moe.expert_mlp` takes them.   shared: of every token, beside
    the chosen ones.
    """

    router: Linear
    gate_up: Tensor | PackedStack
    down: Tensor | PackedStack
    top_k: int
    renormalize: bool
    act: str
    shared: MlpWeights | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. norms: as many as its layout has.   scale: of what a branch adds to the stream.

    qkv: all that attention reads; of latent attention queries and the latent.
    """

    qkv: Linear
    o: Linear
    ffn: MlpWeights | MoeWeights
    norms: tuple[NormWeights, ...]
    layout: Layout
    scale: float
    attention: DecodeAttention | LatentDecode

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All its products but those of experts."""
        ffn = self.ffn
        return (self.qkv, self.o, *((ffn.up, ffn.down) if isinstance(ffn, MlpWeights) else (ffn.router,)))


@dataclass(frozen=True, slots=True)
class ProgramWeights:
    """All that the fused step reads of a model, or of its stage of a pipeline.

    entrance, head: of this rank's rows; the head's begin at `first_row`.   head_rows: of every rank, with padding.
    entrance: None where another stage embeds.   head, norm: None where another stage has what follows the layers.
    logit_scale, logit_softcap: of logits that are drawn from; the most likely token is the same without.
    head_lora: the adapters' matrices of the head.
    """

    layers: tuple[LayerWeights, ...]
    hidden_size: int
    dtype: torch.dtype
    entrance: Entrance | None
    head: Tensor | None
    head_bias: Tensor | None
    norm: NormWeights | None
    vocab_size: int
    first_row: int
    head_rows: int
    logit_scale: float
    logit_softcap: float | None
    tp: TensorParallel
    head_lora: LowRank | None = None

    @property
    def has_latents(self) -> bool:
        """Whether attention is over latents."""
        return any(isinstance(layer.attention, LatentDecode) for layer in self.layers)

    def covers(self, rows: int, adapted: bool) -> bool:
        """Whether steps of so many rows are fused. adapted: rows may have adapters."""
        return (rows <= MOST_ROWS or not self.has_latents) and (self.takes_adapters or not adapted)

    @property
    def takes_adapters(self) -> bool:
        """Whether the step knows what adapters add: to weights that are not packed, by matrices of ranks up to a limit
        that lie row by row."""
        parts = [part for layer in self.layers for part in layer.linears]
        if self.has_latents or any(isinstance(x.ffn, MoeWeights) and x.ffn.shared is not None for x in self.layers):
            return False
        return all(
            part.lora is not None
            and part.lora.a.is_contiguous()
            and part.lora.b.is_contiguous()
            and part.lora.b.shape[2] <= MOST_RANK
            and isinstance(part.weight, Tensor)
            for part in parts
        )


def _norm_computed(norm: Norm) -> Norm:
    return Norm(norm.kind, norm.eps, norm.offset, weight=norm.weight, bias=norm.bias)


def _rope_computed(rope: Rope | None) -> Rope | None:
    # theta and scaling through the table
    return None if rope is None else Rope(rope.dim, rope.theta, interleaved=rope.interleaved, scaling=rope.scaling)


def _attn_computed(attn: Attn) -> Attn:
    norm = attn.qk_norm  # by kernels that know this kind, of each head or of all
    return Attn(
        attn.heads,
        attn.kv_heads,
        attn.head_dim,
        _rope_computed(attn.rope),
        scale=attn.scale,
        window=attn.window,
        softcap=attn.softcap,
        qk_norm=None if norm is None else Norm("rms", norm.eps, norm.offset),
        qk_norm_over=HeadNorm.ALL if attn.qk_norm_over is HeadNorm.ALL else HeadNorm.HEAD,
        qkv_bias=attn.qkv_bias,
        out_bias=attn.out_bias,
    )


def _ffn_computed(ffn: Mlp | Moe) -> Mlp | Moe:
    if type(ffn) is Mlp:
        return Mlp(ffn.act, ffn.hidden, gated=ffn.gated, bias=ffn.bias)
    assert isinstance(ffn, Moe)
    shared = None
    if type(ffn.shared) is Mlp and ffn.shared.gated and ffn.shared.act == ffn.act:
        shared = Mlp(ffn.shared.act, ffn.shared.hidden)
    return Moe(ffn.act, ffn.hidden, ffn.experts, ffn.top_k, renormalize=ffn.renormalize, shared=shared)


def _latent_computed(block: LatentBlock) -> LatentBlock:
    attn = block.attn
    return LatentBlock(
        LatentAttn(
            attn.heads,
            None,
            attn.rank,
            attn.nope_dim,
            attn.rope_dim,
            attn.v_dim,
            Rope(attn.rope.dim, attn.rope.theta, interleaved=attn.rope.interleaved, scaling=attn.rope.scaling),
            attn.scale,
            Norm("rms", attn.norm.eps),
        ),
        _ffn_computed(block.ffn),
        _norm_computed(block.norm),
        block.residual_scale,
    )


def _block_computed(block: BlockSpec) -> Block | LatentBlock | None:
    """What the step computes of a layer: the spec rebuilt from the fields that are read, all others at their default.

    None for a layer of another kind.
    """
    if type(block) is LatentBlock and type(block.ffn) in (Mlp, Moe) and type(block.attn) is LatentAttn:
        return _latent_computed(block)
    if type(block) is not Block or type(block.attn) is not Attn or type(block.ffn) not in (Mlp, Moe):
        return None
    if block.attn.rope is not None and type(block.attn.rope) is not Rope:
        return None
    return Block(
        _attn_computed(block.attn),
        _ffn_computed(block.ffn),
        _norm_computed(block.norm),
        layout=block.layout,
        residual_scale=block.residual_scale,
    )


def computed(spec: Decoder) -> Decoder | None:
    """What the fused step computes of a decoder: `spec` again if it reads every field that is not at its default.

    None for layers of another kind. A field that is not named here is taken for its default, so that one which is
    added to a spec refuses the step, instead of being ignored by it.
    """
    blocks = tuple(_block_computed(block) for block in spec.blocks)
    if spec.norm is None or None in blocks:
        return None
    known = tuple(block for block in blocks if block is not None)
    places = spec.positions
    return Decoder(
        spec.vocab_size,
        spec.hidden_size,
        known,
        _norm_computed(spec.norm),
        spec.tied,
        embed_scale=spec.embed_scale,
        positions=None if places is None else LearnedPositions(places.rows, places.offset),
        head_bias=spec.head_bias,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap,
        unit_head_rows=spec.unit_head_rows,  # through the weights
        scale_positions=spec.scale_positions,
    )


def _attention_sizes(block: Block | LatentBlock) -> tuple[Any, ...]:
    """What all layers must have in common: buffers and tilings are made for the first, and serve all."""
    attn = block.attn
    if isinstance(attn, LatentAttn):
        return attn.heads, attn.rank, attn.nope_dim, attn.rope_dim, attn.v_dim
    return attn.heads, attn.kv_heads, attn.head_dim


def _ffn_sizes(ffn: Mlp | Moe) -> tuple[Any, ...]:
    """What all layers of one kind, or all experts, must have in common."""
    if isinstance(ffn, Mlp):
        return Mlp, ffn.hidden, ffn.gated
    return Moe, ffn.hidden, ffn.experts, ffn.top_k, 0 if ffn.shared is None else ffn.shared.hidden


def covers(spec: Decoder) -> bool:
    """Whether the fused step computes what a decoder of this spec does."""
    blocks = [block for block in spec.blocks if isinstance(block, Block | LatentBlock)]
    if not blocks or computed(spec) != spec:
        return False
    if len({_attention_sizes(block) for block in blocks}) > 1:
        return False
    kinds = {_ffn_sizes(block.ffn) for block in blocks}
    if len({kind[0] for kind in kinds}) < len(kinds) or spec.logit_scale <= 0.0:  # the largest would become the least
        return False
    attn = blocks[0].attn
    if isinstance(attn, Attn):
        fits = attn.head_dim % 8 == 0 and attn.head_dim <= 256 and attn.heads // attn.kv_heads <= 16
    else:
        fits = attn.rope_dim % 2 == 0 and attn.rope_dim == attn.rope.dim
    return fits and all(block.ffn.act in ACTIVATIONS for block in blocks)


def _unlike(spec: Any, other: Any, name: str) -> list[str]:
    """The fields in which two specs differ, by their names."""
    if spec == other:
        return []
    if type(spec) is not type(other) or not is_dataclass(spec):
        return [name]
    found = (_unlike(getattr(spec, f.name), getattr(other, f.name), f"{name}.{f.name}") for f in fields(spec))
    return [path for paths in found for path in paths]


def unknown(spec: Decoder) -> str:
    """What of a decoder the fused step does not compute, in words."""
    found = computed(spec)
    if found is None:
        return "it has layers of a kind that the step does not know"
    paths = _unlike(replace(spec, blocks=()), replace(found, blocks=()), "model")
    paths += [p for a, b in zip(spec.blocks, found.blocks, strict=True) for p in _unlike(a, b, "layer")]
    return f"it does not compute {', '.join(dict.fromkeys(paths))}" if paths else "its layers have unlike or odd sizes"


def refusal(model: Model, kv_caches: list[Tensor]) -> str | None:
    """Why the steps of a model, or of a stage of one, cannot be fused, in words; None if all but its layers' weights
    allows it.
    """
    traits, spec = model.traits, model.traits.decoder
    if spec is None or "logits" not in traits.heads:
        return "the model's layers are not described by a spec, or it has no logits"
    if traits.dtype not in DTYPES:
        return f"there are no kernels for {traits.dtype}"
    if spec.norm is None or not covers(spec):
        return unknown(spec)
    model = cast("DecoderModel", model)
    alike = all(cache.dtype == model.dtype for cache in kv_caches)
    if not all(cache.dtype == model.dtype or fp8_limit(cache.dtype) for cache in kv_caches):
        return "the cache has another dtype than the model, and not one of 8-bit floats"
    if (model.is_first and not model.embed.plain) or (model.is_last and not model.head.plain):
        return "embedding or head are not stored as plain numbers"
    if any(type(block) is not Block for block in spec.blocks) and (model.tp.world > 1 or not alike):
        return "latent attention is fused on one rank and with a cache of the model's dtype only"
    if model.tp.world > 1 and any(isinstance(b.ffn, Moe) and b.ffn.shared is not None for b in spec.blocks):  # type: ignore[attr-defined]
        return "shared experts are fused on one rank only"
    if model.tp.world > 1 and any(b.attn.qk_norm_over is HeadNorm.ALL for b in spec.blocks if isinstance(b, Block)):
        return "norms over the heads of all ranks are fused on one rank only"
    return None


def read_weights(model: Model, kv_caches: list[Tensor]) -> ProgramWeights | None:
    """The weights of a model that the fused step can run, or of a stage of one; else None."""
    spec = model.traits.decoder
    if spec is None or spec.norm is None or refusal(model, kv_caches) is not None:
        return None
    model = cast("DecoderModel", model)
    tp, first, last = model.tp, model.is_first, model.is_last
    layers = [_layer(block, kv_caches) for _, block in model.own_blocks]
    read = tuple(layer for layer in layers if layer is not None)
    if len(read) < len(layers):
        return None
    entrance = head = head_bias = norm = head_lora = None
    first_row = head_rows = 0
    if last:
        if not supports(model.head.weight.data, ARGMAX):
            return None
        head_rows = len(model.head.weight.data)
        if spec.vocab_size <= (tp.world - 1) * head_rows:  # the last rank has padding only
            return None
        first_row = tp.rank * head_rows
        mine = slice(0, spec.vocab_size - first_row)
        head = model.head.weight.data[mine]
        head_bias = None if model.head.bias is None else model.head.bias.data[mine]
        norm, head_lora = _norm_weights(model.norm, spec.norm), _low_rank(model.head, len(head))
    if first:
        places, first_place = None, 0
        if spec.positions is not None:
            places, first_place = model.positions.data, spec.positions.offset
        embed = model.embed
        entrance = Entrance(
            embed.weight.data, embed.first_row, model.embed_scale, places, first_place, spec.scale_positions,
            _low_rank(embed) if tp.is_first else None,
        )  # fmt: skip
    return ProgramWeights(
        read,
        spec.hidden_size,
        model.dtype,
        entrance,
        head,
        head_bias,
        norm,
        spec.vocab_size,
        first_row,
        head_rows,
        spec.logit_scale,
        spec.logit_softcap,
        tp,
        head_lora,
    )


def _layer(block: Any, kv_caches: list[Tensor]) -> LayerWeights | None:
    attn, spec = block.attn, block.attn.spec
    latent = isinstance(spec, LatentAttn)
    qkv, o, ffn = _plain(attn.into if latent else attn.qkv, STORE), _plain(attn.o, RESIDUAL), _ffn(block.ffn)
    if qkv is None or o is None or ffn is None:
        return None
    norms = tuple(_norm_weights(norm, block.spec.norm) for norm in block.norms)
    attention = _latent_attention(attn, kv_caches) if latent else _attention(attn, kv_caches)
    return LayerWeights(qkv, o, ffn, norms, block.layout, block.scale, attention)


def _latent_attention(attn: Any, kv_caches: list[Tensor]) -> LatentDecode:
    spec = attn.spec
    return LatentDecode(
        heads=spec.heads,
        nope_dim=spec.nope_dim,
        scale=spec.scale,
        cache=kv_caches[attn.place.tensor],
        kv_b=attn.kv_b.weight.data.view(-1, spec.nope_dim + spec.v_dim, spec.rank),
        norm_weight=attn.kv_norm.weight.data,
        eps=attn.kv_norm.variance_epsilon,
        cos_sin=attn.cos_sin,
        interleaved=spec.rope.interleaved,
        group=attn.place.group,
    )


def _attention(attn: Any, kv_caches: list[Tensor]) -> DecodeAttention:
    spec = attn.spec
    head_norm = spec.qk_norm
    return DecodeAttention(
        heads=attn.heads,
        scale=attn.params.scale,
        cache=kv_caches[attn.place.tensor],
        cos_sin=None if spec.rope is None else attn.cos_sin,
        q_weight=None if head_norm is None else attn.q_norm.weight.data,
        k_weight=None if head_norm is None else attn.k_norm.weight.data,
        eps=0.0 if head_norm is None else head_norm.eps,
        offset=0.0 if head_norm is None else head_norm.offset,
        group=attn.place.group,
        window=attn.params.window,
        softcap=spec.softcap,
        interleaved=spec.rope is not None and spec.rope.interleaved,
        k_scale=attn.params.k_scale,
        v_scale=attn.params.v_scale,
        joint=spec.qk_norm_over is HeadNorm.ALL,
    )


def _ffn(ffn: Any) -> MlpWeights | MoeWeights | None:
    spec = ffn.spec
    if isinstance(spec, Mlp):
        up = _plain(ffn.gate_up, GATED) if spec.gated else _plain(ffn.up, STORE)
        down = _plain(ffn.down, RESIDUAL)
        return None if up is None or down is None else MlpWeights(up, down, ffn.act, spec.gated)
    experts, router = ffn.experts, ffn.router
    if type(router.method) is not UnquantizedLinearMethod:
        return None
    if type(experts.method) is UnquantizedExpertMethod:
        stacks = experts.gate_up.data, experts.down.data
    elif type(experts.method) is QuantizedExpertMethod and experts.method.stacks is not None:
        stacks = experts.method.stacks
    else:
        return None
    if not all(isinstance(w, PackedStack) or (w.dtype in DTYPES and w.is_contiguous()) for w in stacks):
        return None
    gate_up, down = stacks
    linear = Linear(router.weight.data, None, _low_rank(router))
    shared = None
    if ffn.shared is not None:
        found = _ffn(ffn.shared)
        if not isinstance(found, MlpWeights) or not all(isinstance(x.weight, Tensor) for x in (found.up, found.down)):
            return None
        shared = found
    return MoeWeights(linear, gate_up, down, spec.top_k, spec.renormalize, experts.shape.act, shared)


def _plain(linear: Any, mode: int) -> Linear | None:
    """The linear layer's weight and the bias that this rank adds, if they are ones that the kernels can read."""
    if linear.skip_bias_add:
        return None
    if isinstance(linear.method, QuantizedLinearMethod):
        weight = linear.packed[0].weight if len(linear.packed) == 1 else None  # unlike parts are products of their own
        if isinstance(weight, PackedWords):
            if weight.order is not None:
                return None
        elif not isinstance(weight, Float8Weight) or not supports(weight, mode):
            return None
    else:
        if not isinstance(linear.method, UnquantizedLinearMethod) or linear.packed is not None:
            return None
        weight = linear.weight.data
        if not supports(weight, mode):
            return None
    mine = linear.bias is not None and (mode != RESIDUAL or linear.tp.is_first)
    return Linear(weight, linear.bias.data if mine else None, _low_rank(linear))


def _low_rank(layer: Any, outputs: int | None = None) -> LowRank | None:
    """The matrices of a layer's adapters. outputs: as many as are computed, None for all."""
    if layer.lora is None or not layer.lora.whole:
        return None
    matrices: LowRank = layer.lora.matrices
    return matrices if outputs is None else replace(matrices, parts=((0, outputs),))


def _norm_weights(norm: Any, spec: Norm) -> NormWeights:
    """The factor is kept in fp32 if an offset is added, to lose nothing."""
    center = spec.kind == "layer"
    weight = None if norm.weight is None else norm.weight.data
    if weight is not None and norm.offset != 0.0:
        weight = weight.float() + norm.offset
    bias = None if not center or norm.bias is None else norm.bias.data
    return NormWeights(weight, bias, norm.variance_epsilon, center)
