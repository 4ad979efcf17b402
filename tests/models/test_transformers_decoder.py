"""Architectures that the registry does not list run through transformers' modules, and give its logits and tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.test_against_hugging_face import CASES as LISTED
from tests.models.test_against_hugging_face import GQA, NO_PAD, SIZES
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.config.hf import HFConfig
from vllm.config.model_impl import resolve_model_impl
from vllm.distributed import TensorParallel
from vllm.model_executor.layers.quantization.method import QuantizedLinearMethod

FOUR = {**GQA, "num_hidden_layers": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 29, "first_k_dense_replace": 1}

UNLISTED: dict[str, Any] = {
    "arcee": lambda: hf.ArceeConfig(**GQA),
    "helium": lambda: hf.HeliumConfig(**GQA, head_dim=8),
    "apertus": lambda: hf.ApertusConfig(**GQA, **NO_PAD),
    "vaultgemma": lambda: hf.VaultGemmaConfig(**FOUR, head_dim=12, sliding_window=7),
    "modernbert-decoder": lambda: hf.ModernBertDecoderConfig(
        **SIZES, **NO_PAD, cls_token_id=1, sep_token_id=2, local_attention=10
    ),
    "ctrl": lambda: hf.CTRLConfig(vocab_size=131, n_embd=48, n_layer=3, n_head=6, n_positions=64, dff=77),
    "minimax_m2": lambda: hf.MiniMaxM2Config(**GQA, head_dim=8, num_local_experts=5, num_experts_per_tok=2),
    "nanochat": lambda: hf.NanoChatConfig(**GQA),
    "jais2": lambda: hf.Jais2Config(**GQA, **NO_PAD),
    "solar_open": lambda: hf.SolarOpenConfig(**GQA, **EXPERTS, head_dim=8, n_routed_experts=4, n_group=1, topk_group=1),
    "afmoe": lambda: hf.AfmoeConfig(**FOUR, **EXPERTS, head_dim=8, num_experts=4, sliding_window=7),
}  # fmt: skip

REFUSED: dict[str, tuple[Any, str]] = {
    "convolution": (
        lambda: hf.Lfm2Config(**GQA, **NO_PAD, layer_types=["conv", "full_attention", "conv"]),
        "no attention-only decoder",
    ),
    "encoder": (lambda: hf.BertConfig(**SIZES), "its mask is neither causal nor a plain window"),
    "positions from 1 on": (
        lambda: hf.RobertaConfig(**SIZES, is_decoder=True, pad_token_id=0),
        "numbers the positions of its tokens in a",
    ),
    "positions from 2 on, the head first": (
        lambda: hf.CamembertConfig(**SIZES, is_decoder=True, pad_token_id=1),
        "numbers the positions of its tokens in a",
    ),
    "keys of its own": (
        lambda: hf.DeepseekV4Config(
            **{**FOUR, "num_key_value_heads": 1},
            head_dim=8,
            q_lora_rank=16,
            moe_intermediate_size=29,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
        ),
        "its attention reads 8 keys for 7 tokens",
    ),
    "two calls": (lambda: hf.DiffLlamaConfig(**GQA), "uses an attention layer twice per token"),
    "no interface": (
        lambda: hf.GPTNeoConfig(
            vocab_size=131, hidden_size=48, num_layers=2, num_heads=6, attention_types=[[["global", "local"], 1]]
        ),
        "transformers cannot build this model with our attention",
    ),
    "long rope": (
        lambda: hf.LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "depends on the longest sequence of a batch. Set max_model_len to at most 64",
    ),
}


def _prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 131, (length,), generator=generator) for length in lengths]


def test_the_registry_lists_none_of_them() -> None:
    names = {AutoModelForCausalLM._model_mapping[type(make())].__name__ for make in UNLISTED.values()}
    assert len(names) == len(UNLISTED) >= 10
    assert not any(ModelRegistry.knows([name]) for name in names)


@pytest.mark.parametrize("case", [*UNLISTED, "llama", "gemma2", "opt", "gpt2", "qwen2_moe"])
def test_logits_equal_transformers_in_chunks_of_a_mixed_batch(case: str, tmp_path: Path) -> None:
    reference = save_random_hf_model((UNLISTED.get(case) or LISTED[case])(), tmp_path)
    model = load(tmp_path, model_impl="transformers")
    prompts = _prompts(41, 9, 23)
    for prompt, ours in zip(prompts, PagedDriver(model, requests=3).run(prompts, [5, 3, 11, 1]), strict=True):
        with torch.inference_mode():
            assert relative_error(ours, reference(prompt[None]).logits[0]) < 1e-5


@pytest.mark.parametrize("case", UNLISTED)
def test_engine_gives_the_same_tokens_when_preempted_and_behind_cached_prefixes(case: str, tmp_path: Path) -> None:
    reference = save_random_hf_model(UNLISTED[case](), tmp_path)
    common, *tails = _prompts(19, 5, 11, 2, 7)
    prompts = [torch.cat([common, tail]).tolist() for tail in tails]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    with LLM(
        str(tmp_path),
        model_impl="transformers",
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=8,
        num_gpu_blocks_override=1 + (19 if case in ("vaultgemma", "modernbert-decoder", "afmoe") else 14),
        max_num_batched_tokens=16,
        max_num_seqs=4,
        disable_log_stats=False,
    ) as llm:
        for _ in range(2):  # the second time every prompt is in the cache
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                tokens = list(output.outputs[0].token_ids)
                with torch.inference_mode():
                    expected = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
                assert tokens == expected.argmax(-1).tolist()
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["vllm:num_preemptions"].value > 0
        assert any((output.num_cached_tokens or 0) >= 16 for output in outputs)


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_would_be_computed_wrongly_is_refused(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    save_random_hf_model(make(), tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, model_impl="transformers", max_model_len=128 if case == "long rope" else 64)


def test_model_impl_chooses(tmp_path: Path) -> None:
    hf.LlamaConfig(**GQA, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    listed = HFConfig.load(tmp_path)
    assert resolve_model_impl("auto", listed, trust_remote_code=False)[0] == "vllm"
    assert resolve_model_impl("transformers", listed, trust_remote_code=False)[0] == "transformers"
    hf.ArceeConfig(**SIZES, architectures=["ArceeForCausalLM"]).save_pretrained(tmp_path)
    unlisted = HFConfig.load(tmp_path)
    name, completed, _ = resolve_model_impl("auto", unlisted, trust_remote_code=False)
    assert name == "transformers" and completed.num_kv_heads == 6
    with pytest.raises(ValueError, match="ArceeForCausalLM.* are not supported"):
        resolve_model_impl("vllm", unlisted, trust_remote_code=False)
    mamba = HFConfig.from_dict({"architectures": ["ZambaForCausalLM"], "model_type": "zamba", "hidden_size": 64})
    with pytest.raises(ValueError, match="ZambaForCausalLM.* are not supported"):
        resolve_model_impl("auto", mamba, trust_remote_code=False)
    with pytest.raises(ValueError, match="takes no attention function from outside"):
        resolve_model_impl("transformers", mamba, trust_remote_code=False)
    unknown = HFConfig.from_dict({**unlisted.raw, "architectures": ["NobodysForCausalLM"], "model_type": "nobody"})
    with pytest.raises(ValueError, match="NobodysForCausalLM.* are not supported"):
        resolve_model_impl("auto", unknown, trust_remote_code=False)
    with pytest.raises(ValueError, match="has no causal language model NobodysForCausalLM"):
        resolve_model_impl("transformers", unknown, trust_remote_code=False)
    pooling = HFConfig.from_dict({**listed.raw, "architectures": ["LlamaModel"]})
    with pytest.raises(ValueError, match="only language models run so, LlamaForCausalLM here, and not LlamaModel"):
        resolve_model_impl("transformers", pooling, trust_remote_code=False)


def test_random_weights_and_in_flight_quantization(tmp_path: Path) -> None:
    reference = save_random_hf_model(UNLISTED["arcee"](), tmp_path)
    prompt = _prompts(20)[0]
    dummy = load(tmp_path, model_impl="transformers", load_format="dummy")
    assert PagedDriver(dummy).run([prompt], [7])[0].isfinite().all()
    model = load(tmp_path, model_impl="transformers", quantization="fp8")
    with torch.inference_mode():
        error = relative_error(PagedDriver(model).run([prompt], [7])[0], reference(prompt[None]).logits[0])
    assert 1e-4 < error < 0.3  # 8-bit weights, so not the same, and no other model


def _untied_modernbert() -> Any:
    config = UNLISTED["modernbert-decoder"]()
    config.tie_word_embeddings = False
    return config


@pytest.mark.parametrize(("make", "head"), [(UNLISTED["arcee"], "lm_head"), (_untied_modernbert, "decoder")])
def test_the_head_stays_plain_in_flight_whatever_it_is_called(make: Any, head: str, tmp_path: Path) -> None:
    reference = save_random_hf_model(make(), tmp_path)
    module = load(tmp_path, model_impl="transformers", quantization="fp8").module
    theirs = reference.get_submodule(head)
    x = torch.randn(3, theirs.in_features)
    torch.testing.assert_close(module.get_submodule(head)(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert any(isinstance(getattr(owner, "method", None), QuantizedLinearMethod) for owner in module.modules())


def test_a_checkpoint_must_fit(tmp_path: Path) -> None:
    save_random_hf_model(UNLISTED["arcee"](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(ValueError, match=r"has the shape \[.*\], but the model's config.json needs"):
        load(tmp_path, model_impl="transformers")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"missing 'model.layers.3"):
        load(tmp_path, model_impl="transformers")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"unexpected 'model.layers.2"):
        load(tmp_path, model_impl="transformers")


REMOTE_MODEL = """
from transformers import ArceeConfig, ArceeForCausalLM


