"""What LoRA adapters cost on the CPU: `OMP_NUM_THREADS=2 python -m benchmarks.cpu.adapters FOLDER [--json FILE]`.

The model has random weights, the adapters have rank 16 on all linear layers. Steps of the base model, of one adapter
and of eight in turn are measured alternately, in rounds; shown are the medians over all rounds and their ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.h200.lora import ADAPTERS, write_adapters

ROUNDS, STEPS, SKIPPED = 5, 12, 2  # steps of a round, of which the first ones are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt that is measured")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.set_defaults(noise=None)  # nothing is dropped
    args = parser.parse_args()
    from benchmarks.cpu.compare import describe
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as root:
        requests = write_adapters(json.loads((args.folder / "config.json").read_text()), Path(root), args.rank)
        llm = LLM(
            str(args.folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
            max_num_batched_tokens=8192, enable_prefix_caching=False, enable_lora=True, max_loras=ADAPTERS,
            max_lora_rank=args.rank,
        )  # fmt: skip
        engine = llm.llm_engine
        for request in requests:
            engine.add_lora(request)

        def steps(batch: int, length: int, chosen: list[Any], count: int) -> list[float]:
            """Milliseconds of each step."""
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for i in range(batch):
                ids = random.choices(range(10, 5000), k=length)
                engine.add_request(str(i), {"prompt_token_ids": ids}, params, lora_request=chosen[i % len(chosen)])
            found = []
            while engine.has_unfinished_requests():
                begun = time.perf_counter()
                engine.step()
                found.append(1e3 * (time.perf_counter() - begun))
            return found

        kinds: dict[str, list[Any]] = {"base": [None], "one": requests[:1], "eight": requests}
        rows: list[dict[str, Any]] = []

        def report(case: str, seen: dict[str, list[float]]) -> None:
            row = {kind: statistics.median(found) for kind, found in seen.items()}
            more = "".join(f"  {k} {v:8.2f} ms ({100 * (v / row['base'] - 1):+5.1f} %)" for k, v in row.items())
            print(f"{case:16}{more}", flush=True)
            rows.append({"case": case, **row})

        for batch in args.batches:
            seen: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(ROUNDS):
                for kind, chosen in kinds.items():
                    seen[kind] += steps(batch, 64, chosen, STEPS)[SKIPPED:]
            report(f"decode batch {batch}", seen)
        seen = {"base": [], "one": []}
        for _ in range(ROUNDS):
            for kind in seen:
                seen[kind] += steps(1, args.prompt, kinds[kind], 1)
        report(f"prompt of {args.prompt}", seen)
    if args.json:
        found = {**describe(args), "model": args.folder.name, "rank": args.rank, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
