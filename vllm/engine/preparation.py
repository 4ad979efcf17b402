"""From a request as it came to one that is in order, on an event loop that must not be held up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.engine.input_processor import InputProcessor
from vllm.engine.processed import CheckedParams, ProcessedRequest, RequestInput
from vllm.engine.texts import INLINE_CHARACTERS, Lanes, characters_of_words
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.engine.tokenizer import Tokenizer
    from vllm.lora.request import LoRARequest


class Preparation:
    """Does what is short at once, and what is long in the lanes. Raises what `InputProcessor.process` raises, and
    TimeoutError at the deadline.
    """

    def __init__(self, input_processor: InputProcessor, lanes: Lanes) -> None:
        self._input, self._lanes = input_processor, lanes

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's."""
        return self._input.tokenizer

    async def tokenized(self, request: RequestInput, deadline: float | None) -> RequestInput:
        """Tokenize long texts in another thread, so that they do not hold up the streams of others."""
        texts = self._input.texts
        if texts is None:
            return request
        prompt, params = request.prompt, request.params
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        has_ids = isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None
        if isinstance(text, str) and len(text) > INLINE_CHARACTERS and not has_ids:
            ids = await self.in_lane(deadline, len(text), self._input.token_ids, request)
            extra = dict(prompt) if isinstance(prompt, Mapping) else {}
            request = request._replace(prompt={**extra, "prompt": text, "prompt_token_ids": ids})  # type: ignore[arg-type]
        if request.checked is not None or not isinstance(params, SamplingParams) or not params.bad_words:
            return request
        if not request.owns_params:
            params = params.clone()
            params.verify()
            params.forget_tokenizer()
            request = request._replace(params=params, owns_params=True)
        words = params.bad_words
        if words and params.bad_words_token_ids is None:
            found = await self.in_lane(deadline, characters_of_words(words), texts.bad_words, words)
            params.set_bad_words_token_ids(found)
        return request

    async def processed(self, request: RequestInput, deadline: float | None) -> ProcessedRequest:
        """The checked request. To look at a schema may take long, and is done in another thread."""
        params = request.params
        if isinstance(params, SamplingParams) and _has_form(params):
            return await self.beside(deadline, self._input.process, request)  # type: ignore[no-any-return]
        return self._input.process(request)

    async def checked(self, params: SamplingParams, lora_request: LoRARequest | None) -> CheckedParams:
        """`InputProcessor.check`, in a lane if that may take long."""
        size = INLINE_CHARACTERS + 1 if _has_form(params) else 0
        size = max(size, characters_of_words(params.bad_words or ()))
        return await self._lanes.run(size, self._input.check, params, lora_request)

    async def beside(self, deadline: float | None, function: Callable[..., Any], *args: Any) -> Any:
        """In another thread, whatever the size."""
        return await self.in_lane(deadline, INLINE_CHARACTERS + 1, function, *args)

    async def in_lane(self, deadline: float | None, size: int, function: Callable[..., Any], *args: Any) -> Any:
        """`Lanes.run`, until the deadline."""
        loop = asyncio.get_running_loop()
        work = self._lanes.run(size, function, *args)
        if deadline is None:
            return await work
        try:
            return await asyncio.wait_for(work, max(0.0, deadline - loop.time()))
        except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
            raise TimeoutError("The request was not tokenized before its deadline.") from None


def _has_form(params: SamplingParams) -> bool:
    """Whether the output must have a form."""
    return bool(params.guided_decoding or params.structured_outputs)
