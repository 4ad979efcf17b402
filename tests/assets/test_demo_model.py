"""The demo models that come with the package, and the scripts that make them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tools.demo_model import corpus, train
from tools.demo_model.arithmetic import calculation_exchange, shop_exchange
from tools.demo_model.check import SUBJECTS, Subject, fits
from tools.demo_model.structured import random_object
from tools.demo_model.text import table

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "vllm" / "assets"
MEGABYTES = {"demo": 8, "demo-draft": 2}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def demo() -> Subject:
    return Subject(str(ASSETS / "demo"), "cpu", torch.float32)


@pytest.mark.parametrize("name", list(MEGABYTES))
def test_weights_are_small_bfloat16_tensors_that_llama_takes_completely(name: str) -> None:
    path = ASSETS / name / "model.safetensors"
    assert path.stat().st_size <= MEGABYTES[name] * 1_000_000
    with safe_open(path, "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    _, report = LlamaForCausalLM.from_pretrained(ASSETS / name, output_loading_info=True)
    assert not any(report.values())


@pytest.mark.parametrize("name", list(MEGABYTES))
def test_the_card_says_how_to_make_the_model_again(name: str) -> None:
    card = (ASSETS / name / "README.md").read_text(encoding="utf-8")
    options = re.search(r"python -m tools\.demo_model\.train (.*)", card)
    assert options and "--steps" in options.group(1) and "license: apache-2.0" in card
    generation = json.loads((ASSETS / name / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


def test_both_models_have_the_same_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (ASSETS / "demo" / file).read_bytes() == (ASSETS / "demo-draft" / file).read_bytes()


def test_the_demo_model_knows_the_capitals(demo: Subject) -> None:
    rows = [row for row in table("countries") if row[0] in {"France", "Japan", "Kenya", "Peru", "Norway", "Fiji"}]
    replies = demo.complete([f"{demo.tokenizer.bos_token}The capital of {row[0]} is" for row in rows], 8)
    assert [reply.startswith(f" {row[1]}") for reply, row in zip(replies, rows, strict=True)] == [True] * 6


def test_the_draft_model_continues_france_with_paris() -> None:
    draft = Subject(str(ASSETS / "demo-draft"), "cpu", torch.bfloat16)
    assert draft.complete([f"{draft.tokenizer.bos_token}The capital of France is"], 4)[0].startswith(" Paris")


def test_the_demo_model_chats_calculates_and_ends_its_turn(demo: Subject) -> None:
    questions = {"What is the capital of Japan?": "Tokyo", "What is 7 + 5?": "12", "Who are you?": "I am a small"}
    replies = demo.complete([demo.render([{"role": "user", "content": asked}]) for asked in questions], 60)
    for reply, wanted in zip(replies, questions.values(), strict=True):
        assert wanted in reply and reply.endswith(corpus.EOS)


def test_the_demo_model_calls_a_tool_and_uses_its_response(demo: Subject) -> None:
    asked = {"role": "user", "content": "What is the weather in Paris?"}
    call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    (reply,) = demo.complete([demo.render([asked], [WEATHER])], 60)
    assert reply == f"<tool_call>\n{json.dumps(call)}\n</tool_call>{corpus.EOS}"
    messages = [
        asked,
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": '{"temperature": 21, "condition": "sunny"}'},
    ]
    (reply,) = demo.complete([demo.render(messages, [WEATHER])], 60)
    assert "sunny" in reply and "21" in reply and reply.endswith(corpus.EOS)


def test_the_demo_model_writes_json_for_a_schema(demo: Subject) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    wish = {"role": "user", "content": f"Write JSON for this schema: {json.dumps(schema)}"}
    (reply,) = demo.complete([demo.render([wish])], 60)
    assert fits(schema, json.loads(reply.removesuffix(corpus.EOS)))


def test_sampled_stories_end_by_themselves(demo: Subject) -> None:
    torch.manual_seed(3)
    wish = [{"role": "user", "content": "Tell me a short story about a fox."}]
    replies = demo.complete([demo.render(wish)] * 3, 400, temperature=0.8)
    assert all("fox" in reply and reply.endswith(corpus.EOS) for reply in replies)
    assert len(set(replies)) == 3


@settings(deadline=None)
@given(st.text())
def test_the_tokenizer_gives_back_every_text(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "demo")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_special_tokens_have_their_places(demo: Subject) -> None:
    tokenizer = demo.tokenizer
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_token_id == 1
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 2, 4096)
    ids = tokenizer.encode("<tool_call>\n{}</tool_call>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>\n{}</tool_call>"
    assert len(tokenizer.encode("<tool_call>", add_special_tokens=False)) == 1


def test_the_chat_template_of_the_files_is_the_one_that_the_text_was_made_with(demo: Subject) -> None:
    rng = random.Random(4)
    documents = [corpus.document(rng) for _ in range(200)]
    for item in (item for item in documents if item.messages):
        shown = demo.tokenizer.apply_chat_template(item.messages, tools=item.tools, tokenize=False)
        assert shown.rstrip("\n") == corpus.render(item)


def test_the_generated_text_depends_on_the_seed_only() -> None:
    code = (
        "import hashlib; from tools.demo_model.corpus import strings; "
        "print(hashlib.sha256(''.join(strings(1, 0, 50_000)).encode()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert seen == {hashlib.sha256("".join(corpus.strings(1, 0, 50_000)).encode()).hexdigest()}
    assert "".join(corpus.strings(2, 0, 1000)) != "".join(corpus.strings(1, 0, 1000))


def test_generated_sums_are_right() -> None:
    rng = random.Random(5)
    for _ in range(500):
        item = calculation_exchange(rng)
        formula = re.fullmatch(r"(\d+) ([-+*/x×]) (\d+) = (\d+)", item.assistant)
        if formula:
            left, sign, right, result = formula.groups()
            a, b = int(left), int(right)
            assert int(result) == {"+": a + b, "-": a - b, "/": a // max(b, 1)}.get(sign, a * b)
            assert item.short == result
    for _ in range(200):
        item = shop_exchange(rng)
        a, b = map(int, re.findall(r"\d+", item.user))
        assert int(item.short) in (a + b, a - b, a * b) and item.short in item.assistant


def test_generated_objects_fit_their_schemas() -> None:
    rng = random.Random(6)
    for _ in range(300):
        _, schema, value = random_object(rng)
        assert fits(schema, json.loads(json.dumps(value)))


def test_the_trainer_computes_the_logits_of_transformers() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(train.config_of(train.Shape(64, 2, 96, 4, 2, 1e-3))).eval()
    ids = torch.randint(0, train.VOCAB_SIZE, (2, 37))
    with torch.no_grad():
        torch.testing.assert_close(train.forward(model, ids), model(ids).logits, rtol=1e-4, atol=1e-5)


def test_rounded_weights_are_the_nearest_with_few_bits() -> None:
    weight = torch.randn(1000)
    rounded = train.round_mantissa(weight, 3).float()
    scale = torch.exp2(torch.floor(torch.log2(weight.abs())) - 3)
    torch.testing.assert_close(rounded, torch.sign(weight) * torch.round(weight.abs() / scale) * scale)


def test_every_subject_of_the_check_has_questions(demo: Subject) -> None:
    for ask, length, bar in SUBJECTS.values():
        questions = ask(demo, random.Random(0))
        assert len(questions) >= 60 and length > 0 and 0 < bar <= 1
        assert not any(check("nonsense") for _, check in questions)


def test_the_models_load_through_the_auto_classes() -> None:
    for name in MEGABYTES:
        assert type(AutoModelForCausalLM.from_pretrained(ASSETS / name)) is LlamaForCausalLM
