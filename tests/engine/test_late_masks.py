"""Grammars under an executor that runs ahead: masks come after their step was submitted, and change no token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.executor.configs import config_for
from tests.tiny_llama import save_tiny_llama
from vllm.config import VllmConfig
from vllm.engine.core import EngineCore
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.executor import create_executor
from vllm.executor.base import Executor
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreRequest
from vllm.step.plan import RowMasks, StepPlan
from vllm.structured_output.spec import GrammarSpec

LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5}
PATTERN = "[ab]{3,6}c"


class Ahead:
    """A real executor on the CPU that takes so many steps at once, holds the core to the protocol, and outlives it."""

    def __init__(self, executor: Executor, depth: int) -> None:
        self._executor = executor
        self.max_in_flight = depth
        self.waits: int | None = None
        self.completed = self.free = 0
        self.last = self.fail_at = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> None:
        assert self.waits is None, "a step was submitted behind one that waits for masks"
        self.last = plan.step_id
        if plan.step_id == self.fail_at:
            self.fail_at = -1
            raise RuntimeError("a step fails")
        self._executor.submit(plan)
        self.waits = None if plan.late is None else plan.step_id
        if plan.late is not None:
            self.free += int((plan.sample & ~plan.late).sum())

    def shutdown(self) -> None:
        """The next core uses it too."""

    def complete(self, step_id: int, masks: RowMasks | None) -> None:
        assert step_id == self.waits
        self.waits = None
        self.completed += 1
        self._executor.complete(step_id, masks)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return config_for(folder, max_model_len=96)


def requests() -> list[CoreRequest]:
    """Two with a schema, two with a pattern, one that a grammar of one sentence ends at once, three that are free."""
    grammars = [
        GrammarSpec("json", json.dumps(LIST), "xgrammar"),
        GrammarSpec("regex", PATTERN, "xgrammar"),
        None,
        GrammarSpec("json", json.dumps(LIST), "xgrammar"),
        GrammarSpec("regex", "a", "xgrammar"),
        None,
        GrammarSpec("regex", PATTERN, "xgrammar"),
        None,
    ]
    params = [SamplingParams(temperature=0.0 if i % 3 else 0.9, max_tokens=40, min_tokens=0) for i in range(8)]
    return [
        CoreRequest(str(i), [5 + i] * (3 + 7 * i), params[i], 100 + i, 1, (1,), grammar=grammar)
        for i, grammar in enumerate(grammars)
    ]


def run(core: EngineCore, abort: str | None = None) -> dict[str, tuple[list[int], str | None]]:
    """Tokens and end of each request; one may be aborted on the way."""
    core.check_grammars([r.grammar for r in requests() if r.grammar is not None])
    assert not core.add_requests(requests())
    found: dict[str, list[int]] = {r.request_id: [] for r in requests()}
    ends: dict[str, str | None] = {}
    steps = 0
    while core.has_unfinished():
        steps += 1
        if abort is not None and steps == 6:
            core.abort([abort])
        for output in core.step():
            assert output.error is None, output.error
            found[output.request_id] += output.new_token_ids
            ends[output.request_id] = output.finish_reason
    report = core.idle_report()
    assert (report["requests"], report["in_flight"]) == (0, 0)
    assert report["blocks_free"] == report["blocks_total"]
    return {name: (tokens, ends.get(name)) for name, tokens in found.items()}


def test_tokens_are_those_of_a_core_that_waits(config: VllmConfig) -> None:
    executor = create_executor(config)
    waiting = EngineCore(config, Ahead(executor, 1))
    want = run(waiting)
    waiting.shutdown()
    ahead = Ahead(executor, 2)
    core = EngineCore(config, ahead)
    assert run(core) == want
    assert ahead.completed > 5 and ahead.free > 5  # steps that waited, and rows in them that did not
    tokenizer = load_tokenizer(config.model_config.tokenizer_path, config.model_config.tokenizer_mode, False)
    texts = {name: tokenizer.decode([t for t in tokens if t != 1]) for name, (tokens, _) in want.items()}
    for name in ("1", "6"):
        assert re.fullmatch(PATTERN, texts[name]), texts
    assert texts["4"] == "a"
    for name in ("0", "3"):
        if want[name][1] == "stop":
            assert 2 <= len(json.loads(texts[name])) <= 5
    # one of them fails; everybody goes on alone, and nobody notices
    ahead.fail_at = ahead.last + 7
    assert run(core) == want
    assert ahead.fail_at == -1
    # and one leaves in the middle
    left = run(core, abort="0")
    assert {n: t for n, t in left.items() if n != "0"} == {n: t for n, t in want.items() if n != "0"}
    assert left["0"][0] == want["0"][0][: len(left["0"][0])]
    core.shutdown()
    executor.shutdown()
