"""Settings of guided decoding, reasoning parsers and logits processors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Flag, JsonOr, Text
from vllm.reasoning import NAMES, think_format
from vllm.structured_output.params import BACKEND_OPTIONS
from vllm.validation import flag, show, text

GUIDED_BACKENDS = ("auto", "outlines", "lm-format-enforcer", "xgrammar", "guidance")
_NEWER_NAMES = {
    "backend": text,
    "disable_fallback": flag,
    "disable_any_whitespace": flag,
    "disable_additional_properties": flag,
    "enable_in_reasoning": flag,
}


def split_backend(name: str) -> tuple[str, frozenset[str]]:
    """A back end and its options, "xgrammar:no-fallback,disable-any-whitespace". Raises ValueError for unknown ones."""
    backend, _, options = name.partition(":")
    found = [option.strip() for option in options.split(",") if option.strip()]
    for option in found:
        if option not in BACKEND_OPTIONS:
            raise ValueError(
                f"Unsupported option {show(option)!r} of the guided decoding backend {backend!r}; expected one of "
                f"{', '.join(BACKEND_OPTIONS)}."
            )
    return backend, frozenset(BACKEND_OPTIONS[option] for option in found)


@dataclass(frozen=True)
class DecodingConfig:
    """How outputs are constrained and read."""

    guided_decoding_backend: str = setting(
        "auto",
        Text(),
        "What compiles schemas, regular expressions and grammars: " + ", ".join(GUIDED_BACKENDS) + "; options may "
        "follow after a colon: " + ", ".join(BACKEND_OPTIONS) + ".",
    )
    guided_decoding_disable_fallback: bool = setting(
        False, Flag(), "Do not try another backend where the chosen one lacks a feature."
    )
    guided_decoding_disable_any_whitespace: bool = setting(False, Flag(), "Allow no free whitespace in JSON.")
    guided_decoding_disable_additional_properties: bool = setting(
        False, Flag(), "Forbid properties that a JSON schema does not name."
    )
    structured_outputs_config: Any = setting(
        None,
        JsonOr(optional=True, accept=lambda value: hasattr(value, "backend"), expected="a StructuredOutputsConfig"),
        "The newer name of the guided_decoding_* settings, as one object: " + ", ".join(_NEWER_NAMES) + ".",
    )
    enable_reasoning: bool | None = setting(
        None,
        Flag(optional=True),
        "Separate a model's thoughts from its answer; the older switch of reasoning_parser.",
    )
    reasoning_parser: str = setting(
        "",
        Text(optional=True),
        "How the model marks its thoughts, which are then told from its answer: " + ", ".join(NAMES) + ".",
    )
    logits_processor_pattern: str | None = setting(
        None,
        Text(optional=True),
        "Regular expression of the logits processors that requests to the server may name.",
        later="Logits processors named by requests to the server (logits_processor_pattern)",
    )
    logits_processors: Any = setting(
        None,
        JsonOr(optional=True, accept=lambda value: isinstance(value, list | tuple), expected="a list"),
        "Logits processors of the engine.",
        later="Logits processors of the whole engine (logits_processors); pass them per request in SamplingParams",
    )

    def __post_init__(self) -> None:
        if self.reasoning_parser:
            think_format(self.reasoning_parser)
        elif self.enable_reasoning:
            raise ValueError("enable_reasoning needs a reasoning_parser.")
        backend, _ = split_backend(self.guided_decoding_backend)
        if backend not in GUIDED_BACKENDS:
            raise ValueError(f"Invalid guided_decoding_backend '{backend}', must be one of {list(GUIDED_BACKENDS)}")
        if self.structured_outputs_config is not None:
            object.__setattr__(self, "structured_outputs_config", self._read_newer(self.structured_outputs_config))
        if self.logits_processor_pattern is not None:
            try:
                re.compile(self.logits_processor_pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    "logits_processor_pattern must be a regular expression, got "
                    f"{self.logits_processor_pattern!r}: {error}."
                ) from None

    def _read_newer(self, given: Any) -> dict[str, Any]:
        """`structured_outputs_config` as a dictionary; every value of it may be given in one spelling only."""
        if not isinstance(given, Mapping):
            given = asdict(given) if is_dataclass(given) and not isinstance(given, type) else vars(given)
        for name, value in given.items():
            if name not in _NEWER_NAMES:
                raise ValueError(
                    f"structured_outputs_config has no {show(name)!r}; expected some of {', '.join(_NEWER_NAMES)}."
                )
            _NEWER_NAMES[name](f"structured_outputs_config.{name}", value)
        backend = given.get("backend", "auto")
        if backend not in GUIDED_BACKENDS:
            raise ValueError(
                f"Invalid structured_outputs_config.backend '{show(backend)}', must be one of {list(GUIDED_BACKENDS)}"
            )
        if backend != "auto" and self.guided_decoding_backend not in ("auto", backend):
            raise ValueError(
                f"guided_decoding_backend={self.guided_decoding_backend!r} and structured_outputs_config.backend="
                f"{backend!r} are two names of one setting; set only one of them."
            )
        return dict(given)

    @property
    def backend(self) -> str:
        """The newer name of `guided_decoding_backend`."""
        return self.guided_decoding_backend

    @cached_property
    def _chosen(self) -> tuple[str, frozenset[str]]:
        """The back end, and what is switched on in any spelling."""
        backend, options = split_backend(self.guided_decoding_backend)
        newer = self.structured_outputs_config or {}
        names = {name for name in (*BACKEND_OPTIONS.values(), "enable_in_reasoning") if newer.get(name)}
        older = {name for name in BACKEND_OPTIONS.values() if getattr(self, f"guided_decoding_{name}")}
        return (newer.get("backend", backend) if backend == "auto" else backend), options | names | older

    @property
    def backend_name(self) -> str:
        """What compiles constraints, without options."""
        return self._chosen[0]

    @property
    def disable_fallback(self) -> bool:
        return "disable_fallback" in self._chosen[1]

    @property
    def disable_any_whitespace(self) -> bool:
        return "disable_any_whitespace" in self._chosen[1]

    @property
    def disable_additional_properties(self) -> bool:
        return "disable_additional_properties" in self._chosen[1]

    @property
    def enable_in_reasoning(self) -> bool:
        """Whether a constraint holds for a model's reasoning too, not only for its answer."""
        return "enable_in_reasoning" in self._chosen[1]

    @property
    def reasoning_backend(self) -> str:
        return self.reasoning_parser
