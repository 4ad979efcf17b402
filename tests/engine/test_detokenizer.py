"""Text that arrives in pieces is the text that arrives at once; stop strings end it at the right character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import tokenizer_makers as make
from vllm.engine.detokenizer import Detokenizer
from vllm.engine.tokenizer import FastTokenizer


def wrap(backend) -> FastTokenizer:
    return FastTokenizer(backend, {}, None, load_hf=lambda: None)


KINDS = {
    "byte_level": wrap(make.byte_level()),
    "byte_fallback_llama": wrap(make.byte_fallback(strip=True)),
    "byte_fallback_gemma": wrap(make.byte_fallback(strip=False)),
    "metaspace": wrap(make.metaspace()),
    "words": wrap(make.words()),
    "word_pieces": wrap(make.word_pieces()),
}


def streamed(tokenizer, ids, prompt=(), **options) -> str:
    stream = tokenizer.stream(prompt, **options)
    return "".join([*map(stream.feed, ids), stream.finish()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_stream_to_their_decode(kind, skip):
    tokenizer = KINDS[kind]

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, tokenizer.max_token_id + 3), max_size=40))
    def check(ids):
        assert streamed(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback_llama", "byte_fallback_gemma"])
def test_random_bytes_stream_to_their_decode(kind):
    """Nothing but byte tokens: valid characters, broken ones and everything between."""
    tokenizer = KINDS[kind]
    if kind == "byte_level":
        from vllm.engine.token_streams import BYTE_OF_CHARACTER

        id_of = {byte: tokenizer.token_to_id(character) for character, byte in BYTE_OF_CHARACTER.items()}
    else:
        id_of = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    pieces = st.one_of(st.binary(max_size=3), st.text(max_size=2).map(lambda t: t.encode("utf-8", "ignore")))

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(st.lists(pieces, max_size=5).map(b"".join).filter(lambda raw: len(raw) <= 16))
    def check(raw):
        ids = [id_of[byte] for byte in raw]
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_output_together_make_the_decode(kind):
    """Whatever the cut, output text is what the whole decode adds to the prompt's: leading spaces, split characters."""
    tokenizer = KINDS[kind]
    for text in make.NASTY:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        for cut in range(len(ids) + 1):
            prompt_text = tokenizer.decode(ids[:cut])
            if "\ufffd" in prompt_text:
                continue
            assert prompt_text + streamed(tokenizer, ids[cut:], ids[:cut]) == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback_llama"])
def test_character_split_between_prompt_and_output_belongs_to_the_output(kind):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("x🦙y")
    inside = [cut for cut in range(1, len(ids)) if tokenizer.decode(ids[:cut]).endswith("\ufffd")]
    assert inside
    for cut in inside:
        assert streamed(tokenizer, ids[cut:], ids[:cut]) == "🦙y"


def test_characters_are_held_until_complete():
    tokenizer = KINDS["byte_level"]
    ids = tokenizer.encode("🦙")
    stream = tokenizer.stream()
    assert [stream.feed(i) for i in ids] == [""] * (len(ids) - 1) + ["🦙"]
    stream = tokenizer.stream()
    assert "".join(map(stream.feed, ids[:-1])) == ""
    assert stream.finish() == "\ufffd"


