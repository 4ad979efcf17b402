"""Log probabilities in arrays read like a list of dictionaries."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob

entries = st.builds(Logprob, st.floats(max_value=0, allow_nan=False), st.none() | st.integers(1, 10**6), st.none())
positions = st.lists(st.none() | st.dictionaries(st.integers(0, 2**31), entries, min_size=1, max_size=4), max_size=6)
bounds = st.none() | st.integers(-8, 8)


def flat(listed: list[Any]) -> FlatLogprobs:
    found = FlatLogprobs()
    found.extend(listed)
    return found


@given(positions, positions, bounds, bounds, st.sampled_from([None, 1, 2, -1, -3]), st.integers(0, 8))
def test_it_reads_like_a_list(listed: list[Any], more: list[Any], start: Any, stop: Any, step: Any, kept: int) -> None:
    found = flat(listed)
    assert found == listed and list(found) == listed and len(found) == len(listed)
    assert [found[i] for i in range(-len(listed), len(listed))] == listed + listed
    assert found[start:stop:step] == listed[start:stop:step]
    assert found + more == found + flat(more) == listed + more
    assert copy.deepcopy(found) == pickle.loads(pickle.dumps(found)) == listed
    found[:].append({1: Logprob(-1.0)})
    assert found == listed
    found.truncate(kept)
    assert found == listed[:kept]
    assert (found != listed) == (kept < len(listed))


def test_the_numbers_lie_one_after_the_other() -> None:
    found = FlatLogprobs(lambda token_id: f"<{token_id}>")
    found.append(None)
    found.append_fast([7, 3], [-0.5, -math.inf], [9, 1])
    found.append({4: Logprob(-2.0)})
    assert (list(found.start_indices), list(found.end_indices)) == ([0, 0, 2], [0, 2, 3])
    assert (list(found.token_ids), list(found.logprobs), list(found.ranks)) == (
        [7, 3, 4],
        [-0.5, -math.inf, -2],
        [9, 1, 0],
    )
    assert found.decoded_tokens == ["<7>", "<3>", "<4>"]
    assert found[1] == {7: Logprob(-0.5, 9, "<7>"), 3: Logprob(-math.inf, 1, "<3>")}
    assert repr(found) == "FlatLogprobs(3 positions, 3 log probabilities)"
    with pytest.raises(IndexError):
        found[3]


def test_it_takes_a_tenth_of_the_memory() -> None:
    found = FlatLogprobs()
    for _ in range(1000):
        found.append_fast(range(21), [-1.0] * 21, range(21))
    bytes_of = sum(len(numbers) * numbers.itemsize for numbers in (found.token_ids, found.logprobs, found.ranks))
    assert bytes_of == 21_000 * 20


def test_the_parameter_is_a_flag() -> None:
    assert not SamplingParams().flat_logprobs
    assert SamplingParams(flat_logprobs=True).flat_logprobs
    with pytest.raises(ValueError, match="flat_logprobs"):
        SamplingParams(flat_logprobs=1)  # type: ignore[arg-type]
