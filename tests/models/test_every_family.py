"""Every family and variant of the tables, through the whole engine: in a mixed batch, with prompts that are cut and
requests that must make way, 32 greedy tokens are those of the independent implementation; and two ranks compute its
logits.

There are about 150: a run takes one in `TURNS` of them, others each day. MODELS_TURN=all (make test-models-full) takes
all, MODELS_TURN=3 those of the fourth turn.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import test_against_hugging_face as known
from tests.models import test_against_references as described
from tests.models.harness import PagedDriver, load, on_ranks, relative_error, save_random_hf_model
from tests.models.own_models import NewLlamaForCausalLM, OldLlamaForCausalLM
from vllm import LLM, ModelRegistry, SamplingParams

TURNS = 10
OWN = {"own-0.6": OldLlamaForCausalLM, "own-0.8": NewLlamaForCausalLM}
EVERY = [*known.CASES, *described.CASES, *OWN]
TOKENS = 32
LENGTHS = (23, 3, 17, 30, 9)
# Sizes that two ranks cannot share, and those that take their place.
ODD = {77: 78, 29: 30, 37: 38, 154: 156, 13: 14}
HEADS = ("num_key_value_heads", "kv_n_heads", "num_kv_heads")
# What cannot be divided by two, whatever the sizes; the loader says so.
WHOLE = {
    "decilm": "2 tensor-parallel ranks cannot share",
    "nemotron-nas": "2 tensor-parallel ranks cannot share",  # has a test with heads that they can
}


def chosen() -> list[str]:
    """The cases of this run."""
    turn = os.environ.get("MODELS_TURN") or str(datetime.date.today().toordinal() % TURNS)
    return EVERY if turn == "all" else EVERY[int(turn) :: TURNS]


def even(config: Any) -> Any:
    """A config whose sizes two ranks can share."""
    values = config if isinstance(config, dict) else vars(config)
    for name, value in list(values.items()):
        changed = value
        if name in HEADS and value == 3:
            changed = 2
        elif isinstance(value, dict) or (hasattr(value, "to_dict") and not isinstance(value, type)):
            changed = even(value)
        elif type(value) is int and value in ODD and "layer" not in name:
            changed = ODD[value]
        if changed is not value:
            if isinstance(config, dict):
                config[name] = changed
            else:
                setattr(config, name, changed)
    return config


def save(case: str, folder: Path, *, divided: bool = False) -> Callable[..., Tensor]:
    """A random checkpoint of a case; what gives the oracle's logits at every position of a sequence, of which so many
    tokens are the prompt if that is said, else all.
    """
    if case in described.CASES:
        architecture, model_type, reference, config = described.CASES[case]
        if not {"n_positions", "max_seq_len"} & config.keys() and config.get("max_position_embeddings") != 16:
            config = {**config, "max_position_embeddings": 64}
        if divided:
            config = even(dict(config))
        weights = described.save_config(architecture, model_type, reference, config, folder)
        return lambda ids, prompt=None: reference.logits({**config, "prompt": prompt or len(ids)}, weights, ids)
    hf = known.CASES["llama" if case in OWN else case]()
    model = save_random_hf_model(
        even(hf) if divided else hf, folder, attention="sdpa" if case in known.SDPA else "eager"
    )
    return lambda ids, prompt=None: known.logits_of(model, ids, case)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(ModelRegistry._registered)
    yield
    ModelRegistry._registered.clear()
    ModelRegistry._registered.update(before)


def drive(folder: Path) -> dict[str, tuple[list[int], list[int]]]:
    """Prompts and outputs of a mixed batch: three run, then two of a higher priority make two of them start anew."""
    prompts = [torch.randint(0, 131, (length,)).tolist() for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {
        "block_size": 8,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 3,
        "scheduling_policy": "priority",
    }
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=64, **options) as llm:
        engine, found = llm.llm_engine, {}
        for i, prompt in enumerate(prompts):
            if i == 3:
                for _ in range(8):
                    found.update((output.request_id, output) for output in engine.step() if output.finished)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params, priority=int(i < 3))
        while engine.has_unfinished_requests():
            found.update((output.request_id, output) for output in engine.step() if output.finished)
        assert engine.core.core.stats().num_preemptions >= 2
    return {name: (prompts[int(name)], list(output.outputs[0].token_ids)) for name, output in found.items()}


@pytest.mark.parametrize("case", chosen())
def test_tokens_are_those_of_the_oracle_in_any_company(case: str, tmp_path: Path) -> None:
    logits = save(case, tmp_path)
    if case in OWN:
        ModelRegistry.register_model("LlamaForCausalLM", OWN[case])
    found = drive(tmp_path)
    assert len(found) == len(LENGTHS)
    for prompt, tokens in found.values():
        expected = logits(torch.tensor([*prompt, *tokens[:-1]]), len(prompt))[len(prompt) - 1 :]
        assert tokens == expected.argmax(-1).tolist()
        assert len(tokens) == TOKENS


@pytest.mark.parametrize("case", [case for case in chosen() if case not in WHOLE and case not in OWN])
def test_two_ranks_compute_what_one_does(case: str, tmp_path: Path) -> None:
    logits = save(case, tmp_path, divided=True)
    prompts = [torch.randint(0, 131, (length,)) for length in (23, 1, 38)]
    expected = [logits(prompt) for prompt in prompts]
    for ours in on_ranks(2, lambda tp: PagedDriver(load(tmp_path, tp=tp), requests=3).run(prompts, [5, 1, 7, 3])):
        for found, wanted in zip(ours, expected, strict=True):
            assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("case", sorted(WHOLE))
def test_what_two_ranks_cannot_share_is_refused(case: str, tmp_path: Path) -> None:
    save(case, tmp_path, divided=True)
    with pytest.raises(ValueError, match=WHOLE[case]):
        on_ranks(2, lambda tp: load(tmp_path, tp=tp))


def test_every_architecture_has_a_case() -> None:
    listed = {architecture for architecture, *_ in described.CASES.values()}
    for case in known.CASES.values():
        listed |= set(_architectures(case()))
    generating = {name for name in ModelRegistry.built_in() if ModelRegistry.is_text_generation_model(name)}
    assert generating - listed == ALIASES


def _architectures(config: Any) -> list[str]:
    """What transformers writes into the config.json of such a model."""
    from transformers import AutoModelForCausalLM

    return [AutoModelForCausalLM._model_mapping[type(config)].__name__]


# Older names of architectures that have a case, and the text model inside a larger one.
ALIASES = {
    "LLaMAForCausalLM", "Llama4ForConditionalGeneration", "OLMoForCausalLM", "PhiMoEForCausalLM", "RWForCausalLM",
    "StableLMEpochForCausalLM",
}  # fmt: skip
