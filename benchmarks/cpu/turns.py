"""Two source trees side by side: attention and the cache write on the CPU, in turns (old, new, new, old, ...).

    python -m benchmarks.cpu.turns --old OLD_TREE --new . --pairs 40 --json benchmarks/results/cpu_turns.json

Each tree runs in a process of its own, with its own native library, and computes one case when it is its turn, the same
number of times. Processor time counts, so use one thread (OMP_NUM_THREADS=1). Shown: the median of the ratios new / old
of neighbouring turns, with the interval that holds it at 95 % (of the sign test), so that what others do to the machine
meets both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

_CASES = (
    "decode 1 x 2048",
    "decode 1 x 32768",
    "decode 32 x 256",
    "decode 32 x 2048",
    "prefill 1 x 1024",
    "write 1024",
)
_SECONDS = 0.06  # of one turn


def serve() -> None:
    """A tree's side: answer each case's number with processor seconds per call."""
    import time

    import torch

    from benchmarks import cpu_ops
    from vllm.ops.cpu import library
    from vllm.ops.cpu.native import NativeKernels

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    path = library.find()
    if path is None:
        raise SystemExit("There is no native library for this processor.")
    kernels = NativeKernels(library.load(path))
    dtype = torch.bfloat16
    calls: dict[str, Any] = {
        case.name.removeprefix("attention "): case.candidates["ours"]
        for case in cpu_ops.attention_cases(kernels, dtype)
    }
    cache, _, group = cpu_ops.paged_batch([1024], [1024], dtype, kernels)
    k, v = (torch.randn(1024, cpu_ops.KV_HEADS, cpu_ops.HEAD_DIM).to(dtype) for _ in range(2))
    calls["write 1024"] = lambda: kernels.write_kv(k, v, cache, group.slot_mapping)
    times: dict[str, int] = {}
    for line in sys.stdin:
        call = calls[name := line.strip()]
        if name not in times:
            call()
            begin = time.process_time()
            call()
            times[name] = max(1, round(_SECONDS / (time.process_time() - begin)))
        begin = time.process_time()
        for _ in range(times[name]):
            call()
        print((time.process_time() - begin) / times[name], flush=True)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Where the median lies with 95 %, by the order of the values alone."""
    n = len(ratios)
    ordered = sorted(ratios)
    k = 0
    while sum(math.comb(n, i) for i in range(k + 1)) / 2**n < 0.025:
        k += 1
    return ordered[max(k - 1, 0)], ordered[n - max(k, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--cases", nargs="+", default=list(_CASES))
    parser.add_argument("--serve", action="store_true", help="be one tree's side (not for users)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    sides = []
    for tree in (args.old, args.new):
        # this file from the tree that it was started from, everything else from the tree that is measured
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        program = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        sides.append(
            subprocess.Popen(
                program, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )

    def turn(side: int, case: str) -> float:
        to, back = sides[side].stdin, sides[side].stdout
        assert to is not None
        assert back is not None
        to.write(case + "\n")
        to.flush()
        return float(back.readline())

    rows = []
    for case in args.cases:
        for side in (0, 1):
            turn(side, case)
        found: list[list[float]] = [[], []]
        for i in range(args.pairs):
            for side in (0, 1) if i % 2 == 0 else (1, 0):
                found[side].append(turn(side, case))
        ratios = [new / old for old, new in zip(*found, strict=True)]
        low, high = interval(ratios)
        rows.append(
            {
                "case": case,
                "old_ms": round(statistics.median(found[0]) * 1e3, 4),
                "new_ms": round(statistics.median(found[1]) * 1e3, 4),
                "ratio": round(statistics.median(ratios), 4),
                "interval": [round(low, 4), round(high, 4)],
            }
        )
        print(rows[-1], flush=True)
    for process in sides:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
    if args.json:
        from benchmarks.cpu.compare import describe

        args.noise = None
        args.json.write_text(json.dumps({**describe(args), "pairs": args.pairs, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
