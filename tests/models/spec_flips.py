"""For every field of every spec: values that change what a model computes, to hold against programs that read specs."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vllm.model_executor.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PromptScaling,
    YarnScaling,
)
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.families.deepseek import LatentAttn, LatentBlock
from vllm.model_executor.models.families.latent_block import MODULES
from vllm.model_executor.models.spec import (
    Alibi,
    Attn,
    Block,
    BlockSparse,
    Decoder,
    HeadNorm,
    Layout,
    LearnedPositions,
    LogTemperature,
    Mlp,
    Moe,
    Norm,
    RelativeBias,
    Rope,
    Temperature,
)

POSITIONS = 64
_NORM = Norm("rms", 1e-6)
_MLP = Mlp("silu", 64)
_ATTN = Attn(2, 1, 64, Rope(64))
_LATENT = LatentAttn(2, None, 32, 32, 32, 32, Rope(32, interleaved=True), 0.2, _NORM)
_YARN = YarnScaling(4.0, 16)
_LONG = LongRopeScaling((1.0,) * 32, (3.0,) * 32, 16, 1.2)
_LLAMA = Llama3Scaling(8.0, 1.0, 4.0, 32)


def _decoder(attn: Attn = _ATTN, ffn: Mlp | Moe = _MLP, **kind: Any) -> Decoder:
    return Decoder(96, 64, (Block(attn, ffn, _NORM),) * 2, _NORM, tied=False, **kind)


# Every class of spec occurs in one of them.
BASES = {
    "plain": _decoder(),
    "head norms": _decoder(replace(_ATTN, qk_norm=_NORM)),
    "experts": _decoder(ffn=Moe("silu", 64, 4, 2, shared=_MLP)),
    "grouped experts": _decoder(
        ffn=Moe("silu", 64, 8, 2, score="sigmoid", scale=1.5, choice_bias=True, groups=4, top_groups=2, group_best=2)
    ),
    "sparse": _decoder(replace(_ATTN, sparse=BlockSparse(2, 2, 3))),
    "temperature": _decoder(replace(_ATTN, temperature=Temperature(2, 0.9))),
    "log temperature": _decoder(replace(_ATTN, temperature=LogTemperature(2))),
    "alibi": _decoder(replace(_ATTN, alibi=Alibi(known=4))),
    "prompt": _decoder(replace(_ATTN, rope=Rope(64, scaling=PromptScaling(4)))),
    "positions": _decoder(replace(_ATTN, rope=None), positions=LearnedPositions(POSITIONS)),
    "linear": _decoder(replace(_ATTN, rope=Rope(64, scaling=LinearScaling(4.0)))),
    "dynamic": _decoder(replace(_ATTN, rope=Rope(64, scaling=DynamicScaling(4.0, 4)))),
    "llama3": _decoder(replace(_ATTN, rope=Rope(64, scaling=_LLAMA))),
    "yarn": _decoder(replace(_ATTN, rope=Rope(64, scaling=_YARN))),
    "longrope": _decoder(replace(_ATTN, rope=Rope(64, scaling=_LONG))),
    "relative": _decoder(replace(_ATTN, causal=False, relative=RelativeBias(8, 16))),
    "latent": replace(_decoder(), blocks=(LatentBlock(_LATENT, _MLP, _NORM),) * 2),
    "latent experts": replace(
        _decoder(),
        blocks=(
            LatentBlock(_LATENT, _MLP, _NORM, 0.7),
            LatentBlock(_LATENT, Moe("silu", 64, 5, 2, False, shared=Mlp("silu", 128)), _NORM, 0.7),
        ),
    ),
}

# (class, field) -> other values; far enough from the base's that no rounding hides them.
VALUES: dict[tuple[type, str], tuple[Any, ...]] = {
    (Decoder, "vocab_size"): (130,),
    (Decoder, "hidden_size"): (128,),
    (Decoder, "blocks"): ((Block(_ATTN, _MLP, _NORM),),),
    (Decoder, "norm"): (None, Norm("layer", bias=True)),
    (Decoder, "tied"): (True,),
    (Decoder, "embed_dim"): (32,),
    (Decoder, "embed_scale"): (7.0,),
    (Decoder, "positions"): (LearnedPositions(POSITIONS, 2),),
    (Decoder, "head_bias"): (True,),
    (Decoder, "unit_head_rows"): (True,),
    (Decoder, "scale_positions"): (True,),
    (Decoder, "silent"): ((3, 5),),
    (Decoder, "embed_norm"): (_NORM,),
    (Decoder, "token_types"): (2,),
    (Decoder, "logit_scale"): (0.25,),
    (Decoder, "logit_softcap"): (0.5,),
    (Block, "attn"): (replace(_ATTN, rope=None),),
    (Block, "ffn"): (Moe("silu", 64, 4, 2), Mlp("relu", 64, gated=False, bias=True)),
    (Block, "norm"): (Norm("layer", bias=True),),
    (Block, "layout"): tuple(layout for layout in Layout if layout is not Layout.PRE),
    (Block, "residual_scale"): (0.3,),
    (Block, "attn_norm"): (False,),
    (Attn, "heads"): (4,),
    (Attn, "kv_heads"): (2,),
    (Attn, "head_dim"): (32, 128),
    (Attn, "rope"): (None, Rope(32), Rope(64, 10.0), Rope(64, interleaved=True)),
    (Attn, "scale"): (1.0,),
    (Attn, "window"): (3,),
    (Attn, "softcap"): (0.05,),
    (Attn, "qk_norm"): (_NORM, Norm("layer", bias=True)),
    (Attn, "qkv_bias"): (True,),
    (Attn, "out_bias"): (True,),
    (Attn, "alibi"): (Alibi(), Alibi(4.0)),
    (Attn, "qk_norm_over"): (HeadNorm.EACH, HeadNorm.ALL),
    (Attn, "clip_qkv"): (0.1,),
    (Attn, "causal"): (False,),
    (Attn, "sinks"): (True,),
    (Attn, "chunk"): (3,),
    (Attn, "norm_after_rope"): (True,),
    (Attn, "temperature"): (Temperature(2, 0.9),),
    (Attn, "sparse"): (BlockSparse(2, 2, 3),),
    (Attn, "relative"): (None, RelativeBias(16, 64)),
    (RelativeBias, "buckets"): (16,),
    (RelativeBias, "distance"): (64,),
    (LatentBlock, "attn"): (replace(_LATENT, scale=1.0),),
    (LatentBlock, "ffn"): (Moe("silu", 64, 4, 2), Mlp("relu", 64, gated=False, bias=True)),
    (LatentBlock, "norm"): (Norm("layer", bias=True),),
    (LatentBlock, "residual_scale"): (0.3,),
    (LatentAttn, "heads"): (4,),
    (LatentAttn, "q_rank"): (32,),
    (LatentAttn, "rank"): (64, 96),
    (LatentAttn, "nope_dim"): (64,),
    (LatentAttn, "rope_dim"): (64,),
    (LatentAttn, "v_dim"): (64,),
    (LatentAttn, "rope"): (Rope(32), Rope(32, 10.0, interleaved=True)),
    (LatentAttn, "scale"): (1.0,),
    (LatentAttn, "norm"): (Norm("rms", 60.0),),
    (LatentAttn, "bias"): (True,),
    (BlockSparse, "block"): (4,),
    (BlockSparse, "local"): (1,),
    (BlockSparse, "stride"): (2,),
    (BlockSparse, "alike"): (True,),
    (Temperature, "floor"): (8,),
    (Temperature, "scale"): (0.1,),
    (Alibi, "largest_exponent"): (1.0,),
    (Alibi, "factor"): (9.0,),
    (Alibi, "known"): (2, None),
    (LogTemperature, "known"): (3,),
    (PromptScaling, "original_positions"): (2,),
    (Mlp, "act"): ("swish", "gelu", "relu"),
    (Mlp, "hidden"): (128,),
    (Mlp, "gated"): (False,),
    (Mlp, "bias"): (True,),
    (Mlp, "down_bias"): (True,),
    (Mlp, "limit"): (0.1,),
    (Moe, "act"): ("gelu",),
    (Moe, "hidden"): (128,),
    (Moe, "experts"): (8,),
    (Moe, "top_k"): (1,),
    (Moe, "renormalize"): (False,),
    (Moe, "jitter"): (0.01,),
    (Moe, "shared"): (None, Mlp("gelu", 64)),
    (Moe, "shared_gate"): (True,),
    (Moe, "bias"): (True,),
    (Moe, "limit"): (0.3,),
    (Moe, "weigh_inputs"): (True,),
    (Moe, "gated"): (False,),
    (Moe, "sum_bias"): (True,),
    (Moe, "score"): ("softmax",),
    (Moe, "scale"): (4.0,),
    (Moe, "choice_bias"): (False,),
    (Moe, "groups"): (2,),
    (Moe, "top_groups"): (1,),
    (Moe, "group_best"): (1,),
    (Norm, "kind"): ("layer",),
    (Norm, "eps"): (2.0,),
    (Norm, "offset"): (1.0,),
    (Norm, "weight"): (False,),
    (Norm, "bias"): (True,),
    (LearnedPositions, "rows"): (POSITIONS + 8,),
    (LearnedPositions, "offset"): (2,),
    (Rope, "dim"): (32,),
    (Rope, "theta"): (10.0,),
    (Rope, "interleaved"): (True,),
    (Rope, "scaling"): (LinearScaling(4.0), DynamicScaling(4.0, 4), _LLAMA, _YARN, _LONG),
    (LinearScaling, "factor"): (16.0,),
    (DynamicScaling, "factor"): (16.0,),
    (DynamicScaling, "original_positions"): (8,),
    (Llama3Scaling, "factor"): (2.0,),
    (Llama3Scaling, "low_freq_factor"): (3.0,),
    (Llama3Scaling, "high_freq_factor"): (40.0,),
    (Llama3Scaling, "original_positions"): (256,),
    (YarnScaling, "factor"): (16.0,),
    (YarnScaling, "original_positions"): (2048,),
    (YarnScaling, "beta_fast"): (1.5,),
    (YarnScaling, "beta_slow"): (0.01,),
    (YarnScaling, "attention_factor"): (1.5,),
    (YarnScaling, "truncate"): (False,),
    (LongRopeScaling, "short_factors"): ((2.0,) * 32,),
    (LongRopeScaling, "long_factors"): ((9.0,) * 32,),
    (LongRopeScaling, "original_positions"): (256,),
    (LongRopeScaling, "attention_factor"): (1.6,),
    (LongRopeScaling, "long_attention_factor"): (1.6,),
}

# What the spec says in another way, or what only shows beyond these sizes: the same result is right.
SAME = {
    (Decoder, "unit_head_rows", True),  # what loading does to the weights
    (Decoder, "scale_positions", True),  # without a scale
    (Mlp, "act", "swish"),
    (LearnedPositions, "rows", POSITIONS + 8),
    (Norm, "bias", True),  # of an RMS norm, which has none
    (LongRopeScaling, "short_factors", (2.0,) * 32),  # positions beyond the original ones take the long ones
}
_GROUPED = {"score", "scale", "choice_bias", "groups", "top_groups", "group_best"}
_EVERYWHERE = {
    "heads",
    "kv_heads",
    "head_dim",
    "rank",
    "nope_dim",
    "rope_dim",
    "v_dim",
}  # which all layers have in common


class Flip(NamedTuple):
    """A decoder that differs from its base in one field; `seen`: whether its results must differ. A base that is
    `whole` sees whole prompts, where a token by itself shows nothing.
    """

    name: str
    base: Decoder
    spec: Decoder
    seen: bool

    @property
    def whole(self) -> bool:
        return any(block.needs_whole_prompt() for block in self.base.blocks)


def spec_classes() -> set[type]:
    """The dataclasses and enums that a `Decoder` is made of, found by its fields' types."""
    found: set[type] = set()

    def visit(kind: Any) -> None:
        if isinstance(kind, types.UnionType) or typing.get_args(kind):
            for part in typing.get_args(kind):
                visit(part)
        elif isinstance(kind, type) and kind not in found:
            if dataclasses.is_dataclass(kind):
                found.add(kind)
                for hint in typing.get_type_hints(kind).values():
                    visit(hint)
                for derived in vars(sys.modules[kind.__module__]).values():
                    if isinstance(derived, type) and kind in derived.__bases__:
                        visit(derived)
            elif issubclass(kind, enum.Enum):
                found.add(kind)

    visit(Decoder)
    visit(LatentBlock)
    return found


