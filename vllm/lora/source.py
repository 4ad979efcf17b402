"""Where an adapter's files are: a local folder, the package, or a repository of the Hub, fetched once."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from vllm.exceptions import LoRAAdapterNotFoundError, VLLMValidationError
from vllm.lora.config import (
    TOKENIZER,
    AdapterConfig,
    added_tokens,
    check_stretch,
    find_adapter,
    inside,
    read_config,
)
from vllm.lora.request import LoRARequest

PACKAGED_ADAPTERS = ("demo-pirate",)  # write "./demo-pirate" for a folder of that name
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_FILES = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "new_embeddings.*", *TOKENIZER]


def adapter_folder(request: LoRARequest) -> Path:
    """The absolute path of the adapter's folder. Raises LoRAAdapterNotFoundError."""
    folder = _folder(request.lora_path)
    if folder is None:
        raise LoRAAdapterNotFoundError(request.lora_name, request.lora_path)
    return folder


@functools.lru_cache(maxsize=1024)
def _from_hub(name: str) -> Path | None:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_FILES))
    except Exception:  # every release of huggingface_hub has another HTTP client, with its own errors
        try:
            return Path(huggingface_hub.snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
        except Exception:
            return None


def _folder(path: str) -> Path | None:
    if "\0" in path:
        return None
    if path in PACKAGED_ADAPTERS:
        return _ASSETS / path
    try:
        local = Path(path).expanduser()
        if local.is_dir():
            return local.resolve()
    except (OSError, RuntimeError):  # too long for a path; the folder of a user that there is not
        return None
    if path.count("/") != 1 or path.startswith(("/", ".", "~")):
        return None  # no name of a repository
    return _from_hub(path)


@dataclass(frozen=True)
class AdapterFacts:
    """What front ends know of an adapter, whose weights are read later.

    stretch: how many times as long as the model's own its sequences may be.   added: tokens that it adds to the
    vocabulary.   tokenizer: whether it has one of its own for these.
    """

    folder: Path
    stretch: int
    added: int
    tokenizer: bool


def check_adapter(
    request: LoRARequest,
    max_rank: int,
    positions: int | None = None,
    factors: Collection[float] = (),
    vocabulary: int | None = None,
    extra: int = 0,
) -> AdapterFacts:
    """An adapter whose settings are in order. Raises VLLMValidationError or LoRAAdapterNotFoundError.

    positions: `max_position_embeddings` of the base model.   factors: `long_lora_scaling_factors`.   vocabulary: tokens
    of the base model; None: they are not asked for.   extra: `lora_extra_vocab_size`.
    """
    folder = adapter_folder(request)
    try:
        settings, weights = find_adapter(folder)
        config: AdapterConfig = read_config(settings)
        stretch = check_stretch(config, positions, factors)
        added = 0 if vocabulary is None else added_tokens(folder, weights, vocabulary)
        if added > extra:
            raise ValueError(f"it adds {added} tokens to the vocabulary, more than lora_extra_vocab_size ({extra}).")
        files = [inside(folder, name) for name in TOKENIZER]
        tokenizer = added > 0 and files[0] is not None
    except (ValueError, OSError) as error:
        raise VLLMValidationError(
            f"Loading lora {request.lora_name} failed: {error}", parameter="lora_request"
        ) from None
    if config.largest_rank > max_rank:
        raise VLLMValidationError(
            f"Loading lora {request.lora_name} failed: LoRA rank {config.largest_rank} is greater than max_lora_rank "
            f"{max_rank}.",
            parameter="lora_request",
        )
    return AdapterFacts(folder, stretch, added, tokenizer)
