"""Requests through the real engine core, one executor after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.core import EngineCore
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreOutput, CoreRequest


def greedy(request_id: str, prompt: list[int], count: int, **fields: Any) -> CoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return CoreRequest(request_id, prompt, params, seed=0, **fields)


class Run:
    """What a core said to some requests. tokens, logprobs, cached: by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.cached: dict[str, int] = {}
        self.preemptions = 0
        self.outputs: list[CoreOutput] = []

    def take(self, outputs: Sequence[CoreOutput]) -> None:
        for output in outputs:
            assert output.error is None, output.error
            self.outputs.append(output)
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or ())
            if output.num_cached_tokens is not None:
                self.cached.setdefault(output.request_id, output.num_cached_tokens)
            self.preemptions = max(self.preemptions, output.num_preemptions or 0)


def run(core: EngineCore, requests: Sequence[CoreRequest], between: Callable[[Run], None] | None = None) -> Run:
    """All of them together, to their ends; then nothing is held. between: called before every step."""
    found = Run()
    assert not core.add_requests(requests)
    while core.has_unfinished():
        if between is not None:
            between(found)
        found.take(core.step())
        core.scheduler.check_invariants()
    report = core.idle_report()
    assert report["requests"] == report["in_flight"] == 0 and report["blocks_free"] == report["blocks_total"]
    return found


def core_of(config: VllmConfig, executor: Any = None) -> EngineCore:
    return EngineCore(config, executor)
