"""The `vllm` command: finds the subcommand and imports only what it needs, so that help is there at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from vllm.version import __version__


class Command(NamedTuple):
    """A subcommand: where its `main(argv) -> int` lives, and what it does."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("vllm.entrypoints.cli.serve", "Serve a model over an OpenAI-compatible HTTP API."),
    "complete": Command("vllm.entrypoints.cli.client", "Continue texts with a running server."),
    "chat": Command("vllm.entrypoints.cli.client", "Chat with a running server."),
    "bench": Command("vllm.entrypoints.cli.bench", "Measure latency, throughput, or a running server."),
    "run-batch": Command("vllm.entrypoints.openai.run_batch", "Run a file of requests and write a file of answers."),
    "quantize": Command("vllm.entrypoints.cli.quantize", "Write a quantized copy of a model."),
    "collect-env": Command("vllm.collect_env", "Print versions, hardware and settings for a bug report."),
}


def usage() -> str:
    """The help of `vllm` itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vllm [-h] [-v] COMMAND ...",
            "",
            "An engine that serves large language models.",
            "",
            "commands:",
            *lines,
            "",
            "`vllm COMMAND --help` explains each. `vllm serve` alone serves the packaged demo model.",
        ]
    )


def run(argv: Sequence[str]) -> int:
    """Run `vllm argv...`; returns the exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-v", "--version"):
        print(__version__)
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        print(f"vllm: unknown command {argv[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(command.module).main(list(argv))
    return status


def main() -> None:
    """Console entry point."""
    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = 0
    sys.exit(status)


if __name__ == "__main__":
    main()
