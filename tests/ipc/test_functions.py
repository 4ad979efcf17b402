"""Functions in messages: by name, by value only where it is allowed, and never something else."""

from __future__ import annotations

import operator
import os
import posixpath
from typing import Any

import msgspec
import pytest
import torch

from vllm.ipc import codec
from vllm.ipc.functions import named, portable, received

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
    assert travelled(["w", weight.dtype, weight.shape]) == ["w", torch.bfloat16, [3, 5]]
    assert travelled({"dtype": torch.float8_e4m3fn}) == {"dtype": torch.float8_e4m3fn}
