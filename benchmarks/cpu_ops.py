"""The CPU kernels against this machine's ceilings and against torch: products, attention, small operations.

    python benchmarks/cpu_ops.py --threads 2 --json benchmarks/results/cpu_ops.json

Rounds are interleaved (every round runs every candidate once), so that what others do to the machine meets all of them.
A row gives the fastest and the median time of each candidate, and its distance from the floor: the larger of bytes /
read bandwidth and operations / matrix peak, both measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.activation import activate_gated
from vllm.ops.attention import AttentionParams, attend
from vllm.ops.cpu import library, onednn
from vllm.ops.cpu.native import NativeKernels
from vllm.ops.draw import DrawParams, draw
from vllm.ops.greedy import finite_rows, greedy
from vllm.ops.norm import add_rms_norm
from vllm.ops.rotary import rotate_and_write_kv
from vllm.step.inputs import GroupInputs, StepInputs

# Qwen2.5-0.5B
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 896, 14, 2, 64, 4864, 151936
PRODUCTS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "head": (VOCAB, HIDDEN),
}
COLD_BYTES = 96 << 20  # weights are rotated through this much, so that they come from memory


@dataclass
class Case:
    """One thing to compute, by several candidates. bytes, operations: what it must read and do at least."""

    name: str
    candidates: dict[str, Callable[[], Any]]
    bytes: int = 0
    operations: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)


def huge(shape: tuple[int, ...], dtype: torch.dtype, kernels: NativeKernels) -> Tensor:
    """Zeros in huge pages."""
    tensor = torch.empty(shape, dtype=dtype)
    kernels.library.vllm_advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor.zero_()


def ceilings(kernels: NativeKernels, dtype: torch.dtype) -> list[Case]:
    """Reading memory once, and a large square product."""
    memory = huge((256 << 20,), torch.uint8, kernels)
    n = 1536
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    return [
        Case(
            "read", {"ours": lambda: kernels.library.vllm_read(memory.data_ptr(), memory.nbytes)}, bytes=memory.nbytes
        ),
        Case("matmul", {"torch": lambda: a @ b}, operations=2 * n**3),
    ]


def product_cases(kernels: NativeKernels, dtype: torch.dtype, rows: list[int]) -> list[Case]:
    cases = []
    for name, (n, k) in PRODUCTS.items():
        copies = max(1, COLD_BYTES // (n * k * dtype.itemsize))
        weights = [torch.randn(n, k).to(dtype) for _ in range(copies)]
        ours = [kernels.pack_weight(w) for w in weights]
        theirs = [onednn._pack(w) for w in weights]
        scales = [w.abs().amax(1).float() / 127 for w in weights]
        eight_bit = [
            kernels.pack_int8((w / s[:, None]).round().to(torch.int8), s) for w, s in zip(weights, scales, strict=True)
        ]
        for m in rows:
            if name == "head" and m > 32:
                continue
            x = torch.randn(m, k).to(dtype)

            def run(apply: Callable[[Tensor, Any], Tensor], packed: list[Any], x: Tensor = x) -> Callable[[], None]:
                return lambda: [apply(x, w) for w in packed] and None

            candidates = {
                "ours": run(kernels.linear, ours),
                "onednn": run(onednn._linear, theirs),
                "ours, int8": run(kernels.linear_int8, eight_bit),
            }
            if m == 1:
                candidates["F.linear"] = run(F.linear, weights)
            cases.append(Case(f"{name} x{m}", candidates, copies * n * k * dtype.itemsize, copies * 2 * m * n * k))
    return cases


def paged_batch(
    seq_lens: list[int], query_lens: list[int], dtype: torch.dtype, kernels: NativeKernels
) -> tuple[Tensor, StepInputs, GroupInputs]:
    """A cache of shuffled blocks of 16, and the step over it."""
    blocks = [-(-n // 16) for n in seq_lens]
    cache = huge((sum(blocks) + 1, 2, KV_HEADS, 16, HEAD_DIM), dtype, kernels).normal_()
    table = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    for r, ids in enumerate((torch.randperm(sum(blocks)) + 1).int().split(blocks)):
        table[r, : len(ids)] = ids
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.array(seq_lens, np.int32)
    tokens = int(starts[-1])
    positions = torch.cat([torch.arange(n - m, n) for m, n in zip(query_lens, seq_lens, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(query_lens))
    slots = table[owner, positions // 16].long() * 16 + positions % 16
    group = GroupInputs(slots, table)
    step = StepInputs.of(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=positions,
        query_starts=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        logits_rows=torch.arange(len(seq_lens)),
        groups=(group,),
        host_query_starts=starts,
        host_seq_lens=lens,
    )
    return cache, step, group


def attention_cases(kernels: NativeKernels, dtype: torch.dtype) -> list[Case]:
    cases = []
    params = AttentionParams(HEAD_DIM**-0.5)
    for name, seqs, queries in (
        ("decode 1 x 2048", [2048], [1]),
        ("decode 1 x 32768", [32768], [1]),
        ("decode 32 x 256", [256] * 32, [1] * 32),
        ("decode 32 x 2048", [2048] * 32, [1] * 32),
        ("prefill 1 x 1024", [1024], [1024]),
        ("prefill 1 x 4096", [4096], [4096]),
    ):
        cache, step, group = paged_batch(seqs, queries, dtype, kernels)
        q = torch.randn(sum(queries), HEADS, HEAD_DIM).to(dtype)
        visible = sum(m * n - m * (m - 1) // 2 for m, n in zip(queries, seqs, strict=True))
        arguments = (q, cache, params, step, group)
        cases.append(
            Case(
                f"attention {name}",
                {
                    "ours": lambda a=arguments: kernels.attend(*a),  # type: ignore[misc]
                    "torch": lambda a=arguments: attend.reference(*a),  # type: ignore[misc]
                },
                bytes=sum(seqs) * KV_HEADS * HEAD_DIM * 2 * dtype.itemsize,
                operations=4 * HEADS * HEAD_DIM * visible,
            )
        )
    return cases


def small_cases(kernels: NativeKernels, dtype: torch.dtype) -> list[Case]:
    """What lies between the products, for one token, a decode batch and a prompt."""
    cases = []
    weight = torch.randn(HIDDEN).to(dtype)
    angles = torch.rand(4096, HEAD_DIM // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    for tokens in (1, 32, 1024):
        x, residual = torch.randn(tokens, HIDDEN).to(dtype), torch.randn(tokens, HIDDEN).to(dtype)
        up = torch.randn(tokens, 2 * FFN).to(dtype)
        qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
        cache, step, group = paged_batch([tokens], [tokens], dtype, kernels)
        norm = (x, residual, weight, 1e-6)
        rotary = (qkv, HEADS, step.positions, cos_sin, False, cache, group.slot_mapping)
        for name, kernel, reference, arguments in (
            ("add_rms_norm", kernels.add_rms_norm, add_rms_norm.reference, norm),
            ("silu_and_mul", kernels.activate_gated, activate_gated.reference, (up, "silu")),
            ("rotate_and_write_kv", kernels.rotate_and_write_kv, rotate_and_write_kv.reference, rotary),
        ):
            cases.append(
                Case(
                    f"{name} x{tokens}",
                    {"ours": lambda f=kernel, a=arguments: f(*a), "torch": lambda f=reference, a=arguments: f(*a)},  # type: ignore[misc]
                )
            )
    return cases


def sampling_cases(kernels: NativeKernels) -> list[Case]:
    """From logits to tokens; the floor is reading them once."""
    cases = []
    for rows in (1, 8, 32):
        logits = torch.randn(rows, VOCAB) * 2
        cases.append(
            Case(
                f"greedy x{rows}",
                {
                    "ours": lambda x=logits: kernels.greedy_and_finite(x),  # type: ignore[misc]
                    "torch": lambda x=logits: (greedy.reference(x), finite_rows.reference(x)),  # type: ignore[misc]
                },
                bytes=logits.nbytes,
            )
        )
        for name, top_k, top_p in (("top_k 50, top_p 0.95", 50, 0.95), ("top_p 0.95", 0, 0.95), ("no filter", 0, 1.0)):
            k, p, ones = np.full(rows, top_k, np.int32), np.full(rows, top_p, np.float32), torch.ones(rows)
            params = DrawParams(
                ones * 0.8, ones * 0, torch.from_numpy(k), torch.from_numpy(p), torch.rand(rows), k, p
            )  # fmt: skip
            cases.append(
                Case(
                    f"draw x{rows}, {name}",
                    {
                        "ours": lambda x=logits, p=params: kernels.draw_and_finite(x, p),  # type: ignore[misc]
                        "torch": lambda x=logits, p=params: (draw.reference(x, p), finite_rows.reference(x)),  # type: ignore[misc]
                    },
                    bytes=logits.nbytes,
                )
            )
    return cases


def run(cases: list[Case], rounds: int, shortest: float) -> None:
    """Fill `seconds`, round by round. Fast candidates are repeated until a measurement takes `shortest` seconds."""
    repeats = {}
    for case in cases:
        for name, candidate in case.candidates.items():
            candidate()
            start = time.perf_counter()
            candidate()
            repeats[case.name, name] = max(1, int(shortest / max(time.perf_counter() - start, 1e-7)))
    for _ in range(rounds):
        for case in cases:
            for name, candidate in case.candidates.items():
                count = repeats[case.name, name]
                start = time.perf_counter()
                for _ in range(count):
                    candidate()
                case.seconds.setdefault(name, []).append((time.perf_counter() - start) / count)


def busy_elsewhere(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Cores that other processes kept busy between two readings of (machine's busy seconds, ours), per second."""
    return (after[0] - before[0]) - (after[1] - before[1])


