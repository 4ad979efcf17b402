"""From chat messages to a prompt: checks the messages, chooses the template and the form of contents, renders."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Union

from vllm.entrypoints.chat_template import accepts_content_parts, render_chat
from vllm.reasoning.think import Begins

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam as OpenAIChatCompletionMessageParam

    from vllm.config import ModelConfig
    from vllm.engine.tokenizer import Tokenizer
    from vllm.reasoning.think import ThinkFormat

ContentFormat = Literal["string", "openai"]
ContentFormatOption = Literal["auto", "string", "openai"]
ChatTemplateContentFormatOption = ContentFormatOption
CONTENT_FORMATS = ("auto", "string", "openai")

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Part type -> what a model must be able to take in.
MEDIA_PARTS = {
    "image_url": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}
MAX_MESSAGES = 100_000


class CustomChatCompletionMessageParam(TypedDict, total=False):
    """A message with a role of the user's own."""

    role: str
    content: Union[str, list[Any], None]  # noqa: UP007 (evaluated at run time on Python 3.10)
    name: str
    tool_call_id: str | None
    tool_calls: Iterable[Any] | None


ChatCompletionMessageParam: TypeAlias = "OpenAIChatCompletionMessageParam | CustomChatCompletionMessageParam"


def __getattr__(name: str) -> Any:
    """Types of the openai package that integrations import from here, where that package is installed."""
    if name.startswith("ChatCompletion") and name.endswith("Param"):
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(import_module("openai.types.chat"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the "
    "tokenizer does not define one."
)


class ConversationMessage(TypedDict, total=False):
    """A message as templates receive it."""

    role: str
    content: str | list[dict[str, Any]] | None
    name: str
    tool_call_id: str | None
    tool_calls: list[dict[str, Any]] | None


def validate_chat_template(chat_template: Path | str | None) -> None:
    """Raise if a template given on the command line is neither a template nor a file that exists."""
    if chat_template is None:
        return
    if isinstance(chat_template, Path):
        if not chat_template.exists():
            raise FileNotFoundError("the supplied chat template path doesn't exist")
        return
    if not isinstance(chat_template, str):
        raise TypeError(f"{type(chat_template)} is not a valid chat template type")
    if not _looks_like_jinja(chat_template) and not Path(chat_template).exists():
        raise ValueError(f"The supplied chat template string ({chat_template}) appears path-like, but doesn't exist!")


def load_chat_template(chat_template: Path | str | None, *, is_literal: bool = False) -> str | None:
    """The text of a template that is given as itself or as the path of its file."""
    if chat_template is None:
        return None
    if is_literal:
        if isinstance(chat_template, Path):
            raise TypeError("chat_template is expected to be read directly from its value")
        return chat_template
    validate_chat_template(chat_template)
    if isinstance(chat_template, str) and _looks_like_jinja(chat_template):
        return chat_template
    return Path(chat_template).read_text(encoding="utf-8")


def _looks_like_jinja(text: str) -> bool:
    return any(character in text for character in "{}\n")


def resolve_chat_template(
    tokenizer: Tokenizer,
    chat_template: Path | str | None = None,
    tools: Sequence[Any] | None = None,
    is_literal: bool = False,
) -> str:
    """The template to use: the given one (text, file, or the name of one that the tokenizer has), else the model's.

    A tokenizer with several templates has one called "default", and perhaps "tool_use" for conversations with tools.
    """
    own = tokenizer.chat_template
    if chat_template is not None:
        if isinstance(own, dict) and isinstance(chat_template, str) and chat_template in own:
            return own[chat_template]
        loaded = load_chat_template(chat_template, is_literal=is_literal)
        assert loaded is not None
        return loaded
    if isinstance(own, str):
        return own
    if isinstance(own, dict):
        if tools and "tool_use" in own:
            return own["tool_use"]
        if "default" in own:
            return own["default"]
        raise ValueError(
            f"The tokenizer has several chat templates and none is called 'default'. Set chat_template to one of: "
            f"{', '.join(sorted(own))}."
        )
    raise ValueError(NO_TEMPLATE)


def resolve_hf_chat_template(
    tokenizer: Any,
    chat_template: Path | str | None,
    tools: Sequence[Any] | None,
    *,
    model_config: ModelConfig | None = None,
    trust_remote_code: bool | None = None,
) -> str | None:
    """The template that a transformers tokenizer would be used with, or None if it has none.

    A template that is given stands for itself, its file, or its name in the tokenizer. `model_config` decides nothing
    here; `trust_remote_code` is deprecated, since reading a template runs no code.
    """
    if trust_remote_code is not None:
        warnings.warn("resolve_hf_chat_template no longer needs trust_remote_code.", DeprecationWarning, stacklevel=2)
    own = getattr(tokenizer, "chat_template", None)
    if chat_template is None and (own is None or (isinstance(own, dict) and not {"default", "tool_use"} & own.keys())):
        return None
    if chat_template is None and isinstance(own, dict) and "default" not in own and not tools:
        return None
    return resolve_chat_template(tokenizer, chat_template, tools)


def resolve_content_format(template: str, content_format: ContentFormatOption = "auto") -> ContentFormat:
    """Whether the template gets contents as strings or as lists of parts."""
    if content_format not in CONTENT_FORMATS:
        raise ValueError(
            f"Unknown chat_template_content_format {content_format!r}: expected one of {', '.join(CONTENT_FORMATS)}."
        )
    if content_format != "auto":
        return content_format
    return "openai" if accepts_content_parts(template) else "string"


def checked_messages(messages: Sequence[Any], content_format: ContentFormat) -> list[ConversationMessage]:
    """Check messages and bring their contents into the form that the template takes.

    Raises ValueError, TypeError or NotImplementedError, naming the message at fault.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of messages, got {type(messages).__name__}.")
    if not messages:
        raise ValueError("messages must hold at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"A conversation has at most {MAX_MESSAGES} messages, got {len(messages)}.")
    return [_parse_message(message, i, content_format) for i, message in enumerate(messages)]


def parse_chat_messages(
    messages: Sequence[Any],
    model_config: ModelConfig | None,
    tokenizer: Any,
    content_format: ContentFormat,
) -> tuple[list[ConversationMessage], None]:
    """The messages as templates take them, and what they bring beside text: nothing, since models here take text.

    The model and its tokenizer decide nothing about it. Raises as `checked_messages` does.
    """
    return checked_messages(messages, content_format), None


def apply_hf_chat_template(
    tokenizer: Any,
    conversation: Sequence[ConversationMessage],
    chat_template: Path | str | None = None,
    tools: Sequence[Any] | None = None,
    *,
    model_config: ModelConfig | None = None,
    tokenize: bool = False,
    trust_remote_code: bool | None = None,
    **kwargs: Any,
) -> str | list[int]:
    """The prompt of a conversation by a transformers tokenizer: its text, or with `tokenize` its ids.

    chat_template: as for `resolve_hf_chat_template`.   kwargs: further variables of the template. Raises ValueError if
    there is no template.
    """
    template = resolve_hf_chat_template(
        tokenizer, chat_template, tools, model_config=model_config, trust_remote_code=trust_remote_code
    )
    if template is None:
        raise ValueError(NO_TEMPLATE)
    found: str | list[int] = tokenizer.apply_chat_template(
        conversation=list(conversation), chat_template=template, tools=tools, tokenize=tokenize, return_dict=False,
        **kwargs,
    )  # fmt: skip
    return found


def _parse_message(message: Any, index: int, content_format: ContentFormat) -> ConversationMessage:
    if not isinstance(message, Mapping):
        raise TypeError(f"messages[{index}] must be a dictionary with 'role' and 'content', got {message!r:.200}.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"messages[{index}] must have a 'role' that is a string, such as 'user', got {role!r}.")
    parsed: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
    parsed["content"] = _parse_content(message.get("content"), index, content_format)
    thoughts = parsed.get("reasoning_content", parsed.get("reasoning"))
    if thoughts is not None:  # under both names: templates use the one or the other
        parsed["reasoning_content"] = parsed.setdefault("reasoning", thoughts)
    if parsed.get("tool_calls") is not None:
        parsed["tool_calls"] = [_parse_tool_call(call, index) for call in parsed["tool_calls"]]
    elif role == "user" and message.get("content") is None:
        raise ValueError(f"messages[{index}] has no 'content': expected a string or a list of parts.")
    return parsed  # type: ignore[return-value]


def last_text(messages: Sequence[Any]) -> str:
    """The text of the last message, with which a prompt ends that `continue_final_message` is for."""
    return str(checked_messages(messages[-1:], "string")[0]["content"])


def form_begins(
    begins: Begins, think: ThinkFormat, tokenizer: Tokenizer, prompt: str, messages: Sequence[Any]
) -> Begins:
    """Where an output begins that must have a form. A model that has no token for the tag of thoughts writes one only
    if it is told to; what users and tools say does not count, or their texts could do without the form.
    """
    starts = think.starts
    if begins is not Begins.UNKNOWN or think.opens_itself or any(tokenizer.token_to_id(s) is not None for s in starts):
        return begins
    said = [str(m["content"]) for m in checked_messages(messages, "string") if m["role"] in ("user", "tool")]
    told = any(prompt.count(start) > sum(text.count(start) for text in said) for start in starts)
    return begins if told else Begins.SPEAKING


def _parse_content(content: Any, index: int, content_format: ContentFormat) -> str | list[dict[str, Any]]:
    if content is None:
        texts = []
    elif isinstance(content, str):
        texts = [content]
    elif isinstance(content, Iterable) and not isinstance(content, (Mapping, bytes)):
        texts = [_parse_part(part, index) for part in content]
    else:
        raise TypeError(
            f"messages[{index}]['content'] must be a string or a list of parts, got {type(content).__name__}."
        )
    if content_format == "string":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _parse_part(part: Any, index: int) -> str:
    """The text of one part of a content."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise TypeError(f"messages[{index}]: a content part must be a string or a dictionary, got {part!r:.200}.")
    part_type = part.get("type")
    if part_type is None:
        media = next((key for key in MEDIA_PARTS if key in part), None)
        if media is None:
            raise ValueError("Missing 'type' field in multimodal part.")
        part_type = media
    if not isinstance(part_type, str):
        raise ValueError("Invalid 'type' field in multimodal part.")
    if part_type in MEDIA_PARTS:
        raise ValueError(
            f"messages[{index}] has a part of type {part_type!r}, but the model is not multimodal: it takes text only, "
            f"no {MEDIA_PARTS[part_type]}. Remove the part, or use a model that takes {MEDIA_PARTS[part_type]} input."
        )
    if part_type not in TEXT_PARTS:
        raise NotImplementedError(f"Unknown part type: {part_type}")
    text = part.get(TEXT_PARTS[part_type])
    if not isinstance(text, str):
        raise ValueError(
            f"messages[{index}]: a part of type {part_type!r} must have a string {TEXT_PARTS[part_type]!r}, "
            f"got {text!r:.200}."
        )
    return text


def _parse_tool_call(call: Any, index: int) -> dict[str, Any]:
    """A call that the assistant made earlier. Templates want its arguments as data, the API sends them as JSON text.

    Arguments that are not valid JSON stay the text they are: an agent shows the model what it has written, with the
    error as the call's result, so that it mends it.
    """
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ValueError(
            f"messages[{index}]: each of tool_calls must be a dictionary with a 'function', got {call!r:.200}."
        )
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            function["arguments"] = arguments
    elif arguments is None:
        function["arguments"] = {}
    return {**call, "function": function}


def _developers_as_system(conversation: list[ConversationMessage]) -> list[ConversationMessage]:
    """For templates that do not know developers, who are the newer name of system prompts: one system message has all
    that stand at the beginning.
    """
    if not any(message["role"] == "developer" for message in conversation):
        return conversation
    found: list[ConversationMessage] = []
    for message in conversation:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
            first = found[0] if len(found) == 1 and found[0]["role"] == "system" else None
            if first is not None:
                content, more = first["content"], message["content"]
                if isinstance(content, str) and isinstance(more, str):
                    found = [{**first, "content": f"{content}\n\n{more}"}]
                else:
                    found = [{**first, "content": [*(content or ()), *(more or ())]}]  # type: ignore[list-item]
                continue
        found.append(message)
    return found


def apply_chat_template(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    chat_template: Path | str | None = None,
    content_format: ContentFormatOption = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    is_literal: bool = False,
    **kwargs: Any,
) -> str:
    """The prompt text for a conversation. `kwargs` are further variables of the template.

    is_literal: `chat_template` is the template itself, or the name of one of the model's, whatever it looks like.
    """
    template = resolve_chat_template(tokenizer, chat_template, tools, is_literal)
    conversation = checked_messages(messages, resolve_content_format(template, content_format))
    if "developer" not in template:
        conversation = _developers_as_system(conversation)
    return render_chat(
        template,
        conversation,  # type: ignore[arg-type]
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        special_tokens=tokenizer.special_tokens,
        **kwargs,
    )


def tokenize_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    chat_template: Path | str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    **options: Any,
) -> tuple[str, list[int]]:
    """The prompt for a conversation, as text and as token ids. The options are those of `apply_chat_template`."""
    if not tokenizer.writes_chats:
        text = apply_chat_template(
            tokenizer,
            messages,
            chat_template=chat_template,
            tools=tools,
            continue_final_message=continue_final_message,
            **options,
        )
        # The template has written the special tokens that belong there.
        return text, tokenizer.encode(text, add_special_tokens=False)
    if chat_template is not None:
        raise ValueError("The tokenizer (mistral_common) writes chats by its own rules. Remove chat_template.")
    checked_messages(messages, "string")  # for the errors
    return tokenizer.chat(messages, tools, continue_final_message)
