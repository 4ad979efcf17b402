"""GGUF: blocks beside the gguf package's own, whole models beside Hugging Face's, tokenizers beside the originals."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from torch import Tensor

from tests.models.harness import engine_config, save_random_hf_model
from tests.quantization.gguf_files import _ENCODERS, TYPES, numbers_of, random_blocks, write_model
from tests.quantization.harness import SIZES, _load, assert_same_logits
from vllm import LLM, SamplingParams
from vllm.config.model_source import resolve
from vllm.distributed import TensorParallel
from vllm.gguf.config import config_of
from vllm.gguf.container import read_gguf
from vllm.gguf.folder import folder_of
from vllm.gguf.tokenizer import tokenizer_files
from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_TYPES, read_blocks
from vllm.model_executor.layers.quantization.method import StoredEmbeddingMethod
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.model_loader.checkpoint import find_checkpoint
from vllm.model_executor.model_loader.live_weights import unpacked

DEMO = Path(__file__).parents[2] / "vllm" / "assets" / "demo"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))


def test_every_type_is_tested() -> None:
    assert {kind.lower() for kind in TYPES} == set(BLOCK_TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_stand_for_the_numbers_of_the_package(kind: str) -> None:
    raw = random_blocks(kind, 3, 768, 5)
    ours = read_blocks(kind.lower(), torch.from_numpy(raw), 768).dequantize()
    expected = numbers_of(kind, raw)
    assert expected.abs().max() > 0
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


BASE: dict[str, Any] = {**SIZES, "hidden_size": 256, "num_hidden_layers": 2, "head_dim": 64}
FIELDS: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": 256,
    "block_count": 2,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}


def small(config_class: Any, **changes: Any) -> Any:
    return config_class(**{**BASE, "rms_norm_eps": 1e-6, **changes})


MODELS: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", lambda: small(hf.LlamaConfig), {}, {"heads": (4, 2)}),
    "qwen2": ("qwen2", lambda: small(hf.Qwen2Config), {}, {}),
    "qwen3": ("qwen3", lambda: small(hf.Qwen3Config), {}, {}),
    "gemma": ("gemma", lambda: small(hf.GemmaConfig, tie_word_embeddings=True), {}, {"norm_offset": 1.0}),
    "gemma2": (
        "gemma2",
        lambda: small(hf.Gemma2Config, tie_word_embeddings=True, query_pre_attn_scalar=64, sliding_window=16),
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 16},
        {"norm_offset": 1.0},
    ),
    "phi3": ("phi3", lambda: small(hf.Phi3Config), {}, {}),
    "phi2": (
        "phi2",
        lambda: small(hf.PhiConfig, num_key_value_heads=4, partial_rotary_factor=0.5, layer_norm_eps=1e-5),
        {"attention.head_count_kv": 4, "attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 32},
        {},
    ),
    "mixtral": (
        "llama",
        lambda: small(hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
        {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6},
        {"heads": (4, 2)},
    ),
}


def write(name: str, folder: Path, kind_of: Any, **options: Any) -> tuple[Any, Path]:
    """(Hugging Face's model with the file's numbers, the file)."""
    arch, make, fields, more = MODELS[name]
    reference = save_random_hf_model(make(), folder / "plain")
    from safetensors.torch import load_file

    state = load_file(folder / "plain" / "model.safetensors")
    file = folder / "model.gguf"
    wanted = {**FIELDS, **fields}
    if name == "phi2":
        wanted.pop("attention.layer_norm_rms_epsilon")
    held = write_model(file, arch, state, wanted, kind_of, **more, **options)
    _load(reference, held)
    return reference, file


def mixed(name: str, tensor: Tensor) -> str:
    """Types that differ within fused layers, like those of Q4_K_M."""
    if tensor.dim() == 1 or "gate.weight" in name.rsplit("mlp", 1)[0]:
        return "F32"
    if name.endswith(("v_proj.weight", "down_proj.weight")) or "lm_head" in name:
        return "Q6_K"
    return "Q8_0" if "embed" in name else "Q4_K"


@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_logits_of_their_numbers(name: str, tmp_path: Path) -> None:
    reference, file = write(name, tmp_path, mixed)
    assert_same_logits(folder_of(file), reference)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "Q3_K", "IQ4_XS", "IQ2_XXS", "BF16", "F16"])
def test_types_in_a_model(kind: str, tmp_path: Path) -> None:
    def kind_of(name: str, tensor: Tensor) -> str:
        return "F32" if tensor.dim() == 1 else kind

    reference, file = write("llama", tmp_path, kind_of)
    assert_same_logits(folder_of(file), reference)


def test_model_in_several_files(tmp_path: Path) -> None:
    reference, file = write("llama", tmp_path, mixed, split_max_tensors=5)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2 and file not in parts
    assert_same_logits(folder_of(parts[1]), reference)
    assert resolve(str(tmp_path)) == folder_of(parts[0])
    parts[-1].unlink()
    with pytest.raises(ValueError, match="is missing: the model is split into"):
        folder_of(parts[0])


@pytest.mark.parametrize("kind", ["Q6_K", "Q8_0", "F16"])
def test_the_embedding_stays_in_the_file(kind: str, tmp_path: Path) -> None:
    _, file = write("llama", tmp_path, lambda name, tensor: "F32" if tensor.dim() == 1 else kind)
    config = engine_config(folder_of(file), max_model_len=64)
    ranks = [load_model(config, "cpu", TensorParallel(rank, 2)) for rank in range(2)]
    model = load_model(config, "cpu")
    embed, ids = model.embed, torch.tensor([[0, 3], [model.embed.org_vocab_size - 1, 3]])
    assert isinstance(embed.method, StoredEmbeddingMethod) and embed.weight is None
    looked_up = embed(ids)
    assert looked_up.shape == (2, 2, 256) and torch.equal(looked_up[0, 1], looked_up[1, 1])
    pair = [rank.embed.method.embed(rank.embed, torch.tensor([0])) for rank in ranks]
    assert torch.equal(pair[0][0], looked_up[0, 0])
    assert torch.equal(pair[1], embed(torch.tensor([ranks[1].embed.first_row])))
    with unpacked([model.embed, *(rank.embed for rank in ranks)]):  # who wants to see the weights sees them
        whole = torch.cat([rank.embed.weight.data for rank in ranks])[: embed.org_vocab_size]
        assert torch.equal(embed.weight.data[: embed.org_vocab_size], whole)
    assert torch.equal(embed(ids), looked_up)


def test_a_weight_may_be_a_single_block() -> None:
    for kind in TYPES:
        raw = random_blocks(kind, 1, 256, 3)
        whole = np.concatenate([raw, raw])
        ours = read_blocks(kind.lower(), torch.from_numpy(whole)[:1], 256).dequantize()
        torch.testing.assert_close(ours, numbers_of(kind, raw), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["qwen3", "gemma"])  # with a head of its own, and without
def test_models_that_pool(name: str, tmp_path: Path) -> None:
    """The last state as an embedding, and rows of the quantized head, or table, as those of two tokens."""
    reference, file = write(name, tmp_path, mixed)
    ids = [5, 9, 77, 31]
    with torch.no_grad():
        found = reference(torch.tensor([ids]), output_hidden_states=True)
    states, logits = found.hidden_states[-1][0], found.logits[0]
    for options, want in [
        ({"task": "embed"}, torch.nn.functional.normalize(states[-1], dim=-1)),
        ({"task": "reward", "override_pooler_config": {"returned_token_ids": [5, 9]}}, logits[:, [5, 9]].softmax(-1)),
    ]:
        with LLM(str(file), dtype="float32", skip_tokenizer_init=True, **options) as llm:
            (output,) = llm.encode([{"prompt_token_ids": ids}], use_tqdm=False)
        torch.testing.assert_close(output.outputs.data, want, atol=1e-4, rtol=1e-3)


def add_demo_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The packaged model's byte-level vocabulary as the converter would write it."""
    document = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    added = {token["id"]: token for token in document["added_tokens"]}
    tokens = [""] * 4096
    for token, index in vocabulary.items():
        tokens[index] = token
    kinds = [gguf.TokenType.NORMAL] * 4096
    for index, token in added.items():
        tokens[index] = token["content"]
        kinds[index] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in document["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    template = DEMO / "chat_template.jinja"
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    writer.add_chat_template(template.read_text() if template.exists() else settings["chat_template"])


def write_demo(folder: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """The packaged model as a GGUF file, and the numbers that this holds."""
    from safetensors.torch import load_file

    fields = {
        **FIELDS,
        "context_length": 2048,
        "block_count": 4,
        "feed_forward_length": 384,
        "attention.head_count": 8,
        "attention.key_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    file = folder / f"demo-{kind}.gguf"
    held = write_model(
        file,
        "llama",
        load_file(DEMO / "model.safetensors"),
        fields,
        lambda name, tensor: "F32" if tensor.dim() == 1 else "Q8_0" if tensor.shape[1] % 256 and "_K" in kind else kind,
        heads=(8, 2),
        tokenizer=add_demo_tokenizer,
    )
    return file, held


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_written_here_are_near_the_numbers(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((7, 512)).astype(np.float32)
    values[2] = 0
    values[3] = np.abs(values[3])
    found = numbers_of(kind, _ENCODERS[kind](values)).numpy()
    assert np.abs(found - values).max() < (0.3 if kind == "Q4_K" else 0.08)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q5_0", "Q4_0", "Q4_K", "Q6_K"])
def test_the_packaged_model_as_a_file(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, held = write_demo(tmp_path, kind)
    reference = hf.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    _load(reference, held)
    assert_same_logits(folder_of(file), reference, 1e-3)
    llm = LLM(str(file), max_model_len=256)
    assert "stay so" not in capfd.readouterr().err  # that nothing is quantized is what a file of F16 says
    prompts = ["The capital of France is", "Water freezes"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert "Paris" in outputs[0].outputs[0].text
    original = hf.AutoTokenizer.from_pretrained(DEMO)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == original(prompt)["input_ids"]
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                      SamplingParams(temperature=0, max_tokens=16))  # fmt: skip
    assert answer[0].outputs[0].text


TEXTS = ["Hello, world!", "  two  spaces\n\nand\ttabs", "12345 naïve café 東京 🙂", "don't I'LL", "", "\u2581x <0x41>"]


def test_a_byte_level_vocabulary_gives_the_tokens_of_the_original(tmp_path: Path) -> None:
    file, _ = write_demo(tmp_path, "Q8_0")
    theirs = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ours = Tokenizer.from_file(str(folder_of(file) / "tokenizer.json"))
    for text in ["The quick brown fox, jumped!", "x = 1\nif y:\n  z", *TEXTS]:
        if not any(c.isdigit() or "'" in c for c in text):  # the demo has a way of its own to cut these
            assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


def test_a_sentencepiece_vocabulary_merges_by_score(tmp_path: Path) -> None:
    """Beside a brute force: of all neighbours that join to a token, the pair with the best score goes first."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(pieces)
    words = [
        "\u2581",
        *"abcdehlortw",
        "he",
        "ll",
        "hell",
        "lo",
        "\u2581w",
        "or",
        "\u2581wor",
        "hello",
        "ld",
        "\u2581he",
        "o\u2581",
    ]
    pieces += words
    kinds += [1] * len(words)
    scores += [-float((i * 7) % 23) for i in range(len(words))]
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    made = Tokenizer.from_str(tokenizer_files(read_gguf(tmp_path / "v.gguf"))["tokenizer.json"])
    ids = {piece: i for i, piece in enumerate(pieces)}

    def brute(text: str) -> list[int]:
        parts = list("\u2581" + text.replace(" ", "\u2581"))
        while True:
            joins = [
                (-scores[ids[a + b]], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ids
            ]
            if not joins:
                break
            _, i = min(joins)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        out = [1]
        for part in parts:
            out += [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()]
        return out

    for text in ["hello world", "he held hello", "who \u00e9 told", " a  b", "\u6771 hello"]:
        assert made.encode(text).ids == brute(text), text
        assert made.decode(made.encode(text).ids) == text


def test_llama3_scaling_is_found_again(tmp_path: Path) -> None:
    config = hf.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_theta=500000.0, max_position_embeddings=131072,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 8192},
    )  # fmt: skip
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    writer = gguf.GGUFWriter(tmp_path / "r.gguf", "llama")
    for key, value in {**FIELDS, "context_length": 131072}.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(
            f"llama.{key}", 500000.0 if key == "rope.freq_base" else value
        )
    writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    writer.add_tensor("token_embd.weight", torch.zeros(8, 256).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = config_of(read_gguf(tmp_path / "r.gguf"))["rope_scaling"]
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)


def test_a_file_in_a_download_cache_is_a_link_to_one_with_another_name(tmp_path: Path) -> None:
    write("llama", tmp_path, mixed)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model.gguf").rename(tmp_path / "blobs" / "a80dd99e")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.gguf").symlink_to("../blobs/a80dd99e")
    for given in (tmp_path / "snapshot" / "model.gguf", tmp_path / "snapshot"):
        assert find_checkpoint(resolve(str(given)), "auto").kind == "gguf"


def test_a_cache_that_is_full_is_named_and_nothing_is_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("llama", tmp_path, mixed)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "full"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(ValueError, match="could not be unpacked into .*: File too large. Set VLLM_CACHE_ROOT"):
            folder_of(tmp_path / "model.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "full" / "gguf").iterdir())
