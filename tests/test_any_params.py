"""Whatever value comes in whatever field of a request's parameters: it is valid, or refused with a clear error."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams, SamplingParams

NUMBERS = st.one_of(
    st.integers(),
    st.integers(min_value=-(10**40), max_value=10**40),
    st.sampled_from([-1, 0, 1, 2, 2**31, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.tuples(inner)
    ),
    max_leaves=5,
)


@settings(max_examples=600, deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), ANYTHING, min_size=1, max_size=3))
def test_any_value_in_any_field_is_valid_or_refused(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except (ValueError, TypeError) as error:
        assert str(error)
        return
    # What is accepted is sound: it can be sent, and arrives equal and as valid.
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    assert params.clone() == params
    assert repr(params)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(BeamSearchParams.__struct_fields__), ANYTHING, max_size=3))
def test_any_beam_search_params_are_valid_or_refused(values: dict[str, Any]) -> None:
    try:
        params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, **values})
    except (ValueError, TypeError) as error:
        assert str(error)
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=BeamSearchParams) == params


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(list(GuidedDecodingParams.__dataclass_fields__)), ANYTHING, max_size=3))
def test_any_guided_decoding_params_are_valid_or_refused(values: dict[str, Any]) -> None:
    try:
        params = GuidedDecodingParams(**values)
    except (ValueError, TypeError) as error:
        assert str(error)
        return
    assert msgspec.msgpack.encode(params)
