"""lm-evaluation-harness: its back ends for this engine and for servers against the one for transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import vllm

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
DEMO = str(Path(vllm.__file__).parent / "assets" / "demo")
FACTS = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"), ("Egypt", "Cairo")]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
"""
TEXT = """
doc_to_target: " {{word}}"
generation_kwargs: {until: ["."], do_sample: false, max_gen_toks: 8}
metric_list:
  - {metric: exact_match, ignore_case: true, ignore_punctuation: true}
"""
PERPLEXITY = """
doc_to_target: "{{question}} {{word}}. It is a large city."
metric_list:
  - {metric: byte_perplexity}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Three tasks of 100 items each: a choice, a text, a likelihood."""
    folder = tmp_path_factory.mktemp("tasks")
    items = []
    for i in range(100):
        country, _ = FACTS[i % 5]
        words = [city for _, city in FACTS]
        question = ("In short: " * (i // 5 % 4)) + f"Q{i // 20}. The capital of {country} is"
        items.append({"question": question, "choices": [f" {w}" for w in words], "answer": i % 5, "word": words[i % 5]})
    data = folder / "items.jsonl"
    data.write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    parts = {"choice": ("multiple_choice", CHOICE), "text": ("generate_until", TEXT)}
    parts["likelihood"] = ("loglikelihood_rolling", PERPLEXITY)
    for name, (kind, rest) in parts.items():
        text = TASK.format(name=f"facts_{name}", data=data, kind=kind) + rest
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def save_small(family: str, folder: Path) -> Path:
    """A random model of a family that has the demo model's tokenizer."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer

    sizes = {
        "vocab_size": Tokenizer.from_file(f"{DEMO}/tokenizer.json").get_vocab_size(), "hidden_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "max_position_embeddings": 512,
    }  # fmt: skip
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    configs = {
        "gemma2": lambda: hf.Gemma2Config(**sizes, **ids, head_dim=16, sliding_window=8),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(
            **sizes, **ids, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
        ),
    }
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(configs[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO) / name, folder)
    return folder


def numbers(model: str, arguments: dict[str, Any], tasks: TaskManager, names: list[str]) -> dict[str, float]:
    found = simple_evaluate(
        model, arguments, tasks=names, task_manager=tasks, batch_size="auto" if model == "vllm" else 1,
        bootstrap_iters=0, device="cpu",
    )  # fmt: skip
    return {
        f"{name} {metric}": value
        for name, values in found["results"].items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }


ALL = ["facts_choice", "facts_text", "facts_likelihood"]


@pytest.fixture(scope="module")
def expected(tasks: TaskManager) -> dict[str, float]:
    return numbers("hf", {"pretrained": DEMO, "dtype": "float32"}, tasks, ALL)


def check(found: dict[str, float], expected: dict[str, float], names: list[str]) -> None:
    wanted = {key: value for key, value in expected.items() if key.split()[0] in names}
    assert wanted and found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-3), key


def test_the_engine_in_the_process_gives_the_numbers_of_transformers(
    tasks: TaskManager, expected: dict[str, float]
) -> None:
    assert expected["facts_choice acc,none"] > 0.5  # it knows them
    arguments = {"pretrained": DEMO, "dtype": "float32", "max_model_len": 512, "gpu_memory_utilization": 0.3}
    check(numbers("vllm", arguments, tasks, ALL), expected, ALL)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_so_does_it_for_models_of_other_families(family: str, tasks: TaskManager, tmp_path: Path) -> None:
    folder = str(save_small(family, tmp_path))
    wanted = numbers("hf", {"pretrained": folder, "dtype": "float32", "attn_implementation": "eager"}, tasks, ALL)
    arguments = {"pretrained": folder, "dtype": "float32", "max_model_len": 512, "gpu_memory_utilization": 0.3}
    check(numbers("vllm", arguments, tasks, ALL), wanted, ALL)


def test_a_server_gives_the_numbers_of_transformers(
    tasks: TaskManager, expected: dict[str, float], base_url: str
) -> None:
    """The server computes in bfloat16: choices agree, but for ties."""
    names = ["facts_choice", "facts_text"]
    arguments = {
        "model": "demo", "base_url": f"{base_url}/completions", "tokenizer": DEMO, "num_concurrent": 8,
        "max_length": 512, "tokenized_requests": False,
    }  # fmt: skip
    found = numbers("local-completions", arguments, tasks, names)
    for key, value in found.items():
        assert value == pytest.approx(expected[key], abs=0.03), key
