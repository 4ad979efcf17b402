"""Step times of the engine core alone (scheduler, worker, device; no front end), with random weights.

    python -m benchmarks.h200.core_step --model /tmp/models/qwen3-0.6b --out core.json [--profile]

decode: batches of requests of 128 tokens; ms = (T(256 out) - T(32 out)) / 224, as the offline benchmark counts.
prefill: one batch of prompts, one token out.  --profile prints where the device's time goes in each case.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.core import EngineCore
from vllm.step.messages import CoreRequest


class Core:
    """An engine core fed with random prompts."""

    def __init__(self, model: str, **args: object) -> None:
        start = time.perf_counter()
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 10240}
        config = EngineArgs(model=model, **{**settings, **args}).create_engine_config()
        self.core = EngineCore(config)
        self.start_seconds = time.perf_counter() - start
        self.vocab = config.model_config.logits_width
        self.rng = random.Random(0)
        self.count = 0

    def run(self, requests: int, tokens: int, out: int, **sampling: object) -> float:
        """Seconds from handing over `requests` prompts of `tokens` tokens until the last of `out` tokens of each."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": out, "ignore_eos": True, **sampling})
        batch = []
        for _ in range(requests):
            prompt = self.rng.choices(range(self.vocab), k=tokens)
            batch.append(CoreRequest(str(self.count), prompt, params, seed=self.count))
            self.count += 1
        start = time.perf_counter()
        self.core.add_requests(batch)
        got = 0
        while self.core.has_unfinished():
            for output in self.core.step():
                if output.error:
                    raise RuntimeError(output.error)
                got += len(output.new_token_ids)
        seconds = time.perf_counter() - start
        if got != requests * out:
            raise RuntimeError(f"{got} tokens came, {requests * out} were asked for.")
        return seconds


def profile(core: Core, requests: int, tokens: int, out: int, **sampling: object) -> None:
    """Print the kernels of one run, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    with trace(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        core.run(requests, tokens, out, **sampling)
    rows = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows)
    print(f"--- {requests} x {tokens}/{out}: device {total / 1e3:.2f} ms")
    for e in rows[:14]:
        if e.self_device_time_total:
            print(
                f"{e.self_device_time_total / 1e3:9.3f} ms {e.count:6d} x "
                f"{e.self_device_time_total / e.count:9.2f} us  {e.key[:90]}"
            )
    host = sorted(found.key_averages(), key=lambda e: -e.self_cpu_time_total)
    for e in host[:6]:
        print(f"   host {e.self_cpu_time_total / 1e3:9.3f} ms {e.count:6d}  {e.key[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--prefill", default="1x8192,16x2048")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--quantization", default=None)
    args = parser.parse_args()
    core = Core(args.model, enforce_eager=args.eager, quantization=args.quantization)
    result: dict = {
        "model": args.model,
        "start_s": core.start_seconds,
        "decode_ms": {},
        "sampled_ms": {},
        "prefill_s": {},
    }
    print(f"start {core.start_seconds:.2f} s", flush=True)
    t = core.run(1, 16, 2)
    print(f"first request {t:.3f} s", flush=True)
    kinds = {"decode_ms": {}, "sampled_ms": {"temperature": 0.8, "top_p": 0.95, "top_k": 50}}
    for batch in (int(b) for b in args.batches.split(",") if b):
        for name, sampling in kinds.items():
            first = core.run(batch, 128, 16, **sampling)
            slopes = [
                (core.run(batch, 128, 256, **sampling) - core.run(batch, 128, 32, **sampling)) / 0.224 for _ in range(2)
            ]
            result[name][batch] = {"ms": min(slopes), "all": slopes, "first_s": first}
            print(
                name,
                batch,
                {k: v if isinstance(v, list) else round(v, 4) for k, v in result[name][batch].items()},
                flush=True,
            )
        if args.profile:
            profile(core, batch, 128, 16)
    for case in (c for c in args.prefill.split(",") if c):
        requests, tokens = (int(n) for n in case.split("x"))
        first = core.run(requests, tokens, 1)
        times = [core.run(requests, tokens, 1) for _ in range(4)]
        result["prefill_s"][case] = {"s": statistics.median(times), "all": times, "first_s": first}
        print("prefill", case, [round(t, 4) for t in times], f"first {first:.3f}", flush=True)
        if args.profile:
            profile(core, requests, tokens, 1)
    with open(args.out, "w") as f:
        json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
