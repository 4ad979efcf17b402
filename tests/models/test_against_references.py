"""Families that transformers lacks: fp32 logits equal those of plain models written from their descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models import references
from tests.models.harness import PagedDriver, load, on_ranks, relative_error
from tests.models.kernels import kernels
from tests.models.test_against_hugging_face import check_that_no_field_is_decoration, check_wanted_rows
from vllm import LLM, SamplingParams
from vllm.config.hf import HFConfig
from vllm.model_executor.models.registry import family_of
from vllm.model_executor.models.spec import Block
from vllm.worker import cpu_blocks

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
}
GQA = {**SIZES, "num_key_value_heads": 2}
EXAONE = {
    **{n: v for n, v in GQA.items() if n not in ("num_hidden_layers", "rms_norm_eps")},
    "num_layers": 3,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "silu",
}
MINICPM = {**GQA, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "tie_word_embeddings": True}
QWEN = {
    **{n: v for n, v in SIZES.items() if n not in ("rms_norm_eps", "rope_theta")},
    "intermediate_size": 154, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 30000.0, "seq_length": 64,
    "kv_channels": 8, "use_dynamic_ntk": True, "use_logn_attn": True, "no_bias": True,
}  # fmt: skip
CHATGLM = {
    "num_layers": 3, "padded_vocab_size": 131, "hidden_size": 40, "ffn_hidden_size": 77, "kv_channels": 8,
    "num_attention_heads": 6, "multi_query_attention": True, "multi_query_group_num": 2, "layernorm_epsilon": 1e-5,
    "rmsnorm": True, "add_qkv_bias": True, "add_bias_linear": False, "post_layer_norm": True, "seq_length": 64,
}  # fmt: skip
JAIS = {
    "vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 77, "n_positions": 64,
    "layer_norm_epsilon": 1e-5, "activation_function": "swiglu",
}  # fmt: skip
MPT = {
    "vocab_size": 131, "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 64, "expansion_ratio": 4,
    "learned_pos_emb": True, "no_bias": True, "norm_type": "low_precision_layernorm", "logit_scale": None,
    "init_device": "cpu", "embedding_fraction": 1.0, "emb_pdrop": 0, "resid_pdrop": 0, "use_cache": False,
}  # fmt: skip
MPT_ATTN = {
    "alibi": True, "alibi_bias_max": 8, "attn_impl": "triton", "attn_pdrop": 0, "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
}  # fmt: skip
ARCTIC = {
    **GQA, "intermediate_size": 29, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_layer_frequency": 1,
    "parallel_attn_mlp_res": True,
}  # fmt: skip

LLAMA_3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}  # fmt: skip
FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 2.0, 4.0, 9.0]}
SHORT = {"max_position_embeddings": 16}

_WHOLE = {"no_op": False, "replace_with_linear": False}
_NAS = {
    "attention": {"a": {**_WHOLE, "n_heads_in_group": 2}, "b": {**_WHOLE, "n_heads_in_group": 6}},
    "ffn": {"a": {**_WHOLE, "ffn_mult": 1.3}, "b": {**_WHOLE, "ffn_mult": 9.0}},
}
_GONE = {"no_op": True, "replace_with_linear": False, "n_heads_in_group": None, "ffn_mult": None}
_LINEAR = {"no_op": False, "replace_with_linear": True, "n_heads_in_group": None, "ffn_mult": None}
_KINDS: dict[str, Any] = {"0": _GONE, "-": _LINEAR}
NAS = [  # of each layer its attention and its MLP: two kinds, none, or one matrix
    {"attention": _KINDS.get(a) or _NAS["attention"][a], "ffn": _KINDS.get(f) or _NAS["ffn"][f]}
    for a, f in ("0a", "ab", "b0", "-a", "a-", "00", "bb", "0-")
]
PHI_3_SMALL = {
    **{n: v for n, v in GQA.items() if n not in ("rms_norm_eps", "rope_theta", "intermediate_size")},
    "num_hidden_layers": 4, "ff_intermediate_size": 77, "hidden_act": "gegelu", "gegelu_limit": 0.8,
    "layer_norm_epsilon": 1e-5, "rope_embedding_base": 20000.0, "dense_attention_every_n_layers": 2,
    "blocksparse_block_size": 4, "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 3,
    "blocksparse_homo_head_pattern": False, "mup_use_scaling": True, "mup_width_multiplier": 8.0,
    "mup_embedding_multiplier": 3.0, "mup_attn_multiplier": 2.0, "dummy_token_indices": [5, 77],
}  # fmt: skip

# case -> (architecture, model type, reference, config.json)
CASES: dict[str, tuple[str, str, references.Reference, dict[str, Any]]] = {
    "aquila": ("AquilaModel", "aquila", references.LLAMA, SIZES),
    "aquila2": ("AquilaForCausalLM", "aquila", references.LLAMA, GQA),
    "xverse": ("XverseForCausalLM", "xverse", references.LLAMA, SIZES),
    "internlm-7b": ("InternLMForCausalLM", "internlm", references.LLAMA_BIASED, {**SIZES, "bias": True}),
    "internlm-20b": ("InternLMForCausalLM", "internlm", references.LLAMA, {**SIZES, "bias": False}),
    "internlm2": ("InternLM2ForCausalLM", "internlm2", references.INTERNLM_2, {**GQA, "bias": False}),
    "internlm3": ("InternLM3ForCausalLM", "internlm3", references.INTERNLM_3, {**GQA, "qkv_bias": True, "head_dim": 8}),
    "aquila2-16k": (
        "AquilaForCausalLM", "aquila", references.LLAMA, {**GQA, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    ),
    "internlm2_5": (
        "InternLM2ForCausalLM", "internlm2", references.INTERNLM_2,
        {**GQA, **SHORT, "bias": False, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    ),
    "internlm3-8b": (
        "InternLM3ForCausalLM", "internlm3", references.INTERNLM_3,
        {**GQA, **SHORT, "qkv_bias": True, "bias": False, "head_dim": 8,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}},
    ),
    "orion": ("OrionForCausalLM", "orion", references.ORION, GQA),
    "exaone": ("ExaoneForCausalLM", "exaone", references.EXAONE_3, EXAONE),
    "exaone-tied": ("ExaoneForCausalLM", "exaone", references.EXAONE_3, {**EXAONE, "tie_word_embeddings": True}),
    "exaone-3.5": ("ExaoneForCausalLM", "exaone", references.EXAONE_3, {**EXAONE, "rope_scaling": LLAMA_3}),
    "baichuan-7b": ("BaiChuanForCausalLM", "baichuan", references.BAICHUAN_7B, SIZES),
    "baichuan-13b": ("BaichuanForCausalLM", "baichuan", references.BAICHUAN_13B, SIZES),
    "baichuan2-13b": (
        "BaichuanForCausalLM", "baichuan", references.BAICHUAN_2,
        {**SIZES, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 100_001, "num_hidden_layers": 1},
    ),
    "minicpm": ("MiniCPMForCausalLM", "minicpm", references.MINICPM, MINICPM),
    "minicpm-moe": (
        "MiniCPMForCausalLM", "minicpm", references.MINICPM,
        {**MINICPM, "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    ),
    "minicpm-s": (
        "MiniCPMForCausalLM", "minicpm", references.MINICPM,
        {**MINICPM, "hidden_act": "fatrelu", "hidden_act_param": 0.3},
    ),
    "minicpm4": (
        "MiniCPMForCausalLM", "minicpm", references.MINICPM,
        {**MINICPM, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 16}},
    ),
    "qwen": ("QWenLMHeadModel", "qwen", references.QWEN_1, QWEN),
    "qwen-14b": ("QWenLMHeadModel", "qwen", references.QWEN_1, {**QWEN, "seq_length": 12}),
    "qwen-long": (
        "QWenLMHeadModel", "qwen", references.QWEN_1, {**QWEN, "seq_length": 16, "use_logn_attn": False},
    ),
    "chatglm2-32k": (
        "ChatGLMModel", "chatglm", references.CHATGLM,
        {**CHATGLM, "_name_or_path": "THUDM/chatglm2-6b-32k", "original_rope": True, "rope_ratio": 4},
    ),
    "chatglm2": ("ChatGLMModel", "chatglm", references.CHATGLM, {**CHATGLM, "original_rope": True}),
    "glm4-9b": ("ChatGLMForConditionalGeneration", "chatglm", references.CHATGLM, {**CHATGLM, "rope_ratio": 500}),
    "glm4-9b-1m": (
        "ChatGLMModel", "chatglm", references.CHATGLM,
        {**CHATGLM, "original_rope": True, "rope_ratio": 10000, "multi_query_group_num": 6},
    ),
    "cogagent-rope": ("ChatGLMModel", "chatglm", references.CHATGLM, {**CHATGLM, "original_rope": False}),
    "replit-code-v1_5": (
        "MPTForCausalLM", "mpt", references.MPT,
        {**MPT, "attn_config": {**MPT_ATTN, "attn_type": "grouped_query_attention", "kv_n_heads": 2}},
    ),
    "sea-lion-7b": ("MPTForCausalLM", "mpt", references.MPT, {**MPT, "attn_config": {**MPT_ATTN, "qk_ln": True}}),
    "mpt-learned": (
        "MPTForCausalLM", "mpt", references.MPT,
        {**MPT, "attn_config": {**MPT_ATTN, "alibi": False, "qk_ln": True, "kv_n_heads": 2,
        "attn_type": "grouped_query_attention"}},
    ),
    "jais-13b": (
        "JAISLMHeadModel", "jais", references.JAIS,
        {**JAIS, "position_embedding_type": "alibi", "embeddings_scale": 3.0, "width_scale": 0.3,
        "scale_qk_dot_by_d": True},
    ),
    "jais-30b": (
        "JAISLMHeadModel", "jais", references.JAIS,
        {**JAIS, "position_embedding_type": "alibi", "mup_embeddings_scale": 2.0, "mup_width_scale": 0.5,
        "mup_output_alpha": 1.7, "mup_scale_qk_dot_by_d": False, "alibi_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "jais-scaled": (
        "JAISLMHeadModel", "jais", references.JAIS,
        {**JAIS, "position_embedding_type": "alibi", "alibi_scaling": {"type": "linear", "train_seq_len": 16}},
    ),
    "jais-learned": ("JAISLMHeadModel", "jais", references.JAIS, {**JAIS, "mup_embeddings_scale": 2.0}),
    "deepseek-moe": (
        "DeepseekForCausalLM", "deepseek", references.DEEPSEEK_MOE,
        {**SIZES, "moe_intermediate_size": 29, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False},
    ),
    "deepseek-moe-normalised": (
        "DeepseekForCausalLM", "deepseek", references.DEEPSEEK_MOE,
        {**GQA, "moe_intermediate_size": 29, "n_routed_experts": 4, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "moe_layer_freq": 2, "norm_topk_prob": True},
    ),
    "decilm": (
        "DeciLMForCausalLM", "deci", references.DECI, {**SIZES, "num_key_value_heads_per_layer": [1, 3, 2]},
    ),
    "nemotron-nas": (
        "DeciLMForCausalLM", "nemotron-nas", references.DECI,
        {**SIZES, "num_hidden_layers": 8, "num_key_value_heads": None, "block_configs": NAS, "intermediate_size": None},
    ),
    "phi3-small": ("Phi3SmallForCausalLM", "phi3small", references.PHI_3_SMALL, PHI_3_SMALL),
    "phi3-small-128k": (
        "Phi3SmallForCausalLM", "phi3small", references.PHI_3_SMALL,
        {**PHI_3_SMALL, "rope_scaling": {"type": "su", **FACTORS, "short_mscale": 1.1, "long_mscale": 1.3,
        "original_max_position_embeddings": 16}},
    ),
    "phi3-small-alike": (
        "Phi3SmallForCausalLM", "phi3small", references.PHI_3_SMALL,
        {**PHI_3_SMALL, "blocksparse_homo_head_pattern": True, "mup_use_scaling": False,
        "dense_attention_every_n_layers": 3, "dummy_token_indices": []},
    ),
    "arctic": ("ArcticForCausalLM", "arctic", references.ARCTIC, ARCTIC),
    "arctic-mixed": ("ArcticForCausalLM", "arctic", references.ARCTIC, {**ARCTIC, "moe_layer_frequency": 2}),
    "arctic-no-residual": (
        "ArcticForCausalLM", "arctic", references.ARCTIC, {**ARCTIC, "parallel_attn_mlp_res": False},
    ),
}  # fmt: skip


def save(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """A random checkpoint of a case, its norms and biases included."""
    return save_config(*CASES[case], folder)


def save_config(
    architecture: str, model_type: str, reference: references.Reference, config: dict[str, Any], folder: Path
) -> dict[str, torch.Tensor]:
    """A random checkpoint of a config."""
    torch.manual_seed(0)
    weights = {}
    for name, shape in reference.shapes(config).items():
        spread = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        weights[name] = torch.randn(shape) * spread + (1.0 if len(shape) == 1 and name.endswith("weight") else 0.0)
    save_file(weights, folder / "model.safetensors")
    document = {"architectures": [architecture], "model_type": model_type, **config}
    (folder / "config.json").write_text(json.dumps(document))
    return weights


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference_at_every_position(case: str, tmp_path: Path) -> None:
    weights = save(case, tmp_path)
    _, _, reference, config = CASES[case]
    prompts = [torch.randint(0, 131, (length,)) for length in (23, 1, 38)]
    expected = [reference.logits(config, weights, prompt) for prompt in prompts]
    for kind in ("reference", "fused"):
        with kernels(kind):
            model = load(tmp_path)
            if kind == "fused":
                cpu_blocks.fuse(model)
            ours = PagedDriver(model, requests=3).run(prompts, [5, 1, 7, 3])
            check_wanted_rows(model, prompts, ours)
        for logits, wanted in zip(ours, expected, strict=True):
            assert logits.shape == wanted.shape
            assert relative_error(logits, wanted) < 1e-5, kind
    with kernels("reference"):
        check_that_no_field_is_decoration(tmp_path, prompts[2], expected[2])


def test_a_cached_prefix_is_that_of_prompts_with_the_same_rotations(tmp_path: Path) -> None:
    """Qwen 1 rotates prompts of other lengths in other ways: what is cached of one is not a longer one's."""
    architecture, model_type, reference, config = CASES["qwen-14b"]
    weights = save_config(architecture, model_type, reference, config, tmp_path)
    ids = torch.randint(0, 131, (60,)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, block_size=8) as llm:
        assert llm.llm_engine.model_config.max_model_len == 64  # longer than the model was trained with
        for length, cached in ((20, 0), (10, 0), (23, 16), (30, 0), (12, 8), (57, 0), (31, 24), (60, 56)):
            (out,) = llm.generate({"prompt_token_ids": ids[:length]}, params, use_tqdm=False)
            tokens = list(out.outputs[0].token_ids)
            assert out.num_cached_tokens == cached, length
            own = {**config, "prompt": length}
            expected = reference.logits(own, weights, torch.tensor([*ids[:length], *tokens[:-1]]))
            assert tokens == expected[length - 1 :].argmax(-1).tolist()


