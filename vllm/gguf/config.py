"""From a GGUF file's settings to the config.json that Hugging Face would have, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.gguf.container import GgufFile

_LAYER = "model.layers.{i}."
_COMMON = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{i}.attn_norm.weight": _LAYER + "input_layernorm.weight",
    "blk.{i}.ffn_norm.weight": _LAYER + "post_attention_layernorm.weight",
    **{
        f"blk.{{i}}.attn_{ours}.{leaf}": f"{_LAYER}self_attn.{theirs}.{leaf}"
        for ours, theirs in (
            ("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj"), ("q_norm", "q_norm"),
            ("k_norm", "k_norm"), ("qkv", "qkv_proj"),
        )
        for leaf in ("weight", "bias")
    },
    **{
        f"blk.{{i}}.ffn_{name}.{leaf}": f"{_LAYER}mlp.{name}_proj.{leaf}"
        for name in ("gate", "up", "down")
        for leaf in ("weight", "bias")
    },
}  # fmt: skip
_MIXTRAL = {
    "blk.{i}.ffn_gate_inp.weight": _LAYER + "block_sparse_moe.gate.weight",
    **{
        f"blk.{{i}}.ffn_{name}{form}.weight": f"{_LAYER}block_sparse_moe.experts.{{e}}.{theirs}.weight"
        for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        for form in ("_exps", ".{e}")
    },
}
_GEMMA2 = {
    "blk.{i}.post_attention_norm.weight": _LAYER + "post_attention_layernorm.weight",
    "blk.{i}.ffn_norm.weight": _LAYER + "pre_feedforward_layernorm.weight",
    "blk.{i}.post_ffw_norm.weight": _LAYER + "post_feedforward_layernorm.weight",
}
_PHI3 = {"blk.{i}.ffn_up.weight": _LAYER + "mlp.gate_up_proj.weight"}
_PLAIN_MLP = {
    f"{ours}.{leaf}": f"{theirs}.{leaf}"
    for ours, theirs in (
        ("output_norm", "model.norm"), ("blk.{i}.attn_norm", _LAYER + "input_layernorm"),
        ("blk.{i}.ffn_norm", _LAYER + "post_attention_layernorm"), ("blk.{i}.ffn_up", _LAYER + "mlp.c_fc"),
        ("blk.{i}.ffn_down", _LAYER + "mlp.c_proj"), ("output", "lm_head"),
    )
    for leaf in ("weight", "bias")
}  # fmt: skip
_PHI2 = {
    f"{ours}.{leaf}": f"{theirs}.{leaf}"
    for ours, theirs in (
        ("output_norm", "model.final_layernorm"), ("output", "lm_head"),
        ("blk.{i}.attn_norm", _LAYER + "input_layernorm"), ("blk.{i}.attn_output", _LAYER + "self_attn.dense"),
        ("blk.{i}.ffn_up", _LAYER + "mlp.fc1"), ("blk.{i}.ffn_down", _LAYER + "mlp.fc2"),
    )
    for leaf in ("weight", "bias")
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture is called elsewhere.

    names: its tensors' names there ({i}: layer, {e}: expert).   interleaved: rows of q and k stand in pairs of the two
    halves of a head.   norm_offset: what the converter added to every norm's weight.
    """

    model_type: str
    name: str
    names: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", {**_COMMON, **_MIXTRAL}, interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _COMMON),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _COMMON),
    "gemma": Architecture(
        "gemma", "GemmaForCausalLM", _COMMON, norm_offset=1.0, fields={"hidden_act": "gelu_pytorch_tanh"}
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", {**_COMMON, **_GEMMA2}, norm_offset=1.0,
        fields={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", {**_COMMON, **_PHI3}),
    "phi2": Architecture("phi", "PhiForCausalLM", {**_COMMON, **_PHI2}, fields={"hidden_act": "gelu_new"}),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", {**_COMMON, **_PLAIN_MLP}, fields={"hidden_act": "gelu_pytorch_tanh"}
    ),
}  # fmt: skip
# Tensors whose content goes into the config.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class Settings:
    """A file's settings of one architecture, typed."""

    def __init__(self, gguf: GgufFile) -> None:
        self.file, self.all = gguf.file, gguf.metadata
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, "a text", default)  # type: ignore[no-any-return]

    def number(self, key: str, default: float | None = None) -> float:
        """The setting `{architecture}.{key}`."""
        value = self.all.get(f"{self.architecture}.{key}", default)
        return float(self._typed(f"{self.architecture}.{key}", (int, float), "a number", value))

    def integer(self, key: str, default: int | None = None) -> int:
        """The setting `{architecture}.{key}`, or the only value of an array of equal ones."""
        name = f"{self.architecture}.{key}"
        value = self.all.get(name)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu" and (value == value[0]).all():
            return int(value[0])
        if value is None and default is not None:
            return default
        return self._typed(name, int, "an integer", None)  # type: ignore[no-any-return]

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.all

    def _typed(self, name: str, kind: Any, words: str, default: Any) -> Any:
        value = self.all.get(name, default)
        if value is None:
            raise ValueError(f"{self.file} has no setting {name!r}, which a model needs. Is it the first of its files?")
        if not isinstance(value, kind) or (kind is not str and isinstance(value, bool)):
            raise ValueError(f"{self.file}: the setting {name!r} is {str(value)[:80]!r}, expected {words}.")
        return value


