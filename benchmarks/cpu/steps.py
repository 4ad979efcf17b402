"""Where the time of a step goes on the CPU: planning, inputs, layers, logits, sampling, results; against the floor.

    OMP_NUM_THREADS=2 python -m benchmarks.cpu.steps /tmp/models/qwen2.5-0.5b --json benchmarks/results/cpu_steps.json

Weights are random (`load_format="dummy"`), decoding is greedy. Shown: the fastest and the median step of each kind. The
floor is the larger of weight bytes / read bandwidth and operations of the products / matrix peak, both measured right
before and right after each case (on a shared host the bandwidth can halve for minutes); attention is not in it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


class Clock:
    """Seconds by part of a step, one entry per step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.now: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count the time within `owner.method` to `part`."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.now[part] += time.perf_counter() - begin

        setattr(owner, method, timed)

    def end_step(self, seconds: float) -> None:
        self.now["step"] = seconds
        self.now["other"] = seconds - sum(v for k, v in self.now.items() if k != "step")
        self.steps.append(dict(self.now))
        self.now.clear()


PARTS = ["plan", "inputs", "layers", "logits", "sample", "result", "outputs", "other", "step"]


def summary(steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Milliseconds by part of the fastest and the median step."""
    return {
        kind: {part: round(pick(s.get(part, 0.0) for s in steps) * 1e3, 3) for part in PARTS}
        for kind, pick in (("fastest", min), ("median", statistics.median))
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'ms':27}" + "".join(f"{part:>9}" for part in PARTS))
    for row in rows:
        for kind in ("fastest", "median"):
            figures = "".join(f"{row[kind][part]:9.2f}" for part in PARTS)
            ratio = row[kind]["step"] / row["floor_ms"]
            print(f"{row['case']:18}{kind:9}{figures}  floor {row['floor_ms']:7.2f} ms  x{ratio:.2f}")
        print(f"{'':27}{row['floors']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.set_defaults(noise=None)  # nothing is dropped
    args = parser.parse_args()
    from benchmarks.cpu.compare import describe
    from benchmarks.cpu.peers import floors
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.folder), load_format="dummy", dtype="bfloat16", max_model_len=2048, max_num_batched_tokens=8192
    )
    engine = llm.llm_engine
    core = engine.core.core
    runner = core._executor.worker.runner
    weights = sum(p.numel() for p in runner.model.parameters())
    config = json.loads((args.folder / "config.json").read_text())
    hidden, layers, ffn = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    in_layers = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn)
    head = config["vocab_size"] * hidden
    print(f"parameters in layers {in_layers / 1e6:.1f} M, head {head / 1e6:.1f} M (held: {weights / 1e6:.1f} M)")

    clock = Clock()
    for owner, method, part in (
        (core.scheduler, "schedule", "plan"),
        (core.scheduler, "apply", "plan"),
        (runner, "_take_in", "inputs"),
        (runner.builder, "build", "inputs"),
        (runner.model, "forward", "layers"),
        (runner, "_logits", "logits"),
        (runner, "_sample", "sample"),
        (core._executor, "collect", "result"),
        (engine.output_processor, "process", "outputs"),
    ):
        clock.watch(owner, method, part)

    def floor(tokens: int, rows: int, limits: dict[str, float]) -> float:
        """Milliseconds."""
        operations = 2 * (tokens * in_layers + rows * head)
        return 1e3 * max(
            (in_layers + head) * 2 / (limits["read_gb_s"] * 1e9), operations / (limits["matmul_gflop_s"] * 1e9)
        )

    def run(count: int, length: int, out: int) -> list[dict[str, float]]:
        clock.steps.clear()
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
        for i in range(count):
            ids = random.choices(range(config["vocab_size"] - 1), k=length)
            engine.add_request(str(i), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            begin = time.perf_counter()
            engine.step()
            clock.end_step(time.perf_counter() - begin)
        return list(clock.steps)

    rows: list[dict[str, Any]] = []

    def measure(cases: Callable[[], list[tuple[str, int, int, list[dict[str, float]]]]]) -> None:
        """Add rows for cases: (name, tokens, rows with logits, steps)."""
        before = floors()
        measured = cases()
        limits = {name: round(max(speed, before[name]), 2) for name, speed in floors().items()}
        for case, tokens, outputs, steps in measured:
            least = round(floor(tokens, outputs, limits), 3)
            rows.append({"case": case, "floors": limits, "floor_ms": least, **summary(steps)})

    def decode(batch: int) -> list[tuple[str, int, int, list[dict[str, float]]]]:
        steps = run(batch, 128, args.steps)
        return [
            (f"prefill {batch} x 128", batch * 128, batch, steps[:1]),
            (f"decode batch {batch}", batch, batch, steps[2:]),
        ]

    def prefill(length: int) -> list[tuple[str, int, int, list[dict[str, float]]]]:
        return [(f"prefill 1 x {length}", length, 1, [run(1, length, 1)[0] for _ in range(3)])]

    for batch in args.batches:
        measure(partial(decode, batch))
    for length in args.prompts:
        measure(partial(prefill, length))
    show(rows)
    if args.json:
        report = {**describe(args), "model": args.folder.name, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
