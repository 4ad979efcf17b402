"""What the documentation says of each back end is what it does, and what it takes holds in every text."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import vllm
from tests.structured_output.corpus import json_problem
from tools.structured_output_page import Probe, compiled, markdown
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.structured_output.compiler import GrammarCompiler
from vllm.structured_output.grammar import Grammar
from vllm.structured_output.vocabulary import Vocabulary, vocabulary_of

ROOT = Path(vllm.__file__).parent.parent
CLOSING = [mark.encode() for mark in (*'"}])</f>,:0123456789-@', "true", "null")]


def written(grammar: Grammar, vocabulary: Vocabulary, rng: random.Random) -> str | None:
    """A random text, which soon prefers to close what is open; None if it does not end."""
    matcher, text = grammar.start(), b""
    row: np.ndarray = np.zeros(vocabulary.words, np.uint32)
    closing = [i for c in CLOSING for i, token in enumerate(vocabulary.tokens) if token == c]
    for step in range(150):
        row[:] = 0
        may_end = matcher.fill(row)
        tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if may_end and (not tokens or rng.random() < 0.3 or step > 25):
            return text.decode()
        assert tokens, f"nothing may follow {text!r}"
        known = set(tokens) if step > 25 else set()
        near = [i for i in closing if i in known]
        token = near[0] if near and rng.random() < 0.8 else rng.choice(tokens)
        assert matcher.accept(token)
        text += vocabulary.tokens[token] or b""
    return None


def problem(arguments: dict[str, Any], text: str) -> str | None:
    """What is wrong with a text."""
    if "json" in arguments or "json_object" in arguments:
        if arguments.get("whitespace_pattern") == "" and re.search(r'[:,{}] | [:,{}"]', re.sub(r'"[^"]*"', '""', text)):
            return "there is whitespace"
        return json_problem(arguments.get("json", {"type": "object"}), text)
    if "choice" in arguments:
        return None if text in arguments["choice"] else "none of them"
    pattern = arguments.get("regex")
    if "grammar" in arguments:
        pattern = r"\([a-f0-9]{1,3}(,[a-f0-9]{1,3})?\)"
    if pattern is not None:
        return None if re.fullmatch(pattern, text) else "no match"
    tag = json.loads(arguments["structural_tag"])
    if "format" in tag:
        return None if text == tag["format"]["value"] else "another text"
    for part in text.split("<f>")[1:]:
        wrong = json_problem(tag["structures"][0]["schema"], part.partition("</f>")[0])
        if wrong:
            return wrong
    return None


def test_the_page_says_what_back_ends_do_and_every_text_is_valid() -> None:
    vocabulary = vocabulary_of(load_tokenizer(ROOT / "vllm" / "assets" / "demo"), 4096)
    compiler = GrammarCompiler(lambda: vocabulary)
    rng, ended, wrong = random.Random(0), Counter[str](), []

    def supports(backend: str, probe: Probe) -> bool:
        grammar = compiled(compiler, backend, probe)
        if grammar is None:
            return False
        for _ in range(2):
            text = written(grammar, vocabulary, rng)
            ended[backend] += text is not None
            if text is not None and (found := problem(probe.arguments, text)):
                wrong.append(f"{backend}, {probe.feature} {probe.form}: {found}: {text!r}")
        return True

    try:
        page = markdown(supports)
    finally:
        compiler.close()
    assert not wrong, "\n".join(wrong)
    assert (ROOT / "docs" / "structured_support.md").read_text() == page
    assert all(ended[backend] > page.count("| yes") / 8 for backend in ended), ended
