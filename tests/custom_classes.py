"""Classes of a user's own for tests/test_custom_classes.py: a scheduler, an executor, a stat logger, a platform."""

from __future__ import annotations

import os
from typing import Any

from vllm.core.scheduler import Scheduler
from vllm.engine.metrics import StatLoggerBase
from vllm.executor.uniproc import UniprocExecutor
from vllm.platforms.cpu import CpuPlatform


class ShyScheduler(Scheduler):
    """Plans one request at a time."""

    most = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        plan = super().schedule(*args, **kwargs)
        ShyScheduler.most = max(ShyScheduler.most, 0 if plan is None else len(plan.slots))
        return plan


class CountingExecutor(UniprocExecutor):
    """Counts steps."""

    steps = 0

    def submit(self, plan: Any) -> None:
        CountingExecutor.steps += 1
        super().submit(plan)


class NotingLogger(StatLoggerBase):
    """Remembers what it has heard."""

    heard: list[Any] = []

    def log(self, stats: Any) -> None:
        assert self.vllm_config is not None
        self.heard.append(stats)


class PluggedPlatform(CpuPlatform):
    """The CPU under another name."""

    def get_device_name(self, device_id: int = 0) -> str:
        return "abacus"


class AbacusPlatform(CpuPlatform):
    device_type = "abacus"


def offer_cpu() -> str | None:
    return "tests.custom_classes:PluggedPlatform"


def offer_abacus() -> str | None:
    return "tests.custom_classes.AbacusPlatform" if os.environ.get("ABACUS") else None


def offer_nonsense() -> str:
    return "builtins.dict"


def broken() -> str:
    raise RuntimeError("no such luck")
