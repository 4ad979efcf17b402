"""Families of 2025 that are Llama with some fields changed: Llama 4, SmolLM 3, Seed-OSS, EXAONE 4, GLM-4.5, dots.llm1,
ERNIE 4.5 and Hunyuan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.rope import LongRopeScaling, YarnScaling
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.models.families.deepseek import SHARED_NAMES, dense_layers, shared_and_routed
from vllm.model_executor.models.families.kin import OLMO2_NAMES
from vllm.model_executor.models.families.llama import (
    NAMES,
    NO_WINDOWS,
    ROTARY_FREQUENCIES,
    attention_bias,
    llama_like,
    rope_of,
    windows_of,
)
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Block, Decoder, Layout, Mlp, Moe, Norm, Rope, Temperature


def _norm(hf: HFConfig) -> Norm:
    return Norm("rms", hf.get_float("rms_norm_eps", minimum=0))


def _rotated(hf: HFConfig) -> list[bool]:
    """Which layers rotate queries and keys: those with a 1 in `no_rope_layers`, else all but every so-manieth."""
    named = hf.get("no_rope_layers", default=None)
    if named:
        if not isinstance(named, list) or len(named) != hf.num_layers or any(x not in (0, 1) for x in named):
            raise ValueError(f"{hf.file}: field `no_rope_layers` is {named!r}, expected a 0 or 1 for each layer.")
        return [bool(x) for x in named]
    every = hf.get_int("no_rope_layer_interval", default=4)
    return [(layer + 1) % every != 0 for layer in range(hf.num_layers)]


def _chunked(hf: HFConfig, rotated: list[bool]) -> list[bool]:
    """Which layers see their own chunk only: those that `layer_types` names, else those that rotate."""
    if hf.get("layer_types", default=None) is None:
        return rotated
    for kind in hf.layer_types:
        if kind not in ("chunked_attention", "full_attention"):
            raise ValueError(
                f"{hf.file}: layers of type {kind!r} are not supported, expected chunked_attention or full_attention."
            )
    return [kind == "chunked_attention" for kind in hf.layer_types]


def _without_factor(rope: Rope) -> Rope:
    """The rotation, its lengths kept: a norm behind it takes out the factor that some scalings have."""
    scaling = rope.scaling
    if isinstance(scaling, YarnScaling):
        scaling = replace(scaling, attention_factor=1.0)
    elif isinstance(scaling, LongRopeScaling):
        scaling = replace(scaling, attention_factor=1.0, long_attention_factor=None)
    return replace(rope, scaling=scaling)


def llama4(hf: HFConfig) -> Decoder:
    """Llama 4's text model: layers with rotation see chunks, those without see all and sharpen with the position."""
    act, width = hf.get_str("hidden_act"), hf.get_int("intermediate_size")
    experts = Moe(
        act,
        width,
        hf.get_int("num_local_experts"),
        hf.get_int("num_experts_per_tok"),
        renormalize=False,
        shared=Mlp(act, width),
        score="sigmoid",
        weigh_inputs=True,
    )
    mlp = Mlp(act, hf.get_int("intermediate_size_mlp"))
    step = hf.get_int("interleave_moe_layer_step", default=1)
    sparse = hf.get("moe_layers", default=None)
    if sparse is None:
        sparse = list(range(step - 1, hf.num_layers, step))
    if not isinstance(sparse, list) or any(type(x) is not int for x in sparse):
        raise ValueError(f"{hf.file}: field `moe_layers` is {sparse!r:.200}, expected a list of layers' numbers.")
    rotated, rope = _rotated(hf), rope_of(hf, interleaved=True)
    norm = None
    if hf.get_bool("use_qk_norm", default=True):
        norm = Norm("rms", hf.get_float("rms_norm_eps", minimum=0), weight=False)
        rope = _without_factor(rope)
    chunk = hf.get_int("attention_chunk_size", default=None)
    chunked = _chunked(hf, rotated)
    temperature = None
    if hf.get_bool("attn_temperature_tuning", default=True):
        floor, scale = hf.get_int("floor_scale", default=8192), hf.get_float("attn_scale", default=0.1)
        temperature = Temperature(floor, scale)

    def choose(layer: int, block: Block) -> Block:
        attn = replace(block.attn, rope=None, temperature=temperature)
        if rotated[layer]:
            # the norm has no weights, so that it may as well come before the rotation
            attn = replace(block.attn, rope=rope, qk_norm=norm)
        attn = replace(attn, chunk=chunk if chunked[layer] else None)
        return replace(block, attn=attn, ffn=experts if layer in sparse else mlp)

    return llama_like(hf, attn={**attention_bias(hf), "rope": None}, ffn=mlp, per_layer=choose)


def smollm3(hf: HFConfig) -> Decoder:
    """SmolLM 3: every fourth layer does not rotate."""
    rotated = _rotated(hf)

    def choose(layer: int, block: Block) -> Block:
        return block if rotated[layer] else replace(block, attn=replace(block.attn, rope=None))

    ffn = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), bias=hf.get_bool("mlp_bias", default=False))
    return llama_like(hf, attn=attention_bias(hf), ffn=ffn, windows=windows_of(hf), per_layer=choose)


