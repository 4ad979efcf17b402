"""Results and arrays survive the wire; what is not what it says is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.ipc import codec
from vllm.step.result import Drafts, Logprobs, Pooled, StepResult, TokenLogprobs

NAMES = ["bool", "uint8", "int32", "uint32", "int64", "float32"]
decode_result = codec.decoder(StepResult).decode
decode_array = codec.decoder(np.ndarray).decode


def test_a_result_arrives_as_it_was_sent() -> None:
    logprobs = TokenLogprobs([3, 1], [-0.5, -1.25], 2)
    result = StepResult(
        5, [1, 2, 3], {0: logprobs}, {1: [logprobs, logprobs]}, {2: "no \u4e16"}, 0.25, counts=[2, 0, 1],
        news=(Logprobs(0, [logprobs]), Pooled(1, b"\x00\x01", (2, 1), "uint8"), Drafts(2, [7])),
    )  # fmt: skip
    back = decode_result(codec.encode(result))
    assert back == result and isinstance(back.logprobs[0], TokenLogprobs)
    assert decode_result(codec.encode(StepResult(6, [-1]))) == StepResult(6, [-1])


@given(
    st.sampled_from(NAMES), st.lists(st.integers(0, 4), min_size=0, max_size=3), st.booleans(),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_an_array_arrives_read_only_and_as_it_was(name: str, shape: list[int], turned: bool, seed: int) -> None:
    size = int(np.prod(shape)) * np.dtype(name).itemsize
    data = np.random.default_rng(seed).integers(0, 2, size, np.uint8)
    array = data.view(name).reshape(shape)
    back = decode_array(codec.encode(array.T if turned else array))
    np.testing.assert_array_equal(back, array.T if turned else array)
    assert back.dtype == array.dtype and not back.flags.writeable


@pytest.mark.parametrize(
    "said",
    [("object", [1], b"12345678"), ("int32", [2], b"1234"), ("int32", [-1, -1], b"1234"), ("int32", [1], "1234"),
     ("int32", [1]), ("int32", [1.0], b"1234"), ("int32", [True], b"1234"), ("<i4", [1], b"1234"), [], 5],
)  # fmt: skip
def test_what_is_no_array_is_refused(said: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_array(msgspec.msgpack.encode(said))


@pytest.mark.parametrize("value", [object(), np.zeros(1, object), np.zeros(1, complex), lambda: None])
def test_what_is_not_plain_data_does_not_travel(value: object) -> None:
    with pytest.raises(TypeError):
        codec.encode([value])
