"""LoRA kernels on the device against the reference, over sizes of real layers."""

import pytest
import torch

from tests.lora.adapters import save_adapter
from tests.ops.triton.test_lora import mixed, views
from tests.tiny_models import save_llama
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.ops import lora as ops
from vllm.ops.triton import lora as kernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 3, 32, 100, 513])
@pytest.mark.parametrize(("inputs", "parts"), [(4096, ((0, 4096), (4096, 1024), (5120, 1024))), (14336, ((0, 4096),))])
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_adapters_add_what_the_reference_adds(dtype, rows, inputs, parts, rank):
    adapters = mixed(rows, 5)
    outputs = sum(size for _, size in parts)
    x = torch.randn(rows, inputs, dtype=dtype)
    a = (torch.randn(5, len(parts) * rank, inputs) / inputs**0.5).to(dtype)
    b = (torch.randn(5, outputs, rank) / rank**0.5).to(dtype)
    want = torch.zeros(rows, outputs)
    ops.add_lora.reference(want, x.float(), a.float(), b.float(), parts, views(adapters)[1])
    for view in views(adapters):
        view = type(view)(view.adapters.cuda(), tuple(type(s)(s.slot, s.rows.cuda()) for s in view.segments))
        got = torch.zeros(rows, outputs, dtype=dtype, device="cuda")
        kernels.add_lora(got, x.cuda(), a.cuda(), b.cuda(), parts, view)
        torch.testing.assert_close(got.cpu().float(), want, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])


def test_captured_steps_give_every_adapters_answer(tmp_path):
    """Greedy, drawn and with logprobs, each as without graphs, the adapters of a batch changing from step to step."""
    base = save_llama(tmp_path / "base", sharpness=2.0)
    requests = [None]
    for i, rank in enumerate([8, 16, 4]):
        save_adapter(base, tmp_path / str(i), rank=rank, seed=i, lora_alpha=4 * rank)
        requests.append(LoRARequest(f"adapter-{i}", i + 1, str(tmp_path / str(i))))
    params = [
        SamplingParams(temperature=t, seed=7, max_tokens=10 + 3 * i, ignore_eos=True, logprobs=1 if i == 2 else None)
        for i, t in enumerate([0.0, 0.9, 0.0, 0.7, 0.0, 0.0, 0.8])
    ]
    pairs = [(r, p) for r in requests for p in params]
    found = []
    for eager in (True, False, False):
        with LLM(
            str(base), enable_lora=True, max_loras=3, dtype="float32", max_model_len=128, num_gpu_blocks_override=400,
            enforce_eager=eager, max_num_seqs=16,
        ) as llm:  # fmt: skip
            for _ in range(3):  # until graphs are captured
                outputs = llm.generate(
                    ["The capital of France is"] * len(pairs), [p for _, p in pairs],
                    lora_request=[r for r, _ in pairs], use_tqdm=False,
                )  # fmt: skip
            found.append([list(o.outputs[0].token_ids) for o in outputs])
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0]}) > len(params)
