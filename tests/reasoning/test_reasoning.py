"""Thoughts are told from the answer, streamed as whole; their end is found in token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tool_parsers.outputs import message_of
from tests.tool_parsers.test_parsers import Work
from vllm.engine.tokenizer import Tokenizer
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.reasoning import FORMATS, reasoning_end
from vllm.reasoning.think import Begins

DEMO = Path(__file__).parents[2] / "vllm" / "assets" / "demo"


def split(name: str, pieces: list[str], begins: Begins) -> Any:
    machine = FORMATS[name].machine(begins)
    deltas = [delta for piece in pieces for delta in machine.feed(piece)]
    return message_of([*deltas, *machine.finish()])[:2]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_thoughts_and_answer(name: str) -> None:
    form = FORMATS[name]
    start, end = form.starts[0], form.ends[0]
    answer = f"{start}\nI\nthink.\n{end}\n\nYes.\n"
    assert split(name, [answer], Begins.UNKNOWN) == ("Yes.\n", "I\nthink.")
    assert split(name, [answer.removeprefix(start)], Begins.THINKING) == ("Yes.\n", "I\nthink.")
    assert split(name, ["\nYes. <a>"], Begins.SPEAKING) == ("\nYes. <a>", "")
    assert split(name, [f"{start}\nI th"], Begins.UNKNOWN) == ("", "I th")  # cut inside the thoughts
    without = split(name, ["Yes."], Begins.UNKNOWN)
    assert without == (("", "Yes.") if form.opens_itself else ("Yes.", ""))


def test_a_call_ends_the_thoughts_of_models_that_call_from_inside() -> None:
    text = "I think<|tool_calls_section_begin|><|tool_call_begin|>"
    assert split("kimi_k2", list(text), Begins.THINKING) == (text.removeprefix("I think"), "I think")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_stream_equals_the_whole(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    form = FORMATS[name]
    some = [*form.starts, *form.ends, *form.other_ends, form.ends[0][:-1], "\n", "a", " ", "<", "Here"]
    text = "".join(data.draw(st.lists(st.sampled_from(some), max_size=20)))
    begins = data.draw(st.sampled_from(list(Begins)))
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert split(name, pieces, begins) == split(name, [text], begins)


def test_work_is_linear() -> None:
    counts = []
    for length in (10_000, 100_000):
        with Work() as work:
            for text in ("\n" * length, "<think>" * (length // 7), "</think" * (length // 7)):
                machine = FORMATS["qwen3"].machine(Begins.THINKING)
                for start in range(0, length, 50):
                    machine.feed(text[start : start + 50])
                machine.finish()
        counts.append(work.count)
    assert counts[1] <= 11 * counts[0]


def test_the_prompt_says_where_the_output_begins() -> None:
    form = FORMATS["qwen3"]
    assert form.begins("<|im_start|>assistant\n<think>\n") is Begins.THINKING
    assert form.begins("<|im_start|>assistant\n<think>\n\n</think>\n\n") is Begins.SPEAKING
    assert form.begins("<think>a</think> said <think> once\n<|im_start|>assistant\n") is Begins.UNKNOWN


@pytest.mark.parametrize("said", ["Hello", "hello <think>", "a </think> b", "</think> <think> a"])
def test_only_an_answer_that_is_gone_on_with_has_thoughts_that_go_on(said: str) -> None:
    form, head = FORMATS["qwen3"], f"user: {said}\nassistant: "
    assert form.begins(head) is Begins.UNKNOWN
    for answer, begins in (
        ("It is", Begins.SPEAKING),
        ("", Begins.SPEAKING),
        ("<think>a</think>\nBecause", Begins.SPEAKING),
        ("<think>It is", Begins.THINKING),
        ("Or </think> so\n<think>Because ", Begins.THINKING),
    ):
        assert form.begins(head + answer, answer) is begins
        assert form.begins(head + answer.strip(), answer) is begins
        assert form.begins(head + "<think>\n" + answer, answer) is (begins if "think>" in answer else Begins.THINKING)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


class Marked:
    """The demo model's tokens and one token for each tag."""

    def __init__(self, inner: Tokenizer, *tags: str) -> None:
        self._inner = inner
        self._tags = dict(zip(tags, range(len(inner), len(inner) + len(tags)), strict=True))

    def token_to_id(self, text: str) -> int | None:
        return self._tags.get(text) if text in self._tags else self._inner.token_to_id(text)

    def token_text(self, token: int) -> str:
        names = {number: tag for tag, number in self._tags.items()}
        return names[token] if token in names else self._inner.token_text(token)

    def encode(self, *parts: str) -> list[int]:
        ids = []
        for part in parts:
            ids += [self._tags[part]] if part in self._tags else self._inner.encode(part, False)
        return ids


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("as_token", [True, False])
def test_end_is_found_in_tokens(tokenizer: Tokenizer, name: str, as_token: bool) -> None:
    form = FORMATS[name]
    tags = (*form.starts, *form.ends) if as_token else ()
    marked: Any = Marked(tokenizer, *tags)
    end = reasoning_end(name, marked)
    thoughts = marked.encode(form.starts[0], "I think so.\n", form.ends[0])
    output = [*thoughts, *marked.encode("\n{", '"a": 1}')]
    assert end.find(thoughts[:-1], 0) == -1
    for step in (1, 3, len(output)):  # several tokens may come at once
        found, seen = -1, 0
        while found < 0:
            found = end.find(output[: seen + step], seen)
            seen += step
        assert found == len(thoughts)
    closed = marked.encode("Question", form.starts[0], "\n\n", form.ends[0], "\n\n")
    assert end.begins(closed) is Begins.SPEAKING and end.openings(closed) == ()
    assert end.begins(marked.encode("Question", form.starts[0], "\n")) is Begins.THINKING
    assert end.begins(marked.encode(form.ends[0], " said the user")) is Begins.UNKNOWN


