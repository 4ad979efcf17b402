"""Reads a prompt adapter in peft's format: virtual tokens, as rows of embeddings, that stand in front of a prompt.

Files come from strangers: nothing in them is executed, and sizes are bounded before anything is read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.lora.config import MAX_CONFIG_BYTES, find_adapter

KINDS = ("PROMPT_TUNING", "P_TUNING")  # both store the finished embeddings
_TENSOR = "prompt_embeddings"


@dataclass(frozen=True)
class VirtualTokens:
    """embeddings: [count, width] float32, row by row.   key: SHA-256 of them."""

    count: int
    embeddings: bytes
    key: bytes


def count_virtual_tokens(folder: Path) -> int:
    """How many virtual tokens the settings of an adapter speak of. Raises ValueError that names what is wrong."""
    config_file, _ = find_adapter(folder)
    count = _settings(config_file).get("num_virtual_tokens")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{config_file}: num_virtual_tokens must be an integer from 1 on, got {count!r:.100}.")
    return count


def _settings(config_file: Path) -> dict[str, Any]:
    if config_file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{config_file} is larger than {MAX_CONFIG_BYTES} bytes. Is it the right file?")
    try:
        config = json.loads(config_file.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{config_file} is not valid JSON.") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in KINDS:
        raise ValueError(f"{config_file}: peft_type is {kind!r:.100}, expected one of {', '.join(KINDS)}.")
    return config  # type: ignore[no-any-return]


def read_prompt_adapter(folder: Path, *, width: int, max_tokens: int) -> VirtualTokens:
    """The adapter in `folder`. width: of the model's embeddings.   max_tokens: the most virtual tokens.

    Raises ValueError if anything about it is damaged, unknown or too large.
    """
    config_file, weights_file = find_adapter(folder)
    _settings(config_file)
    if weights_file.stat().st_size > 8 * width * max_tokens + (1 << 20):
        raise ValueError(
            f"{weights_file} is larger than {max_tokens} virtual tokens (max_prompt_adapter_token) of {width} numbers "
            "need. Raise max_prompt_adapter_token, or is it the right file?"
        )
    from vllm.lora.adapter import tensors_of  # with torch, which front ends load when they need it

    found = dict(tensors_of(weights_file))
    table = found.get(_TENSOR)
    if table is None or len(found) > 1:
        raise ValueError(f"{weights_file} must hold the tensor {_TENSOR!r} alone, got {', '.join(found)!r:.200}.")
    if table.ndim != 2 or not table.is_floating_point() or table.shape[1] != width or not len(table):
        raise ValueError(
            f"{weights_file}: {_TENSOR} is {table.dtype} {list(table.shape)}, expected [virtual tokens, {width}]. Was "
            "the adapter trained for another model?"
        )
    if len(table) > max_tokens:
        raise ValueError(
            f"{weights_file} has {len(table)} virtual tokens, more than max_prompt_adapter_token ({max_tokens})."
        )
    if not table.isfinite().all():
        raise ValueError(f"{weights_file} has numbers that are not finite.")
    data = table.float().contiguous().numpy().tobytes()
    return VirtualTokens(len(table), data, hashlib.sha256(data).digest())
