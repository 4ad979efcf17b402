"""Compiles kernels for a device in many processes at once, into Triton's disk cache, where the real launches find them.

A kernel's variant is known only from a launch: dtypes, constants, divisibilities. So each process makes the very
launches that will come, on tensors of the "meta" device, only remembers them, and compiles variants from that list,
which is the same in all of them. The processes are forked, never touch the GPU, and need no more than its compute
capability.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from vllm.logger import init_logger
from vllm.ops.triton.decode_parts import has_tma, has_warp_roles, processors

logger = init_logger(__name__)

DryRun = Callable[[], None]
_STALL = 15.0  # seconds in which nothing gets compiled: some process, forked from a busy one, must have deadlocked


class _NoDevice:
    """What the compiler asks of a driver, answered without one."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _Collector:
    """Stands in for `JITFunction.run`: remembers the first launch of every variant, largest kernels first."""

    def __init__(self) -> None:
        self.jobs: list[tuple[JITFunction, tuple, dict]] = []
        self._seen: set[str] = set()

    def __call__(self, kernel: JITFunction, *args: object, **options: object) -> None:
        kinds = [_kind(kernel, i, a) for i, a in enumerate(args)]
        constants = sorted((k, v) for k, v in options.items() if k not in ("grid", "warmup"))
        variant = f"{kernel.__name__} {kinds} {constants}"
        if variant not in self._seen:
            self._seen.add(variant)
            self.jobs.append((kernel, args, options))

    def take(self) -> list[tuple[JITFunction, tuple, dict]]:
        """What was collected since the last call; large kernels, which take long to compile, come first."""
        jobs, self.jobs = self.jobs, []
        return sorted(jobs, key=lambda job: -_size(job[0]))


@cache
def _size(kernel: JITFunction) -> int:
    """Characters of source, those of the functions that it names included."""
    called = (kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names)
    return len(kernel.src) + sum(_size(function) for function in called if isinstance(function, JITFunction))


def _kind(kernel: JITFunction, index: int, value: object) -> str:
    """What of an argument a variant depends on; finer than Triton's own key in places, which only repeats some work."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{value.data_ptr() % 16 == 0}"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        special = "" if kernel.params[index].do_not_specialize else f"{value == 1}{value % 16 == 0}"
        return f"int{special}{abs(value) >= 1 << 31}"
    if isinstance(value, float):
        return "float"
    base = getattr(value, "base", None)  # a TensorDescriptor
    return str(value) if base is None else f"{base.dtype}{value.block_shape}"  # type: ignore[attr-defined]


class _Progress:
    """Numbers shared by the processes: which job is next, how many there are, and how many are done, first and in
    all.
    """

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.next_job, self.done_first, self.done = (fork.Value("i", 0) for _ in range(3))
        self.first, self.total = (fork.Value("i", 1 << 30) for _ in range(2))

    @staticmethod
    def seen(counter: Any) -> int:
        """A counter as it is, without its lock, which a process may have died with."""
        return int(counter.get_obj().value)

    def take(self) -> int:
        """The index of a job that nobody has taken."""
        with self.next_job.get_lock():
            self.next_job.value += 1
            return int(self.next_job.value) - 1

    def finish(self, index: int) -> None:
        """A job is done."""
        for counter in (self.done, self.done_first) if index < self.first.value else (self.done,):
            with counter.get_lock():
                counter.value += 1


def _work(first: Sequence[DryRun], later: Sequence[DryRun], capability: int, progress: _Progress) -> None:
    """Compile jobs from the common list until there are none left."""
    # A process of its own, so that what is replaced here is replaced for nobody else. It must not collect garbage that
    # it has inherited: what belongs to the device can be freed by the parent only.
    gc.disable()
    os.nice(5)  # the parent goes on, and starts to serve while the later jobs are under way
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(_NoDevice(capability))
    from vllm.ops import triton as kernels

    kernels.register("meta")
    run, collector = JITFunction.run, _Collector()
    JITFunction.run = lambda self, *a, **k: collector(self, *a, **k)

    def launches(dry_runs: Sequence[DryRun]) -> list[tuple[JITFunction, tuple, dict]]:
        with torch.inference_mode():
            for dry_run in dry_runs:
                dry_run()
        return collector.take()

    jobs = launches(first)
    progress.first.value, complete = len(jobs), False
    while True:
        index = progress.take()
        if index >= len(jobs) and not complete:  # nobody waits for the first kernels while later ones are looked for
            jobs, complete = jobs + launches(later), True
            progress.total.value = len(jobs)
        if index >= len(jobs):
            return
        kernel, args, options = jobs[index]
        start = time.perf_counter()
        try:
            compiled = run(kernel, *args, **{**options, "warmup": True})
            _build_launcher(compiled)
        except Exception as error:
            logger.debug("Compiling %s ahead failed: %s: %s", kernel.__name__, type(error).__name__, error)
        progress.finish(index)
        logger.debug("Compiled %s in %.2f s", kernel.__name__, time.perf_counter() - start)


def _build_launcher(compiled: Any) -> None:
    """The C stub that launches a kernel; the first launch would build it otherwise."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)


class Precompilation:
    """Compilation under way. `wait()` before the first real launch; what failed here is compiled again there."""

    def __init__(self, children: list[int], progress: _Progress) -> None:
        self._progress, self._alive = progress, True
        self._begun = time.perf_counter()
        threading.Thread(target=self._reap, args=(children,), daemon=True).start()

    def _reap(self, children: list[int]) -> None:
        """Take the exit codes of the processes; when nothing has been compiled for _STALL seconds, they are killed."""
        done, since = -1, self._begun
        while children:
            children = [pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            now = time.perf_counter()
            if (seen := self._progress.seen(self._progress.done)) != done:
                done, since = seen, now
            elif children and now - since > _STALL:
                logger.debug("Compiling ahead has stalled; %d processes are ended.", len(children))
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                since = now
            time.sleep(0.02)
        self._alive = False

    def wait(self) -> float:
        """Until what is needed first has been compiled (or nobody is left to do it). Returns the seconds since the
        start.
        """
        progress = self._progress
        while self._alive and progress.seen(progress.done_first) < progress.seen(progress.first):
            time.sleep(0.002)
        return time.perf_counter() - self._begun

    @property
    def finished(self) -> bool:
        """Whether everything has been compiled (or nobody is left to do it)."""
        progress = self._progress
        return not self._alive or progress.seen(progress.done) >= progress.seen(progress.total)

    def finish(self) -> None:
        """Until everything has been compiled (or nobody is left to do it)."""
        while not self.finished:
            time.sleep(0.002)


def precompile(
    first: Sequence[DryRun], later: Sequence[DryRun], capability: int, processes: int | None = None
) -> Precompilation:
    """Start to compile the kernels that `first` and `later` launch on "meta" tensors. capability: 90 for 9.0.

    `Precompilation.wait` waits for those of `first` only.
    """
    count = min(16, os.cpu_count() or 1) if processes is None else processes
    processors(), has_tma(), has_warp_roles()  # asked for here, once: the processes must not open the device
    progress = _Progress()
    children = []
    for _ in range(count):
        # not through `multiprocessing`, which forbids children to the daemon processes that an engine may run in
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # "may lead to deadlocks": see _STALL
            pid = os.fork()
        if pid:
            children.append(pid)
            continue
        try:
            _work(first, later, capability, progress)
        except BaseException as error:
            logger.debug("Compiling ahead failed: %s: %s", type(error).__name__, error)
        finally:
            os._exit(0)
    return Precompilation(children, progress)
