"""How much several GPUs bring: the offline benchmark for one device, shares of layers, stages, both, and copies.

    python -m benchmarks.h200.models /tmp/models
    python -m benchmarks.h200.parallel --model /tmp/models/llama-3.1-8b --out /tmp/parallel --layouts 1,tp2,pp2,dp2

A layout names sizes: "tp2pp2" is two stages of two ranks each, "tp2ep" deals out whole experts, "tp2ray" starts its
ranks through Ray, "dp2" is two copies of the engine, which run side by side, each with requests of its own: their
figures are added up. Each engine is a process of its own (`benchmarks.h200.offline`, whose files and logs are left in
`--out`). The table has, for each case, tokens per second and how often that beats the first layout that `--out` has
results of; divided by the number of devices that is the efficiency.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
_SWITCHES: dict[str, dict[str, Any]] = {
    "ep": {"enable_expert_parallel": True},
    "ray": {"distributed_executor_backend": "ray"},
}


@dataclass(frozen=True)
class Layout:
    """settings: of each engine.   copies: engines.   each: devices of one."""

    settings: dict[str, Any]
    copies: int
    each: int

    @classmethod
    def of(cls, name: str) -> Layout:
        """What a layout's name stands for. Raises ValueError for another name."""
        sizes = re.findall(r"(tp|pp|dp)(\d+)", name)
        rest = re.sub(r"(tp|pp|dp)\d+", "", name)
        switches = [] if name == "1" else re.findall("|".join(_SWITCHES), rest)
        if name != "1" and "".join(switches) != rest:
            raise ValueError(f'{name!r} is no layout. Expected "1", or sizes such as "tp2", "pp2", "tp2ep", "dp2".')
        settings: dict[str, Any] = {_SIZES[key]: int(size) for key, size in sizes if key != "dp"}
        each = math.prod(settings.values())
        for switch in switches:
            settings |= _SWITCHES[switch]
        return cls(settings, next((int(size) for key, size in sizes if key == "dp"), 1), each)


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


def run(name: str, args: argparse.Namespace, folder: Path) -> dict[str, float] | None:
    """The figures of a layout, added up over its copies; None if it failed, with the end of the log on the screen."""
    layout, running = Layout.of(name), []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    for copy in range(layout.copies):
        command = [
            sys.executable, "-m", "benchmarks.h200.offline", "--model", args.model,
            "--out", str(folder / f"{name}-{copy}.json"), "--cases", args.cases, "--batches", args.batches,
            "--seed", str(copy), "--llm-kwargs", json.dumps({**json.loads(args.llm_kwargs), **layout.settings}),
            *(["--short"] if args.short else []),
        ]  # fmt: skip
        chosen = visible[copy * layout.each : (copy + 1) * layout.each]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(chosen)}
        with (folder / f"{name}-{copy}.log").open("w") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    deadline = time.monotonic() + args.timeout
    for copy, process in enumerate(running):
        try:
            failed = process.wait(max(0.0, deadline - time.monotonic())) != 0
        except subprocess.TimeoutExpired:
            failed = True
        if failed:
            for other in running:
                other.kill()
                other.wait()
            print(f"{name}: the benchmark failed, or took more than {args.timeout} s", flush=True)
            print((folder / f"{name}-{copy}.log").read_text()[-3000:], file=sys.stderr, flush=True)
            return None
    return results(name, layout, folder)


def results(name: str, layout: Layout, folder: Path) -> dict[str, float]:
    """The figures of a layout that has run."""
    parts = [figures(json.loads((folder / f"{name}-{copy}.json").read_text())) for copy in range(layout.copies)]
    found = {case: sum(part[case] for part in parts) for case in parts[0]}
    found["start-up, s"] /= layout.copies
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--layouts", default="1,tp2,pp2,dp2")
    parser.add_argument("--against", default="1", help="the layout to compare with, if --out has results of it")
    parser.add_argument("--cases", default="decode,prefill,throughput")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--short", action="store_true", help="fewer repetitions")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each layout")
    parser.add_argument("--llm-kwargs", default="{}", help="JSON, for every layout")
    parser.add_argument("--table", default="", help="file for the figures of all layouts, those of before included")
    parser.add_argument("--commit", default="", help="what was measured, for that file")
    args = parser.parse_args()
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    first: dict[str, float] = {}
    if (folder / f"{args.against}-0.json").exists():
        first = results(args.against, Layout.of(args.against), folder)
    for name in args.layouts.split(","):
        found = run(name, args, folder)
        if found is None:
            continue
        first = first or found
        for case, value in found.items():
            print(f"{name:8} {case:24} {value:12.4g} {value / first.get(case, value):8.2f}x", flush=True)
        if args.table:
            note(Path(args.table), f"{Path(args.model).name} {name}", args.commit, found, first, Layout.of(name))


def note(path: Path, key: str, commit: str, found: dict[str, float], first: dict[str, float], layout: Layout) -> None:
    """Put a layout's figures in a file: each case, how often it beats the first layout, and that per device."""
    table = json.loads(path.read_text()) if path.exists() else {}
    devices = layout.copies * layout.each
    table[key] = {"commit": commit, "devices": devices, "cases": {}}
    for case, value in found.items():
        entry = table[key]["cases"][case] = {"value": float(f"{value:.5g}")}
        if case in first and not case.startswith("start-up"):
            entry["times"] = round(value / first[case], 3)
            entry["efficiency"] = round(value / first[case] / devices, 3)
    path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
