"""Structured output on a GPU: a batch of which some rows follow a JSON schema, against the same batch without.

    python -m benchmarks.h200.structured_output /tmp/models [--batch 64] [--tokens 256] [--rounds 3]

The shape of Qwen3 0.6B with random weights and a made-up tokenizer of as many tokens, so that masks are as wide as
real ones and the library's tree of tokens is about as large. Prints tokens a second with no row, half of the rows and
all rows under the schema, and the time per token of the free rows in each. Every answer is checked to be the beginning
of a text of the schema.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.h200.models import MODELS
from benchmarks.structured_output import SCHEMA

SHAPE = "qwen3-0.6b"


def write_model(folder: Path, shape: str = SHAPE, width: int | None = None) -> Path:
    """config.json and tokenizer files of `width` tokens (default: the model's): bytes, then words of two to four
    letters with and without a blank in front.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    target = folder / f"{shape}-with-tokenizer"
    width = MODELS[shape]["vocab_size"] if width is None else width
    target.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        if len(vocabulary) < width - 2 and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))

    blank = "\u0120"
    marks = [*ascii_lowercase, *"0123456789", *'":,{}[]_-.']
    for a in marks:
        merge(blank, a)
    for a, b in product(marks, marks):
        merge(a, b)
        merge(blank + a, b)
    for size in (2, 3):
        for letters in product(ascii_lowercase, repeat=size):
            for last in ascii_lowercase:
                merge("".join(letters), last)
                merge(blank + "".join(letters), last)
    end = "<|end|>"
    vocabulary[end] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([end])
    made.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}), encoding="utf-8"
    )
    config = {**MODELS[shape], "vocab_size": width, "bos_token_id": None, "eos_token_id": vocabulary[end]}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="guidance")
    parser.add_argument("--width", type=int, default=MODELS[SHAPE]["vocab_size"], help="tokens of the vocabulary")
    parser.add_argument("--layers", type=int, default=MODELS[SHAPE]["num_hidden_layers"])
    args = parser.parse_args()
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import GuidedDecodingParams

    llm = LLM(
        str(write_model(args.folder, width=args.width)), load_format="dummy", dtype="bfloat16", max_model_len=2048,
        enable_prefix_caching=False, disable_log_stats=False, hf_overrides={"num_hidden_layers": args.layers},
    )  # fmt: skip
    common: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True, "temperature": 0.7, "seed": 1}
    free = SamplingParams(**common)
    guided = SamplingParams(
        **common, guided_decoding=GuidedDecodingParams(json=SCHEMA, backend=f"{args.backend}:no-fallback")
    )
    prompts: list[Any] = [f"people as json, number {i}:" for i in range(args.batch)]
    counts = {"free": 0, "half": args.batch // 2, "all": args.batch}
    rates: dict[str, list[float]] = {name: [] for name in counts}
    steps: dict[str, list[float]] = {name: [] for name in counts}
    for i in range(args.rounds + 1):
        for name, count in counts.items():
            params = [guided if row % args.batch < count else free for row in range(args.batch)]
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            if any(len(output.outputs[0].token_ids) != args.tokens for output in outputs):
                raise RuntimeError("An answer has another number of tokens.")
            for output in outputs[:count]:
                _check(output.outputs[0].text)
            if i:  # the first round compiles and captures
                rates[name].append(args.batch * args.tokens / seconds)
                times = [output.metrics for output in outputs[count:]]
                steps[name] += [(m.last_token_time - m.first_token_time) / (args.tokens - 1) for m in times if m]
    base = statistics.median(rates["free"])
    own = statistics.median(steps["free"])
    for name in counts:
        rate = statistics.median(rates[name])
        line = f"{name:4} rows guided: {rate:9.0f} tokens/s, {100 * rate / base:5.1f} % of free"
        if steps[name]:
            step = statistics.median(steps[name])
            line += f"; free rows {1e3 * step:.3f} ms per token, {100 * own / step:5.1f} % of their own speed"
        print(line, flush=True)


def _check(text: str) -> None:
    """Whether a text begins as the schema wants it: an array of objects with their keys in order."""
    flat = "".join(text.split())
    if not '[{"name":"'.startswith(flat[:10]):
        raise RuntimeError(f"Not of the schema: {text[:200]!r}")


if __name__ == "__main__":
    main()
