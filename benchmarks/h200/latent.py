"""Times the kernels of latent attention at DeepSeek-V2-Lite's sizes, and those of a rank of DeepSeek-V3, by tiling.

    python -m benchmarks.h200.latent

decode: one layer's attention of so many requests of so many cached tokens, in a graph; GB/s of latents read once.
prefill: one layer's attention of one prompt; TFLOP/s of the scores and sums that a causal mask leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from vllm.ops import attention
from vllm.ops.triton import latent_attention as kernels
from vllm.step.inputs import GroupInputs, StepInputs

NOPE, ROPE, V, RANK, HEADS, BLOCK = 128, 64, 128, 512, 16, 16


def inputs(queries: list[int], lens: list[int], gathers: bool) -> tuple:
    """Arguments of `attend_latent`."""
    blocks = [-(-n // BLOCK) for n in lens]
    order = torch.randperm(sum(blocks), device="cuda").int() + 1
    table = torch.zeros(len(lens), max(blocks), dtype=torch.int32, device="cuda")
    at = 0
    for r, count in enumerate(blocks):
        table[r, :count] = order[at : at + count]
        at += count
    cache = torch.randn(sum(blocks) + 1, BLOCK, RANK + ROPE, device="cuda").bfloat16()
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    host_lens = np.array(lens, np.int32)
    plan = None
    if gathers:
        found = attention.plan_gathering(np.array(queries), host_lens)
        assert found is not None
        plan = found.on_device(torch.from_numpy(found.pieces).cuda(), torch.from_numpy(found.requests).cuda())
    tokens = int(starts[-1])
    ids = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    group = GroupInputs(ids, table, plan)
    step = StepInputs.of(
        ids, ids, torch.from_numpy(starts).cuda(), torch.from_numpy(host_lens).cuda(), (group,),
        host_query_starts=starts, host_seq_lens=host_lens,
    )  # fmt: skip
    q = torch.randn(tokens, HEADS, NOPE + ROPE, device="cuda").bfloat16()
    kv_b = (torch.randn(HEADS, NOPE + V, RANK, device="cuda") * RANK**-0.5).bfloat16()
    return q, cache, kv_b, NOPE, (NOPE + ROPE) ** -0.5, step, group


def microseconds(run: Callable[[], object], calls: int) -> float:
    """Of one call, in a graph of `calls`."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / 5 / calls


def main() -> None:
    for requests, length in ((1, 300), (1, 8192), (32, 300), (32, 4096), (256, 300), (256, 2048)):
        args = inputs([1] * requests, [length] * requests, False)
        for tile, stages, warps in itertools.product((16, 32, 64), (2, 3), (4, 8)):
            kernels._ABSORBED[16] = (tile, stages, warps)
            try:
                took = microseconds(lambda args=args: kernels.attend_latent(*args), 20)
            except Exception as error:  # what does not fit into a processor
                print("decode", requests, length, (tile, stages, warps), type(error).__name__)
                continue
            rate = requests * length * (RANK + ROPE) * 2 / took / 1e3
            print(f"decode {requests} x {length} {tile, stages, warps}: {took:.1f} us, {rate:.0f} GB/s", flush=True)
    for length in (2048, 8192):
        args = inputs([length], [length], True)
        for rows, tile, stages, warps in itertools.product((64, 128), (32, 64, 128), (2, 3), (4, 8)):
            kernels._EXPANDED = (rows, tile, stages, warps)
            try:
                took = microseconds(lambda args=args: kernels.attend_latent(*args), 3)
            except Exception as error:
                print("prefill", length, (rows, tile, stages, warps), type(error).__name__)
                continue
            rate = HEADS * length**2 * (NOPE + ROPE + V) / took / 1e6
            print(f"prefill {length} {rows, tile, stages, warps}: {took:.0f} us, {rate:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
