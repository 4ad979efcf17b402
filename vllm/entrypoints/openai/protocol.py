"""What clients may send: one pydantic model per request. Types are strict; values are checked where they are used."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from vllm.entrypoints.openai.errors import APIError, bad_request
from vllm.tool_parsers.messages import (  # noqa: F401 - plug-ins import them from here
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)

_T = TypeVar("_T")
# Only the first wrong item is reported: a million errors, each with its own text, would take minutes.
ListOf = Annotated[list[_T], Field(fail_fast=True)]
MAX_ENTRIES = 100_000
EXACT_FLOATS = 2**53  # below, a float is exactly the integer that it shows


def _entries(value: type, *others: type) -> BeforeValidator:
    """For an object's values: all of these types, at most MAX_ENTRIES. As with lists, only the first error is told."""
    allowed = {value, *others}

    def check(given: Any) -> Any:
        if isinstance(given, dict):
            if len(given) > MAX_ENTRIES:
                raise ValueError(f"may have at most {MAX_ENTRIES} entries, got {len(given)}")
            if not allowed.issuperset(map(type, given.values())):
                raise ValueError(f"every value must be a {value.__name__}")
        return given

    return BeforeValidator(check)


Numbers = Annotated[dict[str, float], _entries(float, int)]
Texts = Annotated[dict[str, str], _entries(str)]
# Any value but null is refused: a parameter is honoured or refused, never dropped.
LATER_FIELDS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "multi_modal_data",
    "multi_modal_uuids",
    "kv_transfer_params",
    "vllm_xargs",
    "prompt_embeds",
)
# Arguments of Python's that bodies spell otherwise.
_OTHERWISE = {
    "lora_request": "name the adapter as the model",
    "prompt_adapter_request": "name the adapter as the model",
    "guided_decoding": "send structured_outputs with the same contents, or guided_json and its like",
}
# Most requests have none of these, which is seen at one glance.
_NOT_YET = frozenset({"logits_processors", *_OTHERWISE, *LATER_FIELDS})

# Parameters of the other two routes that ask for what a response cannot hold.
NOT_OF_RESPONSES = ("n", "best_of", "use_beam_search", "echo", "prompt_logprobs", "max_tokens", "logprobs")

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_REASONING = "reasoning.encrypted_content"


