"""What it takes to bring tokens to the experts of other copies of an engine and back: all to all copies, or each to
those that have experts of it (`vllm.distributed.exchange`, whose `_WORTH` these figures set).

    python -m benchmarks.exchange --copies 2 --rows 64,512,4096           # gloo
    python -m benchmarks.exchange --copies 2 --device cuda                # NCCL, a GPU for each

Choices of experts are spread evenly. Microseconds, the median of `--turns` in turns; `saved` is what `Exchange.deals`
compares: the bytes that a copy does not have to send, there and back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vllm.distributed.exchange import Exchange


def measure(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One copy; the first one says what was found."""
    cuda = args.device == "cuda"
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.copies
    )
    assert dist.group.WORLD is not None
    exchange = Exchange(rank, args.copies, dist.group.WORLD)
    found = []
    for rows in args.rows:
        exchange.expect(rows)
        generator = torch.Generator(device).manual_seed(rank)
        x = torch.randn(rows, args.hidden, device=device, generator=generator).to(torch.bfloat16)
        copies = torch.randint(args.copies, (rows, args.choices), device=device, generator=generator)
        choices = torch.zeros(rows, 2 * args.choices, dtype=torch.int32, device=device)

        def gather() -> None:
            parts = exchange.gather(x, 1, 0.0), exchange.gather(choices, 1, -1)  # noqa: B023
            exchange.scatter(parts[0], 1)

        def deal() -> None:
            parts = exchange.deal(copies, (x, choices))  # noqa: B023
            exchange.collect(parts[0], rows)  # noqa: B023

        times: dict[str, list[float]] = {"gather": [], "deal": []}
        for turn in range(args.turns + 3):
            for name, run in (("gather", gather), ("deal", deal)):
                if cuda:
                    torch.cuda.synchronize()
                dist.barrier()
                begun = time.perf_counter()
                run()
                if cuda:
                    torch.cuda.synchronize()
                if turn >= 3:
                    times[name].append((time.perf_counter() - begun) * 1e6)
        saved = 2 * rows * (args.copies - 1) * args.hidden * 2 * (1 - 1 / args.copies) ** args.choices
        medians = {name: round(statistics.median(values), 1) for name, values in times.items()}
        found.append({"rows": rows, "saved": int(saved), **medians})
        if rank == 0:
            print(json.dumps(found[-1]), flush=True)
    if rank == 0 and args.out:
        named: dict[str, Any] = {"argv": sys.argv[1:], "rows": found}
        with open(args.out, "w") as file:
            file.write(json.dumps(named, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--choices", type=int, default=2)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[16, 128, 1024, 4096])
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="", help="file for the results")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (args, folder), nprocs=args.copies)


if __name__ == "__main__":
    main()