def seed_oss(hf: HFConfig) -> Decoder:
    """Seed-OSS: biased queries, keys and values."""
    bias = {
        "qkv_bias": hf.get_bool("attention_bias", default=True),
        "out_bias": hf.get_bool("attention_out_bias", default=False),
    }
    ffn = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), bias=hf.get_bool("mlp_bias", default=False))
    return llama_like(hf, attn=bias, ffn=ffn)


def exaone4(hf: HFConfig) -> Decoder:
    """EXAONE 4: norms behind each branch; where some layers have windows, the others do not rotate."""
    mixed = hf.sliding_window is not None

    def choose(layer: int, block: Block) -> Block:
        whole = mixed and block.attn.window is None
        return replace(block, attn=replace(block.attn, rope=None)) if whole else block

    return llama_like(hf, attn={"qk_norm": _norm(hf)}, layout=Layout.BRANCH, windows=windows_of(hf), per_layer=choose)


def _mixture(hf: HFConfig, attn: dict[str, Any], experts: Moe, dense: list[bool], **others: Any) -> Decoder:
    """Llama with experts in the layers that are not dense."""
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), bias=others.pop("mlp_bias", False))

    def choose(layer: int, block: Block) -> Block:
        return replace(block, ffn=mlp) if dense[layer] else block

    return llama_like(hf, attn=attn, ffn=experts, per_layer=choose, **others)


def glm4_moe(hf: HFConfig) -> Decoder:
    """GLM-4.5: DeepSeek 3's choice of experts behind ordinary attention."""
    attn: dict[str, Any] = {"qkv_bias": hf.get_bool("attention_bias", default=False)}
    if hf.get_bool("use_qk_norm", default=False):
        attn["qk_norm"] = _norm(hf)
    return _mixture(hf, attn, shared_and_routed(hf, method="noaux_tc", score="sigmoid"), dense_layers(hf))


def dots1(hf: HFConfig) -> Decoder:
    """dots.llm1: the same with normalised queries and keys."""
    attn = {**attention_bias(hf), "qk_norm": _norm(hf)}
    experts = shared_and_routed(hf, method="noaux_tc", score="sigmoid")
    return _mixture(hf, attn, experts, dense_layers(hf), windows=windows_of(hf))


def _dots1_window(hf: HFConfig, layer: int) -> bool:
    """From `max_window_layers` on, whatever `use_sliding_window` says."""
    first: int = hf.get_int("max_window_layers", default=0, minimum=0)
    return layer >= first


def ernie4_5(hf: HFConfig) -> Decoder:
    """ERNIE 4.5: pairs of neighbours are rotated; one switch for all biases."""
    bias = hf.get_bool("use_bias", default=False)
    attn = {"qkv_bias": bias, "out_bias": bias, "rope": rope_of(hf, interleaved=True)}
    return llama_like(hf, attn=attn, ffn=Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), bias=bias))


def ernie4_5_moe(hf: HFConfig) -> Decoder:
    """ERNIE 4.5 with experts: chosen by their softmax and a learned bias."""
    bias, act = hf.get_bool("use_bias", default=False), hf.get_str("hidden_act")
    width, shared = hf.get_int("moe_intermediate_size"), hf.get_int("moe_num_shared_experts", default=0, minimum=0)
    count, chosen = hf.get_int("moe_num_experts"), hf.get_int("moe_k")
    if hf.get_float("moe_norm_min", default=0.0) > chosen / count:  # the sum of the largest is never less
        raise ValueError(f"{hf.file}: a `moe_norm_min` above moe_k / moe_num_experts is not supported.")
    experts = Moe(
        act,
        width,
        count,
        chosen,
        shared=Mlp(act, width * shared, bias=bias) if shared else None,
        choice_bias=True,
    )
    first, every = hf.get_int("moe_layer_start_index", minimum=0), hf.get_int("moe_layer_interval", default=1)
    last = hf.get_int("moe_layer_end_index", default=-1, minimum=-1)
    last = hf.num_layers - 1 if last == -1 else last
    dense = [not first <= layer <= last or (layer + 1) % every != 0 for layer in range(hf.num_layers)]
    attn = {"qkv_bias": bias, "out_bias": bias, "rope": rope_of(hf, interleaved=True)}
    return _mixture(hf, attn, experts, dense, mlp_bias=bias)


def _hunyuan_attention(hf: HFConfig) -> dict[str, Any]:
    """Queries and keys are normalised behind their rotation, whose base an `alpha` raises for every length."""
    if hf.get_bool("use_cla", default=False):
        raise ValueError(f"{hf.file}: layers that share keys and values (use_cla) are not supported.")
    where = "rope_scaling" if hf.get("rope_scaling", default=None) else "rope_parameters"
    alpha = hf.nested(where).get_float("alpha", default=None, minimum=1e-6)
    rope = rope_of(hf)
    if alpha is not None:
        rope = replace(rope, theta=rope.theta * alpha ** (rope.dim / (rope.dim - 2)), scaling=None)
    return {**attention_bias(hf), "rope": rope, "qk_norm": _norm(hf), "norm_after_rope": True}


