"""Mixes the writers into a corpus: which kinds of documents there are, how often, and how they become strings.

``python -m tools.demo_model.corpus 20`` prints 20 documents.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tools.demo_model import essays
from tools.demo_model.arithmetic import arithmetic_text
from tools.demo_model.stories import tale
from tools.demo_model.structured import structured_chat, table_text
from tools.demo_model.talk import long_chat, plain_chat, styled_chat
from tools.demo_model.text import Document, weighted
from tools.demo_model.tool_calls import tool_chat

BOS, EOS, START, PAD = "<|begin|>", "<|end|>", "<|start|>", "<|pad|>"
TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8").rstrip("\n")

PLAIN: tuple[tuple[float, Callable[[random.Random], str]], ...] = (
    (6.0, essays.country_text),
    (4.0, essays.statements_text),
    (4.0, essays.question_text),
    (2.0, essays.one_line_question_text),
    (2.5, essays.introduction_text),
    (1.5, essays.president_text),
    (1.5, essays.ai_future_text),
    (1.0, essays.city_text),
    (1.2, essays.essay_text),
    (0.8, essays.line_text),
    (2.0, essays.starter_text),
    (0.7, essays.about_animal_text),
    (1.2, essays.continued_text),
    (3.0, arithmetic_text),
    (0.8, table_text),
    (3.0, essays.story_text),
    (0.2, lambda rng: tale(rng).assistant),
)


def plain(rng: random.Random) -> Document:
    return Document(text=weighted(rng, PLAIN)(rng))


KINDS: tuple[tuple[float, Callable[[random.Random], Document]], ...] = (
    (30.0, plain),
    (30.0, plain_chat),
    (0.5, long_chat),
    (5.0, styled_chat),
    (11.0, structured_chat),
    (11.0, tool_chat),
)


def document(rng: random.Random) -> Document:
    """One random training example."""
    return weighted(rng, KINDS)(rng)


@cache
def chat_template() -> jinja2.Template:
    """The chat template, compiled with the settings that Hugging Face tokenizers use."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


def render_chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """Messages as the model sees them, from the first token to the end of the last turn."""
    return chat_template().render(messages=messages, tools=tools, bos_token=BOS).rstrip("\n")


def render(item: Document) -> str:
    """The string of one training example, special tokens included."""
    if item.messages:
        return render_chat(item.messages, item.tools)
    return f"{BOS}{item.text}{EOS}"


def strings(seed: int, shard: int, characters: int) -> Iterator[str]:
    """Rendered documents of one shard until it holds this many characters; the same for the same arguments."""
    rng = random.Random(f"{seed}/{shard}")
    while characters > 0:
        text = render(document(rng))
        characters -= len(text)
        yield text


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for _ in range(count):
        print(render(document(rng)), end="\n" + "-" * 40 + "\n")


if __name__ == "__main__":
    main()