def _changed(spec: Any, kind: type, field: str, value: Any, blocks: tuple[int, ...], top: bool = True) -> Any:
    """`spec` with the field changed in every `kind` inside it; in a decoder, of the given blocks only."""
    if isinstance(spec, kind) and type(spec) is kind:
        turned = {}
        if (kind, field) in ((Attn, "head_dim"), (LatentAttn, "rope_dim")) and spec.rope is not None:
            turned = {"rope": replace(spec.rope, dim=value)}
        spec = replace(spec, **{field: value}, **turned)
    if not dataclasses.is_dataclass(spec):
        return spec
    changes = {}
    for f in dataclasses.fields(spec):
        part = getattr(spec, f.name)
        if f.name == "blocks" and kind is not Decoder:
            part = tuple(
                _changed(b, kind, field, value, blocks, False) if i in blocks else b for i, b in enumerate(part)
            )
        elif dataclasses.is_dataclass(part) and not (kind is Norm and f.name == "norm" and top):
            part = _changed(part, kind, field, value, blocks, False)
        changes[f.name] = part
    return replace(spec, **changes)


def _contains(spec: Any, kind: type) -> bool:
    if type(spec) is kind:
        return True
    if isinstance(spec, tuple):
        return any(_contains(part, kind) for part in spec)
    return dataclasses.is_dataclass(spec) and any(
        _contains(getattr(spec, f.name), kind) for f in dataclasses.fields(spec)
    )


