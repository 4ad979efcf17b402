"""Encoders: BERT, RoBERTa, XLM-R, DistilBERT, MPNet, ModernBERT, NomicBERT, GTE; as embedders and as classifiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.config.facts import Facts, Pooling, Windows
from vllm.config.hf import HFConfig
from vllm.model_executor.layers.rope import LinearScaling
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.models.families.llama import rope_of
from vllm.model_executor.models.family import Family, Rename, renames
from vllm.model_executor.models.pooling import classifier_facts
from vllm.model_executor.models.spec import (
    Attn,
    Block,
    Decoder,
    Dense,
    Layout,
    LearnedPositions,
    Mlp,
    Moe,
    Norm,
    PoolHead,
    RelativeBias,
    Rope,
    layer_norm,
)

CLS = Pooling("embed", "CLS", normalize=True)
MEAN = Pooling("embed", "MEAN", normalize=True)


def _no_head(hf: HFConfig) -> PoolHead:
    return PoolHead()


def _encoder(hf: HFConfig, norm: Norm, block: Block | tuple[Block, ...], **fields: Any) -> Decoder:
    """An encoder of equal blocks, or of these, whose embeddings are normalised."""
    blocks = (block,) * hf.num_layers if isinstance(block, Block) else block
    types = hf.get_int("type_vocab_size", default=0, minimum=0, maximum=1 << 16)
    fields = {"token_types": types, "embed_norm": norm, **fields}
    return Decoder(hf.vocab_size, hf.hidden_size, blocks, fields.pop("last_norm", None), True, **fields)


def _attn(hf: HFConfig, **fields: Any) -> Attn:
    return Attn(hf.num_heads, hf.num_heads, hf.head_dim, causal=False, **fields)


def _check_positions(hf: HFConfig) -> None:
    kind = hf.get_str("position_embedding_type", default="absolute")
    if kind != "absolute":
        raise ValueError(f"{hf.file}: position_embedding_type is {kind!r}, but only 'absolute' is supported here.")


# ---- BERT and RoBERTa ------------------------------------------------------------------------------------------------


def _first_position(hf: HFConfig) -> int:
    return hf.pad_token_id + 1 if hf.facts.padding_positions else 0


def bert(hf: HFConfig) -> Decoder:
    """BERT: norms behind each branch, learned positions. RoBERTa's begin behind the padding token's id."""
    _check_positions(hf)
    norm = layer_norm(hf.get_float("layer_norm_eps", minimum=0))
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), gated=False, bias=True)
    block = Block(_attn(hf, qkv_bias=True, out_bias=True), mlp, norm, Layout.POST)
    first = _first_position(hf)
    rows = hf.get_int("max_position_embeddings") - first
    return _encoder(hf, norm, block, positions=LearnedPositions(rows, first))


def bert_classifier(hf: HFConfig) -> PoolHead:
    """BERT's own pooler, then a score for each class."""
    return PoolHead((Dense(hf.hidden_size, act="tanh"), Dense(hf.num_labels)))


def _bert_names(prefix: str) -> tuple[Rename, ...]:
    table = {
        f"{prefix}embeddings.word_embeddings.weight": "embed.weight",
        f"{prefix}embeddings.position_embeddings.weight": "positions",
        f"{prefix}embeddings.token_type_embeddings.weight": "token_types",
    }
    layer = f"{prefix}encoder.layer.{{i}}."
    parts = {
        "attention.self.query": "attn.q",
        "attention.self.key": "attn.k",
        "attention.self.value": "attn.v",
        "attention.output.dense": "attn.o",
        "intermediate.dense": "ffn.up",
        "output.dense": "ffn.down",
    }
    table |= {f"{layer}{name}.{{p}}": f"blocks.{{i}}.{part}.{{p}}" for name, part in parts.items()}
    norms = {
        f"{prefix}embeddings.LayerNorm": "embed_norm",
        f"{layer}attention.output.LayerNorm": "blocks.{i}.norms.0",
        f"{layer}output.LayerNorm": "blocks.{i}.norms.1",
    }
    for name, target in norms.items():  # old files say gamma and beta
        table |= {f"{name}.gamma": f"{target}.weight", f"{name}.beta": f"{target}.bias"}
        table[f"{name}.{{p}}"] = f"{target}.{{p}}"
    return renames(table)


