"""Every family that pools, tiny and with odd sizes: what it gives equals transformers' in fp32, in any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from tests.models import references
from tests.models.harness import PagedDriver, on_ranks, relative_error
from tests.models.test_against_hugging_face import GEMMA2, GQA, SIZES, without_each
from tests.models.test_against_references import save_config
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig
from vllm.config.hf import HFConfig
from vllm.distributed import TensorParallel
from vllm.model_executor.model_loader.checkpoint import find_checkpoint
from vllm.model_executor.model_loader.loader import build_decoder, fill_from_checkpoint
from vllm.model_executor.models.registry import family_of

BERT = {**SIZES, "pad_token_id": 0}
ROBERTA = {**SIZES, "max_position_embeddings": 62, "pad_token_id": 3, "type_vocab_size": 1}
MPNET = {**SIZES, "max_position_embeddings": 200, "pad_token_id": 1, "layer_norm_eps": 1e-5}
DISTIL = {"vocab_size": 131, "dim": 48, "n_layers": 3, "n_heads": 6, "hidden_dim": 77, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
NO_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MODERN = {**SIZES, **NO_IDS, "num_hidden_layers": 5, "local_attention": 10}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LINEAR = {"rope_type": "linear", "factor": 1.5, "rope_theta": 5000.0}
OLDER_MODERN = {"global_attn_every_n_layers": 2, "global_rope_theta": 5000.0, "local_rope_theta": 300.0}

ENCODERS: dict[str, Any] = {
    "bert": lambda: hf.BertConfig(**BERT),
    "bert-relu": lambda: hf.BertConfig(**BERT, hidden_act="relu", type_vocab_size=3, layer_norm_eps=1e-3),
    "roberta": lambda: hf.RobertaConfig(**ROBERTA),
    "xlm-roberta": lambda: hf.XLMRobertaConfig(**{**ROBERTA, "pad_token_id": 1, "type_vocab_size": 2}),
    "camembert": lambda: hf.CamembertConfig(**ROBERTA),
    "distilbert": lambda: hf.DistilBertConfig(**DISTIL),
    "mpnet": lambda: hf.MPNetConfig(**MPNET),
    "mpnet-relu": lambda: hf.MPNetConfig(**MPNET, hidden_act="relu"),
    "modernbert": lambda: hf.ModernBertConfig(**MODERN),
    "modernbert-biased": lambda: hf.ModernBertConfig(
        **{**MODERN, "local_attention": 6}, norm_bias=True, attention_bias=True, mlp_bias=True
    ),
    "nomic": lambda: hf.NomicBertConfig(**SIZES, **IDS),
    "gte": lambda: hf.GteConfig(**SIZES, **IDS, rope_parameters=LINEAR),
}
DECODERS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**GQA),
    "mistral": lambda: hf.MistralConfig(**GQA, sliding_window=7),
    "qwen2": lambda: hf.Qwen2Config(**GQA),
    "qwen3": lambda: hf.Qwen3Config(**GQA, head_dim=10),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA2),
    "gpt2": lambda: hf.GPT2Config(**GPT2),
}
LONG = [(7 * i) % 129 + 2 for i in range(180)]  # past the distance that MPNet's bias tells apart
PROMPTS = [[5, 9, 120, 33], [77], list(range(20, 57)), [8] * 11, [101, 4, 64, 2, 90, 17, 55]]


def save(config: Any, folder: Path, kind: Any = hf.AutoModel, **more: Any) -> Any:
    """A random model with nothing at its neutral value."""
    torch.manual_seed(0)
    options = {"attn_implementation": "eager"}
    model = kind.from_config(config, **options) if hasattr(kind, "from_config") else kind(config)
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if more:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return model


def start(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 48, "max_num_seqs": 4}
    return LLM(str(folder), **{**defaults, **options})


def encode(llm: LLM, prompts: list[list[int]] = PROMPTS, params: PoolingParams | None = None) -> list[Tensor]:
    outputs = llm.encode([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs.data for output in outputs]


def states(model: Any, ids: list[int], **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), **inputs).last_hidden_state[0]


def assert_near(ours: Tensor, want: Tensor, limit: float = 2e-5) -> None:
    assert ours.shape == want.shape
    error = (ours.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1).clamp_min(1e-3)
    assert not error.numel() or error.max().item() < limit


@pytest.mark.parametrize("case", [*ENCODERS, *DECODERS])
def test_hidden_states_of_all_tokens(case: str, tmp_path: Path) -> None:
    model = save({**ENCODERS, **DECODERS}[case](), tmp_path)
    with start(tmp_path, task="embed", override_pooler_config={"pooling_type": "ALL", "normalize": False}) as llm:
        for ids, found in zip(PROMPTS, encode(llm), strict=True):
            assert_near(found, states(model, ids))


def test_scores_by_distance_hold_beyond_the_farthest_and_on_two_ranks(tmp_path: Path) -> None:
    want = states(save(hf.MPNetConfig(**{**MPNET, "intermediate_size": 78}), tmp_path), LONG)
    with start(tmp_path, max_model_len=198, override_pooler_config={"pooling_type": "ALL", "normalize": False}) as llm:
        assert_near(encode(llm, [LONG])[0], want)
    config = HFConfig.load(tmp_path)
    family = family_of("MPNetModel")
    assert family is not None

    def on_rank(tp: TensorParallel) -> Tensor:
        spec, cpu = family.decoder(config), torch.device("cpu")
        model = build_decoder(spec, torch.float32, 198, cpu, tp)
        fill_from_checkpoint(model, family, spec, find_checkpoint(tmp_path, "auto").tensors(), cpu)
        return PagedDriver(_States(model), max_len=200).run([torch.tensor(LONG)], [200])[0]

    for found in on_ranks(2, on_rank):
        assert_near(found, want)


NOMIC = {
    "vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 78, "n_positions": 64, "type_vocab_size": 1,
    "activation_function": "gelu", "rotary_emb_base": 3000.0, "rotary_emb_fraction": 1.0, "layer_norm_epsilon": 1e-5,
    "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "prenorm": False,
    "rotary_emb_interleaved": False, "num_experts": 5, "moe_top_k": 2, "moe_every_n_layers": 2,
    "expert_choice_router": False,
    "num_shared_experts": 0, "moe_normalize_expert_weights": False, "ffn_div": 1,
}  # fmt: skip


def test_an_encoder_with_experts(tmp_path: Path) -> None:
    """NomicBERT as nomic-embed-text-v2-moe is: beside a plain model, from which every field leads away."""
    reference = references.NOMIC_EXPERTS
    weights = save_config("NomicBertModel", "nomic_bert", reference, NOMIC, tmp_path)
    want = [reference.logits(NOMIC, weights, torch.tensor(ids)) for ids in PROMPTS]
    with start(tmp_path, task="embed", override_pooler_config={"pooling_type": "ALL", "normalize": False}) as llm:
        for found, wanted in zip(encode(llm), want, strict=True):
            assert_near(found, wanted)
    with start(tmp_path) as llm:
        for found, wanted in zip(encode(llm), want, strict=True):
            assert_near(found, torch.nn.functional.normalize(wanted.mean(0), dim=-1))
    config, cpu = HFConfig.load(tmp_path), torch.device("cpu")
    family = family_of("NomicBertModel")
    assert family is not None

    def states_of(spec: Any, tp: TensorParallel) -> Tensor:
        model = build_decoder(spec, torch.float32, 48, cpu, tp, modules=family.modules)
        fill_from_checkpoint(model, family, spec, find_checkpoint(tmp_path, "auto").tensors(), cpu)
        return PagedDriver(_States(model)).run([torch.tensor(PROMPTS[2])], [64])[0]

    for found in on_ranks(2, lambda tp: states_of(family.decoder(config), tp)):
        assert_near(found, want[2])
    for name, spec in without_each(family.decoder(config)):
        try:
            found = states_of(spec, TensorParallel())
        except ValueError:
            continue
        assert relative_error(found, want[2]) > 1e-4, name


def test_experts_of_another_kind_are_refused(tmp_path: Path) -> None:
    for name, value in (("moe_normalize_expert_weights", True), ("num_shared_experts", 1), ("ffn_div", 2)):
        config = HFConfig.from_dict(
            {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", **NOMIC, name: value}
        )
        family = family_of("NomicBertModel")
        assert family is not None
        with pytest.raises(ValueError, match=name):
            family.decoder(config)
    gated = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", **NOMIC, "activation_function": "swiglu"}
    with pytest.raises(ValueError, match="experts with a gate"):
        family.decoder(HFConfig.from_dict(gated))


class _States:
    """A model as the driver wants one, which gives hidden states for logits."""

    def __init__(self, model: Any) -> None:
        self._model, self.traits = model, model.traits

    def __call__(self, *inputs: Any) -> Tensor:
        found: Tensor = self._model(*inputs)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize("case", ENCODERS)
def test_no_field_of_an_encoder_is_decoration(case: str, tmp_path: Path) -> None:
    """Without any one of the fields that the family sets, the checkpoint does not fit, or the states are others."""
    want = states(save(ENCODERS[case](), tmp_path), PROMPTS[2])
    config, cpu, one = HFConfig.load(tmp_path), torch.device("cpu"), TensorParallel()
    family = family_of(config.architectures[0])
    assert family is not None
    for name, spec in [("none", family.decoder(config)), *without_each(family.decoder(config))]:
        try:
            model = build_decoder(spec, torch.float32, 48, cpu, one, modules=family.modules)
            fill_from_checkpoint(model, family, spec, find_checkpoint(tmp_path, "auto").tensors(), cpu)
        except ValueError:
            continue
        (found,) = PagedDriver(_States(model)).run([torch.tensor(PROMPTS[2])], [64])
        assert (relative_error(found, want) > 1e-4) == (name != "none"), name


def scores(model: Any, ids: list[int], second: int | None = None) -> Tensor:
    types = {} if second is None else {"token_type_ids": torch.tensor([[0] * second + [1] * (len(ids) - second)])}
    with torch.no_grad():
        return model(torch.tensor([ids]), **types).logits[0]


LABELS = {"num_labels": 3}
CLASSIFIERS: dict[str, Any] = {
    "bert": lambda: hf.BertConfig(**BERT, **LABELS),
    "bert-one": lambda: hf.BertConfig(**BERT, num_labels=1),
    "roberta": lambda: hf.RobertaConfig(**ROBERTA, **LABELS),
    "xlm-roberta-one": lambda: hf.XLMRobertaConfig(**ROBERTA, num_labels=1),
    "distilbert": lambda: hf.DistilBertConfig(**DISTIL, **LABELS),
    "mpnet": lambda: hf.MPNetConfig(**MPNET, **LABELS),
    "modernbert-cls": lambda: hf.ModernBertConfig(**MODERN, **LABELS),
    "modernbert-mean": lambda: hf.ModernBertConfig(
        **MODERN, **LABELS, classifier_pooling="mean", classifier_bias=True, classifier_activation="relu"
    ),
    "gte": lambda: hf.GteConfig(**SIZES, **IDS, **LABELS),
    "llama": lambda: hf.LlamaConfig(**GQA, **LABELS, pad_token_id=0),
    "qwen2": lambda: hf.Qwen2Config(**GQA, num_labels=1, pad_token_id=0),
    "mistral": lambda: hf.MistralConfig(**GQA, **LABELS, pad_token_id=0),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA2, **LABELS, pad_token_id=0),
    "gpt2": lambda: hf.GPT2Config(**GPT2, **LABELS, pad_token_id=0),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_scores_of_classes(case: str, tmp_path: Path) -> None:
    model = save(CLASSIFIERS[case](), tmp_path, hf.AutoModelForSequenceClassification)
    with start(tmp_path) as llm:
        raw, probabilities = encode(llm, params=PoolingParams(use_activation=False)), encode(llm)
    for ids, found, shown in zip(PROMPTS, raw, probabilities, strict=True):
        want = scores(model, ids)
        assert_near(found, want, 1e-4)
        torch.testing.assert_close(shown, want.softmax(-1) if len(want) > 1 else want.sigmoid(), atol=1e-5, rtol=0)


def test_the_second_text_of_a_pair_has_its_own_token_type(tmp_path: Path) -> None:
    model = save(hf.BertConfig(**BERT, num_labels=1), tmp_path, hf.AutoModelForSequenceClassification)
    seconds: list[int | None] = [2, None, 30, 11, 0]
    prompts = [
        {"prompt_token_ids": ids, "token_type_ids": [int(second is not None and i >= second) for i in range(len(ids))]}
        for ids, second in zip(PROMPTS, seconds, strict=True)
    ]
    with start(tmp_path) as llm:
        found = llm.encode(prompts, PoolingParams(use_activation=False), use_tqdm=False)
    for ids, second, output in zip(PROMPTS, seconds, found, strict=True):
        assert_near(output.outputs.data, scores(model, ids, second))


@pytest.mark.parametrize("pooling_type", ["LAST", "CLS", "MEAN", "ALL", "STEP"])
@pytest.mark.parametrize("kind", ["bert", "qwen2"])
def test_every_pooling_type_in_any_company(pooling_type: str, kind: str, tmp_path: Path) -> None:
    model = save({**ENCODERS, **DECODERS}[kind](), tmp_path)
    config = PoolerConfig(pooling_type=pooling_type.lower(), normalize=True, step_tag_id=8)
    with start(tmp_path, task="embed", override_pooler_config=config, max_num_batched_tokens=48) as llm:
        together, alone = encode(llm), [encode(llm, [ids])[0] for ids in PROMPTS]
    for ids, found, single in zip(PROMPTS, together, alone, strict=True):
        x = states(model, ids)
        tagged = x[[token == 8 for token in ids]]
        want = {"LAST": x[-1], "CLS": x[0], "MEAN": x.mean(0), "ALL": x, "STEP": tagged}[pooling_type]
        assert_near(found, torch.nn.functional.normalize(want, dim=-1))
        torch.testing.assert_close(found, single, atol=2e-6, rtol=0)


def test_long_prompts_of_a_decoder_come_in_chunks(tmp_path: Path) -> None:
    model = save(hf.Qwen2Config(**GQA), tmp_path)
    for pooling_type in ("LAST", "MEAN", "ALL"):
        options = {"override_pooler_config": {"pooling_type": pooling_type}, "max_num_batched_tokens": 8}
        with start(tmp_path, task="embed", **options) as llm:
            for ids, found in zip(PROMPTS, encode(llm), strict=True):
                x = states(model, ids)
                want = {"LAST": x[-1], "MEAN": x.mean(0), "ALL": x}[pooling_type]
                assert_near(found, torch.nn.functional.normalize(want, dim=-1))


def test_a_decoder_that_sees_the_whole_prompt(tmp_path: Path) -> None:
    config = hf.Qwen2Config(**GQA)
    model = save(config, tmp_path, is_causal=False)
    with start(tmp_path, override_pooler_config={"pooling_type": "ALL", "normalize": False}) as llm:
        assert llm.llm_engine.cache_config.enable_prefix_caching is False
        for ids, found in zip(PROMPTS, encode(llm), strict=True):
            assert_near(found, states(model, ids, attention_mask=torch.zeros(1, 1, len(ids), len(ids))))


def test_embeddinggemma_sees_half_a_window_on_either_side(tmp_path: Path) -> None:
    sizes = {**GEMMA2, "num_hidden_layers": 7, "sliding_window": 12}
    model = save(hf.Gemma3TextConfig(**sizes, use_bidirectional_attention=True), tmp_path)
    with start(tmp_path, override_pooler_config={"pooling_type": "ALL", "normalize": False}) as llm:
        for ids, found in zip(PROMPTS, encode(llm), strict=True):
            assert_near(found, states(model, ids))


def test_reward_heads(tmp_path: Path) -> None:
    """Qwen2's two layers on every token, and on the tokens that end a step; InternLM2's one."""
    model = save(hf.Qwen2Config(**GQA, architectures=["Qwen2ForRewardModel"]), tmp_path / "rm")
    torch.manual_seed(1)
    layers = [torch.randn(48, 48), torch.randn(48), torch.randn(2, 48), torch.randn(2)]
    weights = dict(zip(["score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"], layers, strict=True))

    def head(x: Tensor, outputs: int) -> Tensor:
        return (x @ layers[0].T + layers[1]).relu() @ layers[2][:outputs].T + layers[3][:outputs]

    for name, outputs, options in (
        ("Qwen2ForRewardModel", 1, {}),
        ("Qwen2ForProcessRewardModel", 2, {"override_pooler_config": {"step_tag_id": 8}}),
    ):
        add_weights(tmp_path / "rm", {n: w[:outputs] if "2" in n else w for n, w in weights.items()}, name)
        with start(tmp_path / "rm", **options) as llm:
            assert llm.supported_tasks == ("encode", "reward")
            (reward,) = llm.reward({"prompt_token_ids": PROMPTS[0]}, use_tqdm=False)
            torch.testing.assert_close(reward.outputs.data, encode(llm)[0], rtol=0, atol=1e-6)
            for ids, found in zip(PROMPTS, encode(llm), strict=True):
                want = head(states(model, ids), outputs)
                if outputs == 2:
                    want = want[[token == 8 for token in ids]].softmax(-1)
                torch.testing.assert_close(found, want, atol=2e-4, rtol=1e-4)


def add_weights(folder: Path, tensors: dict[str, Tensor], architecture: str) -> None:
    """Lay tensors over those of a saved model, and let it be of another architecture."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name: tensor.contiguous() for name, tensor in tensors.items()}}, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_that_judges_by_two_tokens(tied: bool, tmp_path: Path) -> None:
    """As Qwen3-Reranker: the probability of "yes" against "no"; and as a reward model at the ends of steps."""
    from tests.tiny_models import save_tokenizer

    vocab = save_tokenizer(tmp_path)
    config = hf.Qwen3Config(**{**GQA, "vocab_size": vocab}, tie_word_embeddings=tied)
    model = save(config, tmp_path, hf.AutoModelForCausalLM)
    known = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = known["a"], known["e"]
    overrides = {"classifier_from_token": ["a", "e"], "is_original_qwen3_reranker": True}

    def logits(ids: list[int]) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    with start(tmp_path, task="score", hf_overrides=overrides) as llm:
        assert llm.supported_tasks == ("encode", "classify", "score")
        for ids, found in zip(PROMPTS, encode(llm), strict=True):
            torch.testing.assert_close(found, logits(ids)[-1, [no, yes]].softmax(-1)[1:], atol=1e-5, rtol=0)
    pooler = {"pooling_type": "STEP", "step_tag_id": 8, "returned_token_ids": [no, yes, 7]}
    with start(tmp_path, task="reward", override_pooler_config=pooler) as llm:
        for ids, found in zip(PROMPTS, encode(llm), strict=True):
            want = logits(ids)[[token == 8 for token in ids]][:, [no, yes, 7]].softmax(-1)
            torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
