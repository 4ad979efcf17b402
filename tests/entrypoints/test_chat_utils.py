"""Chat templates render as transformers renders them; bad messages and hostile templates are refused."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.engine import tokenizer_makers as make
from vllm.engine.tokenizer_files import from_transformers
from vllm.entrypoints import chat_template as bounds
from vllm.entrypoints.chat_template import TemplateLimitError, accepts_content_parts, render, render_chat
from vllm.entrypoints.chat_utils import (
    apply_chat_template,
    checked_messages,
    form_begins,
    last_text,
    load_chat_template,
    resolve_chat_template,
    resolve_content_format,
    resolve_hf_chat_template,
    validate_chat_template,
)
from vllm.reasoning import FORMATS
from vllm.reasoning.think import Begins

CHATML = """{% for message in messages %}
    {%- if message.role == 'user' and loop.first -%}
        {{ bos_token }}
    {%- endif -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Namespaces, macros, tool lists, loop controls, the generation block, everything that real templates use.
RICH = """{%- macro show(m, depth=0) -%}
    {{ '  ' * depth ~ m.role ~ ': ' }}
    {%- for part in (m.content if m.content is not string else [{'type': 'text', 'text': m.content}]) -%}
        {{ part.text }}
    {%- endfor -%}
{%- endmacro -%}
{%- set ns = namespace(n=0, last='') -%}
{%- if tools is not none and tools %}TOOLS:{% for tool in tools %}{{ tool | tojson }}
{{ tool | tojson(indent=2) }}{% endfor %}{% endif -%}
{%- if documents %}{% for d in documents %}[{{ d.title }}]{{ d['text'] }}{% endfor %}{% endif %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {% set ns.last = ns.last ~ message.role[0] %}
{{ show(message, depth=loop.index0) }}
    {% if message.tool_calls %}{% for call in message.tool_calls %}
<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>
    {% endfor %}{% endif %}
    {% generation %}[{{ message.role | upper }}]{% endgeneration %}
    {% if ns.n >= 4 %}{% break %}{% endif %}
{% endfor %}
{{ ns.last }} {{ eos_token }} {{ strftime_now('%Y') }} {{ range(3) | list }} {{ mood | default('calm') }}"""

CONVERSATIONS = [
    [{"role": "user", "content": "Hello <b>&amp; 'you' 日本 😀</b>"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  spaces  "},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more\nlines"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "w", "arguments": {"city": "Köln"}}}],
        },
        {"role": "tool", "tool_call_id": "1", "name": "w", "content": '{"t": 21}'},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "w", "description": "Wetter <x>", "parameters": {"a": [1, None]}}}]


@pytest.fixture(scope="module")
def hf():
    return PreTrainedTokenizerFast(
        tokenizer_object=make.byte_level(), bos_token="<|bos|>", eos_token="<|eos|>", chat_template=CHATML
    )


@pytest.fixture(scope="module")
def tokenizer(hf):
    return from_transformers(hf)


@pytest.mark.parametrize("template", [CHATML, RICH], ids=["chatml", "rich"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(hf, tokenizer, template, conversation, prompt):
    options = {
        "chat_template": template,
        "add_generation_prompt": prompt,
        "tools": TOOLS,
        "documents": [{"title": "t", "text": "x"}],
        "mood": "odd",
    }
    ours = apply_chat_template(tokenizer, conversation, content_format="string", **options)
    assert ours == hf.apply_chat_template(conversation, tokenize=False, **options)


def test_the_template_of_a_transformers_tokenizer_is_found(hf, tmp_path):
    """`lm_eval` and others ask for it under this name."""
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages }}")
    assert resolve_hf_chat_template(hf, None, None, model_config=None) == CHATML
    assert resolve_hf_chat_template(hf, file, None, model_config=None) == "{{ messages }}"
    with pytest.warns(DeprecationWarning, match="trust_remote_code"):
        resolve_hf_chat_template(hf, None, TOOLS, model_config=None, trust_remote_code=True)
    several = SimpleNamespace(chat_template={"tool_use": "t", "default": "d"})
    assert resolve_hf_chat_template(several, None, TOOLS) == "t"
    assert resolve_hf_chat_template(several, None, None) == "d"
    assert resolve_hf_chat_template(several, "tool_use", None) == "t"
    for none in (SimpleNamespace(chat_template=None), SimpleNamespace(chat_template={"rag": "r"}), object()):
        assert resolve_hf_chat_template(none, None, None) is None


