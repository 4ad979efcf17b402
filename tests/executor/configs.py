"""Resolved configs, and a core without a front end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.config.resolve import resolve
from vllm.config.settings import all_settings
from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.executor.base import Executor
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreRequest


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
        executor.kv_layout,
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
