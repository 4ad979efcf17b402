"""Where a start goes: from the interpreter's first line to the first token, and the first requests' times after it.

    TRITON_CACHE_DIR=$(mktemp -d) python -m benchmarks.h200.startup /tmp/models/qwen3-0.6b --out startup.json

Each mark: seconds since the process began, seconds taken, what. Weights are random; nothing is tokenized.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
from typing import Any

BEGAN = time.perf_counter()
WORKER = ("_load", "count_blocks", "_load_libraries", "_run_largest_step", "_use_graphs", "start")


class Marks:
    """What took how long."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float, str]] = []

    def here(self, what: str, begun: float | None = None) -> None:
        now = time.perf_counter()
        begun = now if begun is None else begun
        self.found.append((round(begun - BEGAN, 3), round(now - begun, 3), what))

    def watch(self, owner: Any, name: str) -> None:
        """Mark every call of a function."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.here(f"{getattr(owner, '__name__', owner)}.{name}".rsplit("vllm.", 1)[-1], begun)

        setattr(owner, name, watched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    marks = Marks()
    from vllm import LLM, SamplingParams
    from vllm.engine import core

    marks.here("import of vllm", BEGAN)
    init = core.EngineCore.__init__

    def watched_init(self: core.EngineCore, *given: Any, **named: Any) -> None:
        marks.here("the core begins")
        from vllm.ops.triton.precompile import Precompilation
        from vllm.worker import rehearsal, worker

        for name in WORKER:
            marks.watch(worker.Worker, name)
        marks.watch(worker, "compile_ahead")
        marks.watch(Precompilation, "wait")
        marks.watch(rehearsal, "rehearse")
        init(self, *given, **named)

    core.EngineCore.__init__ = watched_init  # type: ignore[method-assign]
    llm = LLM(model=args.model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096)
    marks.here("ready")
    rng = random.Random(0)

    def request(length: int, tokens: int, temperature: float) -> float:
        """Milliseconds of one request."""
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": rng.choices(range(100, 30000), k=length)}], params, use_tqdm=False)
        return round((time.perf_counter() - begun) * 1e3, 1)

    first = request(16, 2, 0.0)
    result = {"total_s": round(time.perf_counter() - BEGAN, 2), "first_ms": first, "marks": marks.found}
    result["ttft_ms"] = [request(256, 1, temperature) for temperature in (0.8, 0.0, 0.8, 0.0, 0.0)]
    with open(args.out, "w") as f:
        json.dump(result, f, indent=1)
    print(json.dumps({k: v for k, v in result.items() if k != "marks"}))
    for begun, seconds, what in marks.found:
        print(f"{begun:8.3f} {seconds:7.3f}  {what}")


if __name__ == "__main__":
    main()