class OtherConfig(ArceeConfig):
    model_type = "other"


class OtherForCausalLM(ArceeForCausalLM):
    config_class = OtherConfig
"""


def test_ranks_need_a_plan_and_enough_heads(tmp_path: Path) -> None:
    save_random_hf_model(hf.BitNetConfig(**GQA), tmp_path)
    with pytest.raises(ValueError, match="does not say how ranks share this model"):
        load(tmp_path, model_impl="transformers", tp=TensorParallel(0, 2))
    with pytest.raises(ValueError, match="2 key/value heads, which 4 tensor-parallel ranks cannot share"):
        load(tmp_path, model_impl="transformers", tp=TensorParallel(0, 4))


def test_code_of_the_repository_runs_if_it_is_trusted(tmp_path: Path) -> None:
    reference = save_random_hf_model(UNLISTED["arcee"](), tmp_path)
    (tmp_path / "modeling_other.py").write_text(REMOTE_MODEL)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "other", "architectures": ["OtherForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_other.OtherConfig",
        "AutoModelForCausalLM": "modeling_other.OtherForCausalLM",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        LLM(str(tmp_path), skip_tokenizer_init=True)
    prompt = _prompts(12)[0].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", trust_remote_code=True) as llm:
        tokens = list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert tokens == expected.argmax(-1).tolist()
