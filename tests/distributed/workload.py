"""Requests of every kind that an engine must answer alike however it is divided, and their answers as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

SMALL = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "block_size": 4, "max_model_len": 64,
    "max_num_seqs": 6, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 40,
}  # fmt: skip
VOCAB = 131


def engine(folder: Path, **settings: Any) -> LLM:
    """An engine so small that requests are preempted and prompts computed in pieces."""
    return LLM(str(folder), **{**SMALL, **settings})


def workload(count: int) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts of mixed lengths, of which every third begins like the others, and what is asked of each."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB, 13).tolist()
    prompts: list[Any] = []
    params = []
    for i in range(count):
        own = rng.integers(0, VOCAB, 1 + int(rng.integers(0, 30))).tolist()
        prompts.append({"prompt_token_ids": common + own if i % 3 == 0 else own})
        kind: dict[str, Any] = {"temperature": 0.0}
        if i % 4 == 1:
            kind.update(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
        if i % 4 == 2:
            kind.update(logprobs=2, prompt_logprobs=1)
        if i % 4 == 3:
            kind.update(temperature=0.7, top_p=0.9, seed=i)
        params.append(SamplingParams(max_tokens=4 + i % 16, ignore_eos=True, detokenize=False, **kind))
    return prompts, params


def plain_answers(outputs: Sequence[Any]) -> list[Any]:
    """Tokens and logprobs of outputs, as plain data."""
    found = [(list(o.outputs[0].token_ids), _plain(o.outputs[0].logprobs)) for o in outputs]
    return [*found, *(_plain(o.prompt_logprobs) for o in outputs)]


def beams_of(output: Any) -> list[list[int]]:
    """The tokens of each beam, those of the prompt before them."""
    return [[*output.prompt_token_ids, *beam.token_ids] for beam in output.outputs]


def answers(llm: LLM, count: int = 40) -> list[Any]:
    """Tokens and logprobs of `count` requests of mixed lengths, and some beams."""
    prompts, params = workload(count)
    found: list[Any] = []
    for _ in range(2):  # the second time much of it is cached
        found += plain_answers(llm.generate(prompts, params, use_tqdm=False))
    beams = llm.beam_search(prompts[:3], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    return [*found, [[s.tokens for s in beam.sequences] for beam in beams]]


def preemptions(llm: LLM) -> int:
    """How often a request lost its place."""
    core: Any = llm.llm_engine
    return int(core.core.core.scheduler.stats().num_preemptions)


def _plain(entries: Any) -> Any:
    if entries is None:
        return None
    return [e and {token: float(lp.logprob) for token, lp in e.items()} for e in entries]


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two answers differ: tokens at all, logprobs by more than sums in another order can explain."""
    if isinstance(expected, float):
        return [] if abs(found - expected) < 1e-3 else [f"{where}: {found} for {expected}"]
    if isinstance(expected, dict):  # logprobs: of equally likely tokens either may be among the best ones
        common = {token: found[token] for token in expected if token in found}
        wanted = {token: expected[token] for token in common}
        rest, others = (sorted(v for token, v in d.items() if token not in common) for d in (found, expected))
        found, expected = [*common.values(), *rest], [*wanted.values(), *others]
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return [f"{where}: {len(found)} for {len(expected)}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}.{i}")]
    return [] if found == expected else [f"{where}: {found!r} for {expected!r}"]