BERT_NAMES, ROBERTA_NAMES = _bert_names("bert."), _bert_names("roberta.")
BERT_POOLER = renames({"bert.pooler.dense.{p}": "pool.0.{p}", "classifier.{p}": "pool.1.{p}"})
ROBERTA_POOLER = renames({"classifier.dense.{p}": "pool.0.{p}", "classifier.out_proj.{p}": "pool.1.{p}"})
_LM_HEADS = ("cls.predictions.bias", "cls.predictions.transform.dense.{p}", "cls.predictions.transform.LayerNorm.{p}",
             "cls.predictions.decoder.{p}", "cls.seq_relationship.{p}", "cls.predictions.transform.LayerNorm.gamma",
             "cls.predictions.transform.LayerNorm.beta", "lm_head.{p}", "lm_head.dense.{p}", "lm_head.layer_norm.{p}",
             "lm_head.decoder.{p}")  # fmt: skip
_BERT_UNUSED = ("bert.embeddings.position_ids", "bert.pooler.dense.{p}", *_LM_HEADS)
_ROBERTA_UNUSED = ("roberta.embeddings.position_ids", "roberta.pooler.dense.{p}", *_LM_HEADS)

BERT_FACTS = Facts(Windows.NONE, learned_positions=True, encoder=True, pooling=CLS)
ROBERTA_FACTS = replace(BERT_FACTS, padding_positions=True)
BERT = Family(bert, BERT_NAMES, "bert.", _BERT_UNUSED, BERT_FACTS, pool=_no_head)
BERT_CLASSIFIER = Family(
    bert, BERT_POOLER + BERT_NAMES, "bert.", _BERT_UNUSED, classifier_facts(BERT_FACTS, "CLS"), pool=bert_classifier
)
ROBERTA = Family(bert, ROBERTA_NAMES, "roberta.", _ROBERTA_UNUSED, ROBERTA_FACTS, pool=_no_head)
ROBERTA_CLASSIFIER = Family(
    bert,
    ROBERTA_POOLER + ROBERTA_NAMES,
    "roberta.",
    _ROBERTA_UNUSED,
    classifier_facts(ROBERTA_FACTS, "CLS"),
    pool=bert_classifier,
)


# ---- DistilBERT ------------------------------------------------------------------------------------------------------


def distilbert(hf: HFConfig) -> Decoder:
    """DistilBERT: BERT without token types."""
    norm = layer_norm(1e-12)
    mlp = Mlp(hf.get_str("activation"), hf.get_int("hidden_dim"), gated=False, bias=True)
    block = Block(_attn(hf, qkv_bias=True, out_bias=True), mlp, norm, Layout.POST)
    rows = hf.get_int("max_position_embeddings")
    return _encoder(hf, norm, block, positions=LearnedPositions(rows), token_types=0)


def distilbert_classifier(hf: HFConfig) -> PoolHead:
    """A dense layer with ReLU, then a score for each class."""
    return PoolHead((Dense(hf.hidden_size, act="relu"), Dense(hf.num_labels)))