@pytest.mark.parametrize(
    "template", [CHATML, RICH.replace("{% generation %}[{{ message.role | upper }}]{% endgeneration %}", "")]
)
@pytest.mark.parametrize("text", ["The answer is", "The answer is ", "twice twice"])
def test_continue_final_message_equals_transformers(hf, tokenizer, template, text):
    conversation = [{"role": "user", "content": "twice"}, {"role": "assistant", "content": text}]
    options = {"chat_template": template, "add_generation_prompt": False, "continue_final_message": True}
    ours = apply_chat_template(tokenizer, conversation, content_format="string", **options)
    assert ours == hf.apply_chat_template(conversation, tokenize=False, **options)


def test_the_two_ways_to_end_a_prompt_exclude_each_other(tokenizer):
    with pytest.raises(
        ValueError, match="^Cannot set both `continue_final_message` and `add_generation_prompt` to True"
    ):
        apply_chat_template(tokenizer, CONVERSATIONS[0], add_generation_prompt=True, continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it():
    messages = [{"role": "assistant", "content": "x"}]
    with pytest.raises(ValueError, match="leaves out the final message"):
        render_chat("nothing", messages, continue_final_message=True)
    with pytest.raises(ValueError, match="no text to continue"):
        render_chat("nothing", [{"role": "assistant", "content": []}], continue_final_message=True)


def test_content_format_is_detected():
    assert not accepts_content_parts(CHATML)
    assert not accepts_content_parts("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}")
    assert not accepts_content_parts("{{ messages | tojson }}")
    assert accepts_content_parts(RICH)
    assert resolve_content_format(CHATML) == "string"
    assert resolve_content_format(RICH) == "openai"
    assert resolve_content_format(CHATML, "openai") == "openai"
    with pytest.raises(ValueError, match="'xml': expected one of auto, string, openai"):
        resolve_content_format(CHATML, "xml")


def test_contents_take_the_form_of_the_template():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
    ]
    as_string = checked_messages(messages, "string")
    assert as_string[0]["content"] == "a\nb\nc"
    assert as_string[1]["content"] == ""
    assert as_string[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    as_parts = checked_messages(messages, "openai")
    assert as_parts[0]["content"] == [{"type": "text", "text": text} for text in "abc"]
    assert as_parts[1]["content"] == []
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'


def test_arguments_that_are_no_json_stay_what_the_model_wrote():
    cut = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"city": "Par'}}]}]
    (message,) = checked_messages(cut, "string")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ("hello", TypeError, "messages must be a list of messages, got str"),
        ([], ValueError, "at least one message"),
        (["hello"], TypeError, r"messages\[0\] must be a dictionary with 'role' and 'content'"),
        ([{"content": "x"}], ValueError, "must have a 'role' that is a string"),
        ([{"role": 3, "content": "x"}], ValueError, "must have a 'role' that is a string"),
        ([{"role": "user"}], ValueError, "has no 'content'"),
        ([{"role": "user", "content": 5}], TypeError, "must be a string or a list of parts, got int"),
        ([{"role": "user", "content": [5]}], TypeError, "must be a string or a dictionary"),
        ([{"role": "user", "content": [{"type": "smell"}]}], NotImplementedError, "^Unknown part type: smell$"),
        ([{"role": "user", "content": [{"text": "x"}]}], ValueError, "^Missing 'type' field in multimodal part.$"),
        ([{"role": "user", "content": [{"type": 1}]}], ValueError, "^Invalid 'type' field in multimodal part.$"),
        ([{"role": "user", "content": [{"type": "text"}]}], ValueError, "must have a string 'text'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], ValueError, "not multimodal.* no image"),
        ([{"role": "user", "content": [{"audio_url": "x"}]}], ValueError, "not multimodal.* no audio"),
        ([{"role": "assistant", "tool_calls": [{}]}], ValueError, "must be a dictionary with a 'function'"),
    ],
)
def test_bad_messages_are_named(messages, error, text):
    with pytest.raises(error, match=text):
        checked_messages(messages, "string")


