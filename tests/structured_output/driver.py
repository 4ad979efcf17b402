"""Runs constraints of the corpus through an engine, and says what came of each."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tests.structured_output.corpus import Case
from vllm import LLM, SamplingParams
from vllm.config.decoding import DecodingConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import GuidedDecodingParams
from vllm.structured_output.spec import GrammarSpec, constraint_of
from vllm.structured_output.support import resolve


def spec_of(backend: str, **arguments: Any) -> GrammarSpec:
    """The constraint for one back end and no other. Raises VLLMValidationError if it lacks a feature."""
    constraint = constraint_of(GuidedDecodingParams(**arguments), "guided_decoding")
    assert constraint is not None
    return resolve(constraint, DecodingConfig(f"{backend}:no-fallback"), "guided_decoding")


def run(llm: LLM, backend: str, corpus: list[Case], **sampling: Any) -> Counter[str]:
    """Counts of what became of each case: valid, unfinished, unsupported, refused. Fails if a finished text is wrong.

    A back end that has the features may still refuse what takes too long; it says so.
    """
    counts: Counter[str] = Counter()
    accepted: list[Case] = []
    core = llm.llm_engine.core.core
    for case in corpus:
        try:
            spec = spec_of(backend, **case.arguments)
        except VLLMValidationError as error:
            assert f"{backend} has no " in str(error), error
            counts["unsupported"] += 1
            continue
        try:
            core.check_grammars([spec])
        except VLLMValidationError as error:
            assert "library failed" not in str(error), (error, case)
            counts["refused"] += 1
            continue
        accepted.append(case)
    params = [
        SamplingParams(
            **{"temperature": 1.0, "seed": i, "max_tokens": 250, **sampling},
            guided_decoding=GuidedDecodingParams(**case.arguments, backend=f"{backend}:no-fallback"),
        )
        for i, case in enumerate(accepted)
    ]
    outputs = llm.generate(["Answer as asked:"] * len(accepted), params, use_tqdm=False) if accepted else []
    wrong = []
    for case, output in zip(accepted, outputs, strict=True):
        (answer,) = output.outputs
        if answer.finish_reason != "stop":
            counts["unfinished"] += 1
            continue
        problem = case.problem(answer.text)
        counts["valid" if problem is None else "wrong"] += 1
        if problem is not None:
            wrong.append(f"{problem[:200]}: {answer.text!r} for {case}")
    assert not wrong, f"{len(wrong)} of {len(accepted)}:\n" + "\n".join(wrong[:10])
    return counts


def as_json(text: str) -> Any:
    return json.loads(text)