_DISTILBERT_LAYER = "distilbert.transformer.layer.{i}."
DISTILBERT_NAMES = renames(
    {
        "distilbert.embeddings.word_embeddings.weight": "embed.weight",
        "distilbert.embeddings.position_embeddings.weight": "positions",
        "distilbert.embeddings.LayerNorm.{p}": "embed_norm.{p}",
        _DISTILBERT_LAYER + "attention.q_lin.{p}": "blocks.{i}.attn.q.{p}",
        _DISTILBERT_LAYER + "attention.k_lin.{p}": "blocks.{i}.attn.k.{p}",
        _DISTILBERT_LAYER + "attention.v_lin.{p}": "blocks.{i}.attn.v.{p}",
        _DISTILBERT_LAYER + "attention.out_lin.{p}": "blocks.{i}.attn.o.{p}",
        _DISTILBERT_LAYER + "sa_layer_norm.{p}": "blocks.{i}.norms.0.{p}",
        _DISTILBERT_LAYER + "ffn.lin1.{p}": "blocks.{i}.ffn.up.{p}",
        _DISTILBERT_LAYER + "ffn.lin2.{p}": "blocks.{i}.ffn.down.{p}",
        _DISTILBERT_LAYER + "output_layer_norm.{p}": "blocks.{i}.norms.1.{p}",
    }
)
DISTILBERT_POOLER = renames({"pre_classifier.{p}": "pool.0.{p}", "classifier.{p}": "pool.1.{p}"})
_DISTILBERT_UNUSED = ("vocab_transform.{p}", "vocab_layer_norm.{p}", "vocab_projector.{p}")
DISTILBERT_FACTS = replace(
    BERT_FACTS,
    defaults={
        "activation": "gelu", "dim": 768, "hidden_dim": 3072, "max_position_embeddings": 512, "n_heads": 12,
        "n_layers": 6, "vocab_size": 30522,
    },
)  # fmt: skip
DISTILBERT = Family(
    distilbert, DISTILBERT_NAMES, "distilbert.", _DISTILBERT_UNUSED, replace(DISTILBERT_FACTS, pooling=MEAN),
    pool=_no_head,
)  # fmt: skip
DISTILBERT_CLASSIFIER = Family(
    distilbert,
    DISTILBERT_POOLER + DISTILBERT_NAMES,
    "distilbert.",
    _DISTILBERT_UNUSED,
    classifier_facts(DISTILBERT_FACTS, "CLS"),
    pool=distilbert_classifier,
)


# ---- MPNet -----------------------------------------------------------------------------------------------------------


def mpnet(hf: HFConfig) -> Decoder:
    """MPNet: RoBERTa without token types, whose layers share a bias by distance."""
    norm = layer_norm(hf.get_float("layer_norm_eps", minimum=0))
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), gated=False, bias=True)
    for name, constant in (("relative_attention_num_buckets", 32), ("pad_token_id", 1)):
        if hf.get_int(name) != constant:
            raise ValueError(f"{hf.file}: {name} is {hf.get_int(name)}, but {constant} is a constant of MPNet's code.")
    relative = RelativeBias(32, 128)
    block = Block(_attn(hf, qkv_bias=True, out_bias=True, relative=relative), mlp, norm, Layout.POST)
    first = _first_position(hf)
    positions = LearnedPositions(hf.get_int("max_position_embeddings") - first, first)
    return _encoder(hf, norm, block, positions=positions, token_types=0)


_MPNET_LAYER = "mpnet.encoder.layer.{i}."
MPNET_NAMES = renames(
    {
        "mpnet.embeddings.word_embeddings.weight": "embed.weight",
        "mpnet.embeddings.position_embeddings.weight": "positions",
        "mpnet.embeddings.LayerNorm.{p}": "embed_norm.{p}",
        "mpnet.encoder.relative_attention_bias.weight": "blocks.0.attn.relative.weight",
        _MPNET_LAYER + "attention.attn.q.{p}": "blocks.{i}.attn.q.{p}",
        _MPNET_LAYER + "attention.attn.k.{p}": "blocks.{i}.attn.k.{p}",
        _MPNET_LAYER + "attention.attn.v.{p}": "blocks.{i}.attn.v.{p}",
        _MPNET_LAYER + "attention.attn.o.{p}": "blocks.{i}.attn.o.{p}",
        _MPNET_LAYER + "attention.LayerNorm.{p}": "blocks.{i}.norms.0.{p}",
        _MPNET_LAYER + "intermediate.dense.{p}": "blocks.{i}.ffn.up.{p}",
        _MPNET_LAYER + "output.dense.{p}": "blocks.{i}.ffn.down.{p}",
        _MPNET_LAYER + "output.LayerNorm.{p}": "blocks.{i}.norms.1.{p}",
    }
)
_MPNET_UNUSED = ("mpnet.embeddings.position_ids", "mpnet.pooler.dense.{p}", *_LM_HEADS)
MPNET_FACTS = replace(ROBERTA_FACTS, pooling=MEAN)
MPNET = Family(mpnet, MPNET_NAMES, "mpnet.", _MPNET_UNUSED, MPNET_FACTS, pool=_no_head)
MPNET_CLASSIFIER = Family(
    mpnet, ROBERTA_POOLER + MPNET_NAMES, "mpnet.", _MPNET_UNUSED, classifier_facts(MPNET_FACTS, "CLS"),
    pool=bert_classifier,
)  # fmt: skip


