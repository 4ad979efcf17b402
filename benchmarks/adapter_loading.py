"""How long loading an adapter holds up a running answer: `python -m benchmarks.adapter_loading FOLDER [--json FILE]`.

The model has random weights, the adapters have rank 16 on all linear layers. One request decodes all the time. Every
few steps a request comes whose adapter nobody has read yet: it is read, copied to the device, and takes the place of
another. Measured is the time between two tokens of the running answer, with nothing beside it, beside requests whose
adapter is there already (their prompts take time too), and beside requests whose adapter is loaded, in rounds that
alternate. Of each kind are shown the median, the longest of a round (median of the rounds) and the longest of all;
and how long a step's own thread copied an adapter to its slot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.h200.lora import ADAPTERS, write_adapters

EVERY, LOADS, ROUNDS = 8, 16, 5  # steps between two requests; requests of a round; rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.lora.layers import LoRALayers

    with tempfile.TemporaryDirectory() as root:
        adapters = write_adapters(json.loads((args.folder / "config.json").read_text()), Path(root), args.rank)
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                str(args.folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, enable_lora=True,
                max_loras=2, max_cpu_loras=2, max_lora_rank=args.rank, max_num_seqs=8, enable_prefix_caching=False,
            )
        )  # fmt: skip

        def gaps(chosen: list[Any]) -> list[float]:
            """Milliseconds between the running answer's tokens. chosen: the other requests' adapters, in turn."""
            steps = (LOADS + 2) * EVERY
            params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
            short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
            engine.add_request("stream", {"prompt_token_ids": list(range(10, 42))}, params)
            found, last, sent, length = [], 0.0, 0, 0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens = len(output.outputs[0].token_ids)
                    if output.request_id != "stream" or tokens == length:
                        continue
                    now, length = time.perf_counter(), tokens
                    if last:
                        found.append(1e3 * (now - last))
                    last = now
                    if chosen and length % EVERY == 0 and sent < LOADS:
                        prompt = {"prompt_token_ids": [20 + sent] * 4}
                        engine.add_request(f"{sent}", prompt, short, lora_request=chosen[sent % len(chosen)])
                        sent += 1
            return found[4:]

        copies: list[float] = []

        def timed(load: Callable[..., None]) -> Callable[..., None]:
            def run(*args: Any) -> None:
                begun = time.perf_counter()
                load(*args)
                copies.append(1e3 * (time.perf_counter() - begun))

            return run

        gaps(adapters)  # until everything has been compiled
        LoRALayers.load = timed(LoRALayers.load)  # type: ignore[method-assign]
        kinds: dict[str, list[Any]] = {
            "alone": [], "adapters there": adapters[:2], "adapters loaded": adapters[:ADAPTERS],
        }  # fmt: skip
        seen: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, chosen in kinds.items():
                seen[kind].append(gaps(chosen))
    report = {}
    for name, rounds in seen.items():
        longest = [max(found) for found in rounds]
        median = statistics.median([gap for found in rounds for gap in found])
        row = report[name] = {
            "median_ms": median, "longest_of_a_round_ms": statistics.median(longest), "longest_ms": max(longest),
        }  # fmt: skip
        print(f"{name:16}" + "".join(f"  {key} {value:7.2f}" for key, value in row.items()))
    report["copy to a slot"] = {"median_ms": statistics.median(copies), "longest_ms": max(copies)}
    print(f"copy to a slot    median {statistics.median(copies):.2f} ms, longest {max(copies):.2f} ms")
    if args.json:
        args.json.write_text(json.dumps({"model": args.folder.name, "rank": args.rank, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
