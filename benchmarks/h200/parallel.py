"""How much several GPUs bring: the offline benchmark for one device, shares of layers, stages, both, and copies.

    python -m benchmarks.h200.models /tmp/models
    python -m benchmarks.h200.parallel --model /tmp/models/llama-3.1-8b --out /tmp/parallel --layouts 1,tp2,pp2,dp2

A layout names sizes: "tp2pp2" is two stages of two ranks each, "dp2" two copies of the engine. Each layout is an engine
in a process of its own (`benchmarks.h200.offline`, whose files are left in `--out`). The table has, for each case, the
figure and how often it beats the first layout; divided by the number of devices that is the efficiency.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}


def sizes_of(layout: str) -> dict[str, int]:
    """The settings that a layout's name stands for. Raises ValueError for another name."""
    found = re.findall(r"(tp|pp|dp)(\d+)", layout)
    if layout != "1" and "".join(a + b for a, b in found) != layout:
        raise ValueError(f'{layout!r} is no layout. Expected "1", or sizes such as "tp2", "pp2", "tp2pp2", "dp2".')
    return {_SIZES[name]: int(size) for name, size in found}


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
        file = folder / f"{layout}.json"
        command = [
            sys.executable, "-m", "benchmarks.h200.offline", "--model", args.model, "--out", str(file), "--cases",
            args.cases, "--batches", args.batches, "--llm-kwargs", json.dumps({**common, **sizes_of(layout)}),
            *(["--short"] if args.short else []),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:
            print(f"{layout}: the benchmark ended with status {done.returncode}", flush=True)
            continue
        found = figures(json.loads(file.read_text()))
        first = first or found
        for case, value in found.items():
            print(f"{layout:8} {case:24} {value:12.4g} {value / first.get(case, value):8.2f}x", flush=True)


if __name__ == "__main__":
    main()