def test_thoughts_that_an_output_need_not_begin_with_have_an_opening(tokenizer: Tokenizer) -> None:
    end = reasoning_end("qwen3", tokenizer)
    question = tokenizer.encode("Hello\nassistant\n", False)
    assert end.openings(question) == ()  # the model has no such token, and has not been told to spell it
    spelled = tuple(tokenizer.encode("<think>", False))
    told = tokenizer.encode("Write <think>thoughts</think> first." + " Hello" * 2000, False)
    assert end.openings(told) == (spelled,)
    for prompt in ("assistant\n<think>\n", "assistant\n<think>Because" + " I think so" * 40):
        ids = tokenizer.encode(prompt, False)
        assert end.openings(ids) is None
        assert end.openings(ids, Begins.UNKNOWN) == (spelled,) and end.openings(ids, Begins.SPEAKING) == ()
    assert end.openings(question, Begins.THINKING) is None
    assert end.opens([*tokenizer.encode("\n", False), *spelled]) and not end.opens(question)
    marked: Any = Marked(tokenizer, "[THINK]", "[/THINK]")
    assert reasoning_end("mistral", marked).openings(question) == ((len(tokenizer),),)
    assert reasoning_end("deepseek_r1", tokenizer).openings(question) is None
    assert reasoning_end("openai_gptoss", tokenizer).openings(question) is None


def test_call_that_ends_the_thoughts_belongs_to_what_follows(tokenizer: Tokenizer) -> None:
    section = "<|tool_calls_section_begin|>"
    marked: Any = Marked(tokenizer, section, "</think>")
    ids = marked.encode("I think", section, "x")
    assert reasoning_end("kimi_k2", marked).find(ids, 0) == len(ids) - len(marked.encode("x")) - 1


def test_final_channel_ends_the_thoughts_of_gpt_oss(tokenizer: Tokenizer) -> None:
    marked: Any = Marked(tokenizer, "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
    end = reasoning_end("openai_gptoss", marked)
    thoughts = marked.encode(
        "<|channel|>", "analysis", "<|message|>", "final it is", "<|end|>", "<|start|>", "assistant"
    )
    for header in (["final"], ["final ", "<|constrain|>", "json"]):
        ids = [*thoughts, *marked.encode("<|channel|>", *header, "<|message|>")]
        assert end.find(ids, 0) == len(ids)
        assert end.find(ids[:-1], 0) == -1


def test_unknown_names_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="Unknown reasoning parser 'nobody': expected one of deepseek_r1"):
        reasoning_end("nobody", tokenizer)
