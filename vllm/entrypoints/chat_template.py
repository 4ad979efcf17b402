"""Renders chat templates: Jinja in a sandbox, as transformers renders them, within bounds of time and size."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
MAX_CHARACTERS = 10 << 20  # of the rendered text, and of any text the template builds on the way
MAX_TEMPLATE_CHARACTERS = 1 << 20
# Variables of a template that have an argument (or field of a request) of their own, or none that a user may set.
RESERVED_VARIABLES = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "template", "tokenize", "tokenizer"}
    | {"add_generation_prompt", "continue_final_message", "content_format", "is_literal", "special_tokens"}
)
_TICKS_PER_LOOK = 256
_BUDGET = "__budget__"
# It ends in a space so that a template which strips message contents is recognised.
_CONTINUE_MARK = "CONTINUE_THE_FINAL_MESSAGE_FROM_HERE "


class TemplateLimitError(ValueError):
    """A template took too long or produced too much."""


class _Budget:
    """Time of one rendering, looked at once in a while."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % _TICKS_PER_LOOK == 0 and time.monotonic() > self._deadline:
            raise TemplateLimitError(f"The chat template took longer than {MAX_SECONDS:g} seconds to render.")


class _Bounds(NodeTransformer):
    """Makes every loop and macro spend from the budget, and every `~` check the length of its result."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        function = nodes.EnvironmentAttribute("bounded_concat", lineno=node.lineno)
        return nodes.Call(function, node.nodes, [], None, None, lineno=node.lineno)

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        line = node.lineno
        tick = nodes.EnvironmentAttribute("tick", lineno=line)
        call = nodes.Call(tick, [nodes.ContextReference(lineno=line)], [], None, None, lineno=line)
        node.body.insert(0, nodes.ExprStmt(call, lineno=line))
        return node


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's tokens for training, renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, with the functions that they expect."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Bounds().visit(tree)

    def tick(self, context: Context) -> None:
        context.parent[_BUDGET].tick()

    def bounded_concat(self, *parts: object) -> str:
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(count, int):
                    _check_length(len(sequence) * count)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() * max(right, 0))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise TemplateLimitError(f"The chat template built a text of more than {MAX_CHARACTERS} characters.")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateLimitError(f"A chat template has at most {MAX_TEMPLATE_CHARACTERS} characters.")
    try:
        return _Environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ValueError(f"The chat template is not valid Jinja: {error}{line}") from error


def check_template(template: str) -> None:
    """Raise ValueError if `template` is too long or not valid Jinja."""
    _compile(template)


def render(template: str, **variables: Any) -> str:
    """Render `template`. Raises ValueError if it is not valid, raises an exception itself, or exceeds its bounds."""
    compiled = _compile(template)
    parts = []
    length = 0
    try:
        for part in compiled.generate({**variables, _BUDGET: _Budget()}):
            length += len(part)
            _check_length(length)
            parts.append(part)
    except TemplateLimitError:
        raise
    except Exception as error:  # templates are programs: whatever one raises is its answer to these messages
        raise ValueError(f"The chat template cannot render these messages: {error}") from error
    return "".join(parts)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt for a conversation.

    continue_final_message: end the prompt inside the last message, so that the model goes on with it.
    special_tokens: names such as "bos_token" and their texts; `kwargs` are further variables of the template.
    """
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        messages = _with_mark(messages)
    text = render(
        template,
        **{
            **(special_tokens or {}),
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return _cut_at_mark(text) if continue_final_message else text


def _with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same messages with a mark behind the text of the last one."""
    if not messages:
        raise ValueError("continue_final_message is set, but there is no message to continue.")
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_MARK
    elif isinstance(content, list) and any("text" in part for part in content):
        position = max(i for i, part in enumerate(content) if "text" in part)
        marked = {**content[position], "text": content[position]["text"] + _CONTINUE_MARK}
        last["content"] = [*content[:position], marked, *content[position + 1 :]]
    else:
        raise ValueError("continue_final_message is set, but the final message has no text to continue.")
    return [*messages[:-1], last]


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUE_MARK.rstrip())
    if position < 0:
        raise ValueError(
            "continue_final_message is set, but the chat template leaves out the final message or changes its text."
        )
    kept = text[:position]
    return kept if text.startswith(_CONTINUE_MARK, position) else kept.rstrip()


@lru_cache(maxsize=64)
def accepts_content_parts(template: str) -> bool:
    """Whether the template takes message contents as lists of parts, as in the OpenAI API, and not as strings only.

    Found by trying: a template for strings fails on a list or prints it as it is.
    """
    probe = "PROBE OF THE CONTENT FORMAT"
    message = {"role": "user", "content": [{"type": "text", "text": probe}]}
    try:
        text = render_chat(template, [message], special_tokens={"bos_token": "", "eos_token": ""})
    except ValueError:
        return False
    return probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text
