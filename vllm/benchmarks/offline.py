"""`vllm bench latency` and `vllm bench throughput`: the engine alone, through `LLM`."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.benchmarks.datasets import Sample, random_samples, sharegpt_samples
from vllm.benchmarks.serve import percentile
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMError
from vllm.utils.argparse import FlexibleArgumentParser

if TYPE_CHECKING:
    from vllm import LLM

INPUT_LENGTHS = {"latency": 32, "throughput": 512}
OUTPUT_LENGTH = 128
LONGEST = 2048  # tokens of prompt and answer of a conversation


def make_parser(kind: str) -> FlexibleArgumentParser:
    """Flags of one of the two, and all of the engine's."""
    parser = FlexibleArgumentParser(prog=f"vllm bench {kind}", description="Measure the offline engine.")
    add = parser.add_argument
    add("--input-len", type=int, help=f"Tokens of each random prompt (default: {INPUT_LENGTHS[kind]}).")
    without = "" if kind == "latency" else "; with --dataset: the length of its answer"
    add("--output-len", type=int, help=f"Tokens generated for each (default: {OUTPUT_LENGTH}{without}).")
    add("--output-json", type=Path, default=None, help="Write the figures here.")
    add("--n", type=int, default=1, help="Sequences per prompt (default: %(default)s).")
    if kind == "latency":
        add("--batch-size", type=int, default=8, help="Prompts generated for together (default: %(default)s).")
        add("--num-iters-warmup", type=int, default=3, help="Rounds before the clock starts (default: %(default)s).")
        add("--num-iters", type=int, default=10, help="Rounds that are measured (default: %(default)s).")
    else:
        add("--num-prompts", type=int, default=100, help="How many prompts (default: %(default)s).")
        add(
            "--dataset",
            type=Path,
            default=None,
            help="File of conversations in ShareGPT's format; default: random tokens.",
        )
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="demo")
    return parser


def main(kind: str, argv: Sequence[str]) -> int:
    """Run the benchmark `kind` ("latency" or "throughput"); returns the exit status."""
    parser = make_parser(kind)
    args = parser.parse_args(list(argv))
    _check(parser, args)
    try:
        return _measure(kind, args)
    except (VLLMError, ValueError, RuntimeError, OSError) as error:
        parser.exit(1, f"vllm bench {kind}: {error}\n")


def _check(parser: FlexibleArgumentParser, args: argparse.Namespace) -> None:
    """End with a message for counts that measure nothing and for files that are not there."""
    for name in ("n", "input_len", "output_len", "batch_size", "num_iters", "num_prompts"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    if getattr(args, "num_iters_warmup", 0) < 0:
        parser.error(f"--num-iters-warmup must be 0 or more, got {args.num_iters_warmup}")
    dataset = getattr(args, "dataset", None)
    if dataset is not None and not dataset.is_file():
        parser.error(f"There is no file {dataset}; --dataset takes conversations in ShareGPT's format")
    if dataset is not None and args.input_len is not None:
        parser.error("--input-len is the length of random prompts; leave it out with --dataset")
    output = args.output_json
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        parser.error(f"--output-json must be a file in a folder that exists, got {output}")


def _measure(kind: str, args: argparse.Namespace) -> int:
    from vllm import LLM, SamplingParams

    llm = LLM(**vars(EngineArgs.from_cli_args(args)))
    samples = _samples(kind, args, llm)
    params = [
        SamplingParams(n=args.n, temperature=1.0 if args.n > 1 else 0.0, ignore_eos=True, max_tokens=s.output_tokens)
        for s in samples
    ]
    prompts = [_prompt(s) for s in samples]

    def run() -> float:
        llm.reset_prefix_cache()  # every iteration computes its prompts
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    result = _latency(args, run) if kind == "latency" else _throughput(samples, args.n, run)
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(result, indent=1))
    return 0


def _samples(kind: str, args: argparse.Namespace, llm: LLM) -> list[Sample]:
    """The prompts and their numbers of tokens. Raises ValueError for lengths that the model does not have."""
    tokenizer, longest = llm.llm_engine.own_tokenizer, llm.model_config.max_model_len
    count = args.batch_size if kind == "latency" else args.num_prompts
    if kind == "throughput" and args.dataset is not None:
        return sharegpt_samples(tokenizer, args.dataset, count, args.output_len, 0, min(LONGEST, longest))
    lengths = args.input_len or INPUT_LENGTHS[kind], args.output_len or OUTPUT_LENGTH
    if sum(lengths) > longest:
        raise ValueError(
            f"--input-len {lengths[0]} and --output-len {lengths[1]} do not fit into max_model_len={longest}: "
            "fewer tokens would be generated than counted. Make them shorter."
        )
    return random_samples(tokenizer, count, *lengths, 0.0, 0, 0)


def _prompt(sample: Sample) -> Any:
    return sample.prompt if isinstance(sample.prompt, str) else {"prompt_token_ids": sample.prompt}


def _latency(args: Any, run: Any) -> dict[str, Any]:
    for _ in range(args.num_iters_warmup):
        run()
    seconds = [run() for _ in range(args.num_iters)]
    print(f"Avg latency: {statistics.fmean(seconds)} seconds")
    marks = (10, 25, 50, 75, 90, 99)
    for q in marks:
        print(f"{q}% percentile latency: {percentile(seconds, q)} seconds")
    return {
        "avg_latency": statistics.fmean(seconds),
        "latencies": seconds,
        "percentiles": {str(q): percentile(seconds, q) for q in marks},
    }


def _throughput(samples: Sequence[Sample], n: int, run: Any) -> dict[str, Any]:
    seconds = run()
    outputs = sum(s.output_tokens for s in samples) * n
    total = outputs + sum(s.prompt_tokens for s in samples)
    print(
        f"Throughput: {len(samples) / seconds:.2f} requests/s, {total / seconds:.2f} total tokens/s, "
        f"{outputs / seconds:.2f} output tokens/s"
    )
    return {
        "elapsed_time": seconds,
        "num_requests": len(samples),
        "total_num_tokens": total,
        "requests_per_second": len(samples) / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": outputs / seconds,
    }
