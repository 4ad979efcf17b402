"""Where the requests of a benchmark come from: random tokens, ShareGPT conversations, lines of JSON."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.tokenizer import Tokenizer

MAX_FILE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: a text or token ids, how long the prompt is, how many tokens are wanted."""

    prompt: str | list[int]
    prompt_tokens: int
    output_tokens: int


def random_samples(
    tokenizer: Tokenizer,
    count: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    seed: int,
    as_text: bool = False,
) -> list[Sample]:
    """Random token ids; lengths vary uniformly by `range_ratio` around the given ones (0: not at all).

    `as_text` is for routes that take no ids: the ids are decoded. Tokenized again, they may become more or fewer; that
    number is the sample's `prompt_tokens`, without what a chat template adds.
    """
    if not 0 <= range_ratio < 1:
        raise ValueError(f"The range ratio must be in [0, 1), got {range_ratio}.")
    if input_len < 1 or output_len < 1 or prefix_len < 0:
        raise ValueError(f"Lengths must be 1 or more (prefix: 0 or more), got {input_len}, {output_len}, {prefix_len}.")
    rng = random.Random(seed)
    special = set(tokenizer.all_special_ids)
    allowed = [i for i in range(len(tokenizer)) if i not in special]
    prefix = rng.choices(allowed, k=prefix_len)

    def around(length: int) -> int:
        return rng.randint(max(1, int(length * (1 - range_ratio))), max(1, int(length * (1 + range_ratio))))

    samples = []
    for _ in range(count):
        ids = prefix + rng.choices(allowed, k=around(input_len))
        if as_text:
            text = tokenizer.decode(ids)
            samples.append(Sample(text, len(tokenizer.encode(text, False)), around(output_len)))
        else:
            samples.append(Sample(ids, len(ids), around(output_len)))
    return samples


def sharegpt_samples(
    tokenizer: Tokenizer, path: Path, count: int, output_len: int | None, seed: int, max_total: int = 2048
) -> list[Sample]:
    """First turns of conversations in ShareGPT's format, the second turn's length being the wanted output length."""
    found = []
    for item in _read_json(path):
        turns = item.get("conversations") or item.get("conversation") or []
        if len(turns) >= 2:
            found.append((str(turns[0].get("value", "")), str(turns[1].get("value", ""))))
    if not found:
        raise ValueError(f"{path} has no conversation with two turns; expected ShareGPT's format.")
    random.Random(seed).shuffle(found)
    samples: list[Sample] = []
    for question, answer in found:
        if len(samples) == count:
            break
        prompt = len(tokenizer.encode(question))
        output = output_len or len(tokenizer.encode(answer))
        if prompt >= 4 and output >= 4 and prompt + output <= max_total:
            samples.append(Sample(question, prompt, output))
    return _repeat(samples, count, path)


def jsonl_samples(tokenizer: Tokenizer, path: Path, count: int, output_len: int) -> list[Sample]:
    """One request per line: an object with `prompt` and perhaps `output_tokens`."""
    samples: list[Sample] = []
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
                raise ValueError(f"{path}:{number}: expected an object with a text `prompt`.")
            text = item["prompt"]
            samples.append(Sample(text, len(tokenizer.encode(text)), int(item.get("output_tokens") or output_len)))
            if len(samples) == count:
                break
    return _repeat(samples, count, path)


def _repeat(samples: list[Sample], count: int, path: Path) -> list[Sample]:
    if not samples:
        raise ValueError(f"{path} holds no usable request.")
    return [samples[i % len(samples)] for i in range(count)]


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"There is no file {path}; give one with --dataset-path.")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES} bytes.")
    return path.open(encoding="utf-8")


def _read_json(path: Path) -> list[dict[str, Any]]:
    with _open(path) as file:
        try:
            data = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, list):
        raise ValueError(f"{path} must hold a list of conversations.")
    return [item for item in data if isinstance(item, dict)]
