"""The settings of a LoRA adapter in peft's format, and where its files are. Needs no torch: front ends look here first.

Files come from strangers: sizes are bounded before anything is read, and what this engine would compute otherwise than
peft does (DoRA, retrained modules, ...) is refused by name.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.utils.safetensors_header import DamagedFile, iterate_header

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
NEW_EMBEDDINGS = ("new_embeddings.safetensors", "new_embeddings.bin")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
MAX_CONFIG_BYTES = 1 << 20
# Of a file of weights, whose header has some 160 bytes a tensor; the largest adapters change 60 layers of 384 experts.
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1 << 18
_MAX_PICKLE_BYTES = 256 << 20  # of rows of new tokens
MAX_RANK = 4096
MAX_PATTERNS = 4096
MAX_NAME = 512  # characters in the name of a tensor
_AT_ONCE = 128  # tensors whose headers are read without a rest
# Settings that change what an adapter computes, with the values that change nothing.
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "use_dora": ("weight-decomposed adapters (DoRA)", (None, False)),
    "modules_to_save": ("retrained modules", (None, [], ())),
    "layer_replication": ("replicated layers", (None, [])),
    "trainable_token_indices": ("retrained tokens", (None, [], {})),
    "alora_invocation_tokens": ("adapters that begin at an invocation (aLoRA)", (None, [])),
    "use_qalora": ("adapters of grouped inputs (QA-LoRA)", (None, False)),
    "use_bdlora": ("block-diagonal adapters (BD-LoRA)", (None, False)),
    "kasa_config": ("adapters of truncated weights (KaSA)", (None,)),
    "arrow_config": ("routed adapters (Arrow)", (None,)),
}
# How an adapter was initialised matters only where peft has changed the base model's weights with it.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """`adapter_config.json`, as far as it matters here.

    rank, alpha: of all layers but those that match a pattern.   context_length: tokens that a long-context adapter was
    trained for, or None.   parameters: ends of the names of parameters that are adapted though they are no layers.
    """

    rank: int
    alpha: float
    rank_stabilized: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    context_length: int | None = None
    base_model: str = ""
    parameters: tuple[str, ...] = ()

    @property
    def largest_rank(self) -> int:
        return max([self.rank, *self.rank_pattern.values()])

    def stretch(self, positions: int | None) -> int:
        """By what a long-context adapter divides positions, in a model of so many of them; 1 for any other. Raises
        ValueError.
        """
        if self.context_length is None:
            return 1
        if positions is None:
            raise ValueError(
                f"{CONFIG} says context_length={self.context_length}, but the base model has no "
                "max_position_embeddings, from which it would follow by what positions are to be divided."
            )
        return math.ceil(self.context_length / positions)

    def scale(self, path: str) -> float:
        """What a layer's product is multiplied by. path: the layer's name in the base model."""
        rank = first_match(self.rank_pattern, path, self.rank)
        alpha = first_match(self.alpha_pattern, path, self.alpha)
        return float(alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)


def check_stretch(config: AdapterConfig, positions: int | None, factors: Collection[float]) -> int:
    """`config.stretch`, which must be among the factors that are served, or 1. Raises ValueError."""
    factor = config.stretch(positions)
    if factor != 1 and factor not in factors:
        raise ValueError(
            f"{CONFIG} says context_length={config.context_length}, so the adapter divides positions by {factor}. Add "
            f"{factor} to long_lora_scaling_factors, which has {sorted(factors)}."
        )
    return factor


def find_adapter(folder: Path) -> tuple[Path, Path]:
    """The files of settings and of weights. Raises ValueError that names what is missing, or leads elsewhere."""
    if not folder.is_dir():
        raise ValueError(f"No adapter found: the folder {folder} does not exist.")
    config = inside(folder, CONFIG)
    if config is None:
        raise ValueError(f"No adapter found in {folder}: {CONFIG} is missing.")
    for name in WEIGHTS:
        file = inside(folder, name)
        if file is not None:
            return config, file
    raise ValueError(f"No adapter found in {folder}: neither {WEIGHTS[0]} nor {WEIGHTS[1]} is there.")


def inside(folder: Path, name: str) -> Path | None:
    """The regular file `name` of an adapter's folder, or None. Links of the Hub's cache are followed, no others."""
    file = folder / name
    if not file.exists():
        return None
    real = file.resolve()
    allowed = {folder.resolve()}
    if folder.resolve().parent.name == "snapshots":  # the Hub's cache: snapshots/<commit>/file -> blobs/<hash>
        allowed.add(folder.resolve().parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise ValueError(f"{file} leads out of the adapter's folder, to {real}; copy the file there instead.")
    if not real.is_file():
        raise ValueError(f"{file} is not a regular file.")
    return file


def added_tokens(folder: Path, weights: Path, vocabulary: int) -> int:
    """How many tokens an adapter adds to a base model's vocabulary, as far as the headers of its files tell; its files
    are checked when they are read.
    """
    names = [name for name in NEW_EMBEDDINGS if inside(folder, name) is not None]
    if names:
        return max((shape[0] for shape in _shapes(folder / names[0]).values() if len(shape) == 2), default=0)
    if weights.suffix != ".safetensors":
        return 0
    shapes = {name: shape for name, shape in _shapes(weights).items() if "lora_" not in name and len(shape) == 2}
    return max([0, *(shape[0] - vocabulary for shape in shapes.values())])


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's matrices but those of LoRA; {} for a damaged one. Of pickles only small ones are read.

    Raises ValueError for a file that is larger than that of any adapter.
    """
    if file.suffix != ".safetensors":
        if file.stat().st_size > _MAX_PICKLE_BYTES:
            raise ValueError(f"{file} is larger than {_MAX_PICKLE_BYTES} bytes. Write it as a safetensors file.")
        from vllm.lora.adapter import tensors_of

        return {name: tuple(tensor.shape) for name, tensor in tensors_of(file)}
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for count, entry in enumerate(iterate_header(file, MAX_HEADER_BYTES), 1):
            if count > MAX_TENSORS:
                raise ValueError(f"{file} has more than {MAX_TENSORS} tensors. Is it the right file?")
            if len(entry.shape) == 2 and "lora_" not in entry.name:
                shapes[entry.name] = entry.shape
            if count % _AT_ONCE == 0:
                time.sleep(0.001)  # let the threads that answer requests in
    except DamagedFile:
        return {}
    return shapes