def hunyuan_dense(hf: HFConfig) -> Decoder:
    """Hunyuan of one MLP in each layer."""
    return llama_like(hf, attn=_hunyuan_attention(hf))


def hunyuan_moe(hf: HFConfig) -> Decoder:
    """Hunyuan of experts; their numbers may be a list, of one entry for each layer."""
    act, width = hf.get_str("hidden_act"), hf.get_int("intermediate_size")

    def per_layer(name: str) -> list[int]:
        value = hf.get(name)
        values = value if isinstance(value, list) else [value] * hf.num_layers
        if len(values) != hf.num_layers or not all(type(x) is int and x > 0 for x in values):
            raise ValueError(f"{hf.file}: field `{name}` is {value!r}, expected a number, or one for each layer.")
        return values

    experts, chosen = per_layer("num_experts"), per_layer("moe_topk")
    ffn = Moe(act, width, experts[0], chosen[0], shared=Mlp(act, width))

    def choose(layer: int, block: Block) -> Block:
        return replace(block, ffn=replace(ffn, experts=experts[layer], top_k=chosen[layer]))

    return llama_like(hf, attn=_hunyuan_attention(hf), ffn=ffn, per_layer=choose)


_LAYER, _FEED = "model.layers.{i}", "model.layers.{i}.feed_forward"
LLAMA4_NAMES = renames(
    {
        f"{_FEED}.router.{{p}}": "blocks.{i}.ffn.router.{p}",
        f"{_FEED}.gate_proj.{{p}}": "blocks.{i}.ffn.gate.{p}",
        f"{_FEED}.up_proj.{{p}}": "blocks.{i}.ffn.up.{p}",
        f"{_FEED}.down_proj.{{p}}": "blocks.{i}.ffn.down.{p}",
        f"{_FEED}.shared_expert.gate_proj.{{p}}": "blocks.{i}.ffn.shared.gate.{p}",
        f"{_FEED}.shared_expert.up_proj.{{p}}": "blocks.{i}.ffn.shared.up.{p}",
        f"{_FEED}.shared_expert.down_proj.{{p}}": "blocks.{i}.ffn.shared.down.{p}",
    }
) + renames(
    {
        f"{_FEED}.experts.gate_up_proj": "blocks.{i}.ffn.experts.gate_up",
        f"{_FEED}.experts.down_proj": "blocks.{i}.ffn.experts.down",
    },
    WeightLayout.EXPERTS_TRANSPOSED,
)
ERNIE_NAMES = renames(
    {f"{_LAYER}.mlp.moe_statics.e_score_correction_bias": "blocks.{i}.ffn.choice_bias"}, WeightLayout.ONE_ROW
)
HUNYUAN_NAMES = renames(
    {
        f"{_LAYER}.self_attn.query_layernorm.{{p}}": "blocks.{i}.attn.q_norm.{p}",
        f"{_LAYER}.self_attn.key_layernorm.{{p}}": "blocks.{i}.attn.k_norm.{p}",
        f"{_LAYER}.mlp.gate.wg.{{p}}": "blocks.{i}.ffn.router.{p}",
        f"{_LAYER}.mlp.shared_mlp.gate_proj.{{p}}": "blocks.{i}.ffn.shared.gate.{p}",
        f"{_LAYER}.mlp.shared_mlp.up_proj.{{p}}": "blocks.{i}.ffn.shared.up.{p}",
        f"{_LAYER}.mlp.shared_mlp.down_proj.{{p}}": "blocks.{i}.ffn.shared.down.{p}",
    }
)


def _family(decoder: Callable[[HFConfig], Decoder], names: Any = (), facts: Facts = NO_WINDOWS, **more: Any) -> Family:
    return Family(decoder, names + NAMES if names else NAMES, harmless=ROTARY_FREQUENCIES, facts=facts, **more)


LLAMA4 = _family(llama4, LLAMA4_NAMES)
LLAMA4_INSIDE = replace(
    LLAMA4,
    inside="language_model.",
    facts=replace(NO_WINDOWS, defaults={"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}),
)
SMOLLM3 = _family(smollm3, facts=Facts(Windows.ON_REQUEST, has_window=lambda hf, layer: not _rotated(hf)[layer]))
SEED_OSS = _family(seed_oss)
EXAONE4 = _family(exaone4, OLMO2_NAMES, Facts(window_pattern=4))
GLM4_MOE = _family(glm4_moe, SHARED_NAMES, extra_layers="model.layers.{i}.")
DOTS1 = _family(dots1, SHARED_NAMES, Facts(has_window=_dots1_window))
ERNIE4_5 = _family(ernie4_5)
ERNIE4_5_MOE = _family(ernie4_5_moe, ERNIE_NAMES + SHARED_NAMES, extra_layers="model.layers.{i}.")
HUNYUAN_DENSE = _family(hunyuan_dense, HUNYUAN_NAMES)
HUNYUAN_MOE = _family(hunyuan_moe, HUNYUAN_NAMES + SHARED_NAMES)
