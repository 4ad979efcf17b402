"""What one greedy client costs eight ordinary ones, and they it: `python -m benchmarks.fairness [--out FILE]`.

The ordinary clients stream answers of 32 tokens with pauses between them, first with the server to themselves, then
beside each greedy request, which is made over and over; both and the greedy request alone are measured in turns, so
that what else happens on the machine meets all of them. Shown are their times to first token (median and p99) in both,
the ratio of the p99s, and the greedy client's tokens per second beside them as a share of what it gets alone, the
median of the turns.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.attacks import serving

CLIENTS, TOKENS, PAUSE_S = 8, 32, 0.25
GREEDY: dict[str, dict[str, Any]] = {
    "n=2,000 of 30 tokens": {"prompt": "Once upon a time", "n": 2000, "max_tokens": 30, "ignore_eos": True},
    "64 beams of 64 tokens": {
        "prompt": "Once upon a time", "use_beam_search": True, "n": 64, "best_of": 64, "max_tokens": 64,
        "temperature": 0, "ignore_eos": True,
    },
    "1,000 prompts of 32 tokens": {
        "prompt": [f"Story {i}: once upon a time" for i in range(1000)], "max_tokens": 32, "ignore_eos": True,
    },
}  # fmt: skip


class Ordinary(threading.Thread):
    """One client that streams answers with random pauses until told to stop; its times to first token in seconds."""

    def __init__(self, port: int, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._port, self._random, self._stopped = port, random.Random(seed), stop
        self.first: list[float] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        while not self._stopped.wait(self._random.expovariate(1 / PAUSE_S)):
            prompt = f"Client {self._random.random():.6f} asks: who are you?"
            body = {"prompt": prompt, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
            begun = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {answer.read()[:300]!r}")
            answer.readline()
            self.first.append(time.perf_counter() - begun)
            answer.read()
        connection.close()


def ask(port: int, body: dict[str, Any]) -> int:
    """Tokens of the answer to a greedy request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {data[:300]!r}")
    tokens: int = json.loads(data)["usage"]["completion_tokens"]
    return tokens


def rate(port: int, body: dict[str, Any], seconds: float) -> float:
    """Tokens per second of greedy requests made back to back for at least `seconds`."""
    begun, tokens = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        tokens += ask(port, body)
    return tokens / (time.perf_counter() - begun)


def beside(port: int, seed: int, body: dict[str, Any] | None, seconds: float) -> tuple[list[float], float]:
    """The ordinary clients' times to first token, and the greedy one's rate beside them."""
    stop = threading.Event()
    clients = [Ordinary(port, seed + i, stop) for i in range(CLIENTS)]
    for client in clients:
        client.start()
    found = 0.0
    if body is None:
        time.sleep(seconds)
    else:
        found = rate(port, body, seconds)
    stop.set()
    for client in clients:
        client.join()
    return [t for client in clients for t in client.first], found


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement, at least")
    parser.add_argument("--turns", type=int, default=4, help="of each: idle, greedy alone, both")
    parser.add_argument("--only", default="", help="greedy requests whose name has this in it")
    parser.add_argument("--server-cores", type=int, help="so many cores of this process; clients get the others")
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    args = parser.parse_args()
    rows = []
    cores = sorted(os.sched_getaffinity(0))
    if args.server_cores:
        os.sched_setaffinity(0, cores[: args.server_cores])
    with serving() as (port, _):
        if args.server_cores:
            os.sched_setaffinity(0, cores[args.server_cores :])
        ask(port, GREEDY["n=2,000 of 30 tokens"])  # warm
        for name, body in ((name, body) for name, body in GREEDY.items() if args.only in name):
            idle: list[float] = []
            times: list[float] = []
            rates: list[tuple[float, float]] = []  # alone, beside the others
            for turn in range(args.turns):
                idle += beside(port, 1 + 100 * turn, None, args.seconds)[0]
                alone = rate(port, body, args.seconds)
                more, shared = beside(port, 1000 + 100 * turn, body, args.seconds)
                times += more
                rates.append((alone, shared))
            rows.append(
                {
                    "greedy": name,
                    "idle_ttft_ms": {"p50": statistics.median(idle) * 1e3, "p99": p99(idle) * 1e3, "n": len(idle)},
                    "ttft_ms": {"p50": statistics.median(times) * 1e3, "p99": p99(times) * 1e3, "n": len(times)},
                    "ratio_p99": p99(times) / p99(idle),
                    "greedy_tokens_per_s": {
                        "alone": statistics.median(alone for alone, _ in rates),
                        "beside": statistics.median(shared for _, shared in rates),
                        "share": statistics.median(shared / alone for alone, shared in rates),
                        "shares": [shared / alone for alone, shared in rates],
                    },
                }
            )
    print(
        "| greedy client | first tokens of others, p50 / p99 | beside it | p99 ratio | its tokens/s, share of alone |"
    )
    print("|---|---|---|---|---|")
    for row in rows:
        idle_ms, ms, own = row["idle_ttft_ms"], row["ttft_ms"], row["greedy_tokens_per_s"]
        print(
            f"| {row['greedy']} | {idle_ms['p50']:.1f} / {idle_ms['p99']:.1f} ms | {ms['p50']:.1f} / {ms['p99']:.1f} "
            f"ms | {row['ratio_p99']:.1f} | {own['beside']:.0f}, {own['share']:.2f} |"
        )
    if args.out:
        args.out.write_text(json.dumps({"clients": CLIENTS, "tokens": TOKENS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
