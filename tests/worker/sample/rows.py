"""Requests in slots, ready to be sampled, without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.step.plan import SlotInit
from vllm.worker.device import CpuContext, DeviceContext
from vllm.worker.sample.sampler import Sampled, Sampler
from vllm.worker.slot_table import SlotTable

LAYOUT = KVLayout.alike((KVGroup(KVKind.FULL, (0,)),), 16, 1, 8, 4)


@dataclass
class Row:
    """One request and the logits of its next token."""

    logits: Tensor
    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    seed: int = 0
    stop: tuple[int, ...] = ()


def params(bad_words_token_ids: list[list[int]] | None = None, **kwargs: Any) -> SamplingParams:
    made = SamplingParams(**{"temperature": 0.0, "max_tokens": 1000, **kwargs})
    made._bad_words_token_ids = bad_words_token_ids
    return made


def make_sampler(
    rows: list[Row], slots: list[int] | None = None, context: DeviceContext | None = None
) -> tuple[Sampler, np.ndarray]:
    """A sampler with the rows in slots (scattered, to notice mix-ups)."""
    vocab = len(rows[0].logits)
    context = CpuContext() if context is None else context
    table = SlotTable(2 * len(rows) + 1, 4000, LAYOUT, context)
    sampler = Sampler(table, vocab, context)
    chosen = np.array(slots if slots is not None else [2 * i + 1 for i in range(len(rows))][::-1], np.int32)
    new = [
        SlotInit(str(i), int(s), r.prompt + r.output, len(r.prompt), 0, ([1],), r.params, r.seed, r.stop)
        for i, (r, s) in enumerate(zip(rows, chosen, strict=True))
    ]
    table.enter(new)
    sampler.enter(new)
    return sampler, chosen


def lengths(rows: list[Row]) -> np.ndarray:
    return np.array([len(r.prompt) + len(r.output) for r in rows], np.int32)


def sample(rows: list[Row], context: DeviceContext | None = None) -> Sampled:
    """One step of all rows together."""
    context = CpuContext() if context is None else context
    sampler, slots = make_sampler(rows, context=context)
    with torch.inference_mode():
        return sampler.sample(torch.stack([r.logits for r in rows]).to(context.device), slots, lengths(rows))