# ---- ModernBERT ------------------------------------------------------------------------------------------------------


def _modernbert_norm(hf: HFConfig) -> Norm:
    return Norm("layer", hf.get_float("norm_eps", minimum=0), bias=hf.get_bool("norm_bias"))


def _modernbert_rope(hf: HFConfig, kind: str) -> Rope:
    if isinstance(hf.get("rope_parameters", default=None), dict):
        return rope_of(hf, layer_type=kind)
    name = "global_rope_theta" if kind == "full_attention" else "local_rope_theta"
    return Rope(hf.head_dim, hf.get_float(name, minimum=1))


def modernbert(hf: HFConfig) -> Decoder:
    """ModernBERT: most layers see a window on both sides, and rotate in their own way; the first has one norm less."""
    norm, bias = _modernbert_norm(hf), hf.get_bool("attention_bias")
    mlp = Mlp(hf.get_str("hidden_activation"), hf.get_int("intermediate_size"), bias=hf.get_bool("mlp_bias"))
    kinds = hf.get("layer_types", default=None)
    if kinds is None:
        every = hf.get_int("global_attn_every_n_layers")
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(hf.num_layers)]
    window = hf.get_int("local_attention") // 2 + 1

    def block(i: int, kind: str) -> Block:
        attn = _attn(
            hf,
            rope=_modernbert_rope(hf, kind),
            window=window if kind == "sliding_attention" else None,
            qkv_bias=bias,
            out_bias=bias,
        )
        return Block(attn, mlp, norm, Layout.PRE, attn_norm=i > 0)

    blocks = tuple(block(i, kind) for i, kind in enumerate(kinds))
    return _encoder(hf, norm, blocks, last_norm=norm, token_types=0)


def modernbert_classifier(hf: HFConfig) -> PoolHead:
    """A dense layer, its activation and a norm, then a score for each class."""
    act, norm = hf.get_str("classifier_activation"), _modernbert_norm(hf)
    dense = Dense(hf.hidden_size, hf.get_bool("classifier_bias"), act, norm)
    return PoolHead((dense, Dense(hf.num_labels)))


