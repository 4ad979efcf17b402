"""A drafter on the device: behind every token that a step samples it writes drafts, some right and some wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm.executor.base import Executor
from vllm.step.plan import StepPlan


class Drafter:
    """An executor on the CPU that takes `depth` steps at once. Its steps are done when they are submitted, so that
    what stands in the slot table then is the truth.

    truth: the tokens of each request, of which drafts are made.
    """

    def __init__(self, executor: Executor, truth: Mapping[str, Sequence[int]], vocab: int, count: int, depth: int):
        self._executor, self.truth, self.vocab, self.count = executor, truth, vocab, count
        self.max_in_flight = depth
        self.random = np.random.default_rng(count * 10 + depth)
        self.slots: dict[int, tuple[str, int]] = {}
        self.drafted = self.inexact = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> None:
        for new in plan.new:
            self.slots[new.slot] = new.request_id, new.num_prompt_tokens
        self.drafted += 0 if plan.drafts is None else int(plan.drafts.sum())
        self.inexact += 0 if plan.exact is None else int((~plan.exact).sum())
        self._executor.submit(plan)
        runner: Any = self._executor.worker.runner  # type: ignore[attr-defined]
        for slot in plan.slots[plan.sample].tolist():
            name, prompt = self.slots[slot]
            length = int(runner.table.lengths[slot])
            runner.table.require_width(min(runner.table.max_width, length + self.count))
            right = list(self.truth[name][length - prompt :])[: self.count]
            room = max(0, min(self.count, runner.table.max_width - length))
            drafts = (right + [0] * self.count)[:room]
            for i, token in enumerate(drafts):
                keep = self.random.random() < 0.7
                runner.table.tokens[slot, length + i] = token if keep else int(self.random.integers(self.vocab))


class DeviceDrafter(Drafter):
    """The same where steps run beside the host: drafts are written by what is queued behind each step, at the length
    that only the device may know.
    """

    def __init__(self, executor: Executor, truth: Mapping[str, Sequence[int]], vocab: int, count: int, depth: int):
        super().__init__(executor, truth, vocab, count, depth)
        table = executor.worker.runner.table  # type: ignore[attr-defined]
        self._device = table.tokens.device
        self._rows = torch.zeros((table.num_slots, table.max_width + count), dtype=torch.int32, device=self._device)
        self._generator = torch.Generator(self._device).manual_seed(count * 10 + depth)

    def submit(self, plan: StepPlan) -> None:
        for new in plan.new:
            tokens = [*new.token_ids[: new.num_prompt_tokens], *self.truth[new.request_id]]
            self._rows[new.slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32, device=self._device)
        self.drafted += 0 if plan.drafts is None else int(plan.drafts.sum())
        self.inexact += 0 if plan.exact is None else int((~plan.exact).sum())
        self._executor.submit(plan)
        table: Any = self._executor.worker.runner.table  # type: ignore[attr-defined]
        table.require_width(table.max_width)
        slots = plan.slots[plan.sample].astype(np.int64)
        if not len(slots):
            return
        index, known = (torch.from_numpy(a).to(self._device) for a in (slots, table.lengths[slots]))
        lengths = torch.where(known < 0, table.device_lengths[index], known).long()
        where = lengths[:, None] + torch.arange(self.count, device=self._device)
        shape, options = where.shape, {"generator": self._generator, "device": self._device}
        keep = torch.rand(shape, **options) < 0.7
        others = torch.randint(self.vocab, shape, dtype=torch.int32, **options)
        drafts = torch.where(keep, self._rows[index[:, None], where], others)
        room = where < table.width  # what is beyond is written once more where it stands
        where = where.clamp(max=table.width - 1)
        last = table.tokens[index, -1][:, None].expand(shape)
        table.tokens[index[:, None], where] = torch.where(room, drafts, last)
