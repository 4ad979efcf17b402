"""Tokenizing within bounds: what is left out changes nothing, and long work keeps nobody waiting."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from tests.engine import tokenizer_makers as make
from vllm.engine.texts import (
    INLINE_CHARACTERS,
    LONG_CHARACTERS,
    LONG_ENTRIES,
    MAX_LONG_WAITING,
    Lanes,
    Texts,
    TooManyTokensError,
)
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.exceptions import EngineDeadError, QueueOverflowError, VLLMValidationError
from vllm.sampling_params import SamplingParams

KINDS = ["byte_level", "byte_fallback", "metaspace", "words"]


@pytest.fixture(scope="module", params=[kind for kind in KINDS if hasattr(make, kind)])
def tokenizer(request, tmp_path_factory):
    return load_tokenizer(make.save(tmp_path_factory.mktemp(request.param), getattr(make, request.param)()))


def text_of(words: int, seed: int) -> str:
    rng = random.Random(seed)
    parts = " ".join(make.CORPUS).split() + make.NASTY
    return " ".join(rng.choice(parts) for _ in range(words))


@pytest.mark.parametrize("keep", [1, 7, 100])
@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_a_text_has_the_tokens_that_it_has_in_the_whole(tokenizer, keep, special):
    texts = Texts(tokenizer, max_model_len=128)
    for seed in range(8):
        for words in (1, 3, 40, 3000):
            text = text_of(words, seed)
            assert texts.prompt(text, special, keep) == tokenizer.encode(text, special)[-keep:]


def test_of_a_long_text_only_the_end_that_is_kept_is_looked_at(tokenizer, monkeypatch):
    texts = Texts(tokenizer, max_model_len=128)
    text, seen, encode = text_of(200_000, 1), [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda part, *args: seen.append(len(part)) or encode(part, *args))
    assert len(texts.prompt(text, True, 50)) == 50
    assert sum(seen) < len(text) / 20


def test_a_text_with_too_many_tokens_is_refused_after_looking_at_what_would_fit(tokenizer, monkeypatch):
    texts = Texts(tokenizer, max_model_len=128)
    text, seen, encode = text_of(200_000, 2), [], tokenizer.encode
    true_count = len(encode(text))
    monkeypatch.setattr(tokenizer, "encode", lambda part, *args: seen.append(len(part)) or encode(part, *args))
    with pytest.raises(TooManyTokensError) as raised:
        texts.prompt(text)
    assert 128 < raised.value.at_least <= true_count
    assert sum(seen) < len(text) / 20


def test_long_and_short_texts_give_the_same_tokens_and_text_as_the_library(tmp_path):
    folder = make.save(tmp_path, make.byte_level())
    tokenizer, library = load_tokenizer(folder), make.byte_level()
    for words in (1, 100, 5000):
        text = text_of(words, words)
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids)


def test_bad_words_are_tokenized_once_and_named_when_they_have_no_tokens(tmp_path):
    tokenizer = load_tokenizer(make.save(tmp_path, make.byte_level()))
    words = ["fox", " fox", "the  dog", "fox"]
    params = SamplingParams(bad_words=words)
    params.update_from_tokenizer(tokenizer)
    expected = []
    for word in words:
        for spelling in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(spelling, add_special_tokens=False)
            if ids not in expected:
                expected.append(ids)
    assert Texts(tokenizer, 128).bad_words(words) == params.bad_words_token_ids == expected
    with pytest.raises(VLLMValidationError, match="at least one token"):
        Texts(tokenizer, 128).bad_words(["fox", "  "])


async def test_long_answers_hold_up_no_others_and_end_with_who_waits_for_them():
    lanes, begun, gate, made = Lanes(), threading.Semaphore(0), threading.Semaphore(0), []

    def pieces():
        begun.release()
        while True:
            gate.acquire()
            made.append(b"x")
            yield made[-1]

    leaving = asyncio.ensure_future(lanes.join(pieces(), LONG_ENTRIES + 1))
    await asyncio.to_thread(begun.acquire)
    assert await asyncio.wait_for(lanes.join([b"a", b"b"], 1), 10) == b"ab"
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gate.release()
    assert await asyncio.wait_for(lanes.join([b"c"], LONG_ENTRIES + 1), 10) == b"c"
    ending = asyncio.ensure_future(lanes.join(pieces(), LONG_ENTRIES + 1))
    await asyncio.to_thread(begun.acquire)
    lanes.close()
    gate.release()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(ending, 10)
    assert made == [b"x", b"x"] and lanes.num_writing == 0


async def test_short_work_does_not_wait_for_long_work_and_long_work_is_bounded():
    lanes, gate = Lanes(), threading.Event()
    here = threading.get_ident()
    assert await lanes.run(INLINE_CHARACTERS, threading.get_ident) == here
    held = [asyncio.ensure_future(lanes.run(LONG_CHARACTERS + 1, gate.wait)) for _ in range(MAX_LONG_WAITING)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(lanes.run(LONG_CHARACTERS, threading.get_ident), 10) != here
    with pytest.raises(QueueOverflowError, match="long texts wait"):
        await lanes.run(LONG_CHARACTERS + 1, gate.wait)
    assert await asyncio.wait_for(lanes.write(threading.get_ident), 10) != here  # large answers do not wait either
    gate.set()
    await asyncio.gather(*held)
    assert await lanes.run(LONG_CHARACTERS + 1, len, "abc") == 3  # there is room again
    lanes.close()
