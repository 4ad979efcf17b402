"""The one reader of Hugging Face configs: config.json to typed, checked values, without importing transformers.

Files of a model folder come from strangers, so everything here is bounded and checked, and the gate that keeps model
code from being imported (`refuse_model_code`) is here too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm.config.facts import Facts, Windows, facts_of
from vllm.config.hf_defaults import class_defaults, known_fields
from vllm.config.hf_rope import ROPE_KINDS, RopeSettings, parse_rope
from vllm.logger import init_logger

__all__ = ["ROPE_KINDS", "HFConfig", "RopeSettings", "read_json_object", "refuse_model_code"]

MAX_JSON_BYTES = 16 * 2**20
logger = init_logger(__name__)

_MAX_LAYERS = 10_000
_MAX_HEADS = 65_536
_MAX_WIDTH = 2**24
_MAX_VOCAB = 2**28
_MAX_LENGTH = 2**31 - 1
_MAX_LABELS = 1_000_000
HEAD_TOKENS = "vllm_head_tokens"  # a field that no file may have

_MISSING = object()
_NAMES = {  # our word -> the names that model families use for it
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "max_position_embeddings": (
        "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
        "model_max_length",
    ),
}  # fmt: skip

_COMPLETED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip

HFOverrides = Mapping[str, Any] | Callable[[Any], Any]


def _aliases(name: str) -> tuple[str, ...]:
    """Every name of the field that transformers calls `name`."""
    return next((names for names in _NAMES.values() if names[0] == name), (name,))


class _MissingFieldError(ValueError):
    """A field is absent and has no default."""


_SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _special_float(value: dict[str, Any]) -> Any:
    """The number that transformers writes as an object, since JSON has no name for it; any other object as it is."""
    name = value.get("__float__") if len(value) == 1 else None
    return _SPECIAL_FLOATS.get(name, value) if isinstance(name, str) else value


def read_json_object(file: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read `file`, which must be a JSON object of at most `max_bytes`. Raises ValueError that names the file."""
    try:
        size = file.stat().st_size
        if size > max_bytes:
            raise ValueError(f"{file} has {size} bytes, expected at most {max_bytes}. Is it the right file?")
        document = json.loads(file.read_bytes()[: max_bytes + 1], object_hook=_special_float)
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist. Expected a model folder in Hugging Face format.") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(document, dict):
        raise ValueError(f"{file} must hold a JSON object, but holds a {type(document).__name__}.")
    return document


def refuse_model_code(document: Any, source: Path | str, *, trust_remote_code: bool) -> None:
    """Raise ValueError if `document` asks for a repository's Python code (`auto_map`, at any depth) without trust.

    All that may import code from a model folder or the Hub calls this first, with the JSON it read from `source`.
    """
    if trust_remote_code:
        return
    pending = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if value.get("auto_map"):
                raise ValueError(
                    f"{source} asks for Python code from the model's repository (`auto_map`), which is not run by "
                    "default. If you trust the repository, pass `trust_remote_code` (--trust-remote-code); otherwise "
                    "use a version of the model without `auto_map`."
                )
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def _is_ours(raw: Mapping[str, Any], hf_overrides: HFOverrides | None) -> bool:
    """Whether a family of ours runs the model, so that no code of its repository is needed. A function that is to
    change transformers' config object may need it to make one.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    names = raw.get("architectures")
    if callable(hf_overrides):
        return False
    if isinstance(hf_overrides, Mapping) and isinstance(hf_overrides.get("architectures"), list):
        names = hf_overrides["architectures"]
    return isinstance(names, list) and ModelRegistry.knows(name for name in names if isinstance(name, str))


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it; dictionaries are merged, anything else is replaced."""
    merged = dict(base)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


# Fields that configs have although no class sets them by default.
_OVERRIDABLE = frozenset(
    {"_num_labels", "architectures", "auto_map", "classifier_from_token", "compression_config", "dtype", "head_dim",
     "id2label", "is_causal", "is_encoder_decoder", "is_matryoshka", "is_original_qwen3_reranker", "layer_types",
     "matryoshka_dimensions", "method", "model_type", "num_labels", "pad_token_id", "padded_vocab_size",
     "problem_type", "quantization_config", "rope_parameters", "rope_pct", "rope_scaling", "rope_theta",
     "rotary_emb_base", "rotary_pct", "rotary_percent", "sbert_ce_default_activation_function", "sliding_window",
     "text_config", "torch_dtype", "vocab_size"}
).union(*_NAMES.values())  # fmt: skip


