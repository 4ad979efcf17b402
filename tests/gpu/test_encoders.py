"""Encoders on the device: the vectors of the CPU's reference, however prompts are batched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from msgspec.structs import replace

from tests.models.test_pooling_models import ENCODERS, PROMPTS, encode, save, start, states
from tests.ops.triton.test_encoder_attention import make_step, plain
from vllm.ops.attention import AttentionParams
from vllm.ops.triton import encoder_attention as kernels


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (48, 65), (96, None), (128, 200), (256, None)])
def test_attention(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [512, 1, 33, 127, 700, 64, 128]
    q, k, v = (torch.randn(sum(lengths), 4, head_dim).to(dtype) for _ in range(3))
    params = AttentionParams(head_dim**-0.5, window)
    step = make_step(lengths)
    on_device = replace(step, query_starts=step.query_starts.cuda())
    found = kernels.attend_whole(q.cuda(), k.cuda(), v.cuda(), params, on_device).cpu().float()
    limit = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(found, plain(q, k, v, params, lengths).float(), atol=limit, rtol=limit)


@pytest.mark.parametrize("case", [case for case in ENCODERS if case != "gte" or hasattr(transformers, "GteConfig")])
def test_hidden_states_of_all_tokens(case: str, tmp_path: Path) -> None:
    model = save(ENCODERS[case](), tmp_path)
    with start(tmp_path, override_pooler_config={"pooling_type": "ALL", "normalize": False}) as llm:
        for ids, found in zip(PROMPTS, encode(llm), strict=True):
            torch.testing.assert_close(found, states(model, ids), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("pooling_type", ["LAST", "CLS", "MEAN"])
def test_half_precision_stays_near(pooling_type: str, tmp_path: Path) -> None:
    model = save(ENCODERS["bert"](), tmp_path)
    with start(tmp_path, dtype="float16", override_pooler_config={"pooling_type": pooling_type}) as llm:
        for ids, found in zip(PROMPTS, encode(llm), strict=True):
            x = states(model, ids)
            want = {"LAST": x[-1], "CLS": x[0], "MEAN": x.mean(0)}[pooling_type]
            assert torch.nn.functional.cosine_similarity(found, want, dim=0) > 0.999
