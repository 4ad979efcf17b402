"""Every parser reads what its models write, a stream as the whole text, in linear time, whatever the model writes."""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tool_parsers.outputs import CALLS, CASES, OUTPUTS, TOOLS, message_of
from vllm.tool_parsers.deltas import Delta
from vllm.tool_parsers.machine import Machine
from vllm.tool_parsers.registry import FORMATS


def parser(name: str) -> Machine:
    return FORMATS[name].machine(TOOLS)


def streamed(name: str, pieces: list[str]) -> list[Delta]:
    machine = parser(name)
    deltas = [delta for piece in pieces for delta in machine.feed(piece)]
    return [*deltas, *machine.finish()]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def seen(deltas: list[Delta]) -> Any:
    """A message without its ids, which are random."""
    return message_of(deltas)[:3]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_calls_are_read(name: str, text: str) -> None:
    content, reasoning, calls, ids = message_of(parser(name).whole(text))
    assert [(called, json.loads(arguments)) for called, arguments in calls] == CALLS
    assert content == ("I look." if "I look." in text else "")
    assert reasoning == ("Need weather." if name == "openai" else "")
    assert len(set(ids)) == 2 or "[CALL_ID]" in text


@pytest.mark.parametrize(("name", "text"), CASES)
def test_stream_of_single_characters_equals_the_whole(name: str, text: str) -> None:
    for end in range(0, len(text) + 1, 7):
        part = text[:end]
        assert seen(streamed(name, list(part))) == seen(parser(name).whole(part)), part


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 800), max_size=30), st.integers(0, 1000))
def test_stream_equals_the_whole_however_it_is_cut(case: tuple[str, str], places: list[int], length: int) -> None:
    name, text = case[0], case[1][:length]
    assert seen(streamed(name, cut(text, places))) == seen(parser(name).whole(text))


def fragments(name: str) -> list[str]:
    """What hostile outputs are made of: the format's own pieces, and other ones."""
    pieces = {piece for text in OUTPUTS[name] for piece in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+|\W", text)}
    return sorted(
        pieces | {"{", "}", '"', "\\", "[", "]", "(", ")", "=", ",", "\n", " ", "\x00", "'", "```", "é", "😀"}
    )


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_hostile_stream_equals_the_whole(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(OUTPUTS)))
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(name)), max_size=60)))
    if data.draw(st.booleans()):
        text = data.draw(st.sampled_from(OUTPUTS[name]))[: data.draw(st.integers(0, 300))] + text
    places = data.draw(st.lists(st.integers(0, len(text) + 1), max_size=30))
    assert seen(streamed(name, cut(text, places))) == seen(parser(name).whole(text))


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_plain_text_is_content(name: str) -> None:
    for text in (
        "",
        " ",
        "Hello",
        "\n a < b, [1] and {x} \\ `code` ",
        "The tag <tool_call> and [TOOL_CALLS] and functools.",
    ):
        content, _, calls, _ = message_of(parser(name).whole(text))
        assert (content, calls) == (text, [])


@pytest.mark.parametrize("name", sorted(set(OUTPUTS) - {"openai"}))
def test_damaged_calls_are_content(name: str) -> None:
    for text in OUTPUTS[name]:
        for marker in ("get_weather", '"name"'):
            if marker in text:
                damaged = text[: text.index(marker)]
                content, _, calls, _ = message_of(parser(name).whole(damaged))
                assert (content, calls) == (damaged, [])


