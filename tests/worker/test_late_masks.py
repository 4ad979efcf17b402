"""A step in two phases: the forward pass, and what waits for masks that come later."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from tests.worker.toy import VOCAB, Ahead, Driver, Toy
from vllm.step.plan import RowMasks, StepPlan
from vllm.worker.device import CpuContext

CONTEXTS = pytest.mark.parametrize("context", [CpuContext(), Ahead()])


def driver_with_requests(context: CpuContext) -> Driver:
    driver = Driver(Toy(), context=context)
    random = np.random.default_rng(4)
    for i in range(6):
        settings = {"temperature": 0.8} if i % 3 == 0 else {"logprobs": 2, "prompt_logprobs": 1} if i % 3 == 1 else {}
        driver.add(str(i), random.integers(0, VOCAB, random.integers(3, 30)).tolist(), seed=i, **settings)
    return driver


def masks_for(rows: list[int], seed: int) -> RowMasks:
    bits = np.random.default_rng(seed).integers(0, 2**32, (len(rows), -(-VOCAB // 32)), dtype=np.uint32)
    return RowMasks(np.array(rows, np.int32), bits)


def some(masks: RowMasks, rows: list[int]) -> RowMasks:
    kept = np.isin(masks.rows, rows)
    return RowMasks(masks.rows[kept], masks.bits[kept])


def late(plan: StepPlan, rows: list[int]) -> np.ndarray:
    flags: np.ndarray = np.zeros(len(plan.slots), bool)
    flags[rows] = True
    return flags


@CONTEXTS
def test_masks_that_come_late_give_what_they_give_in_the_plan(context: CpuContext) -> None:
    """Row 0 is masked in the plan, half of the rows late, of which one gets no mask after all."""
    at_once, in_halves = driver_with_requests(CpuContext()), driver_with_requests(context)
    for step in range(8):
        masks = masks_for([0, 1, 3], step)
        want = at_once.runner.execute(replace(at_once.plan(), masks=masks)).result()
        plan = in_halves.plan()
        plan = replace(plan, masks=some(masks, [0]), late=late(plan, [1, 3, 5]))
        handle = in_halves.runner.execute(plan)
        with pytest.raises(ValueError, match="not said to be late"):
            in_halves.runner.complete(plan.step_id, masks_for([2], 0))
        in_halves.runner.complete(plan.step_id, some(masks, [1, 3]))
        assert handle.wait(10)
        found = handle.result()
        assert found.token_ids == want.token_ids and found.logprobs == want.logprobs
        assert found.prompt_logprobs == want.prompt_logprobs and not found.errors


def test_no_step_follows_one_that_waits() -> None:
    driver = driver_with_requests(CpuContext())
    plan = driver.plan()
    driver.runner.execute(replace(plan, late=late(plan, [1])))
    with pytest.raises(RuntimeError, match="waits for its masks"):
        driver.runner.execute(driver.plan())
    with pytest.raises(ValueError, match="does not wait"):
        driver.runner.complete(plan.step_id + 1, None)


def test_a_step_that_nobody_completes_is_an_error_and_does_not_hold_up_the_next() -> None:
    driver = driver_with_requests(CpuContext())
    plan = driver.plan()
    handle = driver.runner.execute(replace(plan, late=late(plan, [1])))
    with pytest.raises(RuntimeError, match="before its masks had come"):
        handle.result()
    assert driver.runner.execute(driver.plan()).result().token_ids
