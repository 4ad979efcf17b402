"""How long each tool parser takes to read 100 kB: calls as models write them, one after the other, and hostile texts.

    python -m benchmarks.tool_parsers [--rounds 5]

Prints, per parser, the least of the rounds in milliseconds: of a valid text read as a whole, the same text in pieces of
five characters, and the slowest of the hostile texts of the tests. The goal is 50 ms for the first and the third.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from tests.tool_parsers.outputs import OUTPUTS, TOOLS
from tests.tool_parsers.test_parsers import hostile
from vllm.tool_parsers.registry import FORMATS

LENGTH = 100_000


def valid(name: str) -> str:
    """The longest of the parser's examples, again and again."""
    text = max(OUTPUTS[name], key=len)
    return (text * (LENGTH // len(text) + 1))[:LENGTH]


def read(name: str, text: str) -> None:
    FORMATS[name].machine(TOOLS).whole(text)


def read_in_pieces(name: str, text: str) -> None:
    machine = FORMATS[name].machine(TOOLS)
    for start in range(0, len(text), 5):
        machine.feed(text[start : start + 5])
    machine.finish()


def milliseconds(way: Callable[[str, str], None], name: str, text: str, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        way(name, text)
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name in sorted(OUTPUTS):
        text = valid(name)
        whole = milliseconds(read, name, text, args.rounds)
        pieces = milliseconds(read_in_pieces, name, text, args.rounds)
        worst = max(milliseconds(read, name, attack, args.rounds) for attack in hostile(name, LENGTH))
        print(f"{name:22} whole {whole:7.2f} ms, in pieces {pieces:7.2f} ms, hostile {worst:7.2f} ms", flush=True)


if __name__ == "__main__":
    main()
