"""The chat templates in `examples/`: what they write of a call is what the parser of the same models reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tool_parsers.outputs import TOOLS, message_of
from vllm.entrypoints.chat_template import render_chat
from vllm.entrypoints.chat_utils import checked_messages, resolve_content_format
from vllm.reasoning import FORMATS as THOUGHTS
from vllm.tool_parsers.registry import FORMATS

EXAMPLES = Path(__file__).parents[2] / "examples"
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
ARGUMENTS = {"city": 'Zürich "HB"', "days": 3, "exact": True, "range": [1.5, -2], "where": {"a": None}}
PLAIN = sorted(path.name for path in EXAMPLES.glob("template_*.jinja"))
# Template -> (parser, what ends an assistant's turn)
WITH_TOOLS = {
    "deepseekr1": ("deepseek_v3", "<｜end▁of▁sentence｜>"),
    "deepseekv3": ("deepseek_v3", "<｜end▁of▁sentence｜>"),
    "deepseekv31": ("deepseek_v31", "<｜end▁of▁sentence｜>"),
    "gemma3_pythonic": ("pythonic", "<end_of_turn>"),
    "glm4": ("glm45", "<|observation|>"),
    "granite": ("granite", "<|end_of_text|>"),
    "granite_20b_fc": ("granite-20b-fc", "<|endoftext|>"),
    "hermes": ("hermes", "<|im_end|>"),
    "internlm2_tool": ("internlm", "<|im_end|>"),
    "kimi_k2": ("kimi_k2", "<|im_end|>"),
    "llama3.1_json": ("llama3_json", "<|eot_id|>"),
    "llama3.2_json": ("llama3_json", "<|eot_id|>"),
    "llama3.2_pythonic": ("pythonic", "<|eot_id|>"),
    "llama4_json": ("llama4_json", "<|eot|>"),
    "llama4_pythonic": ("llama4_pythonic", "<|eot|>"),
    "minimax_m1": ("minimax", "<end_of_sentence>"),
    "mistral": ("mistral", "<EOS>"),
    "mistral_parallel": ("mistral", "<EOS>"),
    "phi4_mini": ("phi4_mini_json", "<|end|>"),
    "qwen3coder": ("qwen3_coder", "<|im_end|>"),
    "toolace": ("pythonic", "<|eot_id|>"),
    "xlam_llama": ("xlam", "<|eot_id|>"),
    "xlam_qwen": ("xlam", "<|im_end|>"),
}
ONE_CALL = {"internlm2_tool"}
QUESTION = {"role": "user", "content": "How is the weather?"}


def name_of(template: str) -> str:
    return f"tool_chat_template_{template}.jinja"


def rendered(name: str, messages: list[Any], **variables: Any) -> str:
    template = (EXAMPLES / name).read_text(encoding="utf-8")
    conversation: Any = checked_messages(messages, resolve_content_format(template))
    variables.setdefault("add_generation_prompt", True)
    return render_chat(template, conversation, special_tokens=SPECIAL, **variables)


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"functions.{name}:{number}", "type": "function", "function": function}


def test_every_template_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("tool_chat_template_*.jinja")) == [
        name_of(template) for template in sorted(WITH_TOOLS)
    ]
    assert len(PLAIN) >= 9 and "template_chatml.jinja" in PLAIN


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_parser_reads_what_the_template_writes(template: str) -> None:
    parser, end = WITH_TOOLS[template]
    calls = [("get_weather", ARGUMENTS), ("get_time", {})][: 1 if template in ONE_CALL else 2]
    asked = [call(number, *one) for number, one in enumerate(calls)]
    before = rendered(name_of(template), [QUESTION], tools=TOOLS).removesuffix("<think>\n")
    results = [
        {"role": "tool", "content": f"result {i}", "tool_call_id": one["id"], "name": one["function"]["name"]}
        for i, one in enumerate(asked)
    ]
    after = rendered(name_of(template), [QUESTION, {"role": "assistant", "tool_calls": asked}, *results], tools=TOOLS)
    common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    written = after[common:].partition(end)[0]
    written = written.rpartition("</think>")[2]  # some put an empty block of thoughts before an old answer
    read = FORMATS[parser].machine(TOOLS).whole(written)
    content, _, found, ids = message_of(read)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert content == ""
    if parser == "kimi_k2":
        assert ids == [one["id"] for one in asked]
    assert all(f"result {i}" in after[common:] for i in range(len(asked)))


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_every_part_of_the_conversation_is_shown_in_order(template: str) -> None:
    messages = [
        {"role": "system", "content": "SYSTEM TEXT"},
        {"role": "user", "content": "FIRST QUESTION"},
        {"role": "assistant", "content": "FIRST ANSWER"},
        {"role": "user", "content": "SECOND QUESTION"},
    ]
    plain = rendered(name_of(template), messages)
    places = [plain.index(text) for text in ("FIRST QUESTION", "FIRST ANSWER", "SECOND QUESTION")]
    assert places == sorted(places) and "SYSTEM TEXT" in plain
    assert plain.count("<BOS>") <= 1
    assert "get_weather" not in plain
    with_tools = rendered(name_of(template), messages, tools=TOOLS)
    assert with_tools.count("get_weather") == 1 and "The weather of a city" in with_tools
    assert with_tools.count("get_time") == 1
    without = rendered(name_of(template), messages, add_generation_prompt=False)
    assert plain.startswith(without)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_templates(name: str) -> None:
    messages = [
        {"role": "system", "content": "SYSTEM TEXT"},
        {"role": "user", "content": "FIRST QUESTION"},
        {"role": "assistant", "content": "FIRST ANSWER"},
        {"role": "user", "content": "SECOND QUESTION"},
    ]
    text = rendered(name, messages)
    places = [text.index(m["content"]) for m in messages]
    assert places == sorted(places)
    assert text.startswith(rendered(name, messages, add_generation_prompt=False))
    assert len(text) > text.index("SECOND QUESTION") + len("SECOND QUESTION") + 2  # the turn of the assistant is open


def test_chatml_is_chatml() -> None:
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    expected = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    assert rendered("template_chatml.jinja", messages) == expected + "<|im_start|>assistant\n"


def test_mistral_takes_the_last_nine_characters_of_an_id() -> None:
    made = {**call(0, "get_time", {}), "id": "chatcmpl-tool-0123456789abcdef"}
    result = {"role": "tool", "content": "noon", "tool_call_id": made["id"]}
    text = rendered(name_of("mistral"), [QUESTION, {"role": "assistant", "tool_calls": [made]}, result])
    assert text.count("789abcdef") == 2 and "chatcmpl" not in text
    short = {**made, "id": "1"}
    with pytest.raises(ValueError, match="nine characters"):
        rendered(name_of("mistral"), [QUESTION, {"role": "assistant", "tool_calls": [short]}])


def test_thoughts_are_opened_or_closed_as_the_reasoning_parser_reads_it() -> None:
    opened = rendered(name_of("deepseekr1"), [QUESTION])
    assert THOUGHTS["deepseek_r1"].begins(opened).name == "THINKING"
    closed = rendered(name_of("glm4"), [QUESTION], enable_thinking=False)
    assert THOUGHTS["glm45"].begins(closed).name == "SPEAKING"
    assert THOUGHTS["deepseek_v3"].begins(rendered(name_of("deepseekv31"), [QUESTION])).name == "SPEAKING"
