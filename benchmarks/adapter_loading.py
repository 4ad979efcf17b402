"""How long loading an adapter holds up a running answer: `python -m benchmarks.adapter_loading FOLDER [--json FILE]`.

The model has random weights, the adapters have rank 16 on all linear layers. One request decodes all the time. Every
few steps a request comes whose adapter nobody has read yet: it is read, copied to the device, and takes the place of
another. Shown is the longest time between two tokens of the running answer, with nothing beside it, beside requests
whose adapter is there already (their prompts take time too), and beside requests whose adapter is loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.h200.lora import ADAPTERS, write_adapters

EVERY, LOADS = 8, 24  # steps between two requests; requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    from vllm import EngineArgs, LLMEngine, SamplingParams

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

        gaps(adapters)  # until everything has been compiled
        rows = {"alone": gaps([]), "adapters there": gaps(adapters[:2]), "adapters loaded": gaps(adapters[:ADAPTERS])}
    report = {name: {"median_ms": statistics.median(v), "longest_ms": max(v)} for name, v in rows.items()}
    for name, row in report.items():
        print(f"{name:16} median {row['median_ms']:7.2f} ms, longest {row['longest_ms']:7.2f} ms")
    if args.json:
        args.json.write_text(json.dumps({"model": args.folder.name, "rank": args.rank, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