class _Request(BaseModel):
    """Unknown fields are kept, and logged once by the route: newer clients send what older servers do not know."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    _size: int = PrivateAttr(0)

    @property
    def size(self) -> int:
        """Of the body that it was read from, in bytes: what working on all of it costs."""
        return self._size


_Model = TypeVar("_Model", bound=_Request)


def checked(model: type[_Model], data: dict[str, Any], size: int = 0) -> _Model:
    """`data`, read from a body of `size` bytes, as a `model`, whole numbers in it as integers. Raises APIError 400."""
    for name, value in data.items():
        if type(value) is float and value.is_integer() and abs(value) < EXACT_FLOATS:
            data[name] = int(value)  # JSON has one kind of numbers: 5.0 is 5
    try:
        made = model.model_validate(data)
    except ValidationError as error:
        raise _of_fields(error) from None
    made._size = size
    return made


# Fields that take several kinds of values. Of these, the checks by kind would each report what is wrong.
FORMS = {
    "prompt": "a text, a list of token ids, or a list of texts or of lists of token ids",
    "stop": "a text or a list of texts",
    "input": "a text, or a list of messages, texts, token ids or lists of token ids",
    "early_stopping": 'true, false or "never"',
}


def _of_fields(error: ValidationError) -> APIError:
    """What is wrong, field by field, without echoing values."""
    found = error.errors(include_url=False, include_input=False)
    raised = found[0].get("ctx", {}).get("error")
    if isinstance(raised, APIError):
        return raised
    parts: dict[str, None] = {}
    for item in found[:8]:
        place = [str(part)[:64] for part in item["loc"][:3]]
        form = FORMS.get(place[0]) if place else None
        what = item["msg"].removeprefix("Value error, ")
        parts[f"{'.'.join(place)}: {what}" if form is None else f"{place[0]} must be {form}"] = None
    param = str(found[0]["loc"][0]) if found and found[0]["loc"] else None
    return bad_request("; ".join(parts), param)


class StreamOptions(_Request):
    """Extras of a stream: a last chunk with the usage, or the usage so far in every chunk."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class _Sampling(_Request):
    """What all generating routes share. None means: the model's recommendation, else the neutral value."""

    options_need_a_stream: ClassVar[bool] = True

    model: str | None = None
    n: int | None = 1
    best_of: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: Numbers | None = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    echo: bool | None = False
    user: str | None = None
    priority: int = 0
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    request_id: Annotated[str, Field(max_length=128)] | None = None
    # The form of the answer, read by `guided.form_of`.
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    # Features of later versions; any value but the neutral one is refused.
    logits_processors: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    prompt_embeds: Any = None
    media_io_kwargs: Any = None
    multi_modal_data: Any = None
    multi_modal_uuids: Any = None
    lora_request: Any = None
    prompt_adapter_request: Any = None
    guided_decoding: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_streams(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if cls.options_need_a_stream and data.get("stream_options") is not None and not data.get("stream"):
            raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
        prompt_logprobs = data.get("prompt_logprobs")
        if isinstance(prompt_logprobs, int) and not isinstance(prompt_logprobs, bool):
            if data.get("stream") and prompt_logprobs > 0:
                raise bad_request("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
            if prompt_logprobs < 0:
                raise bad_request("`prompt_logprobs` must be a positive value.", "prompt_logprobs")
        return data

    def refuse_later_features(self) -> None:
        """Raise the error of the first parameter whose feature this version does not have."""
        if _NOT_YET.isdisjoint(self.model_fields_set):
            return
        if self.logits_processors:
            raise bad_request(
                "The `logits_processors` argument is not supported by this server: functions cannot be sent over HTTP. "
                "logit_bias, allowed_token_ids and bad_words change what is sampled.",
                "logits_processors",
            )
        for name, instead in _OTHERWISE.items():
            if self._set(name):
                raise bad_request(f"{name} is not a field of the API: {instead}.", name)
        for name in LATER_FIELDS:
            if self._set(name):
                raise bad_request(f"{name} is not available in this version.", name)

    def _set(self, name: str) -> bool:
        return getattr(self, name) is not None

    @property
    def is_decided_at_end(self) -> bool:
        """Whether the choices are known only when all candidates are done: beam search, and best_of beyond n."""
        return self.use_beam_search or (self.best_of is not None and self.best_of != (self.n or 1))

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


# What a response has in common with the chat that it comes down to.
SHARED_WITH_CHAT = frozenset({*_Sampling.model_fields, "chat_template", "chat_template_kwargs"}) - {
    *NOT_OF_RESPONSES,
    "stream_options",
    "request_id",
}


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: str | ListOf[int] | ListOf[str] | ListOf[ListOf[int]] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check_logprobs(cls, data: Any) -> Any:
        if isinstance(data, dict):
            logprobs = data.get("logprobs")
            if isinstance(logprobs, int) and not isinstance(logprobs, bool) and logprobs < 0:
                raise bad_request("`logprobs` must be a positive value.", "logprobs")
        return data


class ChatCompletionRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[Any] | None = None
    tool_choice: Any = "none"  # with tools: "auto"
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: ListOf[Texts] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # OpenAI's earlier form of tools, and what only multimodal or searching models have.
    functions: Any = None
    function_call: Any = None
    modalities: ListOf[str] | None = None
    audio: Any = None
    web_search_options: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_chat(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        top = data.get("top_logprobs")
        if isinstance(top, int) and not isinstance(top, bool):
            if top < 0:
                raise bad_request("`top_logprobs` must be a positive value.", "top_logprobs")
            if top > 0 and not data.get("logprobs"):
                raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        _check_generation_prompt(data)
        _check_tools(data.get("tools"))
        _check_tool_choice(data)
        return data

    @model_validator(mode="after")
    def _set_tool_choice(self) -> ChatCompletionRequest:
        if self.tool_choice is None or "tool_choice" not in self.model_fields_set:
            self.__dict__["tool_choice"] = "auto" if self.tools else "none"  # which nobody has set
        return self

    def refuse_later_features(self) -> None:
        super().refuse_later_features()
        for name in ("functions", "function_call"):
            if getattr(self, name) not in (None, [], "none"):
                raise bad_request(f"{name} is not available in this version: OpenAI replaced it by `tools`.", name)
        if self.modalities not in (None, [], ["text"]):
            raise bad_request("modalities other than ['text'] are not available in this version.", "modalities")
        for name in ("audio", "web_search_options"):
            if self._set(name):
                raise bad_request(f"{name} is not available in this version.", name)


def _check_generation_prompt(data: dict[str, Any]) -> None:
    if data.get("continue_final_message") and data.get("add_generation_prompt", True):
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")


def _check_tools(tools: Any) -> None:
    if not isinstance(tools, list):
        return  # the type is checked, and told, by the model
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(
                f'tools[{i}] must look like {{"type": "function", "function": {{"name": "my_function", ...}}}}.',
                "tools",
            )
        if not isinstance(function.get("parameters"), (dict, type(None))):
            raise bad_request(f"tools[{i}].function.parameters must be a JSON schema, which is an object.", "tools")


def _check_tool_choice(data: dict[str, Any]) -> None:
    choice = data.get("tool_choice")
    if choice is None or choice == "none":
        return
    if not data.get("tools"):
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice in ("auto", "required"):
        return
    if not isinstance(choice, dict):
        raise bad_request(
            f'Invalid value for `tool_choice`: {choice!s:.100}! Only named tools, "none", "auto" or "required" '
            "are supported.",
            "tool_choice",
        )
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    if choice.get("type") == "allowed_tools":
        raise bad_request(
            'A `tool_choice` of the type "allowed_tools" is not supported: send these tools only, with the mode as '
            "`tool_choice`.",
            "tool_choice",
        )
    function = choice.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"Expected field `function` in `tool_choice`. {usage}", "tool_choice")
    name = function.get("name")
    if not name:
        raise bad_request(f"Expected field `name` in `function` in `tool_choice`.{usage}", "tool_choice")
    tools = data["tools"] if isinstance(data["tools"], list) else []
    names = [t["function"].get("name") for t in tools if isinstance(t, dict) and isinstance(t.get("function"), dict)]
    if name not in names:
        raise bad_request(
            "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
        )


class _Pooling(_Request):
    """What all routes of models that pool share."""

    model: str | None = None
    user: str | None = None
    priority: int = 0
    truncate_prompt_tokens: int | None = None
    request_id: Annotated[str, Field(max_length=128)] | None = None
    use_activation: bool | None = None
    additional_data: Any = None
    mm_processor_kwargs: Any = None

    def refuse_later_features(self) -> None:
        """Raise for parameters of features that this version does not have."""
        for name in ("additional_data", "mm_processor_kwargs"):
            if getattr(self, name) is not None:
                raise bad_request(f"{name} is not available in this version.", name)


class _OfInputs(_Pooling):
    """Texts, token ids, or a conversation."""

    input: str | ListOf[int] | ListOf[str] | ListOf[ListOf[int]] | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None  # True for `input`; templates of conversations write them
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_chat(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("continue_final_message") and data.get("add_generation_prompt"):
            raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        return data


class EmbeddingRequest(_OfInputs):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class PoolingRequest(EmbeddingRequest):
    """POST /pooling."""

    task: str | None = None


class ClassifyRequest(_OfInputs):
    """POST /classify."""


class ScoreRequest(_Pooling):
    """POST /score."""

    text_1: str | ListOf[str]
    text_2: str | ListOf[str]


class RerankDocument(_Request):
    """A document in the form of an object."""

    text: str


class RerankRequest(_Pooling):
    """POST /rerank. top_n: 0 for all documents."""

    query: str
    documents: ListOf[str | RerankDocument]
    top_n: int = 0


class LoadLoRAAdapterRequest(_Request):
    """POST /v1/load_lora_adapter. `lora_path` is a folder of the server's machine, or a name on the Hub."""

    lora_name: str = ""
    lora_path: str = ""


class UnloadLoRAAdapterRequest(_Request):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = ""
    lora_int_id: int | None = None


class TokenizeRequest(_Request):
    """POST /tokenize, of a text or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_chat(cls, data: Any) -> Any:
        if isinstance(data, dict):
            _check_generation_prompt(data)
            _check_tools(data.get("tools"))
        return data

    def refuse_later_features(self) -> None:
        """Raise for parameters of features that this version does not have."""
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if getattr(self, name) is not None:
                raise bad_request(f"{name} is not available in this version.", name)


class DetokenizeRequest(_Request):
    """POST /detokenize."""

    model: str | None = None
    tokens: ListOf[int]


class ResponsesRequest(_Sampling):
    """POST /v1/responses."""

    options_need_a_stream: ClassVar[bool] = False  # which have no effect without one
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: ListOf[str] | None = None
    logprobs: Any = None
    top_logprobs: int | None = None
    metadata: Texts | None = None
    text: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted where they ask for what is done anyway, else refused.
    truncation: Literal["auto", "disabled"] | None = "disabled"
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None
    # Features of later versions.
    background: bool | None = False
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None

    def refuse_later_features(self) -> None:
        """Raise the error of the first parameter whose feature this version, or this API, does not have."""
        super().refuse_later_features()
        for name in NOT_OF_RESPONSES:
            value = getattr(self, name)
            if value is not None and value is not False and value != type(self).model_fields[name].default:
                raise bad_request(f"{name} is no parameter of the Responses API.", name)
        for name in ("conversation", "prompt", "max_tool_calls"):
            if getattr(self, name) not in (None, False, []):
                raise bad_request(f"{name} is not available in this version of the Responses API.", name)
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise bad_request("tool_choice needs tools.", "tool_choice")
        pairs = (self.metadata or {}).items()
        if len(pairs) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in pairs):  # as OpenAI's
            raise bad_request(
                "metadata may have 16 pairs, with keys of at most 64 and values of at most 512 characters.", "metadata"
            )
        if self.user is not None and len(self.user) > 512:
            raise bad_request("user may have 512 characters.", "user")
        self._check_reasoning()
        if self.truncation == "auto":
            raise bad_request("truncation='auto' is not available in this version; shorten the input.", "truncation")
        if self.stream_options is not None and (self.stream_options.model_extra or {}).get("include_obfuscation"):
            raise bad_request("stream_options.include_obfuscation is not available.", "stream_options")
        for item in self.include or ():
            if item not in (INCLUDE_LOGPROBS, INCLUDE_REASONING):  # reasoning is shown anyway, not encrypted
                raise bad_request(f"include may only hold {INCLUDE_LOGPROBS!r} in this version.", "include")
        self._check_text()

    def _check_reasoning(self) -> None:
        reasoning = self.reasoning or {}
        if unknown := sorted(set(reasoning) - {"effort", "summary", "generate_summary"}):
            raise bad_request(f"reasoning has no field {unknown[0]!r}; it has effort and summary.", "reasoning")
        if reasoning.get("effort") not in (None, *EFFORTS):
            raise bad_request(f"reasoning.effort must be one of {', '.join(EFFORTS)}.", "reasoning")
        for name in ("summary", "generate_summary"):  # which "auto" leaves to the server
            if reasoning.get(name) not in (None, "auto"):
                raise bad_request(f"reasoning.{name} is not available: the reasoning itself is returned.", "reasoning")

    def _check_text(self) -> None:
        text = self.text or {}
        if text.get("verbosity") not in (None, "medium"):
            raise bad_request("text.verbosity other than 'medium' is not available in this version.", "text")

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or INCLUDE_LOGPROBS in (self.include or ())


def __getattr__(name: str) -> Any:
    """The types of answers, which the server itself does without."""
    from vllm.entrypoints.openai import response_models

    if name.startswith("_") or not hasattr(response_models, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(response_models, name)
