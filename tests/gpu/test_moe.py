"""Mixture-of-experts kernels on the device, against the fp32 reference, and inside a CUDA graph."""

import pytest
import torch

from vllm.ops import moe
from vllm.ops.triton import moe as kernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = {
    "mixtral-like": (512, 1792, 8, 2),
    "many small experts": (256, 96, 60, 8),
    "few pieces": (1536, 512, 40, 8),
    "odd": (200, 76, 5, 3),
}


def inputs(tokens, shape, dtype):
    hidden, inter, experts, top_k = SHAPES[shape]
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    gate_up = (torch.randn(experts, 2 * inter, hidden, device="cuda") * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, inter, device="cuda") * inter**-0.5).to(dtype)
    logits = torch.randn(tokens, experts, device="cuda").to(dtype)
    return x, logits, gate_up, down, top_k


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 40, 300, 3000])
def test_experts_match_the_reference(tokens, shape, dtype):
    x, logits, gate_up, down, top_k = inputs(tokens, shape, dtype)
    weights, chosen = moe.route(logits, top_k, True)
    want_weights, _ = moe.route.reference(logits, top_k, True)
    torch.testing.assert_close(weights, want_weights)
    got = moe.expert_mlp(x, weights, chosen, gate_up, down, "silu")
    want = moe.expert_mlp.reference(x.float(), weights, chosen, gate_up.float(), down.float(), "silu")
    assert ((got.float() - want).norm() / want.norm()).item() < TOLERANCE[dtype]
    assert torch.equal(moe.expert_mlp(x, weights, chosen, gate_up, down, "silu"), got), "twice the same"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_graph_follows_the_router(dtype):
    x, logits, gate_up, down, top_k = inputs(17, "mixtral-like", dtype)

    def run():
        return moe.expert_mlp(x, *moe.route(logits, top_k, True), gate_up, down, "silu")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        logits.normal_()
        graph.replay()
        assert torch.equal(out, run())


def test_a_token_in_fp32_is_computed_alike_in_any_company():
    x, logits, gate_up, down, top_k = inputs(300, "mixtral-like", torch.float32)
    weights, chosen = moe.route(logits, top_k, True)
    together = kernels.expert_mlp(x, weights, chosen, gate_up, down, "silu")
    for count in (1, 7, 130):
        alone = kernels.expert_mlp(x[:count], weights[:count], chosen[:count], gate_up, down, "silu")
        assert torch.equal(alone, together[:count])
