"""The types with which a request constrains the form of its output: older and newer spelling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.validation import Check, flag, plain_dict, show, string_list, text

# Options that may follow a back end's name after a colon.
BACKEND_OPTIONS = {
    "no-fallback": "disable_fallback",
    "disable-any-whitespace": "disable_any_whitespace",
    "no-additional-properties": "disable_additional_properties",
}


@dataclass
class GuidedDecodingParams:
    """The form that the output must have; at most one of json, regex, choice, grammar, json_object, structural_tag.

    json: a JSON schema as a dictionary or text, or a pydantic class.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend_was_auto: bool = False
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        self.json = schema_of(self.json)
        kinds = (self.json, self.regex, self.choice, self.grammar, self.json_object, self.structural_tag)
        if sum(kind is not None for kind in kinds) > 1:
            raise VLLMValidationError(
                f"You can only use one kind of guided decoding but multiple are specified: {show(self.__dict__)}",
                parameter="guided_decoding",
            )
        _check_constraint_types("guided_decoding", self.__dict__)
        if self.backend is not None:
            self.backend, options = backend_and_options(self.backend)
            for option in options:
                setattr(self, option, True)

    @staticmethod
    def from_optional(
        json: str | dict[str, Any] | None = None,
        regex: str | None = None,
        choice: list[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        backend: str | None = None,
        whitespace_pattern: str | None = None,
        structural_tag: str | None = None,
    ) -> GuidedDecodingParams | None:
        """The parameters, or None if nothing constrains the output."""
        if all(kind is None for kind in (json, regex, choice, grammar, json_object, structural_tag)):
            return None
        return GuidedDecodingParams(
            json, regex, choice, grammar, json_object, backend, whitespace_pattern, structural_tag
        )


@dataclass
class StructuredOutputsParams:
    """The form that the output must have, in the newer spelling; exactly one kind of constraint."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    _backend: str | None = field(default=None, init=False)
    _backend_was_auto: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.json = schema_of(self.json)
        kinds = (self.json, self.regex, self.choice, self.grammar, self.json_object, self.structural_tag)
        count = sum(kind is not None for kind in kinds)
        if count > 1:
            raise VLLMValidationError(
                "You can only use one kind of structured outputs constraint but multiple are specified: "
                f"{show(self.__dict__)}",
                parameter="structured_outputs",
            )
        if count < 1:
            raise VLLMValidationError(
                f"You must use one kind of structured outputs constraint but none are specified: {show(self.__dict__)}",
                parameter="structured_outputs",
            )
        _check_constraint_types("structured_outputs", self.__dict__)


def backend_and_options(backend: str) -> tuple[str, set[str]]:
    """What is named in the older spelling of options, "xgrammar:no-fallback,disable-any-whitespace": the back end and
    the fields that are true.
    """
    backend, _, options = backend.partition(":")
    found = set()
    for option in filter(None, options.split(",")):
        field_name = BACKEND_OPTIONS.get(option.strip())
        if field_name is None:
            raise VLLMValidationError(
                f"Unsupported option {show(option)!r} of the guided decoding backend {backend!r}; "
                f"expected one of {', '.join(BACKEND_OPTIONS)}.",
                parameter="guided_decoding",
            )
        found.add(field_name)
    return backend, found


def schema_of(value: Any) -> Any:
    """The JSON schema of a pydantic class; anything else as it is."""
    make = getattr(value, "model_json_schema", None) if isinstance(value, type) else None
    return value if make is None else make()


_CONSTRAINT_CHECKS: dict[str, Check] = {
    "regex": text,
    "choice": string_list,
    "grammar": text,
    "json_object": flag,
    "backend": text,
    "whitespace_pattern": text,
    "structural_tag": text,
    "backend_was_auto": flag,
    "disable_fallback": flag,
    "disable_any_whitespace": flag,
    "disable_additional_properties": flag,
}


def _check_constraint_types(owner: str, fields: dict[str, Any]) -> None:
    """Types and emptiness of a constraint. Whether it compiles is found out by the backend that compiles it."""
    for name, check in _CONSTRAINT_CHECKS.items():
        if fields.get(name) is not None:
            check(f"{owner}.{name}", fields[name])
    schema = fields["json"]
    if schema is not None:
        (text if isinstance(schema, str) else plain_dict)(f"{owner}.json", schema)
    for name in ("json", "regex", "grammar", "structural_tag"):
        if fields[name] == "":
            raise VLLMValidationError(f"{owner}.{name} cannot be an empty string", parameter=f"{owner}.{name}")
    if fields["choice"] is not None and not fields["choice"]:
        raise VLLMValidationError(f"Choice '{fields['choice']}' cannot be an empty list", parameter=f"{owner}.choice")
    if fields["json_object"] is False:
        raise VLLMValidationError(
            f"{owner}.json_object must be True if set; omit {owner} to disable structured outputs",
            parameter=f"{owner}.json_object",
        )
    if fields["regex"] is not None and "\0" in fields["regex"]:
        raise VLLMValidationError(
            f"{owner}.regex must not contain a NUL character ('\\x00')", parameter=f"{owner}.regex"
        )
