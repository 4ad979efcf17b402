"""`vllm quantize MODEL --format ... --out DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_FORMATS = (
    "fp8", "fp8-dynamic", "int8", "w8a16", "w4a16", "gptq", "awq", "gguf-f16", "gguf-q8_0", "gguf-q4_0", "gguf-q4_k_m",
)  # fmt: skip
_HELP = """fp8: 8-bit floats, one scale for a weight. fp8-dynamic: one for each output (compressed-tensors). int8: 8-bit
weights and activations (compressed-tensors). w8a16, w4a16: 8- and 4-bit weights (compressed-tensors; w4a16 rounds as
GPTQ does). gptq, awq: 4-bit weights in those formats. gguf-...: a GGUF file, numbers rounded to nearest."""


def main(argv: Sequence[str]) -> int:
    """`argv` is ["quantize", model, flags...]."""
    parser = argparse.ArgumentParser(
        prog="vllm quantize", description="Write a quantized copy of a model.", epilog=_HELP
    )
    parser.add_argument("model", help="name or folder of the model")
    parser.add_argument("--format", required=True, choices=_FORMATS)
    parser.add_argument("--out", required=True, type=Path, help="folder to write; an interrupted job goes on in it")
    parser.add_argument(
        "--data",
        type=Path,
        help="text to calibrate with and to measure perplexity on (its last fifth); default: the model's own",
    )
    parser.add_argument("--group-size", type=int, help="inputs that share a scale; default: 128, or what divides")
    parser.add_argument("--bits", type=int, help="gptq: 2, 3, 4 or 8 (default 4)")
    parser.add_argument("--act-order", action="store_true", help="gptq: inputs with large values first")
    parser.add_argument("--nearest", action="store_true", help="round to nearest, whatever the inputs")
    parser.add_argument(
        "--tokens",
        type=int,
        default=16384,
        help="of the text that is used (default 16384; at least 5 sequences of up to 256)",
    )
    args = parser.parse_args(list(argv[1:]))
    from vllm.quantize.run import Job, describe, quantize

    job = Job(
        args.model,
        args.format,
        args.out,
        args.data,
        args.group_size,
        args.act_order,
        args.nearest,
        args.tokens,
        args.bits,
    )
    try:
        report = quantize(job)
    except (ValueError, OSError) as error:
        print(f"vllm quantize: {error}", file=sys.stderr)
        return 1
    print(describe(report))
    return 0
