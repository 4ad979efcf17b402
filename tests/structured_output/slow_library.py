"""The process of a library that compiles for as long as it is told, for tests; turns are short."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from vllm.ipc.helper import Questions
from vllm.structured_output import turns
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.worker import serve

TURN_SECONDS = (0.02, 0.02)  # of what sleeps: four times as long
STOPPED_BYTES = 128 << 20


class SlowLibrary:
    """The text of a constraint says what becomes of it."""

    def prepare(self) -> None:
        pass

    def build(self, spec: GrammarSpec) -> bytes:
        word, _, rest = spec.text.partition(" ")
        match word:
            case "until":  # a file is there
                path, _, _ = rest.partition(" ")
                while not Path(path).exists():
                    time.sleep(1e-3)
            case "hold":
                held = [b"x" * (1 << 20) for _ in range(40)]
                time.sleep(600 if held else 0)
            case "refuse":
                raise GrammarError("not this one")
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "late-crash":
                time.sleep(8 * sum(TURN_SECONDS))
                os.kill(os.getpid(), signal.SIGSEGV)
            case "parent":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(600)
            case "hang":
                time.sleep(600)
            case "grow":
                bytearray(turns.MEMORY_BYTES + (1 << 30))
            case "nest":
                return self.build(spec)
            case "large":
                return b"x" * 5_000_000
        return spec.text.encode()


if __name__ == "__main__":
    turns.STOPPED_BYTES = STOPPED_BYTES
    sys.exit(serve(Questions(), lambda name, vocabulary: SlowLibrary(), TURN_SECONDS))  # type: ignore[arg-type,return-value]
