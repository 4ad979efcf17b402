"""What every back end's matcher promises: masks are exact, tokens can be taken back, complete texts are known."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vllm
from tests.structured_output.corpus import cases
from tests.structured_output.driver import spec_of
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.exceptions import VLLMValidationError
from vllm.structured_output.compiler import GrammarCompiler
from vllm.structured_output.grammar import NO_TOKEN, Grammar, GrammarError, Matcher
from vllm.structured_output.vocabulary import Vocabulary, vocabulary_of

BACKENDS = ("guidance", "xgrammar", "outlines", "lm-format-enforcer")
DEMO = Path(vllm.__file__).parent / "assets" / "demo"
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(load_tokenizer(DEMO), 4096)


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: vocabulary)
    yield made
    made.close()


def compiled(compiler: GrammarCompiler, backend: str, **arguments: Any) -> Grammar:
    return compiler.compile(spec_of(backend, **arguments)).result().grammar


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> tuple[set[int], bool]:
    row: np.ndarray = np.full(vocabulary.words, 0xFFFFFFFF, np.uint32)
    may_end = matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()), may_end


def test_tokens_are_what_they_add_to_a_text(vocabulary: Vocabulary) -> None:
    tokenizer = load_tokenizer(DEMO)
    for text in ("Hello world, naïve 日本 🙂!", '{"a": [1, 2.5e3, null]}', "  indented\n\ttabs"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(vocabulary.tokens[i] or b"?" for i in ids).decode() == text
    assert all(vocabulary.tokens[i] is None for i in tokenizer.special_ids)
    wider = vocabulary_of(tokenizer, 4200)
    assert wider.tokens[4096:] == (None,) * 104
    assert wider.words == 132
    assert wider.end_ids == (tokenizer.eos_token_id,)
    assert wider.fingerprint != vocabulary.fingerprint


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_are_exact(backend: str, compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    """Against trying every token: it is allowed if the pattern has a match that begins with the text and the token."""
    words = ["red", "read", "reader", "blue", "blueish red"]
    if backend == "outlines":  # of alternatives of which one begins another, it follows one only
        words = ["red", "reader", "blue", "bluish red"]
    matcher = compiled(compiler, backend, choice=words).start()
    written = ""
    for step in ("re", "ad", "e", "r"):
        tokens, may_end = allowed(matcher, vocabulary)
        expected = {
            i
            for i, token in enumerate(vocabulary.tokens)
            if token and any(word.encode().startswith(written.encode() + token) for word in words)
        }
        assert tokens == expected, (written, step)
        assert may_end == (written in words)
        token = next(i for i in sorted(tokens) if vocabulary.tokens[i] == step.encode())
        assert matcher.accept(token)
        written += step
    assert allowed(matcher, vocabulary) == (set(), True)
    assert matcher.is_terminated


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_can_be_taken_back(backend: str, compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    """As speculation does: some tokens are accepted on trial, and masks before them are what they were."""
    rng = random.Random(5)
    matcher = compiled(compiler, backend, json=OBJECT).start()
    history = [allowed(matcher, vocabulary)]
    for _ in range(60):
        tokens, _ = history[-1]
        drafts = 0
        while tokens and drafts < 4:
            assert matcher.accept(rng.choice(sorted(tokens)))
            history.append(allowed(matcher, vocabulary))
            tokens, drafts = history[-1][0], drafts + 1
        rejected = rng.randrange(drafts + 1) if drafts else 1
        rejected = min(rejected, len(history) - 1)
        matcher.rollback(rejected)
        del history[len(history) - rejected :]
        assert allowed(matcher, vocabulary) == history[-1]
    refused = next(i for i in range(vocabulary.width) if i not in history[-1][0])
    assert not matcher.accept(refused)
    assert allowed(matcher, vocabulary) == history[-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_are_what_each_is_alone(backend: str, compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    made = compiler.compile(spec_of(backend, regex="[a-f]{2,12}x")).result()
    matchers = [made.grammar.start() for _ in range(12)]
    for i, matcher in enumerate(matchers):
        for _ in range(i % 4):
            assert matcher.accept(min(allowed(matcher, vocabulary)[0]))
    complete = next(i for i, token in enumerate(vocabulary.tokens) if token == b"x")
    wrong = next(i for i, token in enumerate(vocabulary.tokens) if token == b"z")
    for matcher in matchers[2::4]:
        assert matcher.accept(complete)
    tokens = [NO_TOKEN] * 12
    for i in (0, 4, 5):  # these are shown a token before their masks are computed
        tokens[i] = min(allowed(matchers[i], vocabulary)[0])
    tokens[7] = complete
    assert complete in allowed(matchers[7], vocabulary)[0]
    notices = backend in ("guidance", "xgrammar")  # the others need not, since no mask allows it
    if notices:
        tokens[8] = wrong
    bits: np.ndarray = np.full((12, vocabulary.words), 0xDEADBEEF, np.uint32)  # what was there before is overwritten
    filled = made.backend.fill_all(matchers, tokens, bits)
    text = f"Token {wrong} was sampled although the grammar does not allow it."
    assert {place: str(error) for place, error in filled.errors.items()} == ({8: text} if notices else {})
    assert filled.may_end == [2, 6, 7, 10]
    assert set(filled.dead) <= {2, 6, 7, 10}
    for i, matcher in enumerate(matchers):
        if i in filled.errors:
            assert not bits[i].any()
            continue
        alone: np.ndarray = np.zeros(vocabulary.words, np.uint32)
        assert matcher.fill(alone) == (i in filled.may_end)
        assert np.array_equal(alone, bits[i])


def test_a_library_that_gives_up_is_to_blame_and_no_token_is(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    """Any of a thousand names may follow an object's brace: more than guidance looks at at once."""
    names = {f"p{i}": {"type": "string", "pattern": "(a|b){1,1000}", "maxLength": 100_000} for i in range(1000)}
    made = compiler.compile(spec_of("guidance", json={"type": "object", "properties": names})).result()
    (brace,) = (i for i, token in enumerate(vocabulary.tokens) if token == b"{")
    (quote,) = (i for i, token in enumerate(vocabulary.tokens) if token == b'"')
    matcher = made.grammar.start()
    bits: np.ndarray = np.zeros((1, vocabulary.words), np.uint32)
    assert not made.backend.fill_all([matcher], [NO_TOKEN], bits).errors
    problems = [made.backend.fill_all([matcher], [token], bits).errors.get(0) for token in (brace, quote)]
    assert "Current row has" in str(problems[-1] or problems[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_of_one_grammar_do_not_disturb_each_other(
    backend: str, compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    grammar = compiled(compiler, backend, json=OBJECT)
    first, second = grammar.start(), grammar.start()
    before = allowed(second, vocabulary)
    assert first.accept(min(allowed(first, vocabulary)[0]))
    assert allowed(second, vocabulary) == before


def test_where_a_text_must_follow_masks_have_one_token(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    """Then no step is needed; the tokens are those the tokenizer would write."""
    grammar = compiled(compiler, "guidance", regex="The capital of France is (Paris|Rome)")
    matcher, tokens = grammar.start(), []
    while len(following := allowed(matcher, vocabulary)[0]) == 1:
        tokens += following
        assert matcher.accept(tokens[-1])
    expected = load_tokenizer(DEMO).encode("The capital of France is Paris", add_special_tokens=False)
    assert len(tokens) >= 2
    assert tokens == expected[: len(tokens)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_nothing_may_follow_are_named(
    backend: str, compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    """Along random texts of the corpus: an empty mask either ends a text, or is a dead end and said to be one."""
    rows = 0
    for i, case in enumerate(cases(8, 40 if backend == "lm-format-enforcer" else 60)):
        try:
            made = compiler.compile(spec_of(backend, **case.arguments)).result()
        except (VLLMValidationError, GrammarError):
            continue
        matcher, random_ = made.grammar.start(), random.Random(i)
        for _ in range(40):
            bits: np.ndarray = np.zeros((1, vocabulary.words), np.uint32)
            filled = made.backend.fill_all([matcher], [NO_TOKEN], bits)
            tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
            if not tokens:
                assert filled.may_end or filled.dead or filled.errors
                break
            assert not filled.dead and not filled.errors
            assert matcher.accept(random_.choice(tokens))
            rows += 1
    assert rows > 3


@pytest.mark.parametrize("backend", ["guidance", "xgrammar", "outlines"])
def test_halves_of_surrogate_pairs_are_no_characters(
    backend: str, compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    matcher = compiled(compiler, backend, regex=r"[^a-z\n]{2,4}").start()
    tokens = {token: i for i, token in enumerate(vocabulary.tokens) if token is not None and len(token) == 1}
    assert matcher.accept(tokens[b"A"]) and matcher.accept(tokens[b"\xed"])
    following, _ = allowed(matcher, vocabulary)
    firsts = {(vocabulary.tokens[i] or b"?")[0] for i in following}
    assert firsts and firsts <= set(range(0x80, 0xA0))
    assert not matcher.accept(tokens[b"\xa0"])
    matcher.rollback(1)
    assert not {i for i in allowed(matcher, vocabulary)[0] if (vocabulary.tokens[i] or b"?")[0] in range(0x80, 0xC0)}
    for byte in (b"\xed", b"\x9f", b"\xbf"):  # the last character before them
        assert matcher.accept(tokens[byte])


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^[0-9]{3}$", "123", "12a"),
        (r"\d\d", "42", "4x"),
        (r"(yes|no)\.", "yes.", "yes!"),
        (r"[\d-]{4}", "1-2-", "1+2-"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_patterns_match_whole_texts(
    backend: str, pattern: str, good: str, bad: str, compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    assert re.fullmatch(pattern, good) and not re.fullmatch(pattern, bad)
    tokens = {token: i for i, token in enumerate(vocabulary.tokens) if token is not None and len(token) == 1}
    for text, is_good in ((good, True), (bad, False)):
        matcher = compiled(compiler, backend, regex=pattern).start()
        taken = all(matcher.accept(tokens[character.encode()]) for character in text)
        assert (taken and allowed(matcher, vocabulary)[1]) is is_good


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_have_neither_fractions_nor_exponents(backend: str, compiler: GrammarCompiler) -> None:
    """1e-5 is no integer, and 1e999 no number that JSON's readers have."""
    digits = {t: i for i, t in enumerate(vocabulary_of(load_tokenizer(DEMO), 4096).tokens) if t and len(t) == 1}
    for schema in ({"type": "integer"}, {"type": ["integer", "boolean"]}):
        matcher = compiled(compiler, backend, json=schema).start()
        assert matcher.accept(digits[b"1"]) and matcher.accept(digits[b"2"])
        assert not any(matcher.accept(digits[mark]) for mark in (b"e", b"E", b"."))
        assert matcher.accept(digits[b"3"])


def test_a_grammar_that_becomes_too_complex_says_so(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError):
        matcher = compiled(compiler, "guidance", regex="x{1000}{1000}").start()
        while True:
            tokens, _ = allowed(matcher, vocabulary)
            assert matcher.accept(max(tokens, key=lambda i: len(vocabulary.tokens[i] or b"")))
