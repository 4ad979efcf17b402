"""Runs plans on one or several workers; the core sees one `Executor`, whatever is behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.executor.base import Executor
from vllm.ipc import functions
from vllm.utils.trace_calls import begin_if_asked

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Executor", "create_executor"]


def create_executor(config: VllmConfig) -> Executor:
    """Start the workers that `config` asks for; returns when they are ready for plans."""
    begin_if_asked()
    parallel = config.parallel_config
    backend = parallel.distributed_executor_backend or ("mp" if parallel.world_size > 1 else "uni")
    if parallel.shares_experts:  # one worker or several, other copies have more
        backend = "mp"
    if backend == "uni" and parallel.world_size == 1:
        from vllm.executor.uniproc import UniprocExecutor

        return UniprocExecutor(config)
    if backend == "mp":
        from vllm.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config)
    if backend == "ray":
        from vllm.executor.ray_executor import RayExecutor

        return RayExecutor(config)
    if backend == "external_launcher":
        from vllm.executor.external_launcher import ExternalLauncherExecutor

        return ExternalLauncherExecutor(config)
    if ":" in backend or "." in backend:
        return executor_class(backend)(config)
    if backend == "uni":
        raise ValueError(
            f"distributed_executor_backend='uni' runs one rank, but {parallel.sizes} asks for {parallel.world_size}. "
            "Use 'mp'."
        )
    raise ValueError(f"Unknown distributed_executor_backend {backend!r}.")


def executor_class(path: str) -> Callable[[VllmConfig], Executor]:
    """The user's own class, "module:Class" or "module.Class". Raises ValueError if there is none of that name, or if it
    lacks a method of an `Executor`.
    """
    found: Any = functions.named(path)
    missing = [name for name in ("submit", "collect", "shutdown", "check_health") if not hasattr(found, name)]
    if not isinstance(found, type) or missing:
        lacks = f" It lacks {', '.join(missing)}()." if missing else ""
        raise ValueError(f"distributed_executor_backend={path!r} must name a class like vllm.executor.Executor.{lacks}")
    made: Callable[[VllmConfig], Executor] = found
    return made
