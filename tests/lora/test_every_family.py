"""Eight adapters of every family and variant, through the whole engine: in batches with the base, alone, with prompts
that are cut, requests that must make way and prefixes that are cached, tokens and their logprobs are those of weights
with the adapter merged; and two ranks compute the logits of these weights.

A run takes one case in `TURNS`, others each day. MODELS_TURN=all (make test-adapters-full) takes all.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.lora.test_families import (
    MANY_RANKS,
    MAX_RANK,
    TARGETS,
    AdaptedDriver,
    merged,
    peft_adapters,
    read,
    with_adapters,
)
from tests.models import test_against_hugging_face as known
from tests.models import test_against_references as described
from tests.models.harness import load, on_ranks, relative_error, save_random_hf_model
from tests.models.test_every_family import WHOLE, even
from vllm import LLM, SamplingParams
from vllm.config.hf import HFConfig
from vllm.lora.layers import LoRALayers
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.weight_layout import WeightLayout
from vllm.model_executor.models.registry import family_of

TURNS = 10
EVERY = [*known.CASES, *described.CASES]
TOKENS = 10
ORDER = [*range(len(MANY_RANKS)), -1]  # the adapter of each request, -1 for the base
LENGTHS = (23, 5, 30, 12, 26, 7, 19, 17, 9)
SCALE = 0.7
Oracle = Callable[[int, Tensor, int], Tensor]  # (adapter, ids, tokens of the prompt) -> logits at every position


def chosen() -> list[str]:
    """The cases of this run."""
    turn = os.environ.get("MODELS_TURN") or str(datetime.date.today().toordinal() % TURNS)
    return EVERY if turn == "all" else EVERY[int(turn) :: TURNS]


def save(case: str, folder: Path, *, divided: bool = False) -> Oracle:
    """A random checkpoint of a case in folder/base and its adapters in folder/a<index>."""
    base = folder / "base"
    if case in known.CASES:
        config = known.CASES[case]()
        attention = "sdpa" if case in known.SDPA else "eager"
        reference = save_random_hf_model(even(config) if divided else config, base, attention=attention)
        targets = TARGETS.get(case) or TARGETS.get(case.partition("-")[0], "all-linear")
        adapted = peft_adapters(reference, folder, MANY_RANKS, targets)

        def by_peft(index: int, ids: Tensor, prompt: int) -> Tensor:
            with merged(adapted, index) as model:
                return known.logits_of(model.base_model.model, ids, case)

        return by_peft
    architecture, model_type, reference, config = described.CASES[case]
    config = {**config, **({} if "n_positions" in config else {"max_position_embeddings": 64})}
    if divided:
        config = even(dict(config))
    base.mkdir()
    weights = described.save_config(architecture, model_type, reference, config, base)
    changed = [weights_with_adapter(weights, base, folder / f"a{i}", rank, i) for i, rank in enumerate(MANY_RANKS)]

    def by_reference(index: int, ids: Tensor, prompt: int) -> Tensor:
        return reference.logits({**config, "prompt": prompt}, weights if index < 0 else changed[index], ids)

    return by_reference


def weights_with_adapter(
    weights: dict[str, Tensor], base: Path, folder: Path, rank: int, seed: int
) -> dict[str, Tensor]:
    """The weights with a random adapter added, which is written to `folder`."""
    family = family_of(HFConfig.load(base).architectures[0])
    assert family is not None
    layers = LoRALayers(load(base).adaptable(), 1, 8, torch.float32, torch.device("cpu"))
    generator, tensors, found = torch.Generator().manual_seed(seed), {}, dict(weights)
    for name, weight in weights.items():
        resolved = family.resolve(name)
        path = name.removesuffix(".weight")
        if weight.ndim != 2 or resolved is None or path == name or "embed" in resolved[0] or "head" in resolved[0]:
            continue
        if resolved[0].removesuffix(".weight") not in layers._targets or "stacked" in resolved[1].value:
            continue
        transposed = resolved[1] is WeightLayout.TRANSPOSED
        outputs, inputs = reversed(weight.shape) if transposed else weight.shape
        a = 0.3 * torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = 0.3 * torch.randn(outputs, rank, generator=generator) / rank**0.5
        tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
        found[name] = weight + SCALE * ((b @ a).t() if transposed else b @ a)
    assert tensors
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return found


@pytest.mark.parametrize("case", chosen())
def test_answers_are_those_of_merged_weights_in_any_company(case: str, tmp_path: Path) -> None:
    """More adapters than there are slots; some requests make way for others; all come again, to cached prefixes."""
    oracle = save(case, tmp_path)
    adapters = [LoRARequest(f"a{i}", i + 1, str(tmp_path / f"a{i}")) for i in range(len(MANY_RANKS))]
    prompts = [torch.randint(0, 131, (length,)).tolist() for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    options: dict[str, Any] = {
        "block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 3, "scheduling_policy": "priority",
        "enable_lora": True, "max_loras": 3, "max_cpu_loras": 8, "max_lora_rank": MAX_RANK, "dtype": "float32",
        "skip_tokenizer_init": True, "max_model_len": 64, "enable_prefix_caching": True,
    }  # fmt: skip
    outputs: dict[str, Any] = {}
    with LLM(str(tmp_path / "base"), **options) as llm:
        engine = llm.llm_engine

        def step() -> None:
            for output in engine.step():
                outputs[output.request_id] = output

        def add(name: str, index: int, priority: int) -> None:
            adapter = None if ORDER[index] < 0 else adapters[ORDER[index]]
            prompt = {"prompt_token_ids": prompts[index]}
            engine.add_request(name, prompt, params, lora_request=adapter, priority=priority)

        for adapter in adapters[:3]:
            engine.add_lora(adapter)
        for i in (0, 1, 2, len(ORDER) - 1, *range(3, len(ORDER) - 1)):
            if i == len(ORDER) - 1:
                while len(outputs) < 3:
                    step()
            add(f"{i}", i, priority=int(i < 3))
        while engine.has_unfinished_requests():
            step()
        preempted = engine.core.core.stats().num_preemptions
        for i in range(len(ORDER)):
            add(f"{i} again", i, priority=0)
            if i % 3 == 0:  # alone
                while engine.has_unfinished_requests():
                    step()
        while engine.has_unfinished_requests():
            step()
    assert preempted >= 1 and len(outputs) == 2 * len(ORDER)
    for i, (adapter, prompt) in enumerate(zip(ORDER, prompts, strict=True)):
        first = outputs[f"{i}"].outputs[0]
        tokens = list(first.token_ids)
        sequence = torch.tensor([*prompt, *tokens[:-1]])
        logits, bare = (oracle(index, sequence, len(prompt)) for index in (adapter, -1))
        assert adapter < 0 or relative_error(logits, bare) > 0.01, "the adapter changes hardly anything"
        wanted = logits[len(prompt) - 1 :].log_softmax(-1)
        assert tokens == wanted.argmax(-1).tolist(), (i, adapter)
        again = outputs[f"{i} again"].outputs[0]
        assert list(again.token_ids) == tokens
        for output in (first, again):
            found = torch.tensor([by_id[token].logprob for by_id, token in zip(output.logprobs, tokens, strict=True)])
            torch.testing.assert_close(found, wanted.amax(-1).float(), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("case", [case for case in chosen() if case not in WHOLE])
def test_two_ranks_compute_the_logits_of_merged_weights(case: str, tmp_path: Path) -> None:
    oracle = save(case, tmp_path, divided=True)
    prompts = [torch.randint(0, 131, (length,)) for length in LENGTHS]
    expected = [oracle(index, prompt, len(prompt)) for index, prompt in zip(ORDER, prompts, strict=True)]
    adapters = [read(tmp_path / "base", tmp_path / f"a{i}") for i in range(len(MANY_RANKS))]

    def work(tp: Any) -> list[Tensor]:
        return AdaptedDriver(with_adapters(load(tmp_path / "base", tp=tp), adapters), ORDER).run(prompts, [5, 1, 7, 3])

    for ours in on_ranks(2, work):
        for found, wanted in zip(ours, expected, strict=True):
            assert relative_error(found, wanted) < 1e-5
