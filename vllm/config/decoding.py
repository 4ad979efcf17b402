"""Settings of guided decoding, reasoning parsers and logits processors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Flag, JsonOr, Text
from vllm.reasoning import NAMES, think_format

GUIDED_BACKENDS = ("auto", "outlines", "lm-format-enforcer", "xgrammar", "guidance")
_GUIDED = "Guided decoding"


@dataclass(frozen=True)
class DecodingConfig:
    """How outputs are constrained and read."""

    guided_decoding_backend: str = setting(
        "auto",
        Text(),
        "What compiles schemas, regular expressions and grammars: " + ", ".join(GUIDED_BACKENDS) + ".",
        later=_GUIDED + " (guided_decoding_backend)",
    )
    guided_decoding_disable_fallback: bool = setting(
        False, Flag(), "Do not try another backend if the chosen one fails.", later=_GUIDED
    )
    guided_decoding_disable_any_whitespace: bool = setting(
        False, Flag(), "Allow no free whitespace in JSON.", later=_GUIDED
    )
    guided_decoding_disable_additional_properties: bool = setting(
        False, Flag(), "Forbid properties that a JSON schema does not name.", later=_GUIDED
    )
    structured_outputs_config: Any = setting(
        None,
        JsonOr(optional=True, accept=lambda value: hasattr(value, "backend"), expected="a StructuredOutputsConfig"),
        "The newer name of the guided_decoding_* settings, as one object.",
        later=_GUIDED + " (structured_outputs_config)",
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
        backend = self.guided_decoding_backend.partition(":")[0]
        if backend not in GUIDED_BACKENDS:
            raise ValueError(f"Invalid guided_decoding_backend '{backend}', must be one of {list(GUIDED_BACKENDS)}")
        if self.logits_processor_pattern is not None:
            try:
                re.compile(self.logits_processor_pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    "logits_processor_pattern must be a regular expression, got "
                    f"{self.logits_processor_pattern!r}: {error}."
                ) from None

    @property
    def backend(self) -> str:
        """The newer name of `guided_decoding_backend`."""
        return self.guided_decoding_backend

    @property
    def reasoning_backend(self) -> str:
        return self.reasoning_parser
