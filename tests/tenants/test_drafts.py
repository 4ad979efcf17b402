"""Drafts that hold or not, through the real engine with several steps in flight: the tokens are those without them.

The model has windows and recurrent states, the batch penalties, seeds, logprobs and tokens that end a request.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.executor.configs import config_for
from tests.tenants.checkpoint import VOCAB
from tests.tenants.drafter import Drafter
from tests.tenants.drive import Run, core_of, greedy, run
from tests.tenants.test_states import folder, prompts  # noqa: F401 (folder is a fixture)
from vllm.config import VllmConfig
from vllm.executor import create_executor
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreRequest

COUNT = 24
SHORT_OF_BLOCKS = {"num_gpu_blocks_override": 26, "max_model_len": 64}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.7},
    "drawn penalties": {"temperature": 1.2, "repetition_penalty": 1.4, "logprobs": 1},
    "minimum": {"temperature": 1.0, "min_tokens": 7},
    "allowed": {"allowed_token_ids": list(range(20)), "logit_bias": {3: 2.0}},
}


def requests() -> list[CoreRequest]:
    found = []
    texts = prompts(30, 1, 13, 22, 37, 9)
    for i, (name, fields) in enumerate(KINDS.items()):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": name != "minimum", **fields})
        stop = tuple(range(10, 40)) if name == "minimum" else ()
        found.append(CoreRequest(name, texts[i], params, seed=100 + i, stop_token_ids=stop))
    return found


def config(folder: Path, drafts: int, **settings: Any) -> VllmConfig:  # noqa: F811
    usual = {"block_size": 4, "num_gpu_blocks_override": 200, "max_num_seqs": 4, "skip_tokenizer_init": True}
    plain = config_for(folder, **{**usual, **settings})
    return replace(plain, scheduler_config=replace(plain.scheduler_config, num_drafts=drafts))


@pytest.fixture(scope="module")
def plainly(folder: Path) -> Run:  # noqa: F811
    engine = core_of(config(folder, 0))
    found = run(engine, requests())
    engine.shutdown()
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_change_no_token(folder: Path, plainly: Run, drafts: int, depth: int) -> None:  # noqa: F811
    settings = config(folder, drafts, **(SHORT_OF_BLOCKS if depth == 2 else {}))
    drafter = Drafter(create_executor(settings), plainly.tokens, VOCAB, drafts, depth)
    assert drafter.kv_layout.policy.states_per_slot == drafts + 1
    engine = core_of(settings, drafter)
    for texts in (requests(), requests()[::-1]):  # the second time from cached prefixes and snapshots
        found = run(engine, texts)
        assert found.tokens == plainly.tokens
        for name, entries in plainly.logprobs.items():
            assert len(found.logprobs[name]) == len(entries)
            for ours, wanted in zip(found.logprobs[name], entries, strict=True):
                assert ours.token_ids[:2] == wanted.token_ids[:2]
                assert ours.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    assert drafter.drafted > 100 and (drafter.inexact > 20) == (depth > 1)
    assert (found.preemptions > 0) == (depth == 2)
    assert depth == 2 or any(found.cached.values())
    engine.shutdown()


def test_drafts_of_the_host_without_pages_of_state_are_dropped(folder: Path, plainly: Run) -> None:  # noqa: F811
    """With a page for one draft, one of three is verified; with none, none is, and nothing else changes."""
    for pages in (0, 1):
        settings = config(folder, 0)
        settings = replace(settings, scheduler_config=replace(settings.scheduler_config, num_drafts=pages))
        executor = create_executor(settings)
        engine = core_of(replace(settings, scheduler_config=replace(settings.scheduler_config, num_drafts=0)), executor)

        def propose(found: Run) -> None:
            for name, tokens in plainly.tokens.items():
                known = len(found.tokens.get(name, ()))
                engine.scheduler.propose(name, tokens[known : known + 3])  # noqa: B023

        widest = 0
        submit = executor.submit

        def watch(plan: Any) -> None:
            nonlocal widest
            widest = max(widest, 0 if plan.drafts is None else int(plan.drafts.max()))
            submit(plan)  # noqa: B023

        executor.submit = watch  # type: ignore[method-assign]
        assert run(engine, requests(), between=propose).tokens == plainly.tokens
        assert widest == pages
        engine.shutdown()


@pytest.mark.parametrize("drafts", [[VOCAB, 3], [10**12], [-1, -1], [-(2**31)]])
def test_drafts_that_are_no_tokens_are_none(folder: Path, plainly: Run, drafts: list[int]) -> None:  # noqa: F811
    settings = config(folder, 2)
    executor = create_executor(settings)
    engine = core_of(replace(settings, scheduler_config=replace(settings.scheduler_config, num_drafts=0)), executor)

    def propose(found: Run) -> None:
        for name, tokens in plainly.tokens.items():
            known = len(found.tokens.get(name, ()))
            engine.scheduler.propose(name, [*tokens[known : known + 1], *drafts])

    assert run(engine, requests(), between=propose).tokens == plainly.tokens
    assert not engine.add_requests([greedy("other", [5] * 9, 3)])
    with pytest.raises(TypeError):
        engine.scheduler.propose("other", ["five"])  # type: ignore[list-item]
    engine.abort(["other"])
    engine.shutdown()


def test_a_prompt_that_comes_later_beside_drafts_is_left_alone(folder: Path, plainly: Run) -> None:  # noqa: F811
    settings = config(folder, 2)
    drafter = Drafter(create_executor(settings), plainly.tokens | {"late": []}, VOCAB, 2, 2)
    engine = core_of(settings, drafter)
    found = run(engine, [*requests(), greedy("late", [5] * 40, 1)])
    assert {name: tokens for name, tokens in found.tokens.items() if name != "late"} == plainly.tokens
    assert len(found.tokens["late"]) == 1
    engine.shutdown()
