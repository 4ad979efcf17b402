"""Beside generating requests with states and windows: pooled ones, and ones whose masks come late."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.executor.configs import Masked, config_for
from tests.tenants.checkpoint import VOCAB, Oracle
from tests.tenants.drive import core_of, greedy, run
from tests.tenants.test_states import COUNT, folder, prompts  # noqa: F401 (folder is a fixture)
from vllm.executor import create_executor
from vllm.pooling_params import PoolingParams
from vllm.step.messages import CoreRequest

SMALL = {"block_size": 4, "num_gpu_blocks_override": 200, "max_num_seqs": 4, "skip_tokenizer_init": True}


@pytest.mark.parametrize("chunk", [7, 128])
def test_pooled_requests_beside_generating_ones(folder: Path, chunk: int) -> None:  # noqa: F811
    settings = config_for(
        folder, **SMALL, max_num_batched_tokens=chunk, worker_cls="tests.tenants.workers.MeanWorker"
    )  # fmt: skip
    engine, oracle = core_of(settings), Oracle(folder)
    texts = prompts(30, 13, 22, 9, 41, 1, seed=11)
    requests = [
        greedy(str(i), text, COUNT) if i % 2 else CoreRequest(str(i), text, PoolingParams(), seed=0)
        for i, text in enumerate(texts)
    ]
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for _ in range(2):  # the second time behind cached prefixes, as far as each kind allows
        found = run(engine, requests)
        pooled = {out.request_id: out.pooled for out in found.outputs if out.pooled is not None}
        assert sorted(pooled) == ["0", "2", "4"]
        for i, text in enumerate(texts):
            if i % 2:
                assert found.tokens[str(i)] == oracle.greedy(text, COUNT)
                continue
            vector = torch.from_numpy(np.frombuffer(pooled[str(i)].data, np.float32).copy())
            torch.testing.assert_close(embedding @ vector, oracle.logits(text).mean(0), rtol=1e-4, atol=1e-4)
    engine.shutdown()


def test_masks_that_come_late_on_half_of_the_rows(folder: Path) -> None:  # noqa: F811
    settings, texts = config_for(folder, **SMALL), prompts(30, 13, 22, 9, seed=12)
    requests = [greedy(str(i), text, COUNT) for i, text in enumerate(texts)]
    said = []
    for late in (False, True):
        engine = core_of(settings, Masked(create_executor(settings), VOCAB, late))
        said.append(run(engine, requests).tokens)
        engine.shutdown()
    assert said[0] == said[1]
    masked = [name for name, tokens in said[1].items() if all(token % 3 == 0 for token in tokens)]
    oracle = Oracle(folder)
    assert len(masked) == 2
    for i, text in enumerate(texts):
        if str(i) not in masked:
            assert said[1][str(i)] == oracle.greedy(text, COUNT)
            continue
        logits = oracle.logits(text + said[1][str(i)][:-1])[len(text) - 1 :]
        assert said[1][str(i)] == (logits[:, ::3].argmax(-1) * 3).tolist()
