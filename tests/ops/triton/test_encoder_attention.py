"""Attention of whole prompts against a plain loop, and the reference against the same."""

import numpy as np
import pytest
import torch

from vllm.ops import encoder_attention as ops
from vllm.ops.attention import AttentionParams
from vllm.ops.triton import encoder_attention as kernels
from vllm.step.inputs import StepInputs


def make_step(lengths):
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lens = np.asarray(lengths, np.int32)
    tokens = int(starts[-1])
    positions = torch.cat([torch.arange(n) for n in lengths])
    return StepInputs.of(
        torch.zeros(tokens, dtype=torch.int64), positions, torch.from_numpy(starts), torch.from_numpy(lens), (),
        host_query_starts=starts, host_seq_lens=lens,
    )  # fmt: skip


def plain(q, k, v, params, lengths):
    """Prompt by prompt and head by head, in fp64."""
    parts, first = [], 0
    for n in lengths:
        heads = []
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            rows = slice(first, first + n)
            scores = q[rows, h].double() @ k[rows, g].double().T * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            if params.relative is not None:
                i, n_far = torch.arange(n), params.relative.shape[1] // 2
                scores = scores + params.relative[h].double()[(i - i[:, None]).clamp(-n_far, n_far) + n_far]
            if params.window is not None:
                i = torch.arange(n)
                scores = scores.masked_fill((i[:, None] - i).abs() >= params.window, float("-inf"))
            heads.append(scores.softmax(-1) @ v[rows, g].double())
        parts.append(torch.stack(heads, 1))
        first += n
    return torch.cat(parts)


@pytest.mark.parametrize("implementation", [kernels.attend_whole, ops.attend_whole.reference])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "window", "softcap", "farthest"),
    [
        ([5, 1, 33, 64, 7], 3, 3, 16, None, None, None),
        ([130, 2, 70], 2, 2, 24, 9, None, None),
        ([80, 80, 80, 3], 4, 2, 40, None, 5.0, None),
        ([300], 1, 1, 64, 65, None, None),
        ([70, 1, 150, 12, 12], 3, 3, 16, None, None, 40),
        ([90, 40], 4, 2, 40, None, 5.0, 20),
    ],
)
def test_every_token_sees_its_prompt_and_nothing_else(
    implementation, lengths, heads, kv_heads, head_dim, window, softcap, farthest
):
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, head_dim)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)  # as a fused product leaves them
    relative = None if farthest is None else 2 * torch.randn(heads, 2 * farthest + 1)
    params = AttentionParams(head_dim**-0.5, window, softcap, relative=relative)
    found = implementation(q, k, v, params, make_step(lengths))
    torch.testing.assert_close(found, plain(q, k, v, params, lengths).float(), atol=2e-5, rtol=1e-4)


def test_half_precision():
    torch.manual_seed(1)
    lengths = [40, 9]
    q, k, v = (torch.randn(49, 2, 32).to(torch.float16) for _ in range(3))
    params = AttentionParams(32**-0.5)
    found = kernels.attend_whole(q, k, v, params, make_step(lengths))
    torch.testing.assert_close(found.float(), plain(q, k, v, params, lengths).float(), atol=3e-3, rtol=1e-2)