_MODERNBERT_LAYER = "model.layers.{i}."
MODERNBERT_NAMES = renames(
    {
        "model.embeddings.tok_embeddings.weight": "embed.weight",
        "model.embeddings.norm.{p}": "embed_norm.{p}",
        _MODERNBERT_LAYER + "attn_norm.{p}": "blocks.{i}.norms.0.{p}",
        _MODERNBERT_LAYER + "attn.Wqkv.{p}": "blocks.{i}.attn.qkv.{p}",
        _MODERNBERT_LAYER + "attn.Wo.{p}": "blocks.{i}.attn.o.{p}",
        _MODERNBERT_LAYER + "mlp_norm.{p}": "blocks.{i}.norms.1.{p}",
        _MODERNBERT_LAYER + "mlp.Wi.{p}": "blocks.{i}.ffn.gate_up.{p}",
        _MODERNBERT_LAYER + "mlp.Wo.{p}": "blocks.{i}.ffn.down.{p}",
        "model.final_norm.{p}": "norm.{p}",
    }
)
MODERNBERT_POOLER = renames(
    {"head.dense.{p}": "pool.0.{p}", "head.norm.{p}": "pool.0.norm.{p}", "classifier.{p}": "pool.1.{p}"}
)
_MODERNBERT_UNUSED = ("head.dense.{p}", "head.norm.{p}", "decoder.{p}")
MODERNBERT_FACTS = Facts(
    Windows.NONE,
    encoder=True,
    pooling=CLS,
    defaults={
        "attention_bias": False, "classifier_activation": "gelu", "classifier_bias": False,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "hidden_activation": "gelu",
        "hidden_size": 768, "intermediate_size": 1152, "local_attention": 128, "local_rope_theta": 10_000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "norm_bias": False, "norm_eps": 1e-5,
        "num_attention_heads": 12, "num_hidden_layers": 22, "vocab_size": 50368,
    },
)  # fmt: skip
MODERNBERT = Family(modernbert, MODERNBERT_NAMES, "model.", _MODERNBERT_UNUSED, MODERNBERT_FACTS, pool=_no_head)
MODERNBERT_CLASSIFIER = Family(
    modernbert,
    MODERNBERT_POOLER + MODERNBERT_NAMES,
    "model.",
    ("decoder.{p}",),
    replace(MODERNBERT_FACTS, pooling=Pooling("classify", "CLS", type_field="classifier_pooling")),
    pool=modernbert_classifier,
)


# ---- NomicBERT -------------------------------------------------------------------------------------------------------


def nomic_bert(hf: HFConfig) -> Decoder:
    """NomicBERT: BERT with rotations and, usually, a gated MLP; with experts in every so-manieth layer. Names of fields
    as in its own code, or as in transformers'.
    """
    _check_nomic(hf)
    norm = layer_norm(hf.get_float("layer_norm_epsilon", "layer_norm_eps", minimum=0))
    act = hf.get_str("activation_function", "hidden_act")
    gated = act in ("swiglu", "silu", "geglu")
    kind = {"swiglu": "silu", "geglu": "gelu"}.get(act, act)
    biases = [hf.get_bool("qkv_proj_bias"), hf.get_bool("mlp_fc1_bias"), hf.get_bool("mlp_fc2_bias")]
    mlp = Mlp(kind, hf.get_int("n_inner", "intermediate_size"), gated, bias=biases[1], down_bias=biases[2] > biases[1])
    rope = rope_of(hf)
    if hf.get("rotary_emb_fraction", default=None) is not None:
        rope = replace(rope, dim=int(hf.head_dim * hf.get_float("rotary_emb_fraction", minimum=0, maximum=1)))
    rope = replace(rope, interleaved=hf.get_bool("rotary_emb_interleaved", default=False))
    block = Block(_attn(hf, rope=rope, qkv_bias=biases[0], out_bias=biases[0]), mlp, norm, Layout.POST)
    number = hf.get_int("num_experts", default=0, minimum=0)
    if not number:
        return _encoder(hf, norm, block)
    experts = Moe(
        act, mlp.hidden, number, hf.get_int("moe_top_k", default=1), renormalize=False, gated=False, sum_bias=True
    )
    every = hf.get_int("moe_every_n_layers")
    return _encoder(
        hf, norm, tuple(replace(block, ffn=experts) if i % every == 1 else block for i in range(hf.num_layers))
    )


def _check_nomic(hf: HFConfig) -> None:
    refused = {
        "prenorm": False, "use_rms_norm": False, "parallel_block": False, "expert_choice_router": False, "ffn_div": 1,
        "moe_normalize_expert_weights": False, "num_shared_experts": 0,
    }  # fmt: skip
    for name, usual in refused.items():
        value = hf.get(name, default=usual)
        if value not in (usual, None):
            raise ValueError(f"{hf.file}: {name} is {value!r}, but only {usual!r} is supported for NomicBERT.")
    if hf.get_bool("mlp_fc1_bias") and not hf.get_bool("mlp_fc2_bias"):
        raise ValueError(f"{hf.file}: mlp_fc1_bias without mlp_fc2_bias is not supported.")
    if (
        hf.get_int("num_experts", default=0, minimum=0)
        and hf.get_str("activation_function", "hidden_act") not in _PLAIN
    ):
        raise ValueError(f"{hf.file}: experts with a gate are not supported for NomicBERT.")