def hostile(name: str, length: int) -> list[str]:
    """Long texts of the format's own pieces: one piece again and again, a long value, much nesting, a mixture."""
    rng = random.Random(name)
    some = fragments(name)
    texts = [(piece * length)[:length] for piece in some if len(piece) > 3]
    beginning = OUTPUTS[name][0]
    texts += [
        (beginning * length)[:length],
        beginning.replace("São", "x\\n" * (length // 3)),
        (beginning[: beginning.index("days")] + "[{" * length)[:length],
        "".join(rng.choices(some, k=length // 4)),
    ]
    return texts


TYPED: list[tuple[Any, str, str]] = [
    ({"type": "integer"}, "7", "7"),
    ({"type": "integer"}, "seven", '"seven"'),
    ({"type": "integer"}, "1_0", '"1_0"'),
    ({"type": "number"}, "2.50", "2.5"),
    ({"type": "number"}, "3.0", "3"),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "boolean"}, "True", "true"),
    ({"type": "boolean"}, "yes", '"yes"'),
    ({"type": "object"}, '{"a": [1, "é"]}', '{"a": [1, "é"]}'),
    ({"type": "object"}, "{'a': 1}", "\"{'a': 1}\""),
    ({"type": "array"}, '{"a": 1}', '"{\\"a\\": 1}"'),
    ({"type": ["integer", "null"]}, "null", "null"),
    ({"type": ["string", "integer"]}, "5", "5"),
    ({"anyOf": [{"type": "null"}, {"oneOf": [{"type": "boolean"}]}]}, "false", "false"),
    ({"enum": [1, "a"]}, "1", "1"),
    ({"const": "x"}, "1", '"1"'),
    ({"type": "str"}, "null", '"null"'),
    ({"type": "no type"}, "5", '"5"'),
    ({}, "5", '"5"'),
    (None, "null", '"null"'),
    (5, "null", '"null"'),
]


@pytest.mark.parametrize(("schema", "text", "expected"), TYPED)
def test_plain_values_get_the_type_of_their_schema(schema: Any, text: str, expected: str) -> None:
    parameters = {"type": "object", "properties": {"x": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    written = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    _, _, calls, _ = message_of(FORMATS["qwen3_coder"].machine(tools).whole(written))
    assert calls == [("f", f'{{"x": {expected}}}')]


def test_large_schemas_are_read_once_and_not_to_the_end() -> None:
    wide: Any = {"anyOf": [{"type": "no type"}] * 100_000}
    for _ in range(20):
        wide = {"anyOf": [wide, *[{"type": "integer"}] * 100]}
    parameters = {"type": "object", "properties": {"x": wide}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}] * 1000
    make = FORMATS["qwen3_coder"].maker(tools)
    call = "<tool_call><function=f><parameter=x>5</parameter></function></tool_call>"
    with Work() as work:
        for _ in range(100):
            make().whole(call * 10)
    assert work.count < 2_000_000  # to the end they would be fifty times as many


class Work:
    """Counts what Python does (calls, of itself and of C) while it is active."""

    def __enter__(self) -> Work:
        self.count = 0
        sys.setprofile(self._on_event)
        return self

    def _on_event(self, frame: Any, event: str, argument: Any) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_work_is_linear_and_nothing_long_is_kept(name: str) -> None:
    """Calls are counted, and a call handles no more than what is kept plus what came: both bounded per character."""
    for text in hostile(name, 4_000):
        machine = parser(name)
        with Work() as work:
            for start in range(0, len(text), 5):
                machine.feed(text[start : start + 5])
                assert len(machine._text) - machine._at < 64
            machine.finish()
        assert work.count <= 60 * len(text) + 1000


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_hundred_kilobytes_take_work_in_proportion(name: str) -> None:
    for small, large in zip(hostile(name, 10_000), hostile(name, 100_000), strict=True):
        counts = []
        for text in (small, large):
            with Work() as work:
                parser(name).whole(text)
            counts.append(work.count)
        assert counts[1] <= 11 * counts[0] + 2000


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_a_long_run_of_one_character_is_read_at_once(name: str) -> None:
    """Wherever it stands: patterns that try every way to divide it would take minutes, and are not seen by counting."""
    for text in OUTPUTS[name]:
        for place in [match.start() for match in re.finditer(r"\b|\W", text)][:60]:
            for run in (" ", "\n", "a"):
                parser(name).whole(text[:place] + run * 30_000 + "`b{" + text[place:])
