"""Functions in messages: by name, by value only where it is allowed, and never something else."""

from __future__ import annotations

import operator
import os
import posixpath
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vllm.ipc import codec
from vllm.ipc.functions import copied, named, portable, received
from vllm.sampling_params import SamplingParams

read = codec.decoder(Any).decode


def travelled(value: object) -> object:
    return received(read(codec.encode(portable(value))))


def test_functions_with_a_name_arrive_as_themselves() -> None:
    value = {"a": [operator.add, 1, {"b": len}], "c": "text"}
    assert travelled(value) == value
    assert travelled(codec.decoder) is codec.decoder
    assert travelled(os.path.join) is posixpath.join


@pytest.mark.parametrize("function", [lambda: 1, operator.itemgetter(1), "text".startswith])
def test_others_do_not_travel(function: object) -> None:
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        portable(function)


def test_others_travel_by_value_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    factor = 3
    sent = codec.encode(portable([lambda x: factor * x]))
    (function,) = received(read(sent))
    assert function(5) == 15
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION")
    with pytest.raises(ValueError, match="not read here"):
        received(read(sent))


@pytest.mark.parametrize("path", ["nothing", "", "no.such.module.x", "os:nothing", ":", "os.path.nothing"])
def test_what_cannot_be_imported_is_said(path: str) -> None:
    with pytest.raises(ValueError, match="cannot be imported"):
        named(path)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="kind 9"):
        received(msgspec.msgpack.Ext(9, b"x"))


def test_dtypes_and_shapes_of_tensors_travel() -> None:
    weight = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert travelled(["w", weight.dtype, weight.shape]) == ["w", torch.bfloat16, (3, 5)]
    assert travelled({"dtype": torch.float8_e4m3fn}) == {"dtype": torch.float8_e4m3fn}
    assert travelled([torch.device("cuda", 1)]) == [torch.device("cuda:1")]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5).to(torch.bfloat16),
        torch.randn(4, 6)[:, ::2],
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.randn(2, 3).to(torch.float8_e4m3fn),
        torch.zeros(0, 4, dtype=torch.int32),
        torch.nn.Parameter(torch.randn(2)),
        torch.randn(2, dtype=torch.complex64),
    ],
)
def test_tensors_travel(tensor: torch.Tensor) -> None:
    (found,) = travelled([{"weights": (tensor,)}])[0]["weights"]  # type: ignore[index]
    assert found.dtype is tensor.dtype and found.shape == tensor.shape
    assert found.reshape(-1).view(torch.uint8).tolist() == (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    )
    found.zero_()  # it may be written to


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3), np.array(["ab", "c"]), np.zeros((0, 2), np.int8), np.arange(9)[::2]]
)
def test_arrays_travel(array: np.ndarray) -> None:
    found = travelled([array])[0]  # type: ignore[index]
    assert found.dtype == array.dtype and found.shape == array.shape and found.tolist() == array.tolist()
    found[...] = found


def test_tuples_sets_numbers_and_parameters_travel() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"], max_tokens=3)
    value = [(1, (2, [3])), {4, 5}, params, {"a": (params,)}]
    assert travelled(value) == value
    assert travelled([np.float32(0.5), np.float64(2), np.int64(3)]) == [0.5, 2.0, 3]
    assert copied(value) == value and copied(value)[2] is not params


@pytest.mark.parametrize("value", [object(), np.array([object()]), [b"x", {1: object()}]])
def test_other_objects_do_not_travel(value: object) -> None:
    with pytest.raises(TypeError):
        travelled(value)


@pytest.mark.parametrize(
    "content",
    [
        1,
        ["tuple", 1],
        ["struct", "os:getcwd", b""],
        ["tensor", "os.getcwd", [1], b"1234"],
        ["tensor", "torch.float32", [9], b"1234"],
        ["array", "O", [1], b"12345678"],
        ["other", 1],
    ],
)
def test_forged_content_is_refused(content: object) -> None:
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        received(msgspec.msgpack.Ext(3, codec.encode(content)))
