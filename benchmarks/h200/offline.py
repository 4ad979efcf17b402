"""The offline benchmark: decode, prefill, prefix caching and throughput of an engine with vLLM's Python API.

    python -m benchmarks.h200.models /tmp/models
    python -m benchmarks.h200.offline --model /tmp/models/qwen3-0.6b --out result.json

Weights are random, prompts are token ids, nothing is tokenized. Works with any engine whose module (`--engine`) has
`LLM` and `SamplingParams`. Every repetition draws fresh prompts; each case runs once before it is timed (`first_s`,
where compilation shows). The clock is the host's, around `generate()`; the length of every output is checked.

decode      batches of 1, 32, 256; 128 tokens in; step_ms = (T(256 out) - T(32 out)) / 224
prefill     1 x 8192 and 16 x 2048 tokens in, one out
prefix      64 requests of 4096 + 128 tokens, 64 out: the 4096 shared by none, by all (cold), by all and cached (warm)
throughput  1000 requests, 512 in, 256 out, handed over at once; sampled: the same with temperature, top-p and top-k
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import random
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


class Bench:
    """An engine under test and what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rng = random.Random(args.seed)
        config = json.loads((Path(args.model) / "config.json").read_text())
        self.vocab = range(100, config["vocab_size"] - 512)  # special tokens sit at the ends
        self.result: dict[str, Any] = {
            "engine": args.engine,
            "model": Path(args.model).name,
            "commit": args.commit,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "argv": sys.argv[1:],
            "host": {"python": platform.python_version(), "machine": platform.machine()},
            "cases": {},
        }

    def start(self) -> None:
        """Import, build, first request: the start-up row."""
        begin = time.perf_counter()
        module = importlib.import_module(self.args.engine)
        llm_class, self.params_class = module.LLM, module.SamplingParams
        imported = time.perf_counter()
        kwargs = {
            "model": self.args.model,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": self.args.max_model_len,
            "seed": self.args.seed,
            **json.loads(self.args.llm_kwargs),
        }
        self.llm = llm_class(**kwargs)
        built = time.perf_counter()
        self.generate(self.prompts(1, 16), 2)
        end = time.perf_counter()
        self.result["startup"] = {
            "import_s": imported - begin,
            "llm_init_s": built - imported,
            "first_request_s": end - built,
            "total_s": end - begin,
        }
        import torch

        self.result["host"] |= {
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        }
        self.result["llm_kwargs"] = kwargs
        self.save()

    def save(self) -> None:
        Path(self.args.out).write_text(json.dumps(rounded(self.result), indent=1))

    def put(self, case: str, key: str, value: Any) -> None:
        self.result["cases"].setdefault(case, {})[key] = value
        shown = {k: v for k, v in rounded(value).items() if not isinstance(v, (list, dict))}
        print(f"[bench] {case:10} {key:14} {shown}", flush=True)
        self.save()

    def tokens(self, n: int) -> list[int]:
        return self.rng.choices(self.vocab, k=n)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [self.tokens(length) for _ in range(count)]

    def generate(self, prompts: list[list[int]], out: int, **sampling: Any) -> float:
        """Seconds that `generate()` took."""
        params = self.params_class(
            **{"temperature": 0.0, "max_tokens": out, "ignore_eos": True, "detokenize": False, **sampling}
        )
        requests = [{"prompt_token_ids": p} for p in prompts]
        begin = time.perf_counter()
        outs = self.llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        lengths = {len(o.outputs[0].token_ids) for o in outs}
        if len(outs) != len(prompts) or lengths != {out}:
            raise RuntimeError(f"{len(outs)} outputs of lengths {sorted(lengths)}, expected {len(prompts)} of {out}.")
        return seconds

    def decode(self) -> None:
        for batch in (int(b) for b in self.args.batches.split(",")):
            first = self.generate(self.prompts(batch, 128), 256)
            reps = 5 if batch == 1 else 3
            long = [self.generate(self.prompts(batch, 128), 256) for _ in range(reps)]
            short = [self.generate(self.prompts(batch, 128), 32) for _ in range(reps)]
            step = (statistics.median(long) - statistics.median(short)) / 224 * 1e3
            self.put(
                "decode", f"batch{batch}", {"step_ms": step, "t_long_s": long, "t_short_s": short, "first_s": first}
            )

    def prefill(self) -> None:
        for count, length in ((1, 8192), (16, 2048)):
            first = self.generate(self.prompts(count, length), 1)
            times = [self.generate(self.prompts(count, length), 1) for _ in range(5 if count == 1 else 3)]
            median = statistics.median(times)
            self.put(
                "prefill",
                f"{count}x{length}",
                {"ttft_s": median, "tok_s": count * length / median, "t_s": times, "first_s": first},
            )

    def prefix(self) -> None:
        count, shared, own, out = 64, 4096, 128, 64

        def sharing(prefix: list[int]) -> list[list[int]]:
            return [prefix + self.tokens(own) for _ in range(count)]

        first = self.generate(sharing(self.tokens(shared)), out)
        times: dict[str, list[float]] = {"unshared": [], "shared_cold": [], "shared_warm": []}
        for _ in range(3):
            if not self.args.short:
                times["unshared"].append(self.generate(self.prompts(count, shared + own), out))
            prefix = self.tokens(shared)
            times["shared_cold"].append(self.generate(sharing(prefix), out))
            times["shared_warm"].append(self.generate(sharing(prefix), out))
        medians = {f"{name}_s": statistics.median(t) for name, t in times.items() if t}
        self.put("prefix", f"{count}x({shared}+{own})", {**medians, "t_s": times, "first_s": first})

    def throughput(self, case: str = "throughput", reps: int = 2, **sampling: Any) -> None:
        count, n_in, n_out = 1000, 512, 256
        first = self.generate(self.prompts(64, n_in), 16, **sampling)
        times = [
            self.generate(self.prompts(count, n_in), n_out, **sampling) for _ in range(1 if self.args.short else reps)
        ]
        best = min(times)
        values = {"best_s": best, "output_tok_s": count * n_out / best, "total_tok_s": count * (n_in + n_out) / best}
        self.put(
            case,
            f"{count}x{n_in}/{n_out}",
            {**values, "t_s": times, "warmup_s": first, "sampling": sampling or "greedy"},
        )

    def sampled(self) -> None:
        self.throughput("sampled", reps=1, **SAMPLED)


def rounded(value: Any) -> Any:
    """Five significant digits, everywhere."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", help="module with LLM and SamplingParams")
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--out", required=True)
    parser.add_argument("--cases", default="decode,prefill,prefix,throughput,sampled")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--max-model-len", type=int, default=10240)
    parser.add_argument("--llm-kwargs", default="{}", help="JSON, over the defaults given to LLM()")
    parser.add_argument("--short", action="store_true", help="fewer repetitions")
    parser.add_argument("--commit", default="")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bench = Bench(args)
    bench.start()
    print("[bench] startup", rounded(bench.result["startup"]), flush=True)
    for case in args.cases.split(","):
        try:
            getattr(bench, case)()
        except Exception as error:  # one case must not cost the others
            bench.put(case, "error", {"message": f"{type(error).__name__}: {error}"[:2000]})
    bench.save()


if __name__ == "__main__":
    main()
