"""The form that a request wants its answer in, from any of the spellings that clients use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.errors import bad_request
from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from vllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

_KINDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
_OPTIONS = ("guided_decoding_backend", "guided_whitespace_pattern")
FORM_FIELDS = frozenset({*_KINDS, *_OPTIONS, "response_format", "structured_outputs"})
_STRUCTURED_FIELDS = frozenset(
    name for name, field in StructuredOutputsParams.__dataclass_fields__.items() if field.init
)

Form = GuidedDecodingParams | StructuredOutputsParams


def form_of(request: CompletionRequest | ChatCompletionRequest) -> Form | None:
    """The form of the answer, None for plain text. Raises APIError 400, which names the field at fault."""
    given = [name for name in (*_KINDS, "structured_outputs") if getattr(request, name) is not None]
    if _wants_form(request.response_format):
        given.append("response_format")
    if isinstance(request.structured_outputs, Mapping):  # programs for servers of any version say the same in both ways
        again = request.structured_outputs
        given = [name for name in given if name not in _KINDS or not _is_said(name, getattr(request, name), again)]
    if not given:
        return None
    if len(given) > 1:
        if set(given) <= set(_KINDS):
            raise bad_request(
                "You can only use one kind of guided decoding ('guided_json', 'guided_regex' or 'guided_choice'), got "
                f"{', '.join(given)}.",
                given[1],
            )
        raise bad_request(f"The form of the answer can be given once, got {' and '.join(given)}.", given[1])
    name = given[0]
    options: dict[str, Any] = {
        "backend": _text(request, "guided_decoding_backend"),
        "whitespace_pattern": _text(request, "guided_whitespace_pattern"),
    }
    try:
        if name == "structured_outputs":
            return _structured(request.structured_outputs, options)
        if name == "response_format":
            return GuidedDecodingParams(**_response_format(request.response_format), **options)
        return GuidedDecodingParams(**{name.removeprefix("guided_"): getattr(request, name)}, **options)
    except (ValueError, TypeError) as error:
        raise bad_request(str(error).replace("guided_decoding.", "guided_"), name) from None


def _is_said(name: str, value: Any, again: Mapping[str, Any]) -> bool:
    """Whether `again` asks for the same form as the older field `name`."""
    return bool(again.get(name.removeprefix("guided_")) == value)


def _text(request: CompletionRequest | ChatCompletionRequest, name: str) -> str | None:
    value = getattr(request, name)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"{name} must be a string.", name)
    return value


def _wants_form(response_format: Any) -> bool:
    if response_format is None:
        return False
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        raise bad_request(
            "response_format must be an object whose type is text, json_object, json_schema or structural_tag.",
            "response_format",
        )
    return kind != "text"


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    """The constraint of a response_format. One that is `strict` allows no property that the schema does not name."""
    if form["type"] == "json_object":
        return {"json_object": True}
    if form["type"] == "structural_tag":
        return {"structural_tag": json.dumps({key: value for key, value in form.items() if value is not None})}
    schema = form.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict | bool):
        raise bad_request(
            'response_format of type json_schema needs json_schema: {"name": "...", "schema": {...}}.',
            "response_format",
        )
    strict = schema.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise bad_request("response_format.json_schema.strict must be true or false.", "response_format")
    text = json.dumps(schema["schema"]) if isinstance(schema["schema"], bool) else schema["schema"]
    return {"json": text, "disable_additional_properties": bool(strict)}


def _structured(given: Any, options: dict[str, Any]) -> StructuredOutputsParams:
    if not isinstance(given, dict):
        raise bad_request("structured_outputs must be an object.", "structured_outputs")
    unknown = given.keys() - _STRUCTURED_FIELDS
    if unknown:
        raise bad_request(
            f"structured_outputs has no field {sorted(unknown)[0]:.80}; it takes "
            f"{', '.join(sorted(_STRUCTURED_FIELDS))}.",
            "structured_outputs",
        )
    values = {key: value for key, value in given.items() if value is not None}
    if isinstance(values.get("structural_tag"), dict):
        values["structural_tag"] = json.dumps(values["structural_tag"])
    if options["whitespace_pattern"] is not None:
        values.setdefault("whitespace_pattern", options["whitespace_pattern"])
    params = StructuredOutputsParams(**values)
    params._backend = options["backend"]
    return params


def form_values(request: CompletionRequest | ChatCompletionRequest) -> dict[str, Form]:
    """The field of SamplingParams that says the form of the answer. Raises APIError 400."""
    if FORM_FIELDS.isdisjoint(request.model_fields_set):
        return {}
    form = form_of(request)
    if form is None:
        return {}
    return {"structured_outputs" if isinstance(form, StructuredOutputsParams) else "guided_decoding": form}


def responses_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` of the Responses API as a response_format of a chat. Raises APIError 400."""
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise bad_request("text.format must be an object whose type is text, json_object or json_schema.", "text")
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    if not isinstance(form.get("schema"), dict | bool):
        raise bad_request("text.format of type json_schema needs a name and a schema.", "text")
    inner = {key: form.get(key) for key in ("name", "schema", "strict")}
    return {"type": "json_schema", "json_schema": inner}
