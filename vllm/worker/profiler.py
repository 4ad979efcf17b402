"""A torch.profiler trace of a worker, between `start_profile` and `stop_profile`."""

from __future__ import annotations

import os

import torch
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from vllm.logger import init_logger

logger = init_logger(__name__)


class WorkerProfiler:
    """Writes one trace per start and stop to `folder`, named after the rank."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self._rank = rank
        self._running: profile | None = None

    def start(self) -> None:
        """Begin a trace. Raises RuntimeError if one is being taken."""
        if self._running is not None:
            raise RuntimeError("A profile is being taken already; stop it first.")
        os.makedirs(self._folder, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(
            activities=activities,
            with_stack=True,
            on_trace_ready=tensorboard_trace_handler(self._folder, worker_name=f"rank{self._rank}", use_gzip=True),
        )
        self._running.start()

    def stop(self) -> None:
        """End the trace and write it. Raises RuntimeError if none is being taken."""
        if self._running is None:
            raise RuntimeError("No profile is being taken; start one first.")
        running, self._running = self._running, None
        running.stop()
        logger.info("Wrote a profile of rank %d to %s.", self._rank, self._folder)
