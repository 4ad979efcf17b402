"""What it costs that Ray has placed the ranks: the time of decode steps under `mp` and under `ray`, in turns.

    python -m benchmarks.ray_against_mp --tensor-parallel-size 2

Needs Ray (`pip install '.[ray]'`). Two engines, each in a process of its own, one of which starts a cluster on this
host, take turns of about a second, so that what else happens on the host meets both: `--batches` of requests of 32
tokens, `--tokens` out of each, `--turns` times. With GPUs, give each engine its own (`--devices 0,1:2,3`), or let both
use the same ones, with caches so small that both fit (`--num-gpu-blocks-override`), and say `--model`; on the CPU a
small model with random weights is written, whose steps take so little that what each of them costs shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """Answer each line of the standard input with the milliseconds that a step takes."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=64 + args.tokens,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        distributed_executor_backend=args.backend,
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
    )

    def seconds(batch: int, tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 500 for j in range(32)]} for i in range(batch)]
        begun = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begun

    few, many = args.tokens // 8, args.tokens
    for batch in args.batches:
        seconds(batch, many)
    print("FOUND ready", flush=True)
    for line in sys.stdin:
        batch = int(line)
        print("FOUND", (seconds(batch, many) - seconds(batch, few)) / (many - few) * 1e3, flush=True)
    llm.llm_engine.model_executor.shutdown()


class Engine:
    """A process with an engine."""

    def __init__(self, backend: str, argv: list[str], devices: str) -> None:
        command = [sys.executable, "-m", "benchmarks.ray_against_mp", *argv, "--backend", backend]
        environment = {**os.environ, "RAY_ADDRESS": "local", **({"CUDA_VISIBLE_DEVICES": devices} if devices else {})}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("FOUND "):
                return line.removeprefix("FOUND ")
        raise RuntimeError("The engine has ended; what it said is above.")

    def step_ms(self, batch: int) -> float:
        assert self._process.stdin is not None
        print(batch, file=self._process.stdin, flush=True)
        return float(self.answer())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder with config.json; default: a small one")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=30, help="of each engine")
    parser.add_argument("--devices", default="", help="CUDA_VISIBLE_DEVICES of both, with a colon between")
    parser.add_argument("--num-gpu-blocks-override", type=int)
    parser.add_argument("--out", default="", help="file for the results")
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend:
        measure(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        argv = sys.argv[1:]
        if not args.model:
            (Path(folder) / "config.json").write_text(json.dumps(SMALL))
            argv += ["--model", folder]
        devices = args.devices.split(":") if args.devices else ["", ""]
        engines = {name: Engine(name, argv, own) for name, own in zip(("mp", "ray"), devices, strict=True)}
        for engine in engines.values():
            engine.answer()
        results = [measured(engines, batch, args.turns) for batch in args.batches]
        for engine in engines.values():
            engine.end()
    if args.out:
        Path(args.out).write_text(json.dumps({"argv": sys.argv[1:], "batches": results}, indent=1) + "\n")


def measured(engines: dict[str, Engine], batch: int, turns: int) -> dict[str, Any]:
    """What steps of so many requests take, and the ratio of each pair of turns: its median, and the middle half."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(turns):
        for name in sorted(engines, reverse=turn % 2 == 1):
            found[name].append(engines[name].step_ms(batch))
    ratios = sorted(ray / mp for mp, ray in zip(found["mp"], found["ray"], strict=True))
    result: dict[str, Any] = {"batch": batch, "ray_over_mp": round(statistics.median(ratios), 4)}
    result["middle_half"] = [round(ratios[len(ratios) // 4], 4), round(ratios[-1 - len(ratios) // 4], 4)]
    for name, times in found.items():
        result[f"{name}_ms"] = round(statistics.median(times), 4)
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    main()
