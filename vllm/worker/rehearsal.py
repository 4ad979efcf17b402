"""Runs a few made-up prompts before a server is ready, so that no request is the first to use a kernel or a library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.step.plan import SlotInit, StepPlan

if TYPE_CHECKING:
    from vllm.worker.model_runner import ModelRunner

LENGTHS = (16, 300)  # of prompts: one for the attention kernel of short queries, one for that of long ones


def rehearse(runner: ModelRunner, max_model_len: int) -> None:
    """Compute prompts in slot 0, each with a greedy and with a drawn token behind it; their keys go to the null block.

    Nothing of them is left: the slot is free, and no block holds anything of theirs.
    """
    kinds = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, top_k=50))
    lengths = sorted({min(length, max_model_len - 1) for length in LENGTHS})
    for length in lengths:
        blocks = [0] * -(-(length + 1) // runner.layout.block_size)
        for params in kinds:
            one: np.ndarray = np.ones(1, np.int32)
            init = SlotInit(
                "", 0, [0] * length, length, 0, tuple(list(blocks) for _ in runner.layout.groups), params, 0, ()
            )
            plan = StepPlan(
                step_id=0, freed=(), new=(init,), blocks=(), slots=one * 0, num_tokens=one * length,
                num_computed=one * 0, sample=one.astype(bool),
            )  # fmt: skip
            runner.execute(plan).result()
            runner.sampler.leave((0,))
