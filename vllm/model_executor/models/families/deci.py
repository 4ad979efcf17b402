"""DeciLM and Nemotron-NAS: layers that a search has made unlike, some without attention or without an MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.models.families.llama import NAMES, ROTARY_FREQUENCIES, attention_bias, rope_of
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Attn, Block, BlockSpec, Decoder, Mlp, Norm
from vllm.step.kv_need import KVNeed


@dataclass(frozen=True, slots=True)
class Map:
    """One product from the stream to the stream, in place of attention or of an MLP."""


@dataclass(frozen=True, slots=True)
class SearchedBlock(BlockSpec):
    """x + A(N1 x), then x + F(N2 x), of which either may be missing, norm and all, or be a single product."""

    attn: Attn | Map | None
    ffn: Mlp | Map | None
    norm: Norm

    def need(self, world: int) -> KVNeed | None:
        return Block(self.attn, Mlp("silu", 1), self.norm).need(world) if isinstance(self.attn, Attn) else None

    def heads(self) -> tuple[int, int]:
        return (self.attn.heads, self.attn.kv_heads) if isinstance(self.attn, Attn) else (0, 0)


def _layers(hf: HFConfig) -> list[HFConfig] | None:
    """`block_configs`, where the config has them: one object for each layer."""
    value = hf.get("block_configs", default=None)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != hf.num_layers or not all(isinstance(x, dict) for x in value):
        raise ValueError(f"{hf.file}: field `block_configs` is not a list of one object for each layer.")
    return [HFConfig(layer, hf.path) for layer in value]


def _kv_heads(hf: HFConfig) -> list[int | None]:
    """Key/value heads of each layer, None for a layer without attention."""
    layers = _layers(hf)
    if layers is None:
        value: Any = hf.get("num_key_value_heads_per_layer", default=None)
        if value is None:
            value = [hf.get_int("num_key_value_heads", default=hf.num_heads)] * hf.num_layers
        if not isinstance(value, list) or len(value) != hf.num_layers or any(type(x) is not int for x in value):
            raise ValueError(
                f"{hf.file}: field `num_key_value_heads_per_layer` is not a list of one number for each layer."
            )
        found: list[int | None] = list(value)
    else:
        groups = [layer.nested("attention").get_int("n_heads_in_group", default=None) for layer in layers]
        found = [None if group is None else hf.num_heads // group for group in groups]
    for heads in found:
        if heads is not None and (heads < 1 or hf.num_heads % heads):
            raise ValueError(f"{hf.file}: {heads} key/value heads in a layer do not divide the {hf.num_heads} heads.")
    return found


def most_kv_heads(hf: HFConfig) -> int:
    """Key/value heads of the layer that has most of them."""
    return max((heads for heads in _kv_heads(hf) if heads is not None), default=1)


def _missing(part: HFConfig, hf: HFConfig, what: str) -> tuple[bool, bool]:
    """(the branch is left out, it is a single product). Raises ValueError for what else a search may have chosen."""
    for name in ("sparsify", "num_sink_tokens", "window_length"):
        if part.get(name, default=None):
            raise ValueError(f"{hf.file}: a layer's {what} has `{name}`, which is not supported.")
    return part.get_bool("no_op", default=False), part.get_bool("replace_with_linear", default=False)


def deci(hf: HFConfig) -> Decoder:
    """DeciLM: Llama with unlike layers."""
    if hf.get_str("position_embedding_type", default="rope") in ("mistral_yarn", "rope_llama4"):
        raise ValueError(f"{hf.file}: this position_embedding_type is not supported.")
    norm, act, bias = Norm("rms", hf.get_float("rms_norm_eps", minimum=0)), hf.get_str("hidden_act"), attention_bias(hf)
    mlp_bias = hf.get_bool("mlp_bias", default=False)
    kv_heads, layers, rope = _kv_heads(hf), _layers(hf), rope_of(hf)

    def attention(layer: int) -> Attn | Map | None:
        left_out, linear = (False, False)
        if layers is not None:
            left_out, linear = _missing(layers[layer].nested("attention"), hf, "attention")
        heads = kv_heads[layer]
        if left_out or linear:
            return None if left_out else Map()
        if heads is None:
            raise ValueError(f"{hf.file}: layer {layer} has attention, but no `n_heads_in_group`.")
        return Attn(hf.num_heads, heads, hf.head_dim, rope=rope, **bias)

    def feed_forward(layer: int) -> Mlp | Map | None:
        if layers is None:
            return Mlp(act, hf.get_int("intermediate_size"), bias=mlp_bias)
        part = layers[layer].nested("ffn")
        left_out, linear = _missing(part, hf, "ffn")
        if left_out or linear:
            return None if left_out else Map()
        width = int(2 * part.get_float("ffn_mult", minimum=0) * hf.hidden_size / 3)
        return Mlp(act, -(-width // 256) * 256, bias=mlp_bias)

    def block(layer: int) -> BlockSpec:
        attn, ffn = attention(layer), feed_forward(layer)
        if isinstance(attn, Attn) and isinstance(ffn, Mlp):
            return Block(attn, ffn, norm)
        return SearchedBlock(attn, ffn, norm)

    blocks = tuple(block(layer) for layer in range(hf.num_layers))
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, norm, hf.tie_word_embeddings)


DECI_NAMES = renames(
    {
        "model.layers.{i}.self_attn.linear_attn.{p}": "blocks.{i}.attn.{p}",
        "model.layers.{i}.mlp.linear_mlp.{p}": "blocks.{i}.ffn.{p}",
    }
)
DECI = Family(
    deci,
    DECI_NAMES + NAMES,
    harmless=ROTARY_FREQUENCIES,
    facts=replace(
        Facts(Windows.NONE, defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}),
        kv_heads=most_kv_heads,
    ),
    modules="vllm.model_executor.models.families.deci_block",
)
