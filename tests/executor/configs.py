"""Resolved configs, and a core without a front end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from vllm.config import VllmConfig
from vllm.config.resolve import resolve
from vllm.config.settings import all_settings
from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.executor.base import Executor
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreRequest
from vllm.step.plan import RowMasks, StepPlan


def config_for(folder: Path, **settings: Any) -> VllmConfig:
    """A config for the CPU in fp32, small."""
    args = {s.name: s.new_default() for s in all_settings()}
    small = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
    }
    return resolve({**args, **small, **settings})


def generate(
    executor: Executor, config: VllmConfig, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Tokens of all prompts, run together."""
    limits = config.scheduler_config
    scheduler = Scheduler(
        SchedulerLimits(limits.max_num_seqs, limits.max_num_batched_tokens, config.model_config.max_model_len),
        executor.kv_layout.policy,
        executor.num_blocks,
    )
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        scheduler.add(CoreRequest(str(i), prompt, p, seed=i))
    tokens: list[list[int]] = [[] for _ in prompts]
    while scheduler.has_unfinished():
        while scheduler.num_in_flight < executor.max_in_flight and (plan := scheduler.schedule()) is not None:
            executor.submit(plan)
        for output in scheduler.apply(executor.collect()):
            assert output.error is None
            tokens[int(output.request_id)] += output.new_token_ids
    scheduler.check_invariants()
    return tokens


class Masked:
    """An executor under which every second row may say multiples of three only; the masks stand in the plan or, if
    `late`, come after it.
    """

    def __init__(self, executor: Executor, vocab: int, late: bool) -> None:
        self._executor, self._late = executor, late
        allowed: np.ndarray = np.arange(-(-vocab // 32) * 32) % 3 == 0
        self._bits = np.packbits(allowed, bitorder="little").view(np.uint32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> None:
        rows = np.flatnonzero(plan.sample & (plan.slots % 2 == 0)).astype(np.int32)
        if not len(rows):
            self._executor.submit(plan)
            return
        masks = RowMasks(rows, np.tile(self._bits, (len(rows), 1)))
        if not self._late:
            self._executor.submit(replace(plan, masks=masks))
            return
        late: np.ndarray = np.zeros(len(plan.slots), bool)
        late[rows] = True
        self._executor.submit(replace(plan, late=late))
        self._executor.complete(plan.step_id, masks)
