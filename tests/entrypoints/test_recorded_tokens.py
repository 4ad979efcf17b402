"""The demo model's tokens, greedy and seeded, are those that it gave at c1cf030.

`python -m tests.entrypoints.test_recorded_tokens FILE` writes them for the package that it finds; the recording was
made with that commit's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded_tokens.json")
PROMPTS = [
    "Hello, my name is",
    "The capital of France is",
    "Once upon a time",
    "7 + 5 =",
    "In the morning, the boy went",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "cut": {"temperature": 1.1, "top_p": 0.9, "top_k": 40, "seed": 11},
    "min_p": {"temperature": 1.3, "min_p": 0.05, "seed": 13},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.3, "seed": 17},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 20, "logit_bias": {5: 1.5}},
    "two": {"temperature": 1.0, "n": 2, "seed": 19},
}


def tokens() -> dict[str, list[list[int]]]:
    """All of them in one batch, in fp32, where no two machines round a choice apart."""
    from vllm import LLM, SamplingParams

    llm = LLM(model="demo", dtype="float32", seed=0)
    names = [name for name in SETTINGS for _ in PROMPTS]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **SETTINGS[name]) for name in names]
    found: dict[str, list[list[int]]] = {}
    for name, output in zip(names, llm.generate(PROMPTS * len(SETTINGS), params, use_tqdm=False), strict=True):
        found.setdefault(name, []).extend(list(completion.token_ids) for completion in output.outputs)
    return found


def test_tokens_are_those_recorded() -> None:
    recorded = json.loads(RECORDED.read_text())
    found = tokens()
    assert found.keys() == recorded.keys()
    for name, sequences in found.items():
        assert sequences == recorded[name], name
    assert sum(map(len, recorded["seeded"])) == 40 * len(PROMPTS)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(tokens()) + "\n")
