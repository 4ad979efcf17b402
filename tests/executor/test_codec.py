"""Plans survive the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec import NODEFAULT
from msgspec.structs import fields, replace

from vllm.executor import codec
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.step.plan import AdapterLoad, BlockAppend, RowMasks, SlotInit, StepPlan, TokenWrite, Transfer, TransferKind


def make_plan(random: np.random.Generator, rows: int, params: SamplingParams) -> StepPlan:
    def numbers(count: int, high: int = 1 << 30) -> list[int]:
        return random.integers(0, high, count).tolist()

    init = SlotInit("r-ü", 3, numbers(50), 20, 16, (numbers(4), [], [0]), params, 2**64 - 1, (1, 2), 5)
    return StepPlan(
        step_id=7,
        freed=tuple(numbers(2)),
        new=(init, init._replace(slot=4)),
        blocks=(BlockAppend(1, 0, 3, numbers(2)),),
        slots=random.integers(0, 99, rows).astype(np.int32),
        num_tokens=random.integers(0, 99, rows).astype(np.int32),
        num_computed=random.integers(0, 99, rows).astype(np.int32),
        sample=random.random(rows) < 0.5,
        transfers=(Transfer(TransferKind.COPY, 0, 5, 6),),
    )


def over_the_wire(plan: StepPlan) -> StepPlan:
    message = codec.decode_to_rank(codec.frame(codec.step_message(plan))[4:])
    assert isinstance(message, codec.Step)
    return message.plan


@pytest.mark.parametrize("rows", [0, 1, 5, 300])
def test_a_plan_arrives_as_it_was_sent(rows: int) -> None:
    params = SamplingParams(
        temperature=0.5, top_k=3, seed=5, logit_bias={3: 1.5}, allowed_token_ids=[1, 2], bad_words=["x"],
        prompt_logprobs=2, stop=["a"], stop_token_ids=[4],
    )  # fmt: skip
    params._bad_words_token_ids = [[1], [2, 3]]
    plan = make_plan(np.random.default_rng(rows), rows, params)
    back = over_the_wire(plan)
    for name in ("slots", "num_tokens", "num_computed", "sample"):
        sent, received = getattr(plan, name), getattr(back, name)
        assert sent.dtype == received.dtype and sent.tolist() == received.tolist()
    for name in ("step_id", "freed", "new", "blocks", "transfers"):
        assert getattr(back, name) == getattr(plan, name)
    assert isinstance(back.new[0], SlotInit) and isinstance(back.blocks[0], BlockAppend)
    assert back.new[0].params.bad_words_token_ids == [[1], [2, 3]]


def test_functions_do_not_travel() -> None:
    params = SamplingParams(temperature=0.5, logits_processors=[lambda output, logits: logits])
    back = over_the_wire(make_plan(np.random.default_rng(0), 1, params))
    assert back.new[0].params.logits_processors is None and back.new[0].params.temperature == 0.5
    assert params.logits_processors
    with pytest.raises(TypeError):
        codec.frame(codec.Call(0, "method", [object()], {}))


def test_every_field_of_a_plan_travels() -> None:
    plan = make_plan(np.random.default_rng(0), 3, SamplingParams())
    init = plan.new[0]._replace(params=PoolingParams(dimensions=3), columns=(1, 0))
    used = {
        "new": (init,),
        "transfers": (Transfer(TransferKind.LOAD, 1, 2, 3),),
        "writes": (TokenWrite(1, 2, [3, 4]),),
        "drafts": np.array([0, 2, 1], np.int32),
        "exact": np.array([True, False, True]),
        "late": np.array([False, False, True]),
        "masks": RowMasks(np.array([2], np.int32), np.array([[5, 2**32 - 1]], np.uint32)),
        "pooled": np.array([True, False, False]),
        "adapters": (AdapterLoad(1, 7),),
        "exchanged": 9,
    }
    assert {f.name for f in fields(StepPlan) if f.default is not NODEFAULT} <= set(used)
    back = over_the_wire(replace(plan, **used))
    for name, sent in used.items():
        received = getattr(back, name)
        if name in ("late", "masks"):  # of use on the rank that samples only, which is not sent anything
            assert received is None
        elif isinstance(sent, np.ndarray):
            np.testing.assert_array_equal(received, sent)
            assert received.dtype == sent.dtype and not received.flags.writeable
        else:
            assert received == sent and (not isinstance(sent, tuple) or isinstance(received[0], type(sent[0])))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80\x04\x95", msgspec.msgpack.encode(["step", "x"])])
def test_garbage_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        codec.decode_to_rank(body)
