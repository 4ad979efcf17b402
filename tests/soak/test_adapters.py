"""Many adapters that share few places: every answer is that of an engine with its adapter alone, and nobody starves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.lora.adapters import save_adapter
from tests.tiny_models import save_llama
from vllm import LLM, EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest

ADAPTERS, REQUESTS, OUTSTANDING, TOKENS = 50, 1000, 48, 12
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "enable_lora": True, "max_lora_rank": 64, "max_model_len": 128, "block_size": 8,
    "num_gpu_blocks_override": 400,
}  # fmt: skip

pytestmark = pytest.mark.soak


def test_a_thousand_requests_of_fifty_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_llama(tmp_path / "base", sharpness=2.0)
    rng = random.Random(0)
    for index in range(ADAPTERS):
        targets: Any = rng.choice(["all-linear", ["q_proj", "v_proj"], ["lm_head", "o_proj"], ["embed_tokens"]])
        save_adapter(base, tmp_path / str(index), targets=targets, rank=rng.choice([8, 9, 16, 64]), seed=index)
    adapters = [LoRARequest(f"adapter-{i}", i + 1, str(tmp_path / str(i))) for i in range(ADAPTERS)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    shared = [rng.randrange(3, 200) for _ in range(20)]

    def prompt() -> list[int]:
        return shared[: rng.randrange(20)] + [rng.randrange(3, 200) for _ in range(rng.randrange(1, 30))]

    work = [(rng.randrange(ADAPTERS), prompt()) for _ in range(REQUESTS)]

    engine = LLMEngine.from_engine_args(
        EngineArgs(model=str(base), max_loras=4, max_cpu_loras=8, enable_prefix_caching=True, **OPTIONS)
    )
    answers: dict[int, list[int]] = {}
    waits: list[float] = []
    overtaken: dict[int, int] = {}
    sent = 0
    while len(answers) < REQUESTS:
        while sent < REQUESTS and sent - len(answers) < OUTSTANDING:
            which, token_ids = work[sent]
            engine.add_request(str(sent), {"prompt_token_ids": token_ids}, params, lora_request=adapters[which])
            overtaken[sent] = 0
            sent += 1
        for output in engine.step():
            if not output.finished:
                continue
            number = int(output.request_id)
            answers[number] = list(output.outputs[0].token_ids)
            times = output.metrics
            waits.append(times.first_scheduled_time - times.arrival_time)
            for other in range(number):
                overtaken[other] += other not in answers
    with capsys.disabled():
        print(f"\nlongest wait {max(waits):.2f} s, mean {sum(waits) / REQUESTS:.3f} s; most that passed one: "
              f"{max(overtaken.values())}")  # fmt: skip

    for index, adapter in enumerate(adapters):
        own = [number for number, (which, _) in enumerate(work) if which == index]
        with LLM(str(base), **OPTIONS) as llm:
            prompts: Any = [{"prompt_token_ids": work[number][1]} for number in own]
            outputs = llm.generate(prompts, params, lora_request=adapter, use_tqdm=False)
        for number, output in zip(own, outputs, strict=True):
            assert answers[number] == list(output.outputs[0].token_ids), (number, adapter)
