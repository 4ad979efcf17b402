"""Masks that are kept by place are those that the library computes there, whatever was written before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.structured_output.driver import spec_of
from tests.structured_output.test_matchers import DEMO
from vllm import LLM, SamplingParams
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.sampling_params import GuidedDecodingParams
from vllm.structured_output.compiler import Compiled, GrammarCompiler
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.positions import MaskTable, Node, Places
from vllm.structured_output.vocabulary import Vocabulary, vocabulary_of

SCALARS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2,9}$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "number"},
    {"type": "boolean"},
    {"type": ["string", "null"]},
    {"enum": ["a", "ab", 'quo"te', "naïve", 7, None]},
    {"const": "fixed text"},
    {"enum": [[1, 2], {"k": "v"}]},
    {},
    {"type": "object"},
    {"type": "array"},
]
NAMES = ["a", "ab", "name", 'quo"te', "naïve", "back\\slash", "b c"]


def schemas(depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    scalars = st.sampled_from(SCALARS)
    if not depth:
        return scalars
    inner = schemas(depth - 1)
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, **low, **more},
        inner,
        st.sampled_from([{}, {"minItems": 2}, {"minItems": 40}]),
        st.sampled_from([{}, {"maxItems": 3}, {"maxItems": 70}]),
    )
    objects = st.builds(
        lambda found, keep: {
            "type": "object",
            "properties": found,
            "required": [name for i, name in enumerate(found) if keep >> i & 1],
        },
        st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=4),
        st.integers(0, 15),
    )
    unlisted = st.builds(
        lambda names: {"type": "object", "required": names}, st.lists(st.sampled_from(NAMES), max_size=3, unique=True)
    )
    return st.one_of(scalars, arrays, objects, objects, unlisted)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(load_tokenizer(DEMO), 4096)


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: vocabulary)
    yield made
    made.close()


def walk(compiled: Compiled, vocabulary: Vocabulary, seed: int, known: dict[Any, tuple[bytes, bool]]) -> int:
    """Write a random text; each mask must be the one that is known for its place, and for those that differ from it by
    counts of items far from their bounds. Returns how many were known.
    """
    chance, met = random.Random(seed), 0
    matcher, places = compiled.grammar.start(), compiled.places
    assert places is not None
    node: Any = places.begin
    row: np.ndarray = np.empty(vocabulary.words, np.uint32)
    written, token = b"", -1
    for _ in range(60):
        may_end = matcher.fill(row)
        if node is not None:
            mask = row.tobytes(), may_end
            met += node in known
            assert known.setdefault(node, mask) == mask, (written, node.place.key(0)[1:])
            alike = node.place.classes(places._reach), *node.place.key(token)[1:]
            assert known.setdefault(alike, mask) == mask, (written, alike[1:])
        choices = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if not choices:
            break
        parts = [i for i in choices if set(vocabulary.tokens[i] or b"") & set(b'"{}[],:\\')]
        token = chance.choice(parts if parts and chance.random() < 0.5 else choices)
        assert matcher.take(token)
        written += vocabulary.tokens[token] or b""
        node = None if node is None else places.after(node, token)
    return met


@pytest.mark.parametrize("backend", ["guidance", "xgrammar"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas())
def test_equal_places_have_equal_masks(
    backend: str, compiler: GrammarCompiler, vocabulary: Vocabulary, schema: dict[str, Any]
) -> None:
    try:
        compiled = compiler.compile(spec_of(backend, json=schema)).result()
    except (GrammarError, ValueError):
        return
    note(str(schema))
    if compiled.places is not None:
        known: dict[Any, tuple[bytes, bool]] = {}
        assert sum(walk(compiled, vocabulary, seed, known) for seed in range(8)) > 0


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
}


def places_of(schema: Any) -> Places | None:
    tokens = [bytes((i,)) for i in range(256)]
    return Places.of(spec_of("guidance", json=schema), tokens, MaskTable(8))


def test_what_was_written_in_a_string_is_forgotten() -> None:
    places = places_of(PERSON)
    assert places is not None

    def at(text: str) -> object:
        node: Any = places.begin
        for token in text.encode():
            node = places.after(node, token)
        return node

    assert at('{"name": "a') is at('{"name":   "bcd é日🙂')
    assert at('{"name": "a", "tags": ["x"') is at('{"name": "b", "tags": ["x", "yy"')
    assert at('{"name": "a') is not at('{"name": "a\\')
    assert at('{"name": "a') is not at('{"name": "a"')
    assert at('{"name": "a", "tags": [') is not at('{"name": "a", "tags": ["x",')
    assert at('{"name": "a", "tags": ["x"]') is not at('{"name": "a", "tags": ["x"]}')


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}}, {"type": "string"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"type": "array", "prefixItems": [{"type": "string"}]},
        {"type": "object", "required": ["a", "b"]},
        {"type": "array", "items": {"required": ["a", "b"]}},
    ],
)
def test_schemas_in_which_more_than_the_place_counts_have_no_places(schema: Any) -> None:
    assert places_of(schema) is None


def test_texts_are_the_same_with_and_without_what_is_kept(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [PERSON, {"type": "array", "items": PERSON, "minItems": 2}, {"type": "object"}]
    params = [
        SamplingParams(max_tokens=70, guided_decoding=GuidedDecodingParams(json=form), **way)
        for form in forms
        for way in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2, "n": 2})
    ]

    def texts() -> list[tuple[int, ...]]:
        outputs = demo.generate(["People, as JSON:"] * len(params), params, use_tqdm=False)
        return [tuple(choice.token_ids) for output in outputs for choice in output.outputs]

    table = demo.llm_engine.core.core._grammars.compiler._table
    kept = texts()
    assert table._used
    assert texts() == kept
    monkeypatch.setattr(table, "_used", len(table.bits))  # full: the next one that is kept makes all be forgotten
    table.places.pop().forget()
    for places in table.places:
        places.forget()
    generation = table.generation
    assert texts() == kept and table.generation > generation
    monkeypatch.setattr(MaskTable, "keep", lambda *_: None)
    table.generation += 1
    assert texts() == kept


def test_a_full_table_forgets_all() -> None:
    table = MaskTable(4, limit=32)
    places = Places.of(spec_of("guidance", json=PERSON), [None], table)
    assert places is not None and len(table.bits) == 2
    first = places.begin
    nodes = [Node(first.place) for _ in range(3)]
    for value, node in enumerate(nodes):
        table.keep(node, np.full(4, value, np.uint32))
        assert table.has(node) and (table.bits[node.row] == value).all()
    assert [table.has(node) for node in nodes] == [False, False, True]
    assert places.begin is not first and not table.has(places.begin)
