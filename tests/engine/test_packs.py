"""Prompts that travel together to a model that keeps nothing: the answers that each gets alone, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_encoders import save_bert
from tests.tiny_llama import assert_idle
from vllm import LLM, PoolingParams
from vllm.engine import llm_engine
from vllm.engine.client import InprocClient
from vllm.engine.processed import RequestInput

LIMITS = {"max_num_batched_tokens": 96, "max_num_seqs": 7}


def prompts(count: int = 40) -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [{"prompt_token_ids": rng.choices(range(5, 90), k=rng.choice([1, 2, 7, 13, 40, 96]))} for _ in range(count)]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the core is asked for."""
    found: list[Any] = []
    add = InprocClient.add_requests

    def note(self: InprocClient, requests: Any) -> Any:
        found.extend(requests)
        return add(self, requests)

    monkeypatch.setattr(InprocClient, "add_requests", note)
    yield found


def vectors(llm: LLM, asked: list[Any], params: Any = None) -> torch.Tensor:
    return torch.stack([output.outputs.data for output in llm.encode(asked, params, use_tqdm=False)])


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN"])
def test_each_gets_what_it_gets_alone(kind: str, sent: list[Any], tmp_path: Path) -> None:
    save_bert(tmp_path)
    asked = prompts()
    with LLM(str(tmp_path), dtype="float32", override_pooler_config={"pooling_type": kind}, **LIMITS) as llm:
        alone = torch.cat([vectors(llm, [prompt]) for prompt in asked])
        assert not any(request.parts for request in sent)
        sent.clear()
        together = vectors(llm, asked)
        assert_idle(llm)
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=1e-5)
    assert max(len(request.parts) for request in sent) > 1
    for request in sent:
        assert len(request.prompt_token_ids) <= 96 and len(request.parts) <= 7
    order = [n for request in sent for n in ([n for n, _ in request.parts] or [len(request.prompt_token_ids)])]
    assert order == [len(prompt["prompt_token_ids"]) for prompt in asked]


def test_pairs_and_wishes_of_ones_own(sent: list[Any], tmp_path: Path) -> None:
    save_bert(tmp_path, classes=3)
    asked = prompts(12)
    for i, prompt in enumerate(asked):
        length = len(prompt["prompt_token_ids"])
        if i % 3:
            prompt["token_type_ids"] = [0] * (length // 2) + [1] * (length - length // 2)
    raw, usual = PoolingParams(use_activation=False), PoolingParams()
    params = [usual if i % 5 else raw for i in range(12)]
    with LLM(str(tmp_path), dtype="float32", **LIMITS) as llm:
        alone = torch.cat([vectors(llm, [prompt], [own]) for prompt, own in zip(asked, params, strict=True)])
        sent.clear()
        together = vectors(llm, asked, params)
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=1e-5)
    assert any(second > 0 for request in sent for _, second in request.parts)
    assert len({request.params.use_activation for request in sent}) == 2


def test_of_prompts_that_fail_together_only_the_guilty_ends_with_an_error(tmp_path: Path) -> None:
    model = save_bert(tmp_path)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7] = torch.nan
    model.save_pretrained(tmp_path)
    asked = [[5, 6], [5, 7, 9], [8], [9] * 20]
    with LLM(str(tmp_path), dtype="float32") as llm:
        engine = llm.llm_engine
        engine.add_requests([RequestInput(str(i), ids, PoolingParams()) for i, ids in enumerate(asked)])
        found = {}
        while engine.has_unfinished_requests():
            found.update((output.request_id, output) for output in engine.step())
        assert_idle(llm)
    assert len(found) == 4
    for request_id, output in found.items():
        assert (output.error is not None) == (request_id == "1")
        assert output.error is None or "not finite" in output.error


@pytest.mark.parametrize("aborted", [["0"], ["2", "1"], ["0", "1", "2"]])
def test_one_that_is_aborted_leaves_the_others(aborted: list[str], tmp_path: Path) -> None:
    save_bert(tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        engine = llm.llm_engine
        engine.add_requests([RequestInput(str(i), [5 + i] * 3, PoolingParams()) for i in range(3)])
        for request_id in aborted:
            engine.abort_request(request_id)
        found = []
        while engine.has_unfinished_requests():
            found += [output.request_id for output in engine.step()]
        assert sorted([*found, *aborted]) == ["0", "1", "2"]
        assert_idle(llm)


def test_the_first_are_computed_while_others_are_looked_at(
    sent: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bert(tmp_path)
    asked = prompts()
    with LLM(str(tmp_path), dtype="float32", **LIMITS) as llm:
        want, usual = vectors(llm, asked), [len(request.parts) or 1 for request in sent]
        monkeypatch.setattr(llm_engine, "_LOOKED_AT", 9)
        monkeypatch.setattr(llm_engine, "_LOOKED_AT_FIRST", 4)
        monkeypatch.setattr(InprocClient, "overlaps", True)
        sent.clear()
        assert torch.equal(vectors(llm, asked), want)
        first, *others = [len(request.parts) or 1 for request in sent]
        assert first <= 4 and first + sum(others) == sum(usual) == len(asked)
        with pytest.raises(ValueError, match="out of vocabulary"):
            llm.encode([*asked, {"prompt_token_ids": [10**6]}], use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
        assert_idle(llm)
        assert torch.equal(vectors(llm, asked), want)
