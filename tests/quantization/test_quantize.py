"""`vllm quantize`: what it writes is read by this package and by others, and beats rounding to nearest."""

from __future__ import annotations

import json
import logging
import re
import resource
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quantization.harness import PROMPT, SIZES, plain_model
from tests.tiny_encoders import save_bert
from tools.demo_model.corpus import strings
from vllm import LLM, SamplingParams
from vllm.config.hf import HFConfig
from vllm.entrypoints.cli.main import run
from vllm.quantize.calibrate import documents_of, texts_of
from vllm.quantize.formats import TARGETS
from vllm.quantize.gguf import FORMATS as GGUF_FORMATS
from vllm.quantize.gguf import GgufJob
from vllm.quantize.gguf_file import metadata_for
from vllm.quantize.rounding import Inputs, awq_scales, output_error, round_gptq, round_nearest
from vllm.quantize.run import Job, Report, _Writer, quantize


def job(out: Path, name: str, **options: Any) -> Job:
    return Job("demo", name, out, tokens=3000, **options)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of the demo model's own kind."""
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("".join(islice(strings(977, 0, 200_000), 400)))
    return file


@pytest.mark.parametrize("name", TARGETS)
def test_the_packaged_model_in_every_format_knows_the_capital_of_france(name: str, tmp_path: Path) -> None:
    report = quantize(job(tmp_path / "out", name))
    assert len(report.errors) == 4 * 7
    assert report.bytes_after < report.bytes_before
    assert report.perplexity_after < 1.05 * report.perplexity_before
    llm = LLM(str(tmp_path / "out"), max_model_len=128)
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))
    assert "Paris" in output.outputs[0].text


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_the_packaged_model_as_a_gguf_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    report = quantize(job(tmp_path / "out", name))
    assert len(report.errors) == 4 * 7
    assert max(report.errors.values()) < {"gguf-f16": 2e-4, "gguf-q8_0": 0.01}.get(name, 0.15)
    assert report.perplexity_after < 1.05 * report.perplexity_before
    (file,) = (tmp_path / "out").iterdir()
    llm = LLM(str(file), max_model_len=128)
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))
    assert "Paris" in output.outputs[0].text
    assert llm.get_tokenizer().encode("2 + 2 = 4, is it?") == LLM("demo").get_tokenizer().encode("2 + 2 = 4, is it?")


def test_calibration_beats_rounding_to_nearest(corpus: Path, tmp_path: Path) -> None:
    """In the error of every layer's outputs, in what tokens' probabilities become on text held out, and, where rounding
    does more than chance does to it (3 bits), in perplexity."""

    def report(name: str, **options: Any) -> Report:
        return quantize(Job("demo", name, tmp_path / f"{name} {options}", corpus, tokens=16000, **options))

    for name in ("gptq", "awq"):
        nearest, ours = report(name, nearest=True), report(name)
        assert set(ours.errors) == set(nearest.errors)
        assert sum(ours.errors.values()) < (0.9 if name == "gptq" else 1.0) * sum(nearest.errors.values())
        assert ours.change < (0.9 if name == "gptq" else 1.0) * nearest.change
    nearest, ours = report("gptq", bits=3, nearest=True), report("gptq", bits=3)
    assert ours.perplexity_after < nearest.perplexity_after
    assert ours.change < 0.85 * nearest.change and ours.agreement > nearest.agreement


