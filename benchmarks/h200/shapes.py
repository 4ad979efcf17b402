"""Models of many shapes as fractions of what the chip could do: decode steps of its bandwidth, prompts of its products.

    python -m benchmarks.h200.shapes --models /tmp/models/llama-3.1-8b,/tmp/models/qwen3-8b --out shapes.json

Through the engine core (`core_step`), with random weights. The first model is what the others are compared with.

floor      of a decode step: reading once what it reads (of experts as many as its rows can choose, if all are equally
           likely) and the cached keys and values, at the bandwidth that the same run measured
ceiling    of a prompt: operations of linear layers and attention at the rate of a product of 8192 cubed
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.core_step import Core
from benchmarks.h200.timing import ceilings
from vllm.model_executor.models.families.deepseek import LatentAttn

CONTEXT = 128  # tokens in; steps are counted between the 32nd and the 160th token out
SHORT, LONG = 32, 160


def sizes(model: Any, rows: int) -> tuple[int, int]:
    """Bytes of the weights that a step of so many rows reads, and parameters that multiply each token of a prompt."""
    spec = model.traits.decoder
    read = multiplied = 0
    for name, p in model.named_parameters():
        size = p.element_size()
        if p.dim() == 3:  # [experts, ...]
            top_k = next(b.ffn.top_k for b in spec.blocks if hasattr(b.ffn, "top_k"))
            read += int((1 - (1 - top_k / len(p)) ** rows) * p.numel() * size)
            multiplied += p.numel() // len(p) * top_k
        elif p.shape[0] < spec.vocab_size:
            read += p.numel() * size
            multiplied += p.numel() if p.dim() == 2 else 0
        elif "head" in name or spec.tied:
            read += p.numel() * size
    return read, multiplied


@dataclass(frozen=True, slots=True)
class Attention:
    """What one layer reads and computes. width: cached numbers of a token.   products: multiplications of a pair."""

    width: int
    products: int
    window: int | None

    @classmethod
    def of(cls, attn: Any) -> Attention:
        if isinstance(attn, LatentAttn):
            return cls(attn.rank + attn.rope_dim, attn.heads * (attn.nope_dim + attn.rope_dim + attn.v_dim), None)
        return cls(2 * attn.kv_heads * attn.head_dim, 2 * attn.heads * attn.head_dim, attn.window)


def attentions(model: Any) -> list[Attention]:
    return [Attention.of(block.attn) for block in model.traits.decoder.blocks]


def cached_bytes(model: Any, tokens: int) -> int:
    """Of keys and values, or latents, that one step reads of a sequence of so many tokens."""
    return sum(2 * a.width * (tokens if a.window is None else min(tokens, a.window)) for a in attentions(model))


def prompt_operations(model: Any, tokens: int, multiplied: int) -> float:
    """Multiplications and additions of a prompt, the last row's logits left out."""
    total = 2.0 * tokens * multiplied
    for a in attentions(model):
        hidden = 0 if a.window is None else max(0, tokens - a.window)
        total += a.products * (tokens * (tokens + 1) - hidden * (hidden + 1))
    return total


def measure(folder: str, found: dict[str, float], rows: list[int], prompts: list[str]) -> dict[str, Any]:
    longest = json.loads((Path(folder) / "config.json").read_text())["max_position_embeddings"]
    core = Core(folder, max_model_len=min(8448, longest), gpu_memory_utilization=0.85)
    model = core.core.executor.worker.model  # type: ignore[attr-defined]
    result: dict[str, Any] = {"start_s": round(core.start_seconds, 2), "decode": {}, "prefill": {}}
    for n in rows:
        core.run(n, CONTEXT, 12)
        least = {out: min(core.run(n, CONTEXT, out) for _ in range(3)) for out in (SHORT, LONG)}
        ms = (least[LONG] - least[SHORT]) / (LONG - SHORT) * 1e3  # what happens once is in neither
        middle = CONTEXT + (SHORT + LONG) // 2
        floor = (sizes(model, n)[0] + n * cached_bytes(model, middle)) / found["read_GBs"] / 1e6
        result["decode"][n] = {"ms": ms, "floor_ms": floor, "fraction": floor / ms}
    for case in prompts:
        n, tokens = (int(x) for x in case.split("x"))
        if tokens >= longest:
            continue
        core.run(n, tokens, 1)
        s = statistics.median(core.run(n, tokens, 1) for _ in range(3))
        least = n * prompt_operations(model, tokens, sizes(model, 1)[1]) / found["matmul_TFLOPs"] / 1e12
        result["prefill"][case] = {"s": s, "floor_s": least, "fraction": least / s}
    core.core.shutdown()
    del core, model
    gc.collect()
    torch.cuda.empty_cache()
    return result


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="folders, separated by commas; the first is the measure")
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--prompts", default="1x8192")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    found = ceilings()
    torch.cuda.empty_cache()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "torch": torch.__version__,
        "ceilings": found,
        "models": {},
    }
    print(result["device"], {k: round(v) for k, v in found.items()}, flush=True)
    first: dict[str, Any] | None = None
    for folder in args.models.split(","):
        name = Path(folder).name
        try:
            one = measure(folder, found, [int(n) for n in args.rows.split(",")], args.prompts.split(","))
        except Exception as error:  # one model must not cost the others
            print(name, f"{type(error).__name__}: {error}"[:500], flush=True)
            continue
        first = first or one
        shown = []
        for kind in ("decode", "prefill"):
            for case, row in one[kind].items():
                row["of_first"] = row["fraction"] / first[kind][case]["fraction"]
                time = f"{row['ms']:.3f} ms" if "ms" in row else f"{row['s'] * 1e3:.1f} ms"
                shown.append(f"{case}: {time} {row['fraction']:.2f} ({row['of_first']:.2f})")
        result["models"][name] = one
        print(f"{name:22}", " | ".join(shown), flush=True)
        Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