def architecture_of(gguf: GgufFile) -> Architecture:
    """The entry of a file's architecture. Raises ValueError if there is none."""
    name = Settings(gguf).architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(
            f"{gguf.file} holds a model of the architecture {name!r}, which is not supported: {known} are."
        )
    return ARCHITECTURES[name]


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """The fields of config.json."""
    settings, arch = Settings(gguf), architecture_of(gguf)
    shapes = {tensor.name: tensor.shape for tensor in gguf.tensors}
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ValueError(f"{gguf.file} has no tensor 'token_embd.weight' with two dimensions. Is a file missing?")
    heads = settings.integer("attention.head_count")
    hidden = settings.integer("embedding_length")
    head_dim = settings.integer("attention.key_length", hidden // max(1, heads))
    if heads < 1 or hidden < 1 or head_dim < 1:
        raise ValueError(f"{gguf.file} says {heads} attention heads of {head_dim} and a width of {hidden}.")
    rms = settings.has("attention.layer_norm_rms_epsilon")
    config: dict[str, Any] = {
        "architectures": [arch.name],
        "model_type": arch.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "num_hidden_layers": settings.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": settings.integer("feed_forward_length"),
        "max_position_embeddings": settings.integer("context_length"),
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf"},
        **arch.fields,
    }
    epsilon = settings.number(f"attention.layer_norm_{'rms_' if rms else ''}epsilon", 1e-5)
    config["rms_norm_eps" if rms else "norm_epsilon" if arch.model_type == "starcoder2" else "layer_norm_eps"] = epsilon
    if settings.has("attention.sliding_window") and settings.integer("attention.sliding_window") > 0:
        config["sliding_window"] = settings.integer("attention.sliding_window")
    rotary = settings.integer("rope.dimension_count", head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    _add_tokens(config, settings)
    add_rope_scaling(config, settings, {name: _numbers(gguf, name) for name in ROPE_TENSORS})
    if settings.architecture == "llama":
        _add_llama(config, settings)
    if settings.architecture == "gemma2":
        _add_gemma2(config, settings)
    if settings.architecture == "starcoder2":
        config["use_bias"] = "blk.0.attn_q.bias" in shapes
    return config


def _add_tokens(config: dict[str, Any], settings: Settings) -> None:
    for name in ("bos", "eos", "padding"):
        value = settings.all.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(value, int) and 0 <= value < config["vocab_size"]:
            config["pad_token_id" if name == "padding" else f"{name}_token_id"] = value


def _add_llama(config: dict[str, Any], settings: Settings) -> None:
    experts = settings.integer("expert_count", 0)
    if experts:
        config.update(architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=experts)
        config["num_experts_per_tok"] = settings.integer("expert_used_count")
    elif "sliding_window" in config:
        config.update(architectures=["MistralForCausalLM"], model_type="mistral")


def _add_gemma2(config: dict[str, Any], settings: Settings) -> None:
    config["attn_logit_softcapping"] = settings.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = settings.number("final_logit_softcapping", 30.0)
    # the file does not say; the 27B model, of 46 layers, alone divides by its width per head
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if config["num_hidden_layers"] == 46 else config["head_dim"]


def add_rope_scaling(config: dict[str, Any], settings: Settings, factors: Mapping[str, np.ndarray | None]) -> None:
    """Add the fields that say how rotary embeddings are scaled. factors: the tensors of ROPE_TENSORS."""
    kind = settings.text(f"{settings.architecture}.rope.scaling.type", "none")
    original = settings.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    divisors, long, short = map(factors.get, ROPE_TENSORS)
    if divisors is not None:
        config["rope_scaling"] = _llama3(divisors, config, settings)
    elif long is not None and short is not None:
        config["original_max_position_embeddings"] = original
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
        }
    elif kind in ("linear", "yarn"):
        scaling: dict[str, Any] = {"rope_type": kind, "factor": settings.number("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = original
        config["rope_scaling"] = scaling
    elif kind != "none":
        raise ValueError(
            f"{settings.file}: rotary embeddings are scaled by {kind!r}; none, linear and yarn are supported."
        )


def _numbers(gguf: GgufFile, name: str) -> np.ndarray | None:
    """A small fp32 tensor of a file."""
    tensor = next((t for t in gguf.tensors if t.name == name), None)
    if tensor is None:
        return None
    if tensor.type != "f32" or len(tensor.shape) != 1 or tensor.num_bytes > 1 << 16:
        raise ValueError(f"{gguf.file}: tensor {name!r} must be a short list of fp32 numbers.")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        values = np.frombuffer(stream.read(tensor.num_bytes), "<f4")
    if len(values) * 4 != tensor.num_bytes or not np.isfinite(values).all() or (values <= 0).any():
        raise ValueError(f"{gguf.file}: tensor {name!r} holds something other than positive numbers.")
    return values


def _llama3(divisors: np.ndarray, config: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The scaling of Llama 3.1 whose divisors a file holds: found by trying the published settings."""
    pairs = len(divisors)
    lengths = 2 * np.pi * config["rope_theta"] ** (np.arange(pairs) / pairs)
    factor = round(float(divisors.max()), 4)
    for original in (8192, 4096, 16384, 32768, config["max_position_embeddings"]):
        low, high = 1.0, 4.0
        smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(expected, divisors, rtol=1e-3):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise ValueError(
        f"{settings.file}: its rotary frequencies are scaled in a way that is not supported (not Llama 3.1's)."
    )