def test_a_text_longer_than_the_model_reads_at_once_is_no_warning(
    corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM("demo", max_model_len=512)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        calibration, held_out = texts_of(llm, corpus, 6000)
    finally:
        logger.removeHandler(caplog.handler)
    assert sum(map(len, calibration + held_out)) > 4000
    assert "indexing errors" not in caplog.text


def test_text_is_cut_where_documents_begin() -> None:
    assert documents_of([1, 5, 6, 7, 8, 1, 9, 1, 3, 4], 1, 3) == [[1, 5, 6], [1, 7, 8], [1, 9], [1, 3, 4]]
    assert documents_of([5, 6, 7, 8, 9], 1, 3) == [[5, 6, 7], [8, 9]]
    assert documents_of([5, 6, 1, 7], None, 4) == [[5, 6, 1, 7]]
    assert documents_of([], 1, 4) == []


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([3, 4, 8]), symmetric=st.booleans(), act_order=st.booleans())
def test_gptq_has_a_smaller_error_of_outputs_than_nearest(
    seed: int, bits: int, symmetric: bool, act_order: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(64, 64, generator=generator) / 8
    x = torch.randn(512, 64, generator=generator) @ mix * torch.rand(64, generator=generator)
    weight, inputs = torch.randn(24, 64, generator=generator), Inputs(64)
    inputs.add(x[:200])
    inputs.add(x[200:])
    torch.testing.assert_close(inputs.gram, x.T @ x, rtol=1e-3, atol=1e-3)
    ours = round_gptq(weight, inputs, bits, 32, symmetric, act_order)
    nearest = round_nearest(weight, bits, 32, symmetric)
    error = output_error(weight, ours.numbers(), inputs)
    brute = ((x @ (ours.numbers() - weight).T).norm() / (x @ weight.T).norm()).item()
    assert error == pytest.approx(brute, rel=1e-2, abs=1e-4)
    assert error < output_error(weight, nearest.numbers(), inputs)


def test_awq_protects_the_inputs_that_are_large() -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.ones(64)
    size[5] = 40
    x, weight, inputs = torch.randn(256, 64, generator=generator) * size, torch.randn(16, 64), Inputs(64)
    inputs.add(x)
    scales = awq_scales([weight], inputs, 4, 32)
    assert scales.argmax() == 5
    scaled = round_nearest(weight * scales, 4, 32, False).numbers() / scales
    assert output_error(weight, scaled, inputs) < output_error(
        weight, round_nearest(weight, 4, 32, False).numbers(), inputs
    )


@pytest.mark.parametrize("name", ["w4a16", "w8a16", "int8", "fp8-dynamic"])
def test_transformers_reads_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Through the compressed-tensors package."""
    _, _ = plain_model(tmp_path / "plain", num_key_value_heads=4)
    source = Path(__file__).parents[2] / "vllm" / "assets" / "demo"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "plain" / file).write_bytes((source / file).read_bytes())
    quantize(Job(str(tmp_path / "plain"), name, tmp_path / "out", tokens=1000))
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(PROMPT[None]).logits[0, -1].log_softmax(-1)
    llm = LLM(str(tmp_path / "out"), dtype="float32", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": PROMPT.tolist()}, params)
    limit = 0.15 if name in ("int8", "fp8-dynamic") else 2e-3  # they round activations, too
    for token, entry in output.outputs[0].logprobs[0].items():
        assert entry.logprob == pytest.approx(expected[token].item(), abs=limit * max(1.0, expected.std().item()))


def test_an_interrupted_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.quantize import run as module

    written: list[str] = []
    original = module._Writer.write_block

    def write(self: Any, block: str, *args: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(block)
        return original(self, block, *args)

    monkeypatch.setattr(module._Writer, "write_block", write)
    with pytest.raises(KeyboardInterrupt):
        quantize(job(tmp_path / "out", "int8"))
    assert written == ["blocks.0", "blocks.1"]
    with pytest.raises(ValueError, match="another job"):
        quantize(job(tmp_path / "out", "fp8"))
    again: list[str] = []
    monkeypatch.setattr(
        module._Writer, "write_block", lambda self, block, *args: again.append(block) or original(self, block, *args)
    )
    monkeypatch.setattr(module, "_GRAM_BYTES", 1)  # block by block
    report = quantize(job(tmp_path / "out", "int8"))
    assert again == ["blocks.2", "blocks.3"]
    assert len(report.errors) == 28
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert all((tmp_path / "out" / file).exists() for file in index["weight_map"].values())


@pytest.mark.parametrize("name", ["gptq", "gguf-q8_0"])
def test_a_job_whose_disk_was_full_is_done_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    asked = ["quantize", "demo", "--format", name, "--tokens", "1280", "--out", str(tmp_path / "out")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        assert run(asked) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(rf"{tmp_path}/out/[^ ]+ cannot be written: .*File too large", capsys.readouterr().err)
    assert not list((tmp_path / "out").glob("*.new"))
    assert run(asked) == 0


def test_a_gguf_job_that_was_killed_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))

    def killed(made: Any, file: Path) -> None:
        file.write_bytes(b"GGUF")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GgufJob, "write", killed)
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)  # nothing is tidied up after SIGKILL
        with pytest.raises(KeyboardInterrupt):
            quantize(job(tmp_path / "out", "gguf-q8_0"))
    assert list((tmp_path / "out").glob("*.new"))
    quantize(job(tmp_path / "out", "gguf-q8_0"))
    assert [file.suffix for file in (tmp_path / "out").iterdir()] == [".gguf"]


def test_a_gguf_file_does_not_go_beside_the_beginning_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(writer: Any, target: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Writer, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(job(tmp_path / "out", "int8"))
    with pytest.raises(ValueError, match="another job"):
        quantize(job(tmp_path / "out", "gguf-q8_0"))
    assert not list((tmp_path / "out").glob("*.gguf"))


def test_experts_stay_plain_and_a_warning_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain_model(tmp_path / "plain", "mixtral")
    source = Path(__file__).parents[2] / "vllm" / "assets" / "demo"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "plain" / file).write_bytes((source / file).read_bytes())
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        quantize(Job(str(tmp_path / "plain"), "w8a16", tmp_path / "out", tokens=1000))
    finally:
        logger.removeHandler(caplog.handler)
    assert re.search(r"Experts stay plain: \d+\.\d of \d+\.\d MiB", caplog.text)


def test_the_copy_is_measured_also_where_its_folder_has_the_name_of_the_packaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = quantize(job(Path("demo"), "gptq", bits=2))
    assert report.change > 0.1 and report.perplexity_after > report.perplexity_before


def test_wrong_requests_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    assert run(["quantize", "demo", "--format", "fp8", "--out", str(tmp_path / "full")]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert run(["quantize", "demo", "--format", "gptq", "--group-size", "100", "--out", str(tmp_path / "a")]) == 1
    assert "Name a --group-size that divides 128." in capsys.readouterr().err
    assert run(["quantize", "demo", "--format", "fp8", "--group-size", "64", "--out", str(tmp_path / "a")]) == 1
    assert "does not go with this format, which has no groups." in capsys.readouterr().err
    (tmp_path / "bert").mkdir()
    save_bert(tmp_path / "bert")
    assert run(["quantize", str(tmp_path / "bert"), "--format", "fp8", "--out", str(tmp_path / "a")]) == 1
    assert "is a model that pools" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert run(["quantize", "demo", "--format", "awq", "--act-order", "--out", str(tmp_path / "b")]) == 1
    assert "--act-order goes with" in capsys.readouterr().err
    for tokens in ("0", "-5", "1279"):
        few = ["--tokens", tokens]
        assert run(["quantize", "demo", "--format", "gptq", *few, "--out", str(tmp_path / "c")]) == 1
        assert f"--tokens must be 1280 or more for this model, got {tokens}." in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("too short")
    short = ["--data", str(tmp_path / "short.txt")]
    assert run(["quantize", "demo", "--format", "gptq", *short, "--out", str(tmp_path / "c")]) == 1
    assert "expected at least" in capsys.readouterr().err
    assert run(["quantize", "demo", "--format", "fp8", "--out", str(tmp_path / "full" / "x" / "y")]) == 1
    assert "Not a directory" in capsys.readouterr().err
    assert run(["quantize", "demo", "--format", "fp8", "--tokens", "1280", "--out", str(tmp_path / "c")]) == 0


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear", "factor": 2.0}, None),
        (LLAMA3, None),
        ({**LLAMA3, "partial_rotary_factor": 0.5}, None),
        ({**LLAMA3, "high_freq_factor": 5.0}, "scaled in a way that is not supported"),
        ({**LLAMA3, "original_max_position_embeddings": 1000}, "scaled in a way that is not supported"),
        ({**YARN, "beta_fast": 32, "attention_factor": None}, None),
        ({**YARN, "beta_fast": 16}, "no place for all of its rotary embeddings' settings: .*beta_fast=16"),
        ({**YARN, "attention_factor": 1.0}, "no place for all .*attention_factor=1.0"),
        ({"rope_type": "dynamic", "factor": 2.0}, "scaled by 'dynamic' cannot be written"),
    ],
)
def test_rotary_embeddings_that_gguf_cannot_hold_are_refused_first(
    rope: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    fields = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192}
    config = HFConfig.from_dict({**fields, "rope_theta": 5e5, "rope_scaling": rope})
    if message is None:
        _, divisors = metadata_for(config, "llama", "model")
        pairs = int(config.head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        assert len(divisors) == pairs if rope["rope_type"] == "llama3" else divisors is None
        return
    with pytest.raises(ValueError, match=f"GGUF file.*{message}"):
        metadata_for(config, "llama", "model")


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
FULL, WINDOW = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        (MISTRAL, None),
        ({**MISTRAL, "layer_types": [WINDOW, FULL, WINDOW, FULL]}, "blocks.1.attn.window is None, .* read as 64"),
        ({"hidden_act": "gelu"}, "blocks.0.ffn.act is 'gelu', and would be read as 'silu'"),
    ],
)
def test_settings_that_gguf_cannot_hold_are_refused(changes: dict[str, Any], message: str | None) -> None:
    folder = Path(__file__).parents[2] / "vllm" / "assets" / "demo"
    config = HFConfig.from_dict({**json.loads((folder / "config.json").read_text()), **changes})
    if message is None:
        GgufJob("gguf-q8_0", config, folder, "model")
        return
    with pytest.raises(ValueError, match=f"GGUF file of model has no place for all of its settings: {message}"):
        GgufJob("gguf-q8_0", config, folder, "model")
