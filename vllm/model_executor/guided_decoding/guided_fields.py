"""The older spelling of guided decoding: `guided_options_request=` of `LLM.generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from vllm.exceptions import VLLMValidationError
from vllm.structured_output.params import GuidedDecodingParams


class LLMGuidedOptions(TypedDict, total=False):
    """The options as a dictionary."""

    guided_json: dict[str, Any] | str
    guided_regex: str
    guided_choice: list[str]
    guided_grammar: str
    guided_decoding_backend: str
    guided_whitespace_pattern: str
    guided_json_object: bool


@dataclass
class GuidedDecodingRequest:
    """The options as an object; at most one constraint."""

    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_json_object: bool | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        kinds = (
            self.guided_json,
            self.guided_regex,
            self.guided_choice,
            self.guided_grammar,
            self.guided_json_object,
            self.structural_tag,
        )
        if sum(kind is not None for kind in kinds) > 1:
            raise VLLMValidationError(
                f"You can only use one kind of guided decoding but multiple are specified: {self.__dict__}",
                parameter="guided_options_request",
            )

    def to_params(self) -> GuidedDecodingParams | None:
        """The same in the spelling of `SamplingParams.guided_decoding`; None if nothing is constrained."""
        return GuidedDecodingParams.from_optional(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            json_object=self.guided_json_object,
            backend=self.guided_decoding_backend,
            whitespace_pattern=self.guided_whitespace_pattern,
            structural_tag=self.structural_tag,
        )
