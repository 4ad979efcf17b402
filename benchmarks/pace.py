"""A simulation of steps beside prompts: clients that each keep one request open, on a device whose steps take so much,
and so much more for each answer and for each token of a prompt; cut as `core.pace` cuts them.

    python -m benchmarks.pace --streams 256 --rounds 3 --step-ms 3.6 --answer-us 26 --token-us 24 --limits 100,60,30

Prints for each limit (--max-token-gap, ms): tokens per second, times to first tokens, and the gaps between tokens.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass

from vllm.core.pace import Pace


@dataclass
class Client:
    """rounds: requests it still has to make.   prompt: tokens of the present one that wait.   left: of its answer."""

    rounds: int
    prompt: int
    left: int = 0
    asked: float = 0.0
    last: float = 0.0


def run(args: argparse.Namespace, limit: float) -> dict[str, float]:
    """Figures of one limit, in seconds."""
    pace, now, tokens = Pace(limit, args.most), 0.0, 0
    waiting = deque(Client(args.rounds, args.input) for _ in range(args.streams))
    for client in waiting:
        pace.came(client.prompt)
    running: list[Client] = []
    first: list[float] = []
    gaps: list[float] = []
    while waiting or running:
        room = pace.budget(len(waiting)) - len(running)
        parts: list[tuple[Client, int]] = []
        while room > 0 and waiting:
            part = min(room, waiting[0].prompt)
            waiting[0].prompt -= part
            room -= part
            parts.append((waiting[0], part))
            if waiting[0].prompt:
                break
            waiting.popleft()
        sizes = [1] * len(running) + [part for _, part in parts]
        pace.planned(sizes, parts[-1][0].prompt if parts else 0)
        begun = now
        now += args.step_ms / 1e3 + args.answer_us / 1e6 * len(running) + args.token_us / 1e6 * sum(p for _, p in parts)
        pace.took(begun, now, sizes)
        for client in running:
            gaps.append(now - client.last)
            client.last, client.left, tokens = now, client.left - 1, tokens + 1
            if not client.left and client.rounds > 1:
                waiting.append(Client(client.rounds - 1, args.input, asked=now))
                pace.came(args.input)
        running = [client for client in running if client.left]
        for client, _ in parts:
            if not client.prompt:
                first.append(now - client.asked)
                client.last, client.left, tokens = now, args.output - 1, tokens + 1
                running.append(client)
    first.sort()
    gaps.sort()
    return {
        "tokens_per_s": tokens / now,
        "first_p50": first[len(first) // 2],
        "first_p99": first[int(0.99 * len(first))],
        "gap_p99": gaps[int(0.99 * len(gaps))],
        "gap_max": gaps[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=3.6)
    parser.add_argument("--answer-us", type=float, default=26.0)
    parser.add_argument("--token-us", type=float, default=24.0)
    parser.add_argument("--most", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--limits", default="100,60,30")
    args = parser.parse_args()
    for limit in map(float, args.limits.split(",")):
        found = run(args, limit / 1e3)
        shown = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in found.items() if name != "tokens_per_s")
        print(f"{limit:g} ms: {found['tokens_per_s']:.0f} tokens/s, {shown}")


if __name__ == "__main__":
    main()
