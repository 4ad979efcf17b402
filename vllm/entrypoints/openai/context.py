"""What every route needs: the engine, the names it answers to, the limits, and the settings of the command line."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.engine.request_stream import is_failed
from vllm.engine.texts import TooManyTokensError
from vllm.engine.tokenizer import Tokenizer
from vllm.entrypoints.logger import RequestLogger
from vllm.entrypoints.openai.errors import APIError, bad_request, not_found, overloaded
from vllm.entrypoints.openai.front_ends import FrontEnds
from vllm.entrypoints.openai.gate import Gate
from vllm.entrypoints.openai.message import ParsingSettings
from vllm.entrypoints.openai.response_store import ResponseStore
from vllm.entrypoints.openai.sampling import RequestLimits
from vllm.entrypoints.template_process import TemplateProcess
from vllm.exceptions import NO_TOKEN_POSSIBLE, EngineDeadError, EngineGenerateError, RetryableRequestError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.engine.processed import CheckedParams
    from vllm.engine.request_stream import RequestStream
    from vllm.entrypoints.openai.adapters import ServedAdapters
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.prompt_adapter.request import PromptAdapterRequest
    from vllm.reasoning.think import Begins

logger = init_logger(__name__)

_T = TypeVar("_T")
MAX_LOGGED_FIELDS = 64
MAX_STRANGERS = 16
MAX_SHOWN_NAME = 256
LARGE_BYTES = 1 << 20  # a body that takes so long to read that others should not wait for it
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class ServerContext:
    """Made once per server; routes read it and change nothing but `load` and `pooled_numbers`."""

    engine: AsyncLLMEngine
    served_names: tuple[str, ...]
    model_path: str
    max_model_len: int
    default_sampling: dict[str, Any]
    limits: RequestLimits = field(default_factory=RequestLimits)
    chat_template: str | None = None
    content_format: str = "auto"
    template_defaults: dict[str, Any] = field(default_factory=dict)  # variables of the template, unless a request says
    response_role: str = "assistant"
    parsing: ParsingSettings = field(default_factory=ParsingSettings)
    responses: ResponseStore = field(default_factory=ResponseStore)
    return_token_ids_as_text: bool = False
    trust_request_template: bool = False
    request_timeout: float | None = None
    request_logger: RequestLogger | None = None
    show_cached_tokens: bool = False
    unknown_fields: set[str] = field(default_factory=set)
    adapters: ServedAdapters | None = None
    prompt_adapters: Mapping[str, PromptAdapterRequest] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    load: int = 0
    pooled_numbers: int = 0  # of answers that are being made
    front_ends: FrontEnds = field(default_factory=FrontEnds)
    gate: Gate = field(default_factory=Gate)
    strangers: TemplateProcess = field(default_factory=TemplateProcess)
    stranger_lane: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="template")
    )
    strangers_waiting: int = 0
    # One large body at a time, and others meanwhile.
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="reader"))
    large_reader: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="large-reader")
    )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; 400 if the server runs without one."""
        tokenizer = self.engine.input_processor.tokenizer
        if tokenizer is None:
            raise no_tokenizer()
        return tokenizer

    def tokenizer_of(self, name: str | None) -> Tokenizer:
        """The tokenizer of the adapter that a request means by the name of its model, or the model's; 400 without."""
        tokenizer = self.engine.input_processor.tokenizer_of(self.adapter(name))
        if tokenizer is None:
            raise no_tokenizer()
        return tokenizer

    def adapter(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request means by the name of its model."""
        return self.adapters.find(name) if self.adapters is not None and name else None

    def prompt_adapter(self, name: str | None) -> PromptAdapterRequest | None:
        """The prompt adapter that a request means by the name of its model."""
        return self.prompt_adapters.get(name) if name else None

    def virtual_tokens(self, name: str | None) -> int:
        """How many tokens a request's prompt adapter puts in front of the prompt."""
        adapter = self.prompt_adapter(name)
        return 0 if adapter is None else adapter.prompt_adapter_num_virtual_tokens

    @property
    def fixed_names(self) -> tuple[str, ...]:
        """Every name that stands for a model as long as the server runs, the model's own first."""
        return (*self.served_names, *self.prompt_adapters)

    async def discover_adapter(self, name: str | None) -> None:
        """Look for an adapter of this name if the server knows none. Raises APIError if it cannot be used."""
        if self.adapters is not None:
            await self.adapters.discover(name, self.fixed_names)

    def check_model(self, name: str | None) -> str:
        """The name to answer with: the adapter's, or the first of the served ones; 404 for any other model."""
        if name and (self.adapter(name) is not None or name in self.prompt_adapters):
            return name
        if name and name not in self.served_names:
            raise not_found(f"The model `{name[:MAX_SHOWN_NAME]}` does not exist.", "model")
        return self.served_names[0]

    def require_generation(self, name: str) -> None:
        """Raise a 400 if the model pools. name: of the API that was asked."""
        self.require_task("generate", name)

    def require_task(self, task: str, name: str) -> None:
        """Raise a 400 unless the model is made for the task. name: of the API that was asked."""
        able = self.engine.vllm_config.model_config.supported_tasks
        if task not in able:
            advice = ""
            if "generate" in able:
                advice = " To pool with it, start the server with --task embed (or classify, score, reward)."
            raise bad_request(f"The model does not support {name}; it is for: {', '.join(able)}.{advice}")

    def cached_tokens(self, outputs: Iterable[RequestOutput | None]) -> int | None:
        """Prompt tokens found in the cache, if the operator wants them shown."""
        if not self.show_cached_tokens:
            return None
        return sum(output.num_cached_tokens or 0 for output in outputs if output is not None)

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool, keep: int | None = None, field: str = "messages",
        adapter: LoRARequest | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Token ids of the texts of a field, of each the last `keep` if that is a number.

        adapter: of the request, which may have a tokenizer of its own.
        Raises a 400 for one with more than the model takes.
        """
        intake = self.engine.input_processor.texts_of(adapter)
        if intake is None:
            raise no_tokenizer()

        def work(text: str) -> list[int]:
            return intake.prompt(text, add_special_tokens, keep)

        try:
            return await self.engine.lanes.run_each(sum(map(len, texts)), work, texts)
        except TooManyTokensError as error:
            raise bad_request(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{error.at_least} or more tokens in the messages, Please reduce the length of the messages.",
                field,
            ) from None

    def log_request(self, request_id: str, text: str | None, prompts: Sequence[Sequence[int]], params: object) -> None:
        """Write a line about a request, if they are logged."""
        if self.request_logger is not None:
            self.request_logger.log(request_id, text, prompts, params)

    def log_unknown_fields(self, names: Iterable[str]) -> None:
        """Say once per name that a field of a request has no effect; of at most MAX_LOGGED_FIELDS names."""
        new = [name for name in names if name not in self.unknown_fields]
        for name in new[: MAX_LOGGED_FIELDS - len(self.unknown_fields)]:
            self.unknown_fields.add(name)
            logger.warning("A request has the field %.80r, which this server does not know; it has no effect.", name)

    async def in_reader(self, size: int, function: Callable[..., _T], *args: Any) -> _T:
        """Read a body of more than a few bytes beside the event loop; one of `LARGE_BYTES` waits for others of its kind
        only.
        """
        reader = self.large_reader if size >= LARGE_BYTES else self.reader
        return await asyncio.get_running_loop().run_in_executor(reader, function, *args)

    async def in_stranger_lane(self, function: Callable[[], _T]) -> _T:
        """Render a template of a request; these wait for each other only, and only a few of them."""
        if self.strangers_waiting >= MAX_STRANGERS:
            raise overloaded(f"{MAX_STRANGERS} requests with templates of their own wait. Try again later.")
        self.strangers_waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self.stranger_lane, function)

        def on_done(work: object) -> None:
            self.strangers_waiting -= 1

        work.add_done_callback(on_done)
        return await work

    async def in_lane(self, size: int, function: Callable[..., _T], *args: Any) -> _T:
        """Do work that is as large as tokenizing `size` characters, beside the event loop if that is much."""
        return await self.engine.lanes.run(size, function, *args)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One checked prompt of a request, not handed to the engine yet. `timeout` is in seconds, None for none; `begins`
    is as of `RequestInput`.
    """

    engine: AsyncLLMEngine
    item: dict[str, Any]
    params: Any  # SamplingParams or PoolingParams
    request_id: str
    priority: int
    timeout: float | None
    account: str | None = None  # of all prompts of one request
    checked: CheckedParams | None = None  # the parameters as they have them in common
    lora_request: LoRARequest | None = None
    prompt_adapter_request: PromptAdapterRequest | None = None
    begins: Begins | None = None

    async def generate(self) -> AsyncGenerator[RequestOutput, None]:
        """The outputs as they come. Leaving the generator aborts the request."""
        stream = await self.open()
        try:
            async for output in stream.outputs():
                yield output
        finally:
            stream.close()

    async def open(self) -> RequestStream:
        """Begin; the outputs come through the stream, which the caller has to close."""
        return await self.engine.open(
            self.item,  # type: ignore[arg-type]
            self.params if self.checked is None else self.checked,
            self.request_id,
            priority=self.priority,
            timeout=self.timeout,
            account=self.account,
            lora_request=self.lora_request,
            prompt_adapter_request=self.prompt_adapter_request,
            begins=self.begins,
        )


def no_tokenizer() -> APIError:
    """400: nothing that takes or makes text works here."""
    return bad_request("This server has no tokenizer (--skip-tokenizer-init): pass token ids.")


def echoed_id(wanted: str | None) -> str:
    """The X-Request-Id to answer with: the client's if it is harmless, else a new one."""
    return wanted if wanted and _SAFE_ID.fullmatch(wanted) else uuid.uuid4().hex


def new_id(prefix: str, wanted: str | None, separator: str = "-") -> tuple[str, str]:
    """The id of a request for its client, made of the one it asks for, and the engine's id, which is unique."""
    unique = uuid.uuid4().hex
    if wanted and _SAFE_ID.fullmatch(wanted):
        shown = f"{prefix}{separator}{wanted}"
        return shown, f"{shown}-{unique[:16]}"
    shown = f"{prefix}{separator}{unique}"
    return shown, shown


def as_api_error(error: BaseException) -> APIError:
    """The HTTP form of what the engine raises."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RetryableRequestError):
        return overloaded(str(error))
    if isinstance(error, TimeoutError):
        return APIError(504, str(error) or "The request took too long.", "TimeoutError")
    if isinstance(error, EngineGenerateError) and NO_TOKEN_POSSIBLE in str(error):
        return bad_request(NO_TOKEN_POSSIBLE)
    if isinstance(error, EngineGenerateError):
        return APIError(500, f"This request failed in the engine: {error}", "InternalServerError")
    if isinstance(error, EngineDeadError):
        return APIError(503, "The engine is not running.", "ServiceUnavailableError")
    if isinstance(error, (ValueError, TypeError, NotImplementedError)):
        return bad_request(str(error), getattr(error, "parameter", None))
    logger.error("Unexpected error in a request", exc_info=error)
    return APIError(500, "The server failed to process the request.", "InternalServerError")


async def open_all(prompts: Sequence[Prompt], streams: list[RequestStream], on_output: Callable[[int], None]) -> None:
    """Begin all prompts of a call, in its turns; `on_output` is called with the number of one that has something.

    streams: gets those that have begun, which the caller has to close.
    """
    call = prompts[0].engine.turns.call()
    for index, prompt in enumerate(prompts):
        await call.next()
        streams.append(await prompt.open())
        streams[index].listen(partial(on_output, index))


async def merge(prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several prompts as they come, with the prompt's number. Leaving it aborts what still runs.

    What it costs grows with the outputs alone, not with the prompts that still wait.
    """
    if len(prompts) == 1:
        async with aclosing(prompts[0].generate()) as outputs:
            async for output in outputs:
                yield 0, output
        return
    streams: list[RequestStream] = []
    due: dict[int, None] = {}  # prompts whose streams have something, in order
    changed = asyncio.Event()

    def on_output(index: int) -> None:
        due[index] = None
        changed.set()

    try:
        await open_all(prompts, streams, on_output)
        unfinished = len(prompts)
        while unfinished:
            await changed.wait()
            changed.clear()
            while due:
                index = next(iter(due))
                taken = streams[index].take()  # raises the error that follows the outputs, if any
                if taken is None:
                    del due[index]
                    continue
                unfinished -= taken.finished and not is_failed(taken)
                yield index, taken
    finally:
        for stream in streams:
            stream.close()
