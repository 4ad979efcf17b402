"""Whether tokens leave the server one by one: `python -m benchmarks.stream_events [--shape qwen3-0.6b] [--out FILE]`.

One client streams answers from an otherwise idle server and notes when each event comes; beside it stands the time of a
step of the offline engine that decodes one request of the same length. Shown are events per token, the median and the
99th percentile of the gaps between events, and the median gap as a multiple of the median step. `--shape` takes random
weights of a public model's shape (for a GPU); without it the demo model answers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.attacks import serving

PROMPT = "Once upon a time there was a stream of events"


def offline_steps(model: str, options: dict[str, Any], tokens: int, rounds: int) -> list[float]:
    """Seconds between the tokens of one request, the engine being in this process."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(EngineArgs(model=model, disable_log_stats=True, **options))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    found: list[float] = []
    for i in range(rounds + 1):
        engine.add_request(str(i), PROMPT, params)
        times: list[float] = []
        while engine.has_unfinished_requests():
            if engine.step():
                times.append(time.perf_counter())
        if i:  # the first round compiles and captures
            found += [b - a for a, b in zip(times, times[1:], strict=False)]
    return found


def streamed(port: int, model: str, tokens: int, rounds: int) -> tuple[int, list[float]]:
    """Events with text, and the seconds between them, of `rounds` streams."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    data = json.dumps({**body, "temperature": 0})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    events, gaps = 0, []
    for i in range(rounds + 1):
        connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read()[:300]!r}")
        times = []
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
        if i:
            events += len(times)
            gaps += [b - a for a, b in zip(times, times[1:], strict=False)]
    connection.close()
    return events, gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="random weights of this shape (benchmarks/h200/models.py)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/models"), help="where its files go")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    args = parser.parse_args()
    model, options, flags = "demo", {}, []
    if args.shape:
        from benchmarks.h200.structured_output import write_model

        model = str(write_model(args.folder, args.shape))
        options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048}
        flags = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        steps = pool.apply(offline_steps, (model, options, args.tokens, args.rounds))
    with serving(*flags, "--served-model-name", "m", model=model) as (port, _):
        events, gaps = streamed(port, "m", args.tokens, args.rounds)
    figures = {
        "model": args.shape or "demo",
        "tokens": args.tokens * args.rounds,
        "events": events,
        "gap_ms": {"p50": statistics.median(gaps) * 1e3, "p99": statistics.quantiles(gaps, n=100)[98] * 1e3},
        "step_ms": {"p50": statistics.median(steps) * 1e3, "p99": statistics.quantiles(steps, n=100)[98] * 1e3},
        "gap_to_step": statistics.median(gaps) / statistics.median(steps),
    }
    print(json.dumps(figures, indent=1))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
