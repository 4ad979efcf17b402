"""Templates of strangers: the same text as in this process, and nothing that they can do to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from vllm.entrypoints.chat_template import TemplateLimitError
from vllm.entrypoints.chat_utils import apply_chat_template
from vllm.entrypoints.template_process import TemplateProcess

MESSAGES = [
    {"role": "user", "content": "Grüße 世界"},
    {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
]


class Specials:
    chat_template = None
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(seconds=3.0)
    yield made
    made.close()


def render(process: TemplateProcess, template: str, **more: Any) -> str:
    return process.render(
        messages=MESSAGES, special_tokens=Specials.special_tokens, chat_template=template, is_literal=True, **more
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}{{ tools|tojson }}",
    ],
)
def test_the_text_is_that_of_rendering_here(process, template):
    more = {"tools": [{"type": "function", "function": {"name": "f"}}], "add_generation_prompt": False, "x": 5}
    expected = apply_chat_template(Specials(), MESSAGES, chat_template=template, is_literal=True, **more)  # type: ignore[arg-type]
    assert render(process, template, **more) == expected


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages|tojson(indent=40000000) }}", "256 MB"),
        ("{{ 'a'.center(1000000000)|length }}", "256 MB"),
        ("{{ 'a'.ljust(1000000000)|length }}", "256 MB"),
        ("{{ ('a'*9000000).replace('a', 'b'*1000)|length }}", "256 MB"),
        ("{{ ('\t'*9000000).expandtabs(1000)|length }}", "256 MB"),
        ("{{ '%1000000000d'|format(1)|length }}", "256 MB"),
        ("{{ '{:1000000000d}'.format(1)|length }}", "256 MB|limit"),
        ("{{ (['x'*9000000]*1000000)|join|length }}", "256 MB"),
        ("{{ [1]|batch(1000000000, 'x')|list|length }}", "256 MB"),
        ("{{ range(90000)|map('string')|map('center', 1000000)|list|length }}", "256 MB|3 seconds"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 3 seconds"),
    ],
)
def test_what_takes_too_much_is_refused_and_the_next_one_works(process, template, problem):
    before = psutil.Process().memory_info().rss
    with pytest.raises(TemplateLimitError, match=problem):
        render(process, template)
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert render(process, "{{ messages|length }}") == "2"


@pytest.mark.parametrize(("template", "problem"), [("{{ x(", "not valid Jinja"), ("{{ x.y.z }}", "cannot render")])
def test_a_wrong_template_is_a_value_error_and_no_limit(process, template, problem):
    with pytest.raises(ValueError, match=problem) as raised:
        render(process, template)
    assert not isinstance(raised.value, TemplateLimitError)


def test_a_process_that_died_is_replaced_and_gets_none_of_our_secrets(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    before = psutil.Process().children()
    made = TemplateProcess()
    try:
        assert render(made, "{{ 1 }}") == "1"
        (child,) = set(psutil.Process().children()) - set(before)
        assert "VLLM_API_KEY" not in child.environ()
        child.kill()
        child.wait()
        assert render(made, "{{ 2 }}") == "2"
    finally:
        made.close()
