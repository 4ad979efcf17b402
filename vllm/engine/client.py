"""The core in this process, as `LLMEngine` drives it: add, abort, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.engine.core import EngineCore
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.structured_output.spec import GrammarSpec


class InprocClient:
    """Owns an `EngineCore` and passes messages to it as they are; the server's client sends the same to a process."""

    def __init__(self, config: VllmConfig, core: EngineCore | None = None) -> None:
        self.core = core or EngineCore(config)

    def add_requests(self, requests: Iterable[CoreRequest]) -> list[CoreOutput]:
        """Queue requests. Returns the ends of those that cannot be served."""
        return self.core.add_requests(requests)

    def check_grammars(self, specs: Iterable[GrammarSpec]) -> None:
        """Wait until these are compiled. Raises VLLMValidationError for the first that cannot be."""
        self.core.check_grammars(specs)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.core.abort(request_ids)

    @property
    def overlaps(self) -> bool:
        """Whether the device computes a step while the host does something else."""
        return self.core.overlaps

    def begin(self) -> None:
        """Start with what waits, if nothing runs and `overlaps`; `step` takes in what comes of it."""
        self.core.begin()

    def step(self) -> list[CoreOutput]:
        return self.core.step()

    def has_unfinished(self) -> bool:
        return self.core.has_unfinished()

    def stats(self) -> CoreStats:
        return self.core.stats()

    def describe(self) -> dict[str, Any]:
        return self.core.describe()

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def start_profile(self) -> None:
        self.core.start_profile()

    def stop_profile(self) -> None:
        self.core.stop_profile()

    def check_health(self) -> None:
        self.core.check_health()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        return self.core.collective_rpc(method, timeout, args, kwargs)

    def shutdown(self) -> None:
        self.core.shutdown()
