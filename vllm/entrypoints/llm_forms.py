"""The forms that the calls of `LLM` take and give: any prompts as a list, parameters for finished outputs, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.prompts import listed
from vllm.entrypoints.chat_template import RESERVED_VARIABLES
from vllm.entrypoints.chat_utils import validate_chat_template
from vllm.exceptions import GenerationError
from vllm.outputs import PoolingRequestOutput, RequestOutput, failure_of
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.validation import show

if TYPE_CHECKING:
    from vllm.model_executor.guided_decoding.guided_fields import GuidedDecodingRequest, LLMGuidedOptions

_CONSTRAINTS = {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"}
CHAT_OPTIONS = {
    "chat_template",
    "chat_template_content_format",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "mm_processor_kwargs",
    "chat_template_kwargs",
}


def as_list(prompts: Any) -> list[Any]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    prompts = listed(prompts)
    if isinstance(prompts, (str, dict)) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]
    return [listed(item) for item in prompts]


def merge_legacy(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """The prompts of the older API: texts and token ids in two arguments, one for one."""
    prompt_token_ids = listed(prompt_token_ids)
    one = bool(prompt_token_ids) and isinstance(prompt_token_ids[0], Integral)
    ids = [prompt_token_ids] if one else [listed(item) for item in prompt_token_ids]
    if prompts is None:
        return [{"prompt_token_ids": item} for item in ids]
    texts = [prompts] if isinstance(prompts, str) else list(listed(prompts))
    if len(texts) != len(ids):
        raise ValueError("The lengths of prompts and prompt_token_ids must be the same.")
    return [{"prompt": text, "prompt_token_ids": item} for text, item in zip(texts, ids, strict=True)]


def final_only(
    params: SamplingParams, guided: LLMGuidedOptions | GuidedDecodingRequest | None, truncate: int | None
) -> SamplingParams:
    """A copy of the parameters for a call that wants the finished outputs only."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}.")
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    if truncate is not None:
        params.truncate_prompt_tokens = truncate
        params.verify()
    if guided is not None:
        from vllm.model_executor.guided_decoding.guided_fields import GuidedDecodingRequest

        if isinstance(guided, dict):
            if len(guided.keys() & _CONSTRAINTS) > 1:
                raise ValueError(f"You can only use one guided decoding but multiple is specified: {guided}")
            guided = GuidedDecodingRequest(**guided)
        if not isinstance(guided, GuidedDecodingRequest):
            raise TypeError(
                "guided_options_request must be one dictionary or GuidedDecodingRequest for all prompts, got "
                f"{type(guided).__name__}; sampling_params may be a list, each with its guided_decoding."
            )
        if params.guided_decoding is not None:
            raise ValueError("Cannot set both guided_options_request and params.guided_decoding.")
        params.guided_decoding = guided.to_params()
    return params


def check_path_of_template(chat_template: Path | str | None) -> None:
    """Raise, before a model is loaded, for the path of a template's file that does not exist.

    Anything else may be a template, or the name of one that the tokenizer has.
    """
    if isinstance(chat_template, Path) or (isinstance(chat_template, str) and chat_template.endswith(".jinja")):
        validate_chat_template(chat_template)


def check_chat_options(tools: Any, variables: Any) -> None:
    """Raise TypeError or ValueError unless these are tools and variables for a chat template."""
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise TypeError(f"tools must be a list of dictionaries that describe functions, got {show(tools)}.")
    if variables is not None and not isinstance(variables, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dictionary, got {type(variables).__name__}.")
    for name in sorted((RESERVED_VARIABLES - {"documents"}).intersection(variables or ())):
        raise ValueError(f"chat_template_kwargs is for the template's own variables; {name} is none of them.")


def raise_if_failed(outputs: Sequence[RequestOutput | PoolingRequestOutput[Any]]) -> None:
    """Raise GenerationError, with the first reason, if the engine could not finish one of the requests."""
    failed = [output for output in outputs if failure_of(output) is not None]
    if failed:
        reason = failure_of(failed[0])
        more = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
        raise GenerationError(f"Request {failed[0].request_id} failed: {reason}{more}")
