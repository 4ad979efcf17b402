"""How much several GPUs bring: the offline benchmark for one device, shares of layers, stages, both, and copies.

    python -m benchmarks.h200.models /tmp/models
    python -m benchmarks.h200.parallel --model /tmp/models/llama-3.1-8b --out /tmp/parallel --layouts 1,tp2,pp2,dp2

A layout names sizes: "tp2pp2" is two stages of two ranks each, "dp2" two copies of the engine, which run side by side,
each with requests of its own: their figures are added up. Each engine is a process of its own
(`benchmarks.h200.offline`, whose files are left in `--out`). The table has, for each case, tokens per second and how
often that beats the first layout; divided by the number of devices that is the efficiency.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}


def sizes_of(layout: str) -> tuple[dict[str, int], int]:
    """The settings that a layout's name stands for, and the number of copies. Raises ValueError for another name."""
    found = re.findall(r"(tp|pp|dp)(\d+)", layout)
    if layout != "1" and "".join(a + b for a, b in found) != layout:
        raise ValueError(f'{layout!r} is no layout. Expected "1", or sizes such as "tp2", "pp2", "tp2pp2", "dp2".')
    sizes = {_SIZES[name]: int(size) for name, size in found if name != "dp"}
    return sizes, next((int(size) for name, size in found if name == "dp"), 1)


def figures(result: dict[str, Any]) -> dict[str, float]:
    """Case -> tokens per second; of start-up the seconds."""
    found = {}
    for case, entries in result["cases"].items():
        for name, values in entries.items():
            if "step_ms" in values:
                found[f"{case} {name}"] = int(name.removeprefix("batch")) / values["step_ms"] * 1e3
            elif "tok_s" in values:
                found[f"{case} {name}"] = values["tok_s"]
            elif "output_tok_s" in values:
                found[f"{case} {name}"] = values["output_tok_s"]
    found["start-up, s"] = result["startup"]["total_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--layouts", default="1,tp2,pp2,dp2")
    parser.add_argument("--cases", default="decode,prefill,throughput")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--short", action="store_true", help="fewer repetitions")
    parser.add_argument("--llm-kwargs", default="{}", help="JSON, for every layout")
    args = parser.parse_args()
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    common = json.loads(args.llm_kwargs)
    first: dict[str, float] = {}
    for layout in args.layouts.split(","):
        sizes, copies = sizes_of(layout)
        each, running, files = math.prod(sizes.values()), [], []
        for copy in range(copies):
            files.append(folder / f"{layout}-{copy}.json")
            command = [
                sys.executable, "-m", "benchmarks.h200.offline", "--model", args.model, "--out", str(files[-1]),
                "--cases", args.cases, "--batches", args.batches, "--seed", str(copy),
                "--llm-kwargs", json.dumps({**common, **sizes}), *(["--short"] if args.short else []),
            ]  # fmt: skip
            devices = ",".join(str(copy * each + i) for i in range(each))
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment))
        states = [process.wait() for process in running]
        if any(states):
            print(f"{layout}: the benchmark failed", flush=True)
            continue
        parts = [figures(json.loads(file.read_text())) for file in files]
        found = {case: sum(part[case] for part in parts) for case in parts[0]}
        found["start-up, s"] /= copies
        first = first or found
        for case, value in found.items():
            print(f"{layout:8} {case:24} {value:12.4g} {value / first.get(case, value):8.2f}x", flush=True)


if __name__ == "__main__":
    main()
