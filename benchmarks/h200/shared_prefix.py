"""Decode attention over a shared prefix: each request for itself, and the common keys once for a tile of requests.

    python -m benchmarks.h200.shared_prefix --out shared.json            # both, over batches and prefixes
    python -m benchmarks.h200.shared_prefix --out tune.json --tune       # tiles and programs of the shared part
    python -m benchmarks.h200.shared_prefix --out chunks.json --chunks   # prompts behind a cached prefix

Microseconds per layer, from CUDA graphs over as many layers' caches as exceed the L2.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial

import numpy as np
import torch

from benchmarks.h200.timing import graph_ms
from vllm.ops import shared_prefix as sharing
from vllm.ops.attention import AttentionParams, plan_gathering
from vllm.ops.triton import decode_attention as kernels
from vllm.ops.triton.attention import attend, choose_splits
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.worker import prefix_sharing as worker

BLOCK, LAYERS, OWN = 16, 12, 160
SHAPES = {"llama-3.1-8b": (32, 8, 128, False), "qwen3-0.6b": (16, 8, 128, True)}


class Case:
    """`rows` requests that share `prefix` tokens and have OWN of their own."""

    def __init__(self, model: str, rows: int, prefix: int) -> None:
        self.heads, self.kv_heads, self.dim, norm = SHAPES[model]
        self.rows, self.prefix = rows, prefix
        per, own = prefix // BLOCK, OWN // BLOCK + 1
        ids = torch.randperm(per + rows * own, device="cuda").to(torch.int32) + 1
        self.table = torch.cat([ids[:per].expand(rows, per), ids[per:].view(rows, own)], 1).contiguous()
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.positions = torch.full((rows,), prefix + OWN, dtype=torch.int32, device="cuda")
        shape = (len(ids) + 1, 2, self.kv_heads, BLOCK, self.dim)
        cos_sin = torch.randn(prefix + 2 * OWN, self.dim, device="cuda")
        weight = torch.ones(self.dim, device="cuda", dtype=torch.bfloat16) if norm else None
        self.layers = [
            kernels.DecodeAttention(
                self.heads, self.dim**-0.5, torch.randn(shape, device="cuda", dtype=torch.bfloat16), cos_sin, weight,
                weight, 1e-6, 0.0,
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        width = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(rows, self.heads * self.dim, device="cuda", dtype=torch.bfloat16)

    def microseconds(self, shared: sharing.SharedPlan | None) -> float:
        """Per layer."""
        few = self.rows * self.kv_heads <= 64
        width = 16384 // 2 if few else 16384
        splits = choose_splits(self.rows * self.kv_heads, width, None)
        count = self.rows * self.heads * splits
        part = torch.empty(count, self.dim, device="cuda")
        rows = kernels.DecodeRows(
            self.slots, self.positions, [self.table], part, part[:, 0].contiguous(),
            torch.zeros(self.rows * self.kv_heads, dtype=torch.int32, device="cuda"), splits,
            tile=64 if few else 32, warps=2 if few else 1, shared=shared,
        )  # fmt: skip

        def run() -> None:
            for i, layer in enumerate(self.layers):
                kernels.decode_attention(self.qkv, self.out, layer, rows, pdl=i > 0)

        return graph_ms(run) / LAYERS * 1e3

    def plan(self, tile_rows: int | None = None, programs: int | None = None) -> sharing.SharedPlan:
        """The work on the common prefix, cut as usual or otherwise."""
        heads = worker.Heads(self.heads, self.kv_heads, self.dim, 2)
        group = sharing.Group(np.arange(self.rows, dtype=np.int32), self.prefix)
        tiles, height = worker.tiles(heads, self.rows), worker.tile_rows(heads, self.rows)
        if tile_rows is not None and programs is not None:
            members, wanted = tile_rows // (self.heads // self.kv_heads), programs // self.kv_heads
            tiles, height = sharing.Tiles(members, wanted + -(-self.rows // members) + 16, wanted), tile_rows
        work = sharing.cut([group], self.rows, tiles)
        items = np.zeros((tiles.items, 4), np.int32)
        items[: len(work.items)] = work.items
        room = (tiles.items, self.kv_heads, height)
        return sharing.SharedPlan(
            *(torch.from_numpy(x).cuda() for x in (work.rows, work.members, items)),
            torch.empty(*room, self.dim, device="cuda"), torch.empty(room, device="cuda"),
        )  # fmt: skip


def compare(result: dict) -> None:
    """Both ways, over models, batches and prefixes."""
    for model, rows, prefix in itertools.product(SHAPES, (4, 8, 16, 64), (1024, 4096)):
        case = Case(model, rows, prefix)
        alone, shared = case.microseconds(None), case.microseconds(case.plan())
        result[f"{model}/{rows}x{prefix}"] = {"alone_us": alone, "shared_us": shared}
        print(f"{model:14} {rows:3} x {prefix:4}: alone {alone:7.1f} us, shared {shared:6.1f} us a layer", flush=True)


def tune(result: dict) -> None:
    """How the shared part is cut, for the benchmark's prefix row."""
    for model in SHAPES:
        case, found = Case(model, 64, 4096), {}
        found["own keys"] = Case(model, 64, 0).microseconds(None)
        shapes, depths = ((64, 4), (128, 4), (128, 8)), ((64, 2), (64, 3), (128, 2))
        for (height, warps), (tile, stages), programs in itertools.product(shapes, depths, (66, 132, 264)):
            kernels.SHARED_TILE, kernels.SHARED_STAGES, kernels.SHARED_WARPS[height] = tile, stages, warps
            name = f"{height}/{warps}/{tile}/{stages}/{programs}"
            try:
                found[name] = case.microseconds(case.plan(height, programs))
            except Exception as error:  # a tile that does not fit this chip
                print(f"{name}: {type(error).__name__}: {str(error)[:80]}")
        result[model] = found
        best = sorted(found.items(), key=lambda pair: pair[1])
        print(model, "rows/warps/keys/stages/programs -> us:", [(k, round(us, 1)) for k, us in [*best[:9], best[-1]]])