def test_long_text_of_byte_tokens_still_streams():
    tokenizer = KINDS["byte_fallback_llama"]
    text = "ភាសាខ្មែរ" * 20
    stream = tokenizer.stream([1])
    shown = [stream.feed(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(shown[: len(shown) // 2])
    assert "".join([*shown, stream.finish()]).lstrip() == text


def test_spaces_between_special_tokens():
    tokenizer = KINDS["words"]
    sep, word = tokenizer.token_to_id("<sep>"), tokenizer.token_to_id("fox")
    ids = [sep, sep, word, sep]
    options = {"skip_special_tokens": False}
    assert streamed(tokenizer, ids, **options) == "<sep> <sep> fox <sep>"
    without = "<sep><sep> fox <sep>"
    assert streamed(tokenizer, ids, spaces_between_special_tokens=False, **options) == without
    assert tokenizer.decode(ids, spaces_between_special_tokens=False, **options) == without
    assert streamed(tokenizer, ids) == "fox"


class Letters:
    """A stream in which token i is the text `texts[i]`."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def seed(self, prompt_token_ids) -> None: ...

    def feed(self, token_id: int) -> str:
        return self._texts[token_id]

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        return ""


def run(texts, stop, **options):
    """Push one token at a time. Returns (text, deltas, stop string, number of tokens used)."""
    detokenizer = Detokenizer(Letters(*texts), stop, **options)
    deltas = []
    for i in range(len(texts)):
        match = detokenizer.push([i])
        deltas.append(detokenizer.take_delta())
        if match is not None:
            return detokenizer.text, deltas, match.stop, i + 1
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    return detokenizer.text, deltas, None, len(texts)


def test_stop_string_across_token_borders():
    text, deltas, stop, used = run(["Hel", "lo w", "or", "ld!", "more"], ["world"])
    assert (text, stop, used) == ("Hello ", "world", 4)
    assert "".join(deltas) == "Hello "
    assert run(["Hello w", "orld!"], ["world"], include_stop_str_in_output=True)[0] == "Hello world"


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 4),
)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_stop_strings_against_a_character_by_character_search(texts, stop, include, min_tokens):
    text, deltas, found, used = run(texts, stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    whole = "".join(texts)
    owner = [i for i, piece in enumerate(texts) for _ in piece]  # token of each character
    expected = (whole, None, len(texts))
    for end in range(1, len(whole) + 1):
        matching = [s for s in stop if whole[:end].endswith(s)]
        if matching and owner[end - 1] >= min_tokens:
            longest = max(matching, key=len)
            expected = (whole[: end if include else end - len(longest)], longest, owner[end - 1] + 1)
            break
    assert (text, found, used) == expected
    assert "".join(deltas) == text


def test_nothing_of_a_stop_string_is_shown_before_it_is_complete():
    detokenizer = Detokenizer(Letters("say <", "e", "nd", "of line"), ["<end>"])
    shown = ""
    for i in range(4):
        detokenizer.push([i])
        shown += detokenizer.take_delta()
        assert not shown.endswith("<")
        assert detokenizer.text == shown
    assert detokenizer.finish() is None
    assert shown + detokenizer.take_delta() == "say <endof line"


def test_stop_string_of_byte_tokens_stops_at_once():
    """The text of byte tokens is held (Llama 2 writes even a newline so); a stop string must not wait for it."""
    tokenizer = KINDS["byte_fallback_llama"]
    ids = tokenizer.encode("oneé", add_special_tokens=False)
    assert ids[-2:] == [tokenizer.token_to_id("<0xC3>"), tokenizer.token_to_id("<0xA9>")]
    detokenizer = Detokenizer(tokenizer.stream([1, ids[0]]), ["é"])
    matches = [detokenizer.push([token_id]) for token_id in ids[1:]]
    assert matches[:-1] == [None] * (len(ids) - 2)
    assert matches[-1] == ("é", 1)
    assert tokenizer.decode(ids[:1]) + detokenizer.text == "one"


def test_text_of_the_first_tokens_does_not_stop_even_if_it_was_held():
    tokenizer = KINDS["byte_fallback_llama"]
    ids = tokenizer.encode("éa", add_special_tokens=False)
    accent, letter = ids[-3:-1], ids[-1]
    detokenizer = Detokenizer(tokenizer.stream([1, letter]), ["é"], min_tokens=2)
    assert detokenizer.push([*accent, letter]) is None
    assert detokenizer.push(accent) == ("é", 2)
    assert detokenizer.text == "é" + tokenizer.token_text(letter)


def test_several_tokens_at_once_stop_at_the_right_one():
    match = Detokenizer(Letters("a", "b", "c", "d"), ["bc"]).push([0, 1, 2, 3])
    assert match == ("bc", 3)


def test_what_is_looked_at_per_token_does_not_grow_with_the_text():
    tokenizer = KINDS["byte_level"]
    ids = tokenizer.encode(" ".join(make.CORPUS)) * 20
    looked_at = []

    class Counting(Detokenizer):
        __slots__ = ()

        def _find_stop(self, new_text):
            looked_at.append(len(self._tail) + len(new_text) + len(self._stream.peek()))
            return super()._find_stop(new_text)

    detokenizer = Counting(tokenizer.stream(), ["never said"])
    for token_id in ids:
        detokenizer.push([token_id])
    half = len(ids) // 2
    assert len(looked_at) == len(ids) > 10_000
    assert max(looked_at[half:]) <= max(looked_at[:half]) < 200