def test_two_ranks_share_layers_of_different_kinds(tmp_path: Path) -> None:
    """Key/value heads that two ranks can share; widths are multiples of 256 anyway."""
    architecture, model_type, reference, config = CASES["nemotron-nas"]
    layers = [{**layer, "attention": _KINDS["-"] if i % 2 else _NAS["attention"]["a"]} for i, layer in enumerate(NAS)]
    layers[0] = {**NAS[0], "attention": {**_WHOLE, "n_heads_in_group": 3}}
    config = {**config, "block_configs": layers, "num_attention_heads": 12, "hidden_size": 48}
    weights = save_config(architecture, model_type, reference, config, tmp_path)
    prompts = [torch.randint(0, 131, (length,)) for length in (23, 1, 30)]
    expected = [reference.logits(config, weights, prompt) for prompt in prompts]
    for ours in on_ranks(2, lambda tp: PagedDriver(load(tmp_path, tp=tp), requests=3).run(prompts, [5, 1, 7, 3])):
        for logits, wanted in zip(ours, expected, strict=True):
            assert relative_error(logits, wanted) < 1e-5


@pytest.mark.parametrize(("hidden", "layers", "rotates"), [(4096, 32, True), (5120, 40, False)])
@pytest.mark.parametrize("vocabulary", [64_000, 125_696])
def test_published_sizes_tell_the_kinds_of_baichuan_apart(
    hidden: int, layers: int, rotates: bool, vocabulary: int
) -> None:
    raw = {
        "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": 13696, "model_max_length": 4096,
        "num_attention_heads": hidden // 128,
        "num_hidden_layers": layers, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "vocab_size": vocabulary,
    }  # fmt: skip
    config = HFConfig.from_dict(raw)
    family = family_of("BaichuanForCausalLM")
    assert family is not None and config.max_position_embeddings == 4096
    spec = family.decoder(config)
    assert spec.unit_head_rows is (vocabulary == 125_696)
    for block in spec.blocks:
        assert isinstance(block, Block)
        assert (block.attn.rope is not None) is rotates and (block.attn.alibi is None) is rotates