def chunks(result: dict) -> None:
    """64 chunks of 128 tokens behind 4096 cached ones: through the block table, and with common keys gathered once."""
    query, prefix, rows = 128, 4096, 64
    for model, (heads, kv_heads, dim, _) in SHAPES.items():
        per, own = prefix // BLOCK, query // BLOCK
        ids = torch.randperm(per + rows * own, device="cuda").to(torch.int32) + 1
        table = torch.cat([ids[:per].expand(rows, per), ids[per:].view(rows, own)], 1).contiguous()
        cache = torch.randn(len(ids) + 1, 2, kv_heads, BLOCK, dim, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(rows * query, heads, dim, device="cuda", dtype=torch.bfloat16)
        starts, lens = np.arange(rows + 1, dtype=np.int32) * query, np.full(rows, prefix + query, np.int32)
        found = plan_gathering(np.diff(starts), lens, [sharing.Group(np.arange(rows), prefix)])
        if found is None:
            raise RuntimeError("The batch is not one that gathers.")
        plan = found.on_device(torch.from_numpy(found.pieces).cuda(), torch.from_numpy(found.requests).cuda())
        work = 4 * heads * dim * rows * query * (prefix + query / 2)
        nothing = torch.zeros(0, device="cuda")
        for name, chosen in (("paged", None), ("gathered", plan)):
            group = GroupInputs(nothing, table, chosen)
            step = StepInputs.of(
                nothing, nothing, torch.from_numpy(starts).cuda(), torch.from_numpy(lens).cuda(), (group,),
                host_query_starts=starts, host_seq_lens=lens,
            )  # fmt: skip
            params = AttentionParams(dim**-0.5)
            ms = graph_ms(partial(attend, q, cache, params, step, group))
            result[f"{model}/{name}"] = {"us": ms * 1e3, "TFLOPs": work / ms / 1e9}
            print(
                f"{model:14} {rows} x {query} behind {prefix}, {name}: {ms * 1e3:.0f} us, {work / ms / 1e9:.0f} TFLOP/s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--chunks", action="store_true")
    args = parser.parse_args()
    result: dict = {}
    (tune if args.tune else chunks if args.chunks else compare)(result)
    with open(args.out, "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