def read_config(file: Path) -> AdapterConfig:
    """The settings of an adapter. Raises ValueError that names the file and the field."""
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes. Is it the right file?")
    try:
        fields = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} is a {type(fields).__name__}, expected an object of settings.")
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ValueError(f'{file}: peft_type is {kind!r}, expected "LORA".')
    for name, (what, harmless) in _REFUSED.items():
        if fields.get(name) not in harmless:
            raise ValueError(f"{file}: {name} is set: {what} are not supported. Merge the adapter into its base model.")
    if fields.get("bias", "none") not in ("none", None) or fields.get("lora_bias"):
        raise ValueError(f"{file}: the adapter has biases, which are not supported; expected bias='none'.")
    initial = str(fields.get("init_lora_weights", "")).lower()
    if initial.startswith(_CHANGES_BASE):
        raise ValueError(
            f"{file}: init_lora_weights={initial!r} changes the weights of the base model. Convert the adapter to a "
            "plain one when it is saved (peft: path_initial_model_for_weight_conversion)."
        )
    length = fields.get("context_length")
    return AdapterConfig(
        rank=_positive(file, "r", fields.get("r", 8), MAX_RANK),
        alpha=_number(file, "lora_alpha", fields.get("lora_alpha", 8)),
        rank_stabilized=fields.get("use_rslora") is True,
        rank_pattern=_patterns(file, "rank_pattern", fields, lambda n, v: _positive(file, n, v, MAX_RANK)),
        alpha_pattern=_patterns(file, "alpha_pattern", fields, lambda n, v: _number(file, n, v)),
        context_length=None if not length else _positive(file, "context_length", length, 1 << 40),
        base_model=str(fields.get("base_model_name_or_path") or ""),
        parameters=_names(file, "target_parameters", fields),
    )


def read_targets(file: Path) -> tuple[str, ...]:
    """The last parts of the names of the modules that an adapter's settings speak of; () for all linear layers.

    Raises ValueError.
    """
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes. Is it the right file?")
    try:
        targets = json.loads(file.read_bytes())["target_modules"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ValueError(f"{file} has no target_modules.") from None
    if targets == "all-linear":
        return ()
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise ValueError(f"{file}: target_modules must be a list of names or 'all-linear', got {targets!r:.100}.")
    return tuple(targets)


def _positive(file: Path, name: str, value: Any, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ValueError(f"{file}: {name} must be an integer from 1 to {high}, got {value!r:.100}.")
    return value


def _number(file: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ValueError(f"{file}: {name} must be a number, got {value!r:.100}.")
    return float(value)


def _names(file: Path, name: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    given = fields.get(name) or []
    if not isinstance(given, list) or len(given) > MAX_PATTERNS or not all(isinstance(x, str) and x for x in given):
        raise ValueError(f"{file}: {name} must be a list of at most {MAX_PATTERNS} names.")
    return tuple(given)


def _patterns(file: Path, name: str, fields: Mapping[str, Any], check: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Layer -> its own value. The names are peft's patterns; as regular expressions from strangers may never end, only
    plain names are taken.
    """
    given = fields.get(name) or {}
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
        raise ValueError(f"{file}: {name} must be an object of at most {MAX_PATTERNS} layers.")
    found = {}
    for pattern, value in given.items():
        plain = pattern.replace("\\.", ".").removeprefix(".*.")  # a name stands for what ends with it anyway,
        plain = plain.removesuffix("$")  # and for nothing that goes on behind it
        if not re.fullmatch(r"\^?[\w.]+", plain):
            raise ValueError(f"{file}: {name} has the pattern {pattern!r:.100}; only names of layers are supported.")
        found[plain] = check(f"{name}[{pattern!r:.100}]", value)
    return found


def first_match(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value of the first pattern that names `path` or an end of it. The work does not grow with the patterns but
    where several do.
    """
    if not patterns:
        return default
    hits = [name for name in (f"^{path}", *endings(path)) if name in patterns]
    if len(hits) > 1:
        hits = [next(name for name in patterns if name in hits)]
    return patterns[hits[0]] if hits else default


def endings(path: str) -> list[str]:
    """The path and what is behind each of its dots."""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]
