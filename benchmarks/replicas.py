"""What routing by cached prefix brings: the share of prompt tokens that copies of an engine find in their caches.

    python -m benchmarks.replicas --copies 2 --prefixes 20

Requests begin with one of some prefixes, in random order, a few at a time; a copy's cache has room for part of the
prefixes only. First copies are chosen by load alone, then with the prefixes that they have been sent counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

BLOCK = 16


async def run(args: argparse.Namespace, by_prefix: bool) -> tuple[float, float]:
    """(share of prompt tokens that were cached, seconds)."""
    room = args.room * args.length // BLOCK + args.at_once * (args.own + 2 * BLOCK) // BLOCK
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(
            args.model, data_parallel_size=args.copies, max_model_len=args.length + args.own + 32, block_size=BLOCK,
            num_gpu_blocks_override=room, disable_log_requests=True, disable_log_stats=True,
        )
    )  # fmt: skip
    fleet: Any = engine._core
    fleet._caches = by_prefix
    rng = random.Random(0)
    prefixes = [[rng.randrange(100, 1000) for _ in range(args.length)] for _ in range(args.prefixes)]
    places = asyncio.Semaphore(args.at_once)

    async def one(i: int) -> None:
        prompt: Any = {"prompt_token_ids": rng.choice(prefixes) + [rng.randrange(100, 1000) for _ in range(args.own)]}
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        async with places:
            async for _ in engine.generate(prompt, params, str(i)):
                pass

    try:
        begun = time.perf_counter()
        await asyncio.gather(*(one(i) for i in range(args.requests)))
        seconds = time.perf_counter() - begun
        stats = [replica.stats for replica in fleet._replicas]
        return sum(s.prefix_cache_hits for s in stats) / sum(s.prefix_cache_queries for s in stats), seconds
    finally:
        await engine.shutdown(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--prefixes", type=int, default=20)
    parser.add_argument("--length", type=int, default=256, help="tokens of a prefix")
    parser.add_argument("--own", type=int, default=20, help="further tokens of each prompt")
    parser.add_argument("--room", type=int, default=12, help="prefixes that one copy's cache has room for")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=8)
    args = parser.parse_args()
    for by_prefix in (False, True):
        share, seconds = asyncio.run(run(args, by_prefix))
        name = "by load and prefix" if by_prefix else "by load alone"
        print(f"{name:20} {share:6.1%} of prompt tokens cached, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
