"""`vllm bench latency | throughput | serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

KINDS = {
    "latency": "Time of one batch through the offline engine.",
    "throughput": "Tokens per second of the offline engine.",
    "serve": "Latency and throughput of a running server.",
}


def main(argv: Sequence[str]) -> int:
    """`argv` is ["bench", kind, flags...]."""
    kind = argv[1] if len(argv) > 1 else "--help"
    if kind == "serve":
        from vllm.benchmarks.serve import main as run

        return run(argv[2:])
    if kind in KINDS:
        from vllm.benchmarks.offline import main as run_offline

        return run_offline(kind, argv[2:])
    text = "usage: vllm bench {latency,throughput,serve} ...\n\n"
    text += "\n".join(f"  {name:<11} {what}" for name, what in KINDS.items())
    if len(argv) > 1 and not kind.startswith("-"):
        text = f"vllm bench: unknown kind {kind!r}\n\n{text}"
    wanted = kind in ("-h", "--help")
    print(text, file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2
