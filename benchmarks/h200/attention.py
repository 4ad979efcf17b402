"""Attention alone: TFLOP/s of prefill and GB/s of decode over a grid of shapes, beside the chip's own ceilings.

    python -m benchmarks.h200.attention --out attention.json

Prefill in three forms: `own`, a prompt without anything cached, whose keys are read where the step has them;
`gathered`, 2048 new tokens behind a cached prefix, whose keys are copied out of their blocks first (part of the time);
`paged`, through the block table, which is left for what the others do not cover (windows, soft-caps, few queries).

Inputs are random, caches larger than the L2, block tables shuffled; times are medians of device events around CUDA
graph replays of several calls on different caches.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.h200.timing import ceilings, graph_ms
from vllm.ops.attention import AttentionParams, dense_runs, plan_gathering
from vllm.ops.triton.attention import attend
from vllm.step.inputs import GroupInputs, StepInputs

HEADS, KV_HEADS = 32, 8
NEW_TOKENS = 2048  # of a prompt behind a cached prefix


def batch(requests: int, query: int, context: int, block: int) -> tuple[StepInputs, int]:
    """`requests` sequences of `context` tokens, the last `query` of them new."""
    per = -(-context // block)
    table = (torch.randperm(requests * per, device="cuda") + 1).view(requests, per).to(torch.int32)
    starts = np.arange(requests + 1, dtype=np.int32) * query
    lens = np.full(requests, context, np.int32)
    step = StepInputs.of(
        token_ids=torch.zeros(requests * query, dtype=torch.int64, device="cuda"),
        positions=torch.zeros(requests * query, dtype=torch.int64, device="cuda"),
        query_starts=torch.from_numpy(starts).cuda(),
        seq_lens=torch.from_numpy(lens).cuda(),
        logits_rows=torch.zeros(requests, dtype=torch.int64, device="cuda"),
        groups=(GroupInputs(torch.zeros(0, dtype=torch.int64, device="cuda"), table),),
        host_query_starts=starts,
        host_seq_lens=lens,
    )
    return step, requests * per + 1


def gather_plan(step: StepInputs, own: bool) -> object:
    """The plan that the engine makes for this step."""
    lens = step.host_seq_lens
    queries = np.diff(step.host_query_starts).astype(np.int32)
    found = plan_gathering(queries, lens)
    if found is None:
        raise ValueError("The engine would not gather here.")
    pieces, requests = torch.from_numpy(found.pieces).cuda(), torch.from_numpy(found.requests).cuda()
    return found.on_device(pieces, requests, dense_runs(queries, lens) if own else ())


def measure(
    requests: int, query: int, context: int, head_dim: int, block: int, dtype: torch.dtype, form: str = "paged"
) -> float:
    """Milliseconds of one call."""
    step, blocks = batch(requests, query, context, block)
    group = step.groups[0]
    if form != "paged":
        group = replace(group, plan=gather_plan(step, own=form == "own"))
    size = 2 * blocks * KV_HEADS * block * head_dim
    copies = max(1, min(8, int(4e8 // (2 * size))))
    caches = [
        torch.randn(blocks, 2, KV_HEADS, block, head_dim, device="cuda", dtype=torch.bfloat16).to(dtype)
        for _ in range(copies)
    ]
    fused = torch.randn(requests * query, HEADS + 2 * KV_HEADS, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], 1)
    params = AttentionParams(scale=head_dim**-0.5)

    def run() -> None:
        for cache in caches:
            attend(q, cache, params, step, group, (k, v) if form == "own" else None)

    return graph_ms(run, reps=7) / copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    args = parser.parse_args()
    top = ceilings()
    result: dict = {"ceilings": top, "block_size": args.block, "prefill": {}, "decode": {}}
    for head_dim in (64, 128):
        for tokens in (1024, 8192) if args.quick else (1024, 2048, 4096, 8192, 16384, 32768):
            for form in ("own", "gathered", "paged"):
                new = min(tokens, NEW_TOKENS) if form == "gathered" else tokens
                if form == "gathered" and (tokens == new or tokens > 4 * new):
                    continue  # nothing is cached, or so much that the engine would not gather
                ms = measure(1, new, tokens, head_dim, args.block, torch.bfloat16, form)
                pairs = new * (tokens - new) + new * (new + 1) / 2
                rate = 4 * HEADS * head_dim * pairs / ms / 1e9
                result["prefill"][f"d{head_dim}/{form}/{new} of {tokens}"] = {
                    "ms": ms,
                    "tflops": rate,
                    "of_ceiling": rate / top["matmul_TFLOPs"],
                }
    for requests in (1, 32, 256):
        for context in (1024, 4096) if args.quick else (1024, 4096, 16384, 65536):
            if requests * context > 4e6:
                continue
            for dtype in (torch.bfloat16, torch.float8_e4m3fn):
                ms = measure(requests, 1, context, 128, args.block, dtype)
                rate = 2 * requests * context * KV_HEADS * 128 * dtype.itemsize / ms / 1e6
                name = f"{'fp8' if dtype.itemsize == 1 else 'bf16'}/{requests}x{context}"
                result["decode"][name] = {"ms": ms, "gbs": rate, "of_ceiling": rate / top["read_GBs"]}
    for part in ("prefill", "decode"):
        for name, row in result[part].items():
            print(f"{part:8} {name:28} " + "  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
    with open(args.out, "w") as f:
        json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