@dataclass(frozen=True)
class HFConfig:
    """A model's config.json.

    raw:    the file's fields, overrides applied. Treat it as read-only.
    path:   the model folder.
    """

    raw: dict[str, Any]
    path: Path = field(default_factory=Path)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        hf_overrides: HFOverrides | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        rope_theta: float | None = None,
        trust_remote_code: bool = False,
    ) -> HFConfig:
        """Read `folder`/config.json, lay `hf_overrides`, `rope_scaling` and `rope_theta` over it, and check it.

        A callable in `hf_overrides` gets transformers' own config object and returns it changed.
        """
        folder = Path(folder)
        file = folder / "config.json"
        if not file.exists() and (folder / "params.json").exists():
            raise ValueError(
                f"{folder} holds a model in Mistral's own format (params.json), which is not supported. "
                "Use the version of the model in Hugging Face format, which has a config.json."
            )
        raw = read_json_object(file)
        layers = raw.get("num_hidden_layers")
        if raw.get("auto_map") and not trust_remote_code and _is_ours(raw, hf_overrides):
            logger.info("%s names Python code of the model's repository, which is neither needed nor run.", file)
            raw = {name: value for name, value in raw.items() if name != "auto_map"}
        refuse_model_code(raw, file, trust_remote_code=trust_remote_code)
        if callable(hf_overrides):
            raw = _override_with_function(folder, hf_overrides, trust_remote_code)
        elif hf_overrides:
            raw = _with_overrides(raw, hf_overrides)
        raw = _cut_to_fewer_layers(raw, layers)
        if rope_scaling:
            raw = _with_rope_scaling(raw, rope_scaling)
        if rope_theta is not None:
            raw = _with_rope_theta(raw, rope_theta)
        refuse_model_code(raw, "hf_overrides", trust_remote_code=trust_remote_code)
        return cls.from_dict(raw, folder)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], path: Path | None = None) -> HFConfig:
        """A config from its fields, checked. Raises ValueError naming the file, the field and what was expected."""
        config = cls(raw, path if path is not None else Path())
        config._check()
        return config

    def completed(self, *, trust_remote_code: bool = False, code_revision: str | None = None) -> HFConfig:
        """The same config with the sizes that transformers' class of it computes or has by default (imports
        transformers). For models of which we know nothing but that.
        """
        config = self.to_transformers(trust_remote_code=trust_remote_code, code_revision=code_revision)
        text = config.get_text_config()
        found = {name: getattr(text, name, None) for name in _COMPLETED}
        added = {
            name: value
            for name, value in found.items()
            if isinstance(value, int) and self.get(*_aliases(name), default=None) is None
        }
        return HFConfig.from_dict({**self.raw, **added}, self.path)

    # ---- raw access ----------------------------------------------------------------------------------------------

    def get(self, *names: str, default: Any = _MISSING) -> Any:
        """The first of `names` that is present and not null; then Hugging Face's class default; then `default`.

        A name that is present but null never falls back to the class default (null means "off" there).
        Raises ValueError if there is nothing at all.
        """
        value = self._find(names)
        if value is not _MISSING:
            return value
        if default is not _MISSING:
            return default
        wanted = " or ".join(f"`{name}`" for name in names)
        raise _MissingFieldError(f"{self.file} has no field {wanted}, which a model of type {self.model_type!r} needs.")

    def _find(self, names: tuple[str, ...]) -> Any:
        explicit_null = False
        for name in names:
            for source in self._sources:
                if source.get(name) is not None:
                    return source[name]
                explicit_null = explicit_null or name in source
        if not explicit_null:
            for defaults in (self.facts.defaults, class_defaults(self.model_type)):
                for name in names:
                    if name in defaults:
                        return defaults[name]
        return _MISSING

    def nested(self, name: str) -> HFConfig:
        """The object that field `name` holds, as a config of its own; an empty one if there is none."""
        value = self.get(name, default={})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return HFConfig(value, self.path)

    def get_int(self, *names: str, default: Any = _MISSING, minimum: int = 1, maximum: int = _MAX_LENGTH) -> Any:
        """Like `get`, checked to be an integer in [minimum, maximum]. `default` may be anything, such as None."""
        value = self._find(names)
        if value is _MISSING:
            return self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._wrong(names[0], value, f"an integer from {minimum} to {maximum}")
        return value

    def get_float(self, *names: str, default: Any = _MISSING, minimum: float = -1e300, maximum: float = 1e300) -> Any:
        """Like `get`, checked to be a number in [minimum, maximum]. `default` may be anything, such as None."""
        value = self._find(names)
        if value is _MISSING:
            return self.get(*names, default=default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= maximum:  # NaN compares false
            raise self._wrong(names[0], value, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def get_bool(self, *names: str, default: Any = _MISSING) -> Any:
        """Like `get`, checked to be true or false. `default` may be anything, such as None; null is false, as Python
        takes it, or None if that is the default.
        """
        value = self._find(names)
        if value is not _MISSING and not isinstance(value, bool):
            raise self._wrong(names[0], value, "true or false")
        is_null = value is _MISSING and any(name in source for name in names for source in self._sources)
        return self.get(*names, default=False if is_null and default is not None else default)

    def get_str(self, *names: str, default: Any = _MISSING) -> Any:
        """Like `get`, checked to be a string. `default` may be anything, such as None."""
        value = self._find(names)
        if value is not _MISSING and not isinstance(value, str):
            raise self._wrong(names[0], value, "a string")
        return self.get(*names, default=default)

    def _wrong(self, name: str, value: Any, expected: str) -> ValueError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ValueError(f"{self.file}: field `{name}` is {shown}, expected {expected}.")

    @property
    def file(self) -> Path:
        return self.path / "config.json"

    @cached_property
    def _sources(self) -> tuple[dict[str, Any], ...]:
        """Where fields are looked up: the file's own, then (multimodal models) those of its text model."""
        text = self.raw.get("text_config")
        return (self.raw, text) if isinstance(text, dict) else (self.raw,)

    # ---- identity ------------------------------------------------------------------------------------------------

    @cached_property
    def model_type(self) -> str:
        value = self.raw.get("model_type", "")
        if not isinstance(value, str):
            raise self._wrong("model_type", value, "a string")
        return value

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        value = self.raw.get("architectures") or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._wrong("architectures", value, "a list of strings")
        return tuple(value)

    @cached_property
    def facts(self) -> Facts:
        """What the model's family states about all its models."""
        return facts_of(self.architectures, self.model_type)

    @cached_property
    def torch_dtype(self) -> str | None:
        """The checkpoint's dtype by name ("float16", "bfloat16", "float32"), None if the file does not say."""
        value = self.get("dtype", "torch_dtype", default=None)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self._wrong("torch_dtype", value, "a string")
        return value.removeprefix("torch.")

    @cached_property
    def quantization_config(self) -> dict[str, Any] | None:
        """How the checkpoint is quantized, None if it is not."""
        value = self.get("quantization_config", "compression_config", default=None)
        if value is not None and not isinstance(value, dict):
            raise self._wrong("quantization_config", value, "an object")
        return value

    @cached_property
    def is_multimodal(self) -> bool:
        return any(isinstance(self.raw.get(name), dict) for name in ("vision_config", "audio_config"))

    @cached_property
    def is_encoder_decoder(self) -> bool:
        value: bool = self.get_bool("is_encoder_decoder", default=False)
        return value

    # ---- sizes ---------------------------------------------------------------------------------------------------

    @cached_property
    def hidden_size(self) -> int:
        value: int = self.get_int(*_NAMES["hidden_size"], maximum=_MAX_WIDTH)
        return value

    @cached_property
    def num_layers(self) -> int:
        value: int = self.get_int(*_NAMES["num_layers"], maximum=_MAX_LAYERS)
        return value

    @cached_property
    def num_heads(self) -> int:
        if not self.facts.attention:
            return 0
        value: int = self.get_int(*_NAMES["num_heads"], maximum=_MAX_HEADS)
        return value

    @cached_property
    def num_kv_heads(self) -> int:
        """Key/value heads; the number of attention heads if the file does not say."""
        if self.facts.kv_heads is not None:
            return self.facts.kv_heads(self)
        count: int | None = self.get_int(*_NAMES["num_kv_heads"], default=None, maximum=_MAX_HEADS)
        return self.num_heads if count is None else count

    @cached_property
    def head_dim(self) -> int:
        size: int | None = self.get_int("head_dim", "kv_channels", default=None, maximum=_MAX_WIDTH)
        if size is None:
            return self.hidden_size // self.num_heads if self.num_heads else 0
        return size

    @cached_property
    def vocab_size(self) -> int:
        value: int = self.get_int("vocab_size", "padded_vocab_size", maximum=_MAX_VOCAB)
        return value

    @cached_property
    def max_position_embeddings(self) -> int | None:
        """The longest sequence the model was made for, before rope scaling; None if the file does not say."""
        value: int | None = self.get_int(*_NAMES["max_position_embeddings"], default=None)
        return value

    @cached_property
    def tie_word_embeddings(self) -> bool:
        value: bool = self.get_bool("tie_word_embeddings", default=True)
        return value

    # ---- attention -----------------------------------------------------------------------------------------------

    @cached_property
    def sliding_window(self) -> int | None:
        """Tokens that a windowed layer sees (itself included); None if no layer has a window."""
        windows = self.facts.windows
        if windows is Windows.NONE:
            return None
        if windows is Windows.ON_REQUEST and not self.get_bool("use_sliding_window", default=False):
            return None
        window: int | None = self.get_int("sliding_window", "sliding_window_size", default=None)
        return window

    @cached_property
    def layer_types(self) -> tuple[str, ...]:
        """Per layer "full_attention" or "sliding_attention" (or another kind that the file names)."""
        named = self.get("layer_types", default=None)
        if named is not None:
            if not isinstance(named, list) or not all(isinstance(kind, str) for kind in named):
                raise self._wrong("layer_types", named, "a list of strings")
            if len(named) != self.num_layers:
                raise self._wrong("layer_types", named, f"one entry for each of the {self.num_layers} layers")
            return tuple(named)
        if self.sliding_window is None:
            return ("full_attention",) * self.num_layers
        return tuple(
            "sliding_attention" if self._has_window(layer) else "full_attention" for layer in range(self.num_layers)
        )

    def _has_window(self, layer: int) -> bool:
        if self.facts.has_window is not None:
            return self.facts.has_window(self, layer)
        if self.facts.windows is Windows.ON_REQUEST:
            first: int = self.get_int("max_window_layers", default=0, minimum=0)
            return layer >= first
        pattern: int | None = self.get_int("sliding_window_pattern", default=self.facts.window_pattern)
        return pattern is None or (layer + 1) % pattern != 0

    @cached_property
    def rope(self) -> RopeSettings:
        """Rotary embedding of full-attention layers."""
        return self.rope_for("full_attention")

    def rope_for(self, layer_type: str) -> RopeSettings:
        """Rotary embedding of the layers of one type (configs may give each type its own)."""
        where = "rope_scaling" if self.get("rope_scaling", default=None) else "rope_parameters"
        params = self.get(where, default={})
        by_type = isinstance(params, dict) and isinstance(params.get(layer_type), dict)
        if by_type:
            params, where = params[layer_type], f"{where}.{layer_type}"
        theta = self.get_float("rope_theta", "rotary_emb_base", default=10000.0)
        local_theta = self.get_float("rope_local_base_freq", default=None)
        if layer_type == "sliding_attention" and local_theta is not None and not by_type:
            theta, params = local_theta, {}  # Gemma 3's windowed layers: their own base, no scaling
        return parse_rope(
            params,
            where=where,
            theta=theta,
            partial_rotary_factor=self._partial_rotary_factor(),
            original_max_position_embeddings=self.get_int("original_max_position_embeddings", default=None),
            max_position_embeddings=self.max_position_embeddings,
            kinds=self.facts.rope_kinds,
            fail=self._wrong,
        )

    def _partial_rotary_factor(self) -> float:
        factor: float | None = self.get_float(
            "partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_percent", default=None
        )
        if factor is not None:
            return factor
        rotary_dim: int | None = self.get_int("rotary_dim", default=None)
        return 1.0 if rotary_dim is None else rotary_dim / self.head_dim

    # ---- tokens --------------------------------------------------------------------------------------------------

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        value = self.get("eos_token_id", default=[])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise self._wrong("eos_token_id", value, "an integer or a list of integers")
        return tuple(ids)

    @cached_property
    def pad_token_id(self) -> int:
        """The padding token; 0 if the file does not say."""
        value: int = self.get_int("pad_token_id", default=0, minimum=0)
        return value

    # ---- pooling -------------------------------------------------------------------------------------------------

    @cached_property
    def num_labels(self) -> int:
        """Classes of a model that classifies; 2 if the file does not say, as in transformers."""
        names = self.get("id2label", default=None)
        if names is not None:
            if not isinstance(names, dict) or not 0 < len(names) <= _MAX_LABELS:
                raise self._wrong("id2label", names, f"an object with 1 to {_MAX_LABELS} names")
            return len(names)
        value: int = self.get_int("num_labels", "_num_labels", default=2, maximum=_MAX_LABELS)
        return value

    @cached_property
    def matryoshka_dimensions(self) -> list[int] | None:
        """Sizes that embeddings may be cut to; None for any."""
        value = self.get("matryoshka_dimensions", default=None)
        if value is not None and not (isinstance(value, list) and all(type(size) is int for size in value)):
            raise self._wrong("matryoshka_dimensions", value, "a list of integers")
        return value

    @cached_property
    def is_matryoshka(self) -> bool:
        """Whether the beginning of an embedding is one, too."""
        stated: bool = self.get_bool("is_matryoshka", default=False)
        return stated or bool(self.matryoshka_dimensions)

    @cached_property
    def sees_whole_prompt(self) -> bool:
        """Whether no token is hidden from another: encoders, and decoders that were trained to embed like that."""
        causal = self.get_bool("is_causal", default=None)
        return self.facts.encoder or causal is False or self.get_bool("use_bidirectional_attention", default=False)

    @cached_property
    def head_tokens(self) -> tuple[int, ...]:
        """Tokens whose rows of the language model's head score a prompt, as `resolve_pooling` has found them."""
        return tuple(self.raw.get(HEAD_TOKENS, ()))

    # ---- checks --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Compute every value once, so that a hostile file fails here and not in the middle of loading."""
        for name in ("model_type", "architectures", "torch_dtype", "quantization_config", "is_encoder_decoder",
                     "hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size", "max_position_embeddings",
                     "tie_word_embeddings", "sliding_window", "eos_token_ids"):  # fmt: skip
            self._probe(name)
        heads, kv_heads, hidden = self._probe("num_heads"), self._probe("num_kv_heads"), self._probe("hidden_size")
        if heads and kv_heads and heads % kv_heads:
            raise self._wrong(_NAMES["num_kv_heads"][0], kv_heads, f"a divisor of the {heads} attention heads")
        if heads and hidden and self.get("head_dim", "kv_channels", default=None) is None and hidden % heads:
            raise self._wrong(_NAMES["num_heads"][0], heads, f"a divisor of the hidden size {hidden}")
        for name in ("head_dim", "layer_types", "rope"):
            self._probe(name)

    def _probe(self, name: str) -> Any:
        """The property `name`, or None if the file lacks a field for it (whoever needs the field says so then)."""
        try:
            return getattr(self, name)
        except _MissingFieldError:
            return None

    # ---- transformers --------------------------------------------------------------------------------------------

    def to_transformers(self, *, trust_remote_code: bool = False, code_revision: str | None = None) -> Any:
        """transformers' own config object with the same fields (imports transformers)."""
        from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

        refuse_model_code(self.raw, self.file, trust_remote_code=trust_remote_code)
        if self.model_type in CONFIG_MAPPING:
            config = CONFIG_MAPPING[self.model_type].from_dict(deepcopy(self.raw))
        elif self.raw.get("auto_map"):  # which the line above has seen to
            return AutoConfig.from_pretrained(
                self.path, trust_remote_code=trust_remote_code, code_revision=code_revision
            )
        else:
            config = PretrainedConfig.from_dict({"rope_parameters": {}, **deepcopy(self.raw)})
        return self._with_older_rope(config)

    def _with_older_rope(self, config: Any) -> Any:
        """`config` with the rotary embedding also in the attributes of older versions, which models were written for:
        `rope_theta`, and `rope_scaling` (None if there is none). Newer ones have `rope_parameters` only.
        """
        rope = self._probe("rope")
        if rope is None or not hasattr(config, "rope_parameters"):
            return config
        scaling = None if rope.kind == "default" else {"rope_type": rope.kind, "type": rope.kind, **rope.params}
        for name, value in (("rope_theta", rope.theta), ("rope_scaling", scaling)):
            if getattr(config, name, None) is None:
                setattr(config, name, value)
        return config


def _override_with_function(folder: Path, function: Callable[[Any], Any], trust_remote_code: bool) -> dict[str, Any]:
    """config.json after a user's function changed transformers' config object."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    changed = function(config)
    if not hasattr(changed, "to_json_string"):
        raise ValueError(
            f"hf_overrides must return the config it was given, but returned a {type(changed).__name__}. "
            "End the function with `return config`."
        )
    fields: dict[str, Any] = json.loads(changed.to_json_string(use_diff=False), object_hook=_special_float)
    return fields


def _with_overrides(raw: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` laid over the file's fields. Rope fields may be spelled unlike the file's: `rope_parameters` of newer
    files, `rope_scaling` and its neighbours of older ones.
    """
    unknown = sorted(changes.keys() - raw.keys() - _OVERRIDABLE - known_fields())
    if unknown:
        logger.warning("hf_overrides: no model is known to have the fields %s.", ", ".join(map(str, unknown)))
    merged = _merge(raw, changes)
    if "rope_parameters" in changes:
        if "rope_scaling" not in changes:
            merged.pop("rope_scaling", None)
        return merged
    if not isinstance(raw.get("rope_parameters"), dict):
        return merged
    scaling = changes.get("rope_scaling", {})
    if scaling is None or isinstance(scaling, Mapping):
        merged.pop("rope_scaling", None)
        merged = _with_newer_rope(merged, {"rope_type": "default"} if scaling is None else scaling)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in changes:
            merged = {**merged, "rope_parameters": {**merged["rope_parameters"], name: merged[name]}}
    return merged


def _cut_to_fewer_layers(raw: dict[str, Any], layers: Any) -> dict[str, Any]:
    """`raw`, whose lists of one entry for each of the file's `layers` end where an override ends the model."""
    fewer = raw.get("num_hidden_layers")
    if not isinstance(layers, int) or not isinstance(fewer, int) or not 0 < fewer < layers:
        return raw
    lists = {name: raw.get(name) for name in ("layer_types", "mlp_layer_types", "no_rope_layers")}
    return {**raw, **{k: v[:fewer] for k, v in lists.items() if isinstance(v, list) and len(v) == layers}}


def _with_newer_rope(raw: dict[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A whole scaling replaces that of `rope_parameters`, a part of one is laid over it."""
    if "rope_type" in scaling or "type" in scaling:
        return _with_rope_scaling(raw, scaling)
    return _merge(raw, {"rope_parameters": scaling})


def _with_rope_scaling(raw: dict[str, Any], rope_scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the scaling, in whichever spelling the file uses; theta and the partial factor stay."""
    if "rope_type" not in rope_scaling and "type" not in rope_scaling:
        raise ValueError(f"rope_scaling must have a 'rope_type', such as 'yarn' or 'linear', got {dict(rope_scaling)}.")
    new = raw.get("rope_parameters")
    if not isinstance(new, dict):
        return {**raw, "rope_scaling": dict(rope_scaling)}
    kept = {name: new[name] for name in ("rope_theta", "partial_rotary_factor") if name in new}
    return {**raw, "rope_parameters": {**kept, **rope_scaling}}


def _with_rope_theta(raw: dict[str, Any], rope_theta: float) -> dict[str, Any]:
    new = raw.get("rope_parameters")
    if isinstance(new, dict):
        return {**raw, "rope_parameters": {**new, "rope_theta": rope_theta}}
    return {**raw, "rope_theta": rope_theta}