_PLAIN = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu")
_NOMIC_LAYER, _NOMIC_NEW = "bert.encoder.layers.{i}.", "bert.layers.{i}."
NOMIC_NAMES = renames(
    {
        "bert.embeddings.word_embeddings.weight": "embed.weight",
        "bert.embeddings.token_type_embeddings.weight": "token_types",
        "bert.emb_ln.{p}": "embed_norm.{p}",
        _NOMIC_LAYER + "attn.Wqkv.{p}": "blocks.{i}.attn.qkv.{p}",
        _NOMIC_LAYER + "attn.out_proj.{p}": "blocks.{i}.attn.o.{p}",
        _NOMIC_LAYER + "norm1.{p}": "blocks.{i}.norms.0.{p}",
        _NOMIC_LAYER + "mlp.fc11.{p}": "blocks.{i}.ffn.up.{p}",
        _NOMIC_LAYER + "mlp.fc12.{p}": "blocks.{i}.ffn.gate.{p}",
        _NOMIC_LAYER + "mlp.fc1.{p}": "blocks.{i}.ffn.up.{p}",
        _NOMIC_LAYER + "mlp.fc2.{p}": "blocks.{i}.ffn.down.{p}",
        _NOMIC_LAYER + "norm2.{p}": "blocks.{i}.norms.1.{p}",
        _NOMIC_LAYER + "mlp.router.layer.{p}": "blocks.{i}.ffn.router.{p}",
        _NOMIC_LAYER + "mlp.experts.bias": "blocks.{i}.ffn.sum_bias",
        # transformers' own form
        "bert.embeddings.LayerNorm.{p}": "embed_norm.{p}",
        _NOMIC_NEW + "self_attn.q_proj.{p}": "blocks.{i}.attn.q.{p}",
        _NOMIC_NEW + "self_attn.k_proj.{p}": "blocks.{i}.attn.k.{p}",
        _NOMIC_NEW + "self_attn.v_proj.{p}": "blocks.{i}.attn.v.{p}",
        _NOMIC_NEW + "self_attn.o_proj.{p}": "blocks.{i}.attn.o.{p}",
        _NOMIC_NEW + "mlp.gate_proj.{p}": "blocks.{i}.ffn.gate.{p}",
        _NOMIC_NEW + "mlp.up_proj.{p}": "blocks.{i}.ffn.up.{p}",
        _NOMIC_NEW + "mlp.down_proj.{p}": "blocks.{i}.ffn.down.{p}",
        _NOMIC_NEW + "post_attention_layernorm.{p}": "blocks.{i}.norms.0.{p}",
        _NOMIC_NEW + "post_mlp_layernorm.{p}": "blocks.{i}.norms.1.{p}",
    }
)
NOMIC_NAMES += renames({_NOMIC_LAYER + "mlp.experts.mlp.w1": "blocks.{i}.ffn.experts.up"}, WeightLayout.STACKED)
NOMIC_NAMES += renames(
    {_NOMIC_LAYER + "mlp.experts.mlp.w2": "blocks.{i}.ffn.experts.down"}, WeightLayout.STACKED_TRANSPOSED
)
NOMIC_FACTS = Facts(
    Windows.NONE,
    encoder=True,
    pooling=MEAN,
    defaults={
        "hidden_act": "silu", "layer_norm_eps": 1e-12, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
        "qkv_proj_bias": False, "rope_theta": 1000.0, "type_vocab_size": 2,
    },
)  # fmt: skip
_NOMIC_UNUSED = ("bert.pooler.dense.{p}", "bert.embeddings.position_ids", *_LM_HEADS)
NOMIC_BERT = Family(nomic_bert, NOMIC_NAMES, "bert.", _NOMIC_UNUSED, NOMIC_FACTS, pool=_no_head)


