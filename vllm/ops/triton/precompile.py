"""Compiles kernels for a device in many processes at once, into Triton's disk cache, where the real launches find them.

A kernel's variant is known only from a launch: dtypes, constants, divisibilities. So each process makes the very launches
that will come, on tensors of the "meta" device, and instead of launching compiles the share of variants that falls to it.
The processes are forked, never touch the GPU, and need no more than its compute capability.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from vllm.logger import init_logger

logger = init_logger(__name__)

DryRun = Callable[[], None]


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


class _Share:
    """Stands in for `JITFunction.run`: compiles every `count`-th new variant."""

    def __init__(self, rank: int, count: int) -> None:
        self._rank, self._count = rank, count
        self._run = JITFunction.run
        self._seen: set[str] = set()

    def __call__(self, kernel: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        kinds = [_kind(kernel, i, a) for i, a in enumerate(args)]
        variant = f"{kernel.__name__} {kinds} {sorted(options.items())}"
        if variant in self._seen:
            return
        mine = len(self._seen) % self._count == self._rank
        self._seen.add(variant)
        if mine:
            compiled = self._run(kernel, *args, grid=grid, warmup=True, **options)
            with contextlib.suppress(Exception):  # the C stub that launches; without it the first launch builds it
                from triton.backends.nvidia.driver import CudaLauncher

                CudaLauncher(compiled.src, compiled.metadata)


def _kind(kernel: JITFunction, index: int, value: object) -> str:
    """What of an argument a variant depends on; finer than Triton's own key in places, which only repeats some work."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        special = "" if kernel.params[index].do_not_specialize else f"{value == 1}{value % 16 == 0}"
        return f"int{special}{abs(value) >= 1 << 31}"
    if isinstance(value, float):
        return "float"
    base = getattr(value, "base", None)  # a TensorDescriptor
    return str(value) if base is None else f"{base.dtype}{value.block_shape}"  # type: ignore[attr-defined]


def _compile_share(runs: Sequence[DryRun], capability: int, rank: int, count: int) -> None:
    # a process of its own, so that what is replaced here is replaced for nobody else
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(_NoDevice(capability))
    from vllm.ops import triton as kernels

    kernels.register("meta")
    share = _Share(rank, count)
    JITFunction.run = lambda self, *a, **k: share(self, *a, **k)
    for run in runs:
        with torch.inference_mode():
            run()


class Precompilation:
    """Compilation under way. `wait()` before the first real launch; what failed here is compiled again there."""

    def __init__(self, children: list[int]) -> None:
        self._children = children
        self._begun = time.perf_counter()

    def wait(self, limit: float = 120.0) -> float:
        """Until every process has ended; those that take longer than `limit` seconds are killed. Returns the seconds since
        the start."""
        while self._children:
            self._children = [pid for pid in self._children if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            if self._children and time.perf_counter() - self._begun > limit:
                for pid in self._children:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                self._children = []
            elif self._children:
                time.sleep(0.01)
        return time.perf_counter() - self._begun


def precompile(runs: Sequence[DryRun], capability: int, processes: int | None = None) -> Precompilation:
    """Start to compile the kernels that `runs` launch on "meta" tensors. capability: 90 for compute capability 9.0."""
    count = min(16, os.cpu_count() or 1) if processes is None else processes
    children = []
    for rank in range(count):
        # not through `multiprocessing`, which forbids children to the daemon processes that an engine may run in
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # "may lead to deadlocks": see the limit in `wait`
            pid = os.fork()
        if pid:
            children.append(pid)
            continue
        try:
            _compile_share(runs, capability, rank, count)
        except BaseException as error:
            logger.debug("Compiling ahead failed: %s: %s", type(error).__name__, error)
        finally:
            os._exit(0)
    return Precompilation(children)
