"""A real model behind the in-process executor."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from tests.executor.configs import Masked, config_for, generate
from tests.tiny_models import save_llama
from vllm.exceptions import EngineDeadError
from vllm.executor import create_executor
from vllm.sampling_params import SamplingParams
from vllm.worker.device import rounded_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


PROMPTS = [np.random.default_rng(i).integers(5, 300, 1 + 9 * i).tolist() for i in range(6)]


def test_tokens_are_those_of_hugging_face(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    config = config_for(folder)
    executor = create_executor(config)
    found = generate(executor, config, PROMPTS, [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * 6)
    executor.shutdown()
    reference = LlamaForCausalLM.from_pretrained(folder)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = reference.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens == ids[0, len(prompt) :].tolist()


def test_seeded_requests_alone_and_with_a_small_cache(folder: Path) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=20, max_tokens=40, ignore_eos=True, presence_penalty=1.0),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.5),
    ] * 2
    plenty = config_for(folder)
    executor = create_executor(plenty)
    assert executor.num_blocks == 8 * 512 // 16 + 1
    together = generate(executor, plenty, PROMPTS, params)
    executor.shutdown()
    # 33 blocks are 528 tokens: hardly more than one request may be long
    tight = config_for(folder, num_gpu_blocks_override=33)
    executor = create_executor(tight)
    assert executor.num_blocks == 34
    assert generate(executor, tight, PROMPTS, params) == together
    executor.shutdown()


def test_masks_in_the_plan_and_masks_that_come_late(folder: Path) -> None:
    params = [SamplingParams(temperature=0.0 if i % 3 else 0.9, max_tokens=12, ignore_eos=True) for i in range(6)]
    config = config_for(folder)
    executor = create_executor(config)
    free = generate(executor, config, PROMPTS, params)
    vocab = config.model_config.logits_width
    in_plan, late = (generate(Masked(executor, vocab, late), config, PROMPTS, params) for late in (False, True))  # type: ignore[arg-type]
    executor.shutdown()
    assert in_plan == late
    threes = [all(token % 3 == 0 for token in tokens) for tokens in late]
    assert sum(threes) == 3 and [f for f, three in zip(free, threes, strict=True) if not three] == [
        tokens for tokens, three in zip(late, threes, strict=True) if not three
    ]


def test_calls_by_name_and_by_function(folder: Path) -> None:
    executor = create_executor(config_for(folder))
    assert executor.collective_rpc("check_health") == [None]
    assert executor.collective_rpc(lambda worker, n: worker.layout.block_size + n, args=(1,)) == [17]
    release = Event()
    with pytest.raises(TimeoutError, match="within 0.05 s"):
        executor.collective_rpc(lambda worker: release.wait(30), timeout=0.05)
    release.set()
    assert executor.collective_rpc("check_health", timeout=30) == [None]  # after the late one
    with pytest.raises(ZeroDivisionError):
        executor.collective_rpc(lambda worker: 1 // 0, timeout=30)
    for name in ("_load", "nothing", "__init__", "config"):
        with pytest.raises(ValueError, match="has no public method"):
            executor.collective_rpc(name)
    executor.shutdown()
    executor.shutdown()
    for call in (executor.check_health, lambda: executor.collective_rpc("check_health")):
        with pytest.raises(EngineDeadError, match="has been shut down"):
            call()


def test_a_profile_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(folder)
    executor = create_executor(config)
    with pytest.raises(RuntimeError, match="Profiler is not enabled"):
        executor.collective_rpc("start_profile")
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    with pytest.raises(RuntimeError, match="Profiler is not enabled"):
        executor.collective_rpc("stop_profile")
    executor.collective_rpc("start_profile")
    with pytest.raises(RuntimeError, match="being taken already"):
        executor.collective_rpc("start_profile")
    generate(executor, config, PROMPTS[:1], [SamplingParams(max_tokens=2)])
    executor.collective_rpc("stop_profile")
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name.startswith("rank0") and trace.stat().st_size > 1000
    executor.shutdown()


def test_a_model_that_does_not_fit_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"max seq len \(512\).*estimated maximum model length is 80\."):
        create_executor(config_for(folder, kv_cache_memory_bytes=6 * 16 * 2 * 2 * 2 * 12 * 4))


def test_kernels_of_libraries_are_loaded_for_every_size_and_failing_to_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = create_executor(config_for(folder, max_num_seqs=700, max_num_batched_tokens=700))
    worker = executor.driver_worker  # type: ignore[attr-defined]
    rows: dict[tuple[int, ...], list[int]] = {}

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: None, out_dtype: torch.dtype | None) -> torch.Tensor:
        rows.setdefault(tuple(weight.shape), []).append(len(x))
        return torch.nn.functional.linear(x, weight)

    monkeypatch.setattr("vllm.worker.worker.linear", multiply)
    monkeypatch.setattr(worker.context, "product_rows", rounded_rows)
    worker._load_libraries()
    sizes = sorted({rounded_rows(count) for count in range(1, 701)})
    assert len(sizes) < 50
    assert rows and all(found == sizes for found in rows.values())

    def fail(*args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("vllm.worker.worker.linear", fail)
    worker._load_libraries()
    executor.shutdown()