# ---- GTE -------------------------------------------------------------------------------------------------------------


def gte(hf: HFConfig) -> Decoder:
    """GTE: BERT with rotations, whose scaling ("ntk") changes base and frequencies, and a gated MLP."""
    if hf.get_str("position_embedding_type", default="rope") != "rope":
        raise ValueError(f"{hf.file}: position_embedding_type must be 'rope'.")
    norm = layer_norm(hf.get_float("layer_norm_eps", minimum=0))
    mlp = Mlp(hf.get_str("hidden_act"), hf.get_int("intermediate_size"), down_bias=True)
    rope = rope_of(hf)
    scaling = hf.nested("rope_scaling")
    if scaling.get_str("type", "rope_type", default="") == "ntk" and isinstance(rope.scaling, LinearScaling):
        factor = rope.scaling.factor
        rope = replace(rope, theta=rope.theta * factor, scaling=LinearScaling(factor ** (2 / rope.dim)))
    block = Block(_attn(hf, rope=rope, qkv_bias=True, out_bias=True), mlp, norm, Layout.POST)
    return _encoder(hf, norm, block)


def _gte_names(prefix: str) -> tuple[Rename, ...]:
    layer, newer = f"{prefix}encoder.layer.{{i}}.", f"{prefix}layers.{{i}}."  # the latter are transformers' own
    parts = {
        layer + "attention.qkv_proj": "attn.qkv",
        layer + "attention.o_proj": "attn.o",
        layer + "attn_ln": "norms.0",
        layer + "mlp.down_proj": "ffn.down",
        layer + "mlp_ln": "norms.1",
        newer + "self_attn.q_proj": "attn.q",
        newer + "self_attn.k_proj": "attn.k",
        newer + "self_attn.v_proj": "attn.v",
        newer + "self_attn.o_proj": "attn.o",
        newer + "mlp.gate_proj": "ffn.gate",
        newer + "mlp.up_proj": "ffn.up",
        newer + "mlp.down_proj": "ffn.down",
        newer + "post_attention_layernorm": "norms.0",
        newer + "post_mlp_layernorm": "norms.1",
    }
    table = {f"{name}.{{p}}": f"blocks.{{i}}.{part}.{{p}}" for name, part in parts.items()} | {
        f"{prefix}embeddings.word_embeddings.weight": "embed.weight",
        f"{prefix}embeddings.token_type_embeddings.weight": "token_types",
        f"{prefix}embeddings.LayerNorm.{{p}}": "embed_norm.{p}",
    }
    fused = {f"{layer}mlp.up_gate_proj.{{p}}": "blocks.{i}.ffn.gate_up.{p}"}
    return renames(fused, WeightLayout.UP_GATE) + renames(table)


GTE_NAMES = _gte_names("new.") + _gte_names("gte.")
GTE_POOLER = renames(
    {"new.pooler.dense.{p}": "pool.0.{p}", "gte.pooler.dense.{p}": "pool.0.{p}", "classifier.{p}": "pool.1.{p}"}
)
# "ntk" has the fields of "linear"; the config's length includes it
GTE_FACTS = Facts(
    Windows.NONE,
    encoder=True,
    pooling=CLS,
    length_has_scaling=True,
    rope_kinds={"ntk": "linear"},
    defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "rope_theta": 160_000.0, "type_vocab_size": 1},
)
_GTE_UNUSED = ("new.pooler.dense.{p}", "gte.pooler.dense.{p}", "new.embeddings.position_ids", *_LM_HEADS)
GTE = Family(gte, GTE_NAMES, "new.", _GTE_UNUSED, GTE_FACTS, pool=_no_head)
GTE_CLASSIFIER = Family(
    gte, GTE_POOLER + GTE_NAMES, "new.", _GTE_UNUSED, classifier_facts(GTE_FACTS, "CLS"), pool=bert_classifier
)