def busy_seconds() -> tuple[float, float]:
    ticks = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system = (int(t) for t in ticks[:3])
    return (user + nice + system) / 100, time.process_time()


def report(cases: list[Case], bandwidth: float, peak: float) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        floor = max(case.bytes / bandwidth, case.operations / peak)
        row: dict[str, Any] = {"case": case.name, "floor_us": round(floor * 1e6, 1)}
        for name, seconds in case.seconds.items():
            best = min(seconds)
            row[name] = {
                "best_us": round(best * 1e6, 2),
                "median_us": round(statistics.median(seconds) * 1e6, 2),
                "over_floor": round(best / floor, 2) if floor else None,
            }
        ours = row.get("ours")
        others = {n: row[n]["best_us"] for n in case.seconds if n != "ours"}
        if ours and others:
            row["speedup"] = {n: round(us / ours["best_us"], 2) for n, us in others.items()}
        rows.append(row)
        times = "  ".join(f"{n} {row[n]['best_us']:>10} us" for n in case.seconds)
        over = f"  floor x{row['ours']['over_floor']}" if ours and floor else ""
        print(f"{case.name:<28}{times}{over}  {row.get('speedup', '')}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument(
        "--instruction-set", choices=list(library.INSTRUCTION_SETS), help="default: this processor's best"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shortest", type=float, default=0.01, help="seconds a measurement lasts at least")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    path = library.path_of(options.instruction_set) if options.instruction_set else library.find()
    if path is None or not path.exists():
        raise SystemExit("No native library: run python tools/build_native.py first.")
    kernels, dtype = NativeKernels(library.load(path)), getattr(torch, options.dtype)
    before, start = busy_seconds(), time.perf_counter()
    read, matmul = limits = ceilings(kernels, dtype)
    cases = [
        *limits,
        *product_cases(kernels, dtype, options.rows),
        *attention_cases(kernels, dtype),
        *small_cases(kernels, dtype),
        *sampling_cases(kernels),
    ]
    with torch.inference_mode():
        run(cases, options.rounds, options.shortest)
    bandwidth = read.bytes / min(read.seconds["ours"])
    peak = matmul.operations / min(matmul.seconds["torch"])
    elsewhere = busy_elsewhere(before, busy_seconds()) / (time.perf_counter() - start)
    print(f"{path.name}, {options.threads} threads, {options.dtype}: read {bandwidth / 1e9:.1f} GB/s, ", end="")
    print(f"matmul {peak / 1e9:.0f} GFLOP/s; other processes kept {elsewhere:.2f} cores busy")
    rows = report(cases[2:], bandwidth, peak)
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
        result = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit.stdout.strip(),
            "machine": cpu.partition(":")[2].strip() or platform.processor(),
            "torch": torch.__version__,
            "library": path.name,
            "threads": options.threads,
            "dtype": options.dtype,
            "read_gb_s": round(bandwidth / 1e9, 2),
            "matmul_gflop_s": round(peak / 1e9, 1),
            "cores_busy_elsewhere": round(elsewhere, 2),
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
