"""The families with selective state spaces: Mamba, Falcon-Mamba, Mamba 2 and Jamba."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm.config.facts import Facts, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.models.families.llama import NAMES
from vllm.model_executor.models.families.moe import experts_of
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Attn, Block, BlockSpec, Decoder, Mlp, Moe, Norm
from vllm.step.kv_need import KVNeed, KVTensor
from vllm.step.kv_policy import KVKind


@dataclass(frozen=True, slots=True)
class Mamba:
    """A selective state space with a gate (arXiv 2312.00752).

    inner: channels.   state: numbers per channel.   conv: width of the convolution before it.   rank: of the step
    sizes' product.   bias, conv_bias: of the products into and out of the channels, and of the convolution.
    norm: of the step sizes' input and of both products with the state.
    """

    inner: int
    state: int
    conv: int
    rank: int
    bias: bool = False
    conv_bias: bool = True
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Heads of channels with one decay each (arXiv 2405.21060).

    heads, head_dim: their product is the number of channels.   groups: of neighbouring heads, each with products of its
    own with the state.   norm: of what the gate leaves, over the channels of each group.   The rest as in `Mamba`.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    norm: Norm
    bias: bool = False
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    def mixed(self, world: int) -> int:
        """Channels of the convolution on one rank: the heads' own, and both products with the state."""
        return self.inner // world + 2 * max(1, self.groups // world) * self.state


@dataclass(frozen=True, slots=True)
class MambaBlock(BlockSpec):
    """x + M(N1 x), then, with a feed-forward layer, x + F(N2 x)."""

    mixer: Mamba | Mamba2
    norm: Norm
    ffn: Mlp | Moe | None = None

    def need(self, world: int) -> KVNeed | None:
        mixer, channels = self.mixer, self.mixer.inner // world
        width = channels if isinstance(mixer, Mamba) else mixer.mixed(world)
        conv = KVTensor((mixer.conv - 1, width), "float32")
        return KVNeed(KVKind.RECURRENT, (conv, KVTensor((channels, mixer.state), "float32")))


def _silu(hf: HFConfig) -> str:
    act = hf.get_str("hidden_act")
    if act != "silu":
        raise ValueError(f"{hf.file}: field `hidden_act` is {act!r}, expected 'silu', the only one that mixers have.")
    found: str = act
    return found


def _rank(hf: HFConfig, name: str) -> int:
    """The width of what step sizes are computed from: "auto" is a sixteenth of the model's."""
    return -(-hf.hidden_size // 16) if hf.get(name, default="auto") == "auto" else hf.get_int(name, minimum=1)


def mamba(hf: HFConfig, norm: Norm | None = None) -> Decoder:
    """Mamba.   norm: of what the mixer's inner products give."""
    _silu(hf)
    inner = hf.get_int("intermediate_size", "d_inner", default=None)
    mixer = Mamba(
        int(hf.get_float("expand") * hf.hidden_size) if inner is None else inner,
        hf.get_int("state_size"),
        hf.get_int("conv_kernel", minimum=2),
        _rank(hf, "time_step_rank"),
        hf.get_bool("use_bias"),
        hf.get_bool("use_conv_bias"),
        norm,
    )
    outer = Norm("rms", hf.get_float("layer_norm_epsilon", minimum=0))
    blocks = (MambaBlock(mixer, outer),) * hf.num_layers
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, outer, hf.tie_word_embeddings)


def falcon_mamba(hf: HFConfig) -> Decoder:
    """Falcon-Mamba: Mamba with norms without weights inside the mixer."""
    return mamba(hf, Norm("rms", hf.get_float("mixer_rms_eps", minimum=0), weight=False))


def mamba2(hf: HFConfig) -> Decoder:
    """Mamba 2."""
    _silu(hf)
    limit = hf.get("time_step_limit", default=[0.0, math.inf])
    endless = (math.inf, "Infinity")  # as transformers has written it over time
    if not isinstance(limit, list) or len(limit) != 2 or limit[0] != 0.0 or limit[1] not in endless:
        raise ValueError(f"{hf.file}: field `time_step_limit` is {limit}, expected no limit, which is [0, Infinity].")
    norm = Norm("rms", hf.get_float("layer_norm_epsilon", minimum=0))
    mixer = Mamba2(
        hf.get_int("num_heads"),
        hf.get_int("head_dim"),
        hf.get_int("n_groups"),
        hf.get_int("state_size"),
        hf.get_int("conv_kernel", minimum=2),
        norm,
        hf.get_bool("use_bias"),
        hf.get_bool("use_conv_bias"),
    )
    if mixer.heads % mixer.groups or mixer.inner != hf.get_float("expand") * hf.hidden_size:
        raise ValueError(
            f"{hf.file}: {mixer.heads} heads of {mixer.head_dim} in {mixer.groups} groups do not make up `expand` "
            "times the hidden size."
        )
    return Decoder(
        hf.vocab_size, hf.hidden_size, (MambaBlock(mixer, norm),) * hf.num_layers, norm, hf.tie_word_embeddings
    )


