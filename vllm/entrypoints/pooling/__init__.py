"""What pooled answers are made of, for `LLM` and the server: parameters, pairs of texts, similarities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.validation import INT32_MAX, integer_in

if TYPE_CHECKING:
    from vllm.engine.input_processor import InputProcessor

_truncation = integer_in(-1, INT32_MAX)


def params_for(given: PoolingParams | Sequence[PoolingParams] | None, task: str | None) -> list[PoolingParams]:
    """The parameters of a call: one for all prompts, or one each; for a task, where they name none themselves."""
    found = list(given) if isinstance(given, Sequence) else [PoolingParams() if given is None else given]
    for params in found:
        if not isinstance(params, PoolingParams):
            raise TypeError(f"pooling_params must be PoolingParams, got {type(params).__name__}.")
    return [params if params.task is not None or task is None else _changed(params, task=task) for params in found]


def truncated(params: PoolingParams, length: int) -> PoolingParams:
    """The parameters of prompts that are cut to so many tokens; -1: to what the model takes."""
    return _changed(params, truncate_prompt_tokens=_truncation("truncate_prompt_tokens", length))


def _changed(params: PoolingParams, **fields: Any) -> PoolingParams:
    copy = params.clone()
    for name, value in fields.items():
        setattr(copy, name, value)
    copy.__post_init__()
    return copy


def pairs(firsts: list[Any], seconds: list[Any]) -> tuple[list[Any], list[Any]]:
    """The texts that are scored. Raises ValueError unless there are 1 and 1, 1 and N, or N and N of them."""
    if not firsts:
        raise ValueError("At least one text element must be given")
    if not seconds:
        raise ValueError("At least one text_pair element must be given")
    if len(firsts) not in (1, len(seconds)):
        raise ValueError(f"Input lengths must be either 1:1, 1:N or N:N, got {len(firsts)}:{len(seconds)}.")
    return firsts, seconds


def pair_prompts(
    processor: InputProcessor,
    firsts: list[Any],
    seconds: list[Any],
    options: dict[str, Any],
    chat_template: str | None = None,
) -> list[dict[str, Any]]:
    """One prompt for each pair, for a model that reads both texts together."""
    from vllm.engine.prompts import tokenization_options

    special, truncate = tokenization_options(options)
    if truncate is not None:
        truncate = _truncation("truncate_prompt_tokens", truncate)
    if len(firsts) == 1 and chat_template is None:
        return processor.pairs(_text(firsts[0]), [_text(second) for second in seconds], special, truncate)
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    prompts = []
    for first, second in zip(map(_text, firsts), map(_text, seconds), strict=True):
        if chat_template is not None:
            prompts.append(_templated(processor, chat_template, first, second))
        else:
            prompts.append(processor.pair(first, second, special, truncate))
    return prompts


def _templated(processor: InputProcessor, chat_template: str, query: str, document: str) -> dict[str, Any]:
    from vllm.entrypoints.chat_utils import tokenize_chat

    if processor.tokenizer is None:
        raise ValueError("You cannot pass text prompts when `skip_tokenizer_init` is True")
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    text, ids = tokenize_chat(
        processor.tokenizer, messages, chat_template=chat_template, content_format="string",
        add_generation_prompt=True, continue_final_message=False, tools=None,
    )  # fmt: skip
    return {"prompt": text, "prompt_token_ids": ids}


def _text(prompt: Any) -> str:
    """The text of one of a pair. Raises ValueError for anything else."""
    if isinstance(prompt, dict):
        if prompt.get("multi_modal_data"):
            raise ValueError("Multi-modal prompt is not supported for scoring")
        prompt = prompt.get("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f"A model that scores pairs needs two texts, got {type(prompt).__name__}.")
    return prompt


def similarities(
    firsts: Sequence[PoolingRequestOutput[Any]], seconds: Sequence[PoolingRequestOutput[Any]], pad: int | None
) -> list[ScoringRequestOutput]:
    """The cosine of each pair of vectors. Token ids are those of both, with a padding token between them."""
    if len(firsts) == 1:
        firsts = [firsts[0]] * len(seconds)
    between = [] if pad is None else [pad]
    return [
        ScoringRequestOutput(
            f"{first.request_id}_{second.request_id}",
            ScoringOutput(cosine(first.outputs.array, second.outputs.array)),
            [*first.prompt_token_ids, *between, *second.prompt_token_ids],
            True,
        )
        for first, second in zip(firsts, seconds, strict=True)
    ]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two vectors; 0 if one of them is."""
    length = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / length if length else 0.0
