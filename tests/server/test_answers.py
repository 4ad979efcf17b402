"""Whole answers are encoded in pieces that add up to what the standard encoder gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.http_server import Server
from vllm.entrypoints.openai.answers import (
    INLINE_ENTRIES,
    ITEMS_PER_PIECE,
    Numbers,
    Repeated,
    encode,
    encode_at_once,
    listed,
    pieces,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["choices", "a", "b"]), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["choices", "logprobs", "x"]), values))
def test_pieces_add_up(answer: dict[str, Any]) -> None:
    assert asyncio.run(encode(answer)) == json.dumps(answer).encode()


@pytest.mark.parametrize("length", [0, 1, ITEMS_PER_PIECE, ITEMS_PER_PIECE + 1, 3 * ITEMS_PER_PIECE])
def test_no_piece_is_large(length: int) -> None:
    entry = {"token": "x", "top_logprobs": [{"token": "y", "logprob": -1.0}] * 20}
    choice = {"index": 0, "logprobs": {"content": [entry] * length}, "prompt_logprobs": [{"5": {"rank": 1}}] * length}
    answer = {"id": "a", "choices": [choice] * 5, "usage": {"total_tokens": 3}}
    found = list(pieces(answer))
    assert b"".join(found) == json.dumps(answer).encode()
    assert max(map(len, found)) <= len(json.dumps([entry] * ITEMS_PER_PIECE)) + 100


@pytest.mark.parametrize("vectors", [[[0.5] * 1000], [[0.5] * 1000] * 3, [[[0.5] * 100] * 30]])
def test_a_vector_is_not_encoded_number_by_number(vectors: list[Any]) -> None:
    answer = {"object": "list", "data": [{"index": i, "data": vector} for i, vector in enumerate(vectors)]}
    found = list(pieces(answer))
    assert b"".join(found) == json.dumps(answer).encode()
    assert len(found) < 40 * len(vectors) + 120
    assert max(map(len, found)) < 500


@pytest.mark.parametrize("make", [encode_at_once, lambda answer: json.dumps(listed(answer)).encode()])
def test_what_is_repeated_is_made_once(make: Any) -> None:
    made = []

    def items() -> Iterator[dict[str, int] | None]:
        for number in range(3 * ITEMS_PER_PIECE):
            made.append(number)
            yield {"5": number} if number else None

    expected = [{"5": number} if number else None for number in range(3 * ITEMS_PER_PIECE)]
    repeated = Repeated(items())
    answer = {"choices": ({"index": i, "prompt_logprobs": repeated, "text": "x"} for i in range(4))}
    whole = {"choices": [{"index": i, "prompt_logprobs": expected, "text": "x"} for i in range(4)]}
    assert make(answer) == json.dumps(whole).encode()
    assert made == list(range(3 * ITEMS_PER_PIECE))


def rounded(value: Any) -> Any:
    """Log probabilities are equal but for the last bits, which depend on the batch; ranks of near ones then do, too."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items() if key != "top_logprobs"}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_large_answers_equal_small_ones(server: Server, route: str) -> None:
    """What is built beside the event loop is what would have been built on it."""
    body: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    if route == "/v1/completions":
        body |= {"prompt": "Hello", "logprobs": 20}
    else:
        body |= {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "top_logprobs": 20}
    small = server.post(route, body).json["choices"]
    large = server.post(route, {**body, "n": 4, "temperature": 1.0, "top_k": 1}).json["choices"]
    assert 60 * 21 <= INLINE_ENTRIES < 4 * 60 * 21
    assert [choice["index"] for choice in large] == [0, 1, 2, 3]
    for choice in large:
        assert rounded({**choice, "index": 0}) == rounded(small[0])


def test_large_streams_say_what_large_answers_say(server: Server) -> None:
    """Events of very many log probabilities are written beside the event loop, in the order in which they came."""
    prompts = [[5 + i, *range(5, 200)] for i in range(6)]
    body = {"prompt": prompts, "n": 2, "seed": 1, "max_tokens": 30, "echo": True, "logprobs": 20, "ignore_eos": True}
    whole = server.post("/v1/completions", body).json
    streamed: dict[int, list[str]] = {}
    for event in server.post("/v1/completions", {**body, "stream": True}).text.split("\n\n"):
        for choice in json.loads(event[6:])["choices"] if event.startswith("data: {") else ():
            streamed.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
    assert len(prompts[0]) * 21 > INLINE_ENTRIES
    assert streamed == {choice["index"]: choice["logprobs"]["tokens"] for choice in whole["choices"]}
    assert len(streamed) == 12


@pytest.mark.parametrize("shape", [(0,), (3,), (5000,), (0, 4), (3, 1), (700, 5), (2, 3000)])
def test_numbers_of_an_array_become_the_same_json(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype("f4")
    answer = {"data": iter([{"index": 0, "data": Numbers(array)}])}
    found = list(pieces(answer))
    assert max(map(len, found)) < 1.5 * len(json.dumps(array[:1].tolist())) + 40_000
    assert json.loads(b"".join(found)) == {"data": [{"index": 0, "data": array.tolist()}]}
    assert listed({"data": Numbers(array)}) == {"data": array.tolist()}