def test_where_the_template_comes_from(tokenizer, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("from file {{ messages }}")
    assert resolve_chat_template(tokenizer) == CHATML
    assert resolve_chat_template(tokenizer, "{{ literal }}") == "{{ literal }}"
    assert resolve_chat_template(tokenizer, file) == resolve_chat_template(tokenizer, str(file)) == file.read_text()
    several = from_transformers(PreTrainedTokenizerFast(tokenizer_object=make.byte_level()))
    with pytest.raises(ValueError, match="^As of transformers v4.44, default chat template is no longer allowed, so"):
        resolve_chat_template(several)
    several.chat_template = {"default": "d", "tool_use": "t", "rag": "r"}
    assert [resolve_chat_template(several, *a) for a in [(), (None, TOOLS), ("rag",)]] == ["d", "t", "r"]
    several.chat_template = {"rag": "r"}
    with pytest.raises(ValueError, match="none is called 'default'.*: rag"):
        resolve_chat_template(several)


def test_given_templates_are_checked(tmp_path):
    with pytest.raises(FileNotFoundError, match="^the supplied chat template path doesn't exist$"):
        validate_chat_template(tmp_path / "none.jinja")
    with pytest.raises(ValueError, match=r"^The supplied chat template string \(none.jinja\) appears path-like, but"):
        validate_chat_template("none.jinja")
    with pytest.raises(TypeError, match="is not a valid chat template type"):
        validate_chat_template(5)
    with pytest.raises(TypeError, match="^chat_template is expected to be read directly from its value$"):
        load_chat_template(Path("x"), is_literal=True)
    assert load_chat_template(None) is None


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for %}", "not valid Jinja.*line 1"),
        ("{{ raise_exception('roles must alternate') }}", "cannot render these messages: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ messages[0].__init__.__globals__ }}", "cannot render"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
    ],
)
def test_broken_and_hostile_templates_are_refused(template, text):
    with pytest.raises(ValueError, match=text):
        render(template, messages=[{}])


@pytest.mark.parametrize(
    "template",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ 'x' * 999999999999 }}",
        "{{ [0] * 999999999999 }}",
        "{{ 10 ** 999999999 }}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
)
def test_templates_end_in_time_and_size(template, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(TemplateLimitError):
        render(template, messages=[])
    assert time.monotonic() - start < 2


# -- developers and thoughts -------------------------------------------------------------------------------------------

SHOW = "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}]{% endfor %}"


def show(template: str, *messages: dict[str, Any]) -> str:
    tokenizer: Any = SimpleNamespace(chat_template=template, special_tokens={}, writes_chats=False)
    return apply_chat_template(tokenizer, messages, content_format="string")


def test_developers_are_system_prompts_unless_the_template_knows_them():
    system, developer = {"role": "system", "content": "a"}, {"role": "developer", "content": "b"}
    user = {"role": "user", "content": "c"}
    assert show(SHOW, system, developer, user) == "[system:a\n\nb][user:c]"
    assert show(SHOW, developer, developer, user) == "[system:b\n\nb][user:c]"
    assert show(SHOW, user, developer) == "[user:c][system:b]"
    assert show(SHOW + "{# developer #}", developer, user) == "[developer:b][user:c]"


def test_developers_parts_are_joined():
    tokenizer: Any = SimpleNamespace(chat_template=SHOW, special_tokens={}, writes_chats=False)
    messages = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
    text = apply_chat_template(tokenizer, messages, content_format="openai")
    assert text == "[system:[{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]]"


def test_thoughts_have_both_names():
    template = "{% for m in messages %}{{ m.reasoning }}/{{ m.reasoning_content }};{% endfor %}"
    older = {"role": "assistant", "content": "x", "reasoning_content": "t"}
    newer = {"role": "assistant", "content": "x", "reasoning": "u"}
    assert show(template, older, newer) == "t/t;u/u;"


def test_users_do_not_tell_a_model_to_think_in_place_of_a_form() -> None:
    think, none = FORMATS["qwen3"], SimpleNamespace(token_to_id=lambda text: None)

    def begins(*messages: tuple[str, Any], tokenizer: Any = none) -> Begins:
        chat = [{"role": role, "content": content} for role, content in messages]
        prompt = render_chat(CHATML, checked_messages(chat, "string"), special_tokens={"bos_token": ""})
        assert last_text(chat) in prompt
        return form_begins(Begins.UNKNOWN, think, tokenizer, prompt, chat)

    assert begins(("user", "Hello")) is Begins.SPEAKING
    for said in ("a <think> b", "<think>", [{"type": "text", "text": "a"}, {"type": "text", "text": "<think>"}]):
        assert begins(("user", said)) is begins(("user", "Hello"), ("tool", said)) is Begins.SPEAKING
        assert begins(("system", "Write <think>thoughts</think> first."), ("user", said)) is Begins.UNKNOWN
        assert begins(("user", said), tokenizer=SimpleNamespace(token_to_id=lambda text: 5)) is Begins.UNKNOWN
    assert form_begins(Begins.THINKING, think, none, "<think>", []) is Begins.THINKING  # type: ignore[arg-type]
    assert form_begins(Begins.UNKNOWN, FORMATS["step3"], none, "", []) is Begins.UNKNOWN  # type: ignore[arg-type]