def flips() -> Iterator[Flip]:
    """Every field's other values: in the last block alone, in all blocks, and in the decoder itself."""
    for (kind, field), values in VALUES.items():
        for name, base in BASES.items():
            usual = "head norms" if field in ("qk_norm_over", "norm_after_rope") else "plain"
            usual = "relative" if field == "relative" else usual
            if not _contains(base, kind) or (name != usual and kind in (Decoder, Block, Attn, Mlp, Rope)):
                continue
            if kind is Moe and (name == "grouped experts") != (field in _GROUPED):
                continue
            if name == "latent experts" or (name == "latent" and kind not in (LatentBlock, LatentAttn)):
                continue
            if kind is Norm and name not in ("plain", "head norms"):
                continue
            for value in values:
                label = f"{name}: {kind.__name__}.{field}={value}"
                seen = (kind, field, value) not in SAME
                if kind in (Decoder, LearnedPositions):
                    yield Flip(label, base, _changed(base, kind, field, value, ()), seen)
                    continue
                if kind is Norm and name == "plain" and base.norm is not None:
                    last = replace(base, norm=replace(base.norm, **{field: value}))
                    yield Flip(f"{label} (of the decoder)", base, last, seen)
                table = kind not in (Attn, Block, Mlp, Moe, Norm, Rope)  # through the rotary table alone
                for blocks in (
                    [(0, 1)] if field in _EVERYWHERE or kind is PromptScaling else [(1,)] if table else [(1,), (0, 1)]
                ):
                    yield Flip(f"{label} in {blocks}", base, _changed(base, kind, field, value, blocks), seen)


def build(spec: Decoder, dtype: torch.dtype) -> DecoderModel:
    """A model of random weights that depend on their names and shapes alone."""
    model = DecoderModel(spec, dtype=dtype, max_positions=POSITIONS, modules=MODULES)
    for name, parameter in model.named_parameters():
        rng = torch.Generator().manual_seed(sum(name.encode()))
        values = torch.randn(parameter.shape, generator=rng)
        wide = parameter.dim() > 1 and "norm" not in name
        parameter.data.copy_(values * parameter.shape[-1] ** -0.5 if wide else 1 + 0.3 * values)
    return model