def jamba(hf: HFConfig) -> Decoder:
    """Jamba: Mamba blocks with feed-forward layers, every so many an attention layer without positions in place of the
    mixer, every so many experts in place of the MLP.
    """
    norm, act = Norm("rms", hf.get_float("rms_norm_eps", minimum=0)), _silu(hf)
    attn = Attn(hf.num_heads, hf.num_kv_heads, hf.head_dim)
    mixer = Mamba(
        hf.get_int("mamba_expand") * hf.hidden_size,
        hf.get_int("mamba_d_state"),
        hf.get_int("mamba_d_conv", minimum=2),
        _rank(hf, "mamba_dt_rank"),
        hf.get_bool("mamba_proj_bias"),
        hf.get_bool("mamba_conv_bias"),
        norm,
    )
    mlp, experts = Mlp(act, hf.get_int("intermediate_size")), hf.get_int("num_experts", minimum=1)
    moe = experts_of(hf, renormalize=False) if experts > 1 else mlp
    attends = _turns(hf, "attn_layer")
    expert = _turns(hf, "expert_layer")
    blocks: list[BlockSpec] = []
    for layer in range(hf.num_layers):
        ffn = moe if layer % expert[0] == expert[1] else mlp
        attention = layer % attends[0] == attends[1]
        blocks.append(Block(attn, ffn, norm) if attention else MambaBlock(mixer, norm, ffn))
    return Decoder(hf.vocab_size, hf.hidden_size, tuple(blocks), norm, hf.tie_word_embeddings)


def _turns(hf: HFConfig, name: str) -> tuple[int, int]:
    """Every how manieth layer, from which on."""
    period, offset = hf.get_int(f"{name}_period", minimum=1), hf.get_int(f"{name}_offset", minimum=0)
    if offset >= period:
        raise ValueError(f"{hf.file}: {name}_offset is {offset}, expected less than {name}_period, which is {period}.")
    return period, offset


def _mixer(source: str) -> dict[str, str]:
    """The names of a mixer's tensors, which stand below `source`."""
    target = "blocks.{i}.mixer."
    return {
        f"{source}.in_proj.{{p}}": target + "inp.{p}",
        f"{source}.conv1d.weight": target + "conv",
        f"{source}.conv1d.bias": target + "conv_bias",
        f"{source}.x_proj.{{p}}": target + "select.{p}",
        f"{source}.dt_proj.bias": target + "dt_bias",
        f"{source}.dt_proj.{{p}}": target + "dt.{p}",
        f"{source}.A_log": target + "a",
        f"{source}.D": target + "d",
        f"{source}.out_proj.{{p}}": target + "out.{p}",
        f"{source}.dt_layernorm.{{p}}": target + "norms.0.{p}",
        f"{source}.b_layernorm.{{p}}": target + "norms.1.{p}",
        f"{source}.c_layernorm.{{p}}": target + "norms.2.{p}",
    }


_BACKBONE = {
    "backbone.embeddings.{p}": "embed.{p}",
    "backbone.embedding.{p}": "embed.{p}",
    "backbone.norm_f.{p}": "norm.{p}",
    "lm_head.{p}": "head.{p}",
    "backbone.layers.{i}.norm.{p}": "blocks.{i}.norms.0.{p}",
}
_FFN = "model.layers.{i}.feed_forward"
JAMBA_NAMES = renames(
    {
        **_mixer("model.layers.{i}.mamba"),
        "model.final_layernorm.{p}": "norm.{p}",
        "model.layers.{i}.pre_ff_layernorm.{p}": "blocks.{i}.norms.1.{p}",
        f"{_FFN}.router.{{p}}": "blocks.{i}.ffn.router.{p}",
        f"{_FFN}.experts.{{e}}.gate_proj.weight": "blocks.{i}.ffn.experts.{e}.gate.weight",
        f"{_FFN}.experts.{{e}}.up_proj.weight": "blocks.{i}.ffn.experts.{e}.up.weight",
        f"{_FFN}.experts.{{e}}.down_proj.weight": "blocks.{i}.ffn.experts.{e}.down.weight",
        f"{_FFN}.experts.gate_up_proj": "blocks.{i}.ffn.experts.gate_up",
        f"{_FFN}.experts.down_proj": "blocks.{i}.ffn.experts.down",
        f"{_FFN}.gate_proj.{{p}}": "blocks.{i}.ffn.gate.{p}",
        f"{_FFN}.up_proj.{{p}}": "blocks.{i}.ffn.up.{p}",
        f"{_FFN}.down_proj.{{p}}": "blocks.{i}.ffn.down.{p}",
    }
)
_MODULES = "vllm.model_executor.models.families.mamba_block"
_PLAIN = renames(_BACKBONE | _mixer("backbone.layers.{i}.mixer"))
MAMBA2_NAMES = renames(
    {
        "backbone.layers.{i}.mixer.norm.weight": "blocks.{i}.mixer.norm_weight",
        "backbone.layers.{i}.mixer.dt_bias": "blocks.{i}.mixer.dt_bias",
    }
)
_STATES_ONLY = Facts(Windows.NONE, attention=False)
MAMBA = Family(mamba, _PLAIN, "backbone.", facts=_STATES_ONLY, modules=_MODULES)
FALCON_MAMBA = Family(falcon_mamba, _PLAIN, "backbone.", facts=_STATES_ONLY, modules=_MODULES)
MAMBA2 = Family(mamba2, MAMBA2_NAMES + _PLAIN, "backbone.", facts=_STATES_ONLY, modules=_MODULES)
JAMBA = Family(jamba, JAMBA_NAMES + NAMES, facts=Facts(Windows.NONE), modules=_MODULES)
