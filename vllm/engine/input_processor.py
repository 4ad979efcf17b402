"""From what a user passes to what the core runs: checks everything, tokenizes, resolves defaults, fans out `n`."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config.max_model_len import resolve_max_model_len
from vllm.engine.processed import SEED_BITS, SEED_MASK, CheckedParams, Children, ProcessedRequest, RequestInput
from vllm.engine.prompts import Parsed, parse, refuse_what_needs_other_models, token_list
from vllm.engine.texts import PLAUSIBLE_CHARACTERS_PER_TOKEN, Texts, TooManyTokensError
from vllm.engine.tokenizer import Tokenizer
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.exceptions import VLLMValidationError
from vllm.inputs import INPUT_REGISTRY, LLMInputs, PromptType
from vllm.lora.request import LoRARequest
from vllm.lora.source import check_adapter
from vllm.pooling_params import PoolingParams
from vllm.prompt_adapter.request import PromptAdapterRequest
from vllm.prompt_adapter.source import VirtualTokens, read_prompt_adapter
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.structured_output.spec import Constraint, GrammarSpec, constraint_of
from vllm.structured_output.support import resolve
from vllm.validation import integer_in, show

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_KNOWN_ADAPTERS = 4096
MAX_TOKENIZERS = 64  # of adapters
KNOWN_FORMS = 256  # whose back end is known
MAX_KNOWN_FORM = 1 << 14  # characters of one
# Fields of SamplingParams that beam search could only ignore, and their values that say nothing.
BEAM_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "stop": (None, []),
    "prompt_logprobs": (None,),
    "guided_decoding": (None,),
    "structured_outputs": (None,),
}
_NEUTRAL = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)  # where a request that is pooled has none
_priority = integer_in(-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class _KnownAdapter:
    """An adapter that a request has named.

    longest: sequence with it.   tokens: of the model and the adapter together.   tokenizer: None: that of the model.
    """

    folder: str
    longest: int
    tokens: int
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class _Shared:
    """What requests of one batch have in common that have the same parameters, by their identity, and adapters."""

    checked: dict[tuple[int, int], CheckedParams] = field(default_factory=dict)
    pooled: dict[int, PoolingParams] = field(default_factory=dict)


class InputProcessor:
    """Owns the tokenizer and the source of seeds for requests without one."""

    def __init__(self, config: VllmConfig, tokenizer: Tokenizer | None) -> None:
        model = config.model_config
        self._config = config
        self._model = model
        self.tokenizer = tokenizer
        self._random = random.Random(model.seed)
        self._generation_config: dict[str, Any] = model.try_get_generation_config()
        self._known: dict[tuple[int, str], _KnownAdapter] = {}
        lora, self._longest = config.lora_config, model.max_model_len
        if lora is not None and lora.long_lora_scaling_factors:  # for requests without an adapter
            own, _ = resolve_max_model_len(None, model.hf, model.disable_sliding_window)
            self._longest = min(own, model.max_model_len)
        self._known_prompt = model.known_prompt
        self.prompt_adapters: dict[tuple[int, str], VirtualTokens] = {}  # by number and folder, the newest last
        self.adapter_names: dict[int, str] = {}  # of adapters that requests have named, by number
        self._resolve_known = lru_cache(KNOWN_FORMS)(self._resolve_form)
        self._hook: Callable[[LLMInputs], LLMInputs] | None = None
        if INPUT_REGISTRY.has_input_processors:
            self._hook = INPUT_REGISTRY.create_input_processor(model)

    @property
    def texts(self) -> Texts | None:
        """What tokenizes, with the tokenizer of the moment."""
        return None if self.tokenizer is None else Texts(self.tokenizer, self._model.max_model_len)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A call that fails inside leaves the seeds of the next ones as they were."""
        state = self._random.getstate()
        try:
            yield
        except Exception:
            self._random.setstate(state)
            raise

    # -- the whole way -------------------------------------------------------------------------------------------------

    def process(self, request: RequestInput) -> ProcessedRequest:
        """Raises ValueError or TypeError, with nothing changed, if anything about the request is wrong."""
        self._check_options(request)
        prompt = self._parsed(request.prompt)
        return self._build(request, prompt, self._tokenize([request], [prompt])[0], _Shared())

    def process_batch(self, requests: Sequence[RequestInput]) -> list[ProcessedRequest]:
        """Several requests, tokenized together. One bad request fails all of them, with nothing changed."""
        return self._build_all(requests, *self._read(requests), _Shared())

    def process_batches(self, batches: Sequence[Sequence[RequestInput]]) -> Iterator[list[ProcessedRequest]]:
        """`process_batch` of each; while the caller has one, the next is tokenized in a thread of its own."""
        shared = _Shared()
        with ThreadPoolExecutor(1, "tokenizer") as thread:
            read = self._read(batches[0]) if batches else ([], [])
            for i, requests in enumerate(batches):
                coming = thread.submit(self._read, batches[i + 1]) if i + 1 < len(batches) else None
                yield self._build_all(requests, *read, shared)
                if coming is not None:
                    read = coming.result()

    def _read(self, requests: Sequence[RequestInput]) -> tuple[list[Parsed], list[list[int]]]:
        """The prompts of requests, and their token ids. May run in any thread."""
        parsed, options = [], set()
        for request in requests:
            same = id(request.params), id(request.lora_request), id(request.prompt_adapter_request), request.priority
            if same not in options or not isinstance(request.request_id, str):
                self._check_options(request)
                options.add(same)
            parsed.append(self._parsed(request.prompt))
        return parsed, self._tokenize(requests, parsed)

    def _build_all(
        self,
        requests: Sequence[RequestInput],
        parsed: Sequence[Parsed],
        tokenized: Sequence[list[int]],
        shared: _Shared,
    ) -> list[ProcessedRequest]:
        with self.all_or_none():
            return [
                self._build(request, prompt, ids, shared)
                for request, prompt, ids in zip(requests, parsed, tokenized, strict=True)
            ]

    def token_ids(self, request: RequestInput) -> list[int]:
        """The token ids of a request's text, not yet checked against the model. May run in any thread."""
        self._check_options(request)
        return self._tokenize([request], [self._parsed(request.prompt)])[0]

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's padding token, None without one."""
        tokenizer = self.tokenizer
        token = None if tokenizer is None else tokenizer.special_tokens.get("pad_token")
        return None if tokenizer is None or token is None else tokenizer.token_to_id(token)

    def pooled_ids(self, text: str, add_special_tokens: bool, truncate: int | None) -> list[int]:
        """The token ids of a text that is pooled, cut at its end. Raises TooManyTokensError. May run in any thread."""
        assert self.texts is not None
        keep = None if truncate is None else self._kept(truncate)
        if keep is None:
            return self.texts.prompt(self._lower_case(text), add_special_tokens)
        return self.texts.pair(self._lower_case(text), None, add_special_tokens, keep)[0]

    def pair(
        self, first: str, second: str, add_special_tokens: bool = True, truncate: int | None = None
    ) -> dict[str, Any]:
        """The prompt of two texts for a model that scores pairs. Raises as `process` does. May run in any thread."""
        texts = self.texts
        if texts is None:
            raise ValueError("You cannot pass text prompts when `skip_tokenizer_init` is True")
        keep = None if truncate is None else self._kept(truncate)
        try:
            found = texts.pair(self._lower_case(first), self._lower_case(second), add_special_tokens, keep)
        except TooManyTokensError as error:
            raise _too_long(f"{error.at_least} or more", self._model.max_model_len) from None
        return _pair_prompt(*found)

    def pairs(
        self,
        first: str,
        seconds: Sequence[str],
        add_special_tokens: bool = True,
        truncate: int | None = None,
        most: int | None = None,
    ) -> list[dict[str, Any]]:
        """The prompts of one text and each of several, as `pair` makes them.

        most: tokens of all of them, more of which are refused (ValueError): the first text is sent once, but stands in
        each prompt.
        """
        texts = self.texts
        if texts is None:
            raise ValueError("You cannot pass text prompts when `skip_tokenizer_init` is True")
        keep = None if truncate is None else self._kept(truncate)
        prompts: list[dict[str, Any]] = []
        total = 0
        try:
            lowered = [self._lower_case(second) for second in seconds]
            for ids, second_from in texts.pairs(self._lower_case(first), lowered, add_special_tokens, keep):
                total += len(ids)
                if most is not None and total > most:
                    raise VLLMValidationError(
                        f"These pairs have more than {most} tokens together. Send fewer at once, shorten the text that "
                        "stands in all of them, or set truncate_prompt_tokens.",
                        parameter="prompt",
                    )
                prompts.append(_pair_prompt(ids, second_from))
        except TooManyTokensError as error:
            raise _too_long(f"{error.at_least} or more", self._model.max_model_len) from None
        return prompts

    def default_params(self) -> SamplingParams:
        """What is used without sampling parameters: the model's recommendation, else the neutral ones."""
        return SamplingParams.from_optional(**self._model.get_diff_sampling_param())

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def _parsed(self, prompt: PromptType) -> Parsed:
        return parse(prompt, pools=self._model.pooling is not None)

    def _tokenize(self, requests: Sequence[RequestInput], prompts: Sequence[Parsed]) -> list[list[int]]:
        """The token ids of every prompt. Texts are encoded in parallel; for a single one that would only cost."""
        found: list[list[int]] = [p.token_ids or [] for p in prompts]
        texts = [i for i, p in enumerate(prompts) if p.token_ids is None]
        if texts and self.texts is None:
            raise ValueError("You cannot pass text prompts when `skip_tokenizer_init` is True")
        together: dict[bool, list[int]] = {True: [], False: []}
        for i in texts:
            if len(texts) > 1 and self._is_ordinary(requests[i], prompts[i].text or ""):
                together[requests[i].add_special_tokens].append(i)
            else:
                found[i] = self._encode(requests[i], prompts[i].text or "")
        for special, chosen in together.items():
            if chosen and self.tokenizer is not None:
                encoded = self.tokenizer.encode_batch(
                    [self._lower_case(prompts[i].text or "") for i in chosen], special
                )
                for i, ids in zip(chosen, encoded, strict=True):
                    found[i] = ids
        return found

    def _lower_case(self, text: str) -> str:
        pooling = self._model.pooling
        return text.lower() if pooling is not None and pooling.lower_case else text

    def _is_ordinary(self, request: RequestInput, text: str) -> bool:
        """Whether the model's tokenizer takes the text, and the whole is no more work than the context is worth."""
        kept = _truncation(request.params)
        own = request.lora_request is not None and self.tokenizer_of(request.lora_request) is not self.tokenizer
        return kept is None and not own and len(text) <= self._model.max_model_len * PLAUSIBLE_CHARACTERS_PER_TOKEN

    def _encode(self, request: RequestInput, text: str) -> list[int]:
        kept, texts = _truncation(request.params), self.texts_of(request.lora_request)
        assert texts is not None
        try:
            if isinstance(request.params, PoolingParams) and kept is not None:
                return texts.pair(self._lower_case(text), None, request.add_special_tokens, self._kept(kept))[0]
            text = self._lower_case(text)
            return texts.prompt(text, request.add_special_tokens, None if kept is None else self._kept(kept))
        except TooManyTokensError as error:
            raise _too_long(f"{error.at_least} or more", self._model.max_model_len) from None

    def _check_prompt(self, token_ids: list[int], prompt: Parsed, limit: int, lora: LoRARequest | None) -> None:
        """`prompt`: what the ids come from, which need not be this model's tokenizer.   limit: of tokens."""
        if not token_ids:
            raise VLLMValidationError("The decoder prompt cannot be empty", parameter="prompt")
        if len(token_ids) > limit:
            raise _too_long(str(len(token_ids)), limit)
        known = prompt.bounds if token_ids is prompt.token_ids else None
        self.check_token_ids(token_ids, known, made=prompt.token_ids is None, lora_request=lora)

    def check_token_ids(
        self,
        token_ids: list[int],
        bounds: tuple[int, int] | None = None,
        *,
        made: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Raise VLLMValidationError if the model does not have all of these tokens, of which there is one at least.

        bounds: the smallest and the largest id, where they are known.   made: by the tokenizer, which has none below 0.
        """
        low, high = bounds or (0 if made else min(token_ids), max(token_ids))
        if low < 0 or high >= self.tokens_of(lora_request):
            wrong, hint = show(low if low < 0 else high), " (the tokenizer has more tokens than the model)" * made
            raise VLLMValidationError(f"Token id {wrong} is out of vocabulary{hint}", parameter="prompt_token_ids")

    def _kept(self, truncate: int) -> int:
        """How many of a prompt's last tokens `truncate_prompt_tokens` leaves at most."""
        limit = self._model.max_model_len
        return limit if truncate == -1 else min(truncate, limit)

    # -- the parameters ------------------------------------------------------------------------------------------------

    def check(self, params: SamplingParams, lora_request: LoRARequest | None = None) -> CheckedParams:
        """Parameters that were made for one call, as all requests of it may have them (`RequestInput.checked`), so that
        they are looked at once. Raises ValueError. May run in any thread.
        """
        return CheckedParams(params, self._adapt(params, lora_request))

    def _check_options(self, request: RequestInput) -> None:
        if not isinstance(request.request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request.request_id).__name__}.")
        if isinstance(request.params, PoolingParams):
            self._check_pooling(request.params)
        elif not isinstance(request.params, (SamplingParams, BeamSearchParams)):
            raise TypeError(f"params must be SamplingParams, got {type(request.params).__name__}.")
        elif self._model.pooling is not None:
            raise ValueError(needs_generation(self._model.convert_type))
        if request.lora_request is not None:
            self.lora_folder(request.lora_request)
        if request.prompt_adapter_request is not None:
            params = request.params
            if isinstance(params, PoolingParams) or getattr(params, "prompt_logprobs", None) is not None:
                raise ValueError("Prompt adapters are not for pooling, and not available with prompt_logprobs.")
            self.virtual_tokens(request.prompt_adapter_request)
        if _priority("priority", request.priority) != 0 and self._config.scheduler_config.policy != "priority":
            raise ValueError(f"Got priority {request.priority} but Priority scheduling is not enabled.")

    def _check_pooling(self, params: PoolingParams) -> None:
        """Raise ValueError unless the model pools as these parameters ask."""
        if self._model.pooling is None:
            raise ValueError(
                "The model generates text; PoolingParams need a pooling model. Use task='embed' (or classify, reward) "
                "to make one of it."
            )
        params.__post_init__()  # fields may have been changed since
        params.verify(self._model)
        if params.task is not None and params.task not in self._model.pooling.tasks:
            raise VLLMValidationError(
                f"The model is for {', '.join(self._model.pooling.tasks)}, not for {params.task!r}.", parameter="task"
            )

    def lora_folder(self, lora_request: LoRARequest) -> str:
        """The folder of a request's adapter, its settings checked; the first time it may be fetched from the Hub.

        Raises ValueError, or LoRAAdapterNotFoundError.
        """
        return self._lora(lora_request).folder

    def _lora(self, lora_request: LoRARequest) -> _KnownAdapter:
        lora = self._config.lora_config
        if lora is None:
            raise ValueError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        if not isinstance(lora_request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, got {type(lora_request).__name__}.")
        key = (lora_request.lora_int_id, lora_request.lora_path)
        found = self._known.get(key)
        if found is None:
            positions = self._model.hf.get_int("max_position_embeddings", default=None)
            factors = lora.long_lora_scaling_factors or ()
            facts = check_adapter(
                lora_request, lora.max_lora_rank, positions, factors, self._model.logits_width,
                lora.lora_extra_vocab_size,
            )  # fmt: skip
            longest = min(self._longest * facts.stretch, self._model.max_model_len)
            tokenizer = None
            if facts.tokenizer and self.tokenizer is not None:  # code that comes with an adapter is never run
                tokenizer = load_tokenizer(facts.folder)
            found = _KnownAdapter(str(facts.folder), longest, self._model.logits_width + facts.added, tokenizer)
            many = tokenizer is not None and sum(x.tokenizer is not None for x in self._known.values())
            if len(self._known) >= MAX_KNOWN_ADAPTERS or many >= MAX_TOKENIZERS:
                self._known.clear()
                self.adapter_names.clear()
            self._known[key] = found
            self.adapter_names[lora_request.lora_int_id] = lora_request.lora_name
        return found

    def tokens_of(self, lora_request: LoRARequest | None) -> int:
        """How many tokens a request's model has, to whose vocabulary its adapter may add some."""
        return self._model.logits_width if lora_request is None else self._lora(lora_request).tokens

    def tokenizer_of(self, lora_request: LoRARequest | None) -> Tokenizer | None:
        """The tokenizer of a request's adapter, if it has one of its own, or the model's."""
        own = None if lora_request is None else self._lora(lora_request).tokenizer
        return self.tokenizer if own is None else own

    def texts_of(self, lora_request: LoRARequest | None) -> Texts | None:
        """What tokenizes the texts of a request."""
        tokenizer = self.tokenizer_of(lora_request)
        return None if tokenizer is None else Texts(tokenizer, self._model.max_model_len)

    def _limit(self, lora_request: LoRARequest | None) -> int:
        """The longest sequence of a request, which its adapter may change."""
        if lora_request is None:
            return self._longest
        own = self._lora(lora_request).longest
        return own if lora_request.long_lora_max_len is None else min(own, lora_request.long_lora_max_len)

    def virtual_tokens(self, request: PromptAdapterRequest) -> VirtualTokens:
        """The virtual tokens of a prompt adapter, read the first time. Raises ValueError."""
        config = self._config.prompt_adapter_config
        if config is None:
            raise ValueError(f"Got prompt_adapter_request {request} but prompt adapters are not enabled!")
        if not isinstance(request, PromptAdapterRequest):
            kind = type(request).__name__
            raise TypeError(f"prompt_adapter_request must be one PromptAdapterRequest for all prompts, got {kind}.")
        folder = Path(request.prompt_adapter_local_path).expanduser().resolve()
        key = (request.prompt_adapter_id, str(folder))
        found = self.prompt_adapters.pop(key, None)
        if found is None:
            found = read_prompt_adapter(
                folder, width=self._model.get_hidden_size(), max_tokens=config.max_prompt_adapter_token
            )
            if found.count != request.prompt_adapter_num_virtual_tokens:
                raise VLLMValidationError(
                    f"The prompt adapter {request.prompt_adapter_name} has {found.count} virtual tokens, the request "
                    f"says {request.prompt_adapter_num_virtual_tokens}.",
                    parameter="prompt_adapter_num_virtual_tokens",
                )
            while len(self.prompt_adapters) >= config.max_prompt_adapters:
                self.prompt_adapters.pop(next(iter(self.prompt_adapters)))
        self.prompt_adapters[key] = found  # the newest last
        return found

    def _checked(self, params: SamplingParams, lora_request: LoRARequest | None) -> CheckedParams:
        """Our own copy of the parameters, checked against the model; what depends on the prompt is left open."""
        params = params.clone()
        params.verify()  # fields may have been changed since
        params.forget_tokenizer()
        return CheckedParams(params, self._adapt(params, lora_request))

    def _take_grammar(self, params: SamplingParams) -> GrammarSpec | None:
        """The form that the output must have, taken out of the parameters. Raises ValueError if nothing can compile it.

        Whether it compiles is found out by the core.
        """
        name = "guided_decoding" if params.guided_decoding is not None else "structured_outputs"
        given = params.guided_decoding or params.structured_outputs
        params.guided_decoding = params.structured_outputs = None
        constraint = None if given is None else constraint_of(given, name)
        if constraint is None:
            return None
        if self.tokenizer is None:
            raise VLLMValidationError(
                "Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'", parameter=name
            )
        known = len(constraint.text) <= MAX_KNOWN_FORM
        return (self._resolve_known if known else self._resolve_form)(constraint, name)

    def _resolve_form(self, constraint: Constraint, name: str) -> GrammarSpec:
        return resolve(constraint, self._config.decoding_config, name)

    def _adapt(self, params: SamplingParams, lora_request: LoRARequest | None) -> GrammarSpec | None:
        """Check the parameters against the model and fill in what it decides. Raises ValueError."""
        width, tokenizer = self.tokens_of(lora_request), self.tokenizer_of(lora_request)
        grammar = None
        if params.guided_decoding is not None or params.structured_outputs is not None:
            grammar = self._take_grammar(params)
        if tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise ValueError(f"{name} needs a tokenizer, but `skip_tokenizer_init` is True. Remove {name}.")
            params.detokenize = False
        else:
            if params.bad_words_token_ids is None:
                params.update_from_tokenizer(tokenizer)
        params.verify_against_model(width, self._model.max_logprobs)
        eos = None if tokenizer is None else tokenizer.eos_token_id  # else those of the generation config end it
        eos = eos if eos is not None and eos < width else None
        params.update_from_generation_config(self._generation_config, eos)
        # The tokenizer and the generation config may name tokens that this model cannot produce.
        params.stop_token_ids = [i for i in params.stop_token_ids or () if 0 <= i < width]
        if params.stream_interval is None:
            params.stream_interval = self._config.scheduler_config.stream_interval
        if params.logprobs == -1:
            params.logprobs = width
        if params.prompt_logprobs == -1:
            params.prompt_logprobs = width
        if params.allowed_token_ids is not None or params.bad_words_token_ids or params.min_tokens:
            self._check_that_a_token_is_left(params, width)
        return grammar

    def _resolve(
        self, request: RequestInput, given: SamplingParams, rest: int, checked: dict[tuple[int, int], CheckedParams]
    ) -> CheckedParams:
        """The request's parameters, with nothing left open. rest: tokens that may follow the prompt."""
        if request.checked is not None:
            params, grammar = request.checked
        elif request.owns_params:
            params, grammar = self.check(given, request.lora_request)
        else:
            key = id(request.params), id(request.lora_request)
            found = checked.get(key)
            if found is None:
                found = checked[key] = self._checked(given, request.lora_request)
            params, grammar = found.params.clone(), found.grammar
        most = params.max_tokens
        if most is None or self._limit(request.lora_request) < self._model.max_model_len:
            most = max(1, rest if most is None else min(most, rest))
        if most != params.max_tokens:
            params = params if request.checked is None else copy.copy(params)
            params.max_tokens = most
        return CheckedParams(params, grammar)

    def _check_that_a_token_is_left(self, params: SamplingParams, width: int) -> None:
        """Raise VLLMValidationError if no token may be sampled first, as far as the parameters alone can tell."""
        barred = {ids[0] for ids in params.bad_words_token_ids or () if len(ids) == 1}
        causes = ["bad_words"] if barred else []
        if params.min_tokens:
            eos = params.eos_token_id
            ends = {*(params.stop_token_ids or ()), *(() if eos is None else (eos,))}
            causes += ["min_tokens"] if ends else []
            barred |= ends
        allowed = params.allowed_token_ids
        if allowed is not None:
            causes.insert(0, "allowed_token_ids")
        if barred.issuperset(range(width) if allowed is None else allowed):
            raise VLLMValidationError(
                f"No token may be sampled: {', '.join(causes)} together leave none (before min_tokens, no token that "
                "ends the output is sampled). Allow more tokens, or forbid fewer.",
                parameter=causes[0],
            )

    # -- the result ----------------------------------------------------------------------------------------------------

    def _build(self, request: RequestInput, prompt: Parsed, token_ids: list[int], shared: _Shared) -> ProcessedRequest:
        if isinstance(request.params, PoolingParams):
            return self._build_pooled(request, request.params, prompt, token_ids, shared)
        given, beams = _sampling_and_beams(request.params)
        if given.truncate_prompt_tokens is not None:
            if prompt.token_ids:
                # also those that are cut off
                self.check_token_ids(prompt.token_ids, prompt.bounds, lora_request=request.lora_request)
            token_ids = token_ids[-self._kept(given.truncate_prompt_tokens) :]
        text = prompt.text
        if self._hook is not None:
            text, token_ids = _after_hook(self._hook, text, token_ids)
        limit = self._limit(request.lora_request)
        self._check_prompt(token_ids, prompt, limit, request.lora_request)
        virtual = None
        if request.prompt_adapter_request is not None:
            virtual = self.virtual_tokens(request.prompt_adapter_request)
            if virtual.count + len(token_ids) > limit:
                raise _too_long(f"{len(token_ids)} and {virtual.count} virtual tokens", limit)
        rest = limit - len(token_ids) - (0 if virtual is None else virtual.count)
        params, grammar = self._resolve(request, given, rest, shared.checked)
        arrival = time.time() if request.arrival_time is None else request.arrival_time
        made = ProcessedRequest(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            children=(),
            returned=params.n,
            arrival_time=arrival,
            priority=request.priority,
            cache_salt=prompt.cache_salt,
            beams=beams,
            account=request.account or (request.request_id if beams is not None or params.num_candidates > 1 else None),
            grammar=grammar,
            lora_request=request.lora_request,
            lora_folder="" if request.lora_request is None else self.lora_folder(request.lora_request),
            virtual=virtual,
            tokenizer=None if request.lora_request is None else self._lora(request.lora_request).tokenizer,
            known_prompt=self._known_prompt,
            begins=request.begins,
        )
        return made if beams is not None else made._replace(children=self._children(made))

    def _build_pooled(
        self, request: RequestInput, params: PoolingParams, prompt: Parsed, token_ids: list[int], shared: _Shared
    ) -> ProcessedRequest:
        if params.truncate_prompt_tokens is not None and prompt.token_ids:
            self.check_token_ids(prompt.token_ids, prompt.bounds)  # also those that are cut off
            token_ids = token_ids[: self._kept(params.truncate_prompt_tokens)]
        self._check_prompt(token_ids, prompt, self._limit(request.lora_request), request.lora_request)
        own = shared.pooled.get(id(params))
        if own is None:
            own = shared.pooled[id(params)] = params.clone()
            own.second_from = own.truncate_prompt_tokens = None
        return ProcessedRequest(
            request_id=request.request_id,
            prompt=prompt.text,
            prompt_token_ids=token_ids,
            params=_NEUTRAL,
            children=(),
            returned=1,
            arrival_time=time.time() if request.arrival_time is None else request.arrival_time,
            priority=request.priority,
            cache_salt=prompt.cache_salt,
            account=request.account,
            lora_request=request.lora_request,
            lora_folder="" if request.lora_request is None else self.lora_folder(request.lora_request),
            pooled=own,
            second_from=prompt.second_from,
            known_prompt=self._known_prompt,
        )

    def _children(self, request: ProcessedRequest) -> Children:
        params, count = request.params, request.params.num_candidates
        seed = (self._random.getrandbits(SEED_BITS) if params.seed is None else params.seed) & SEED_MASK
        if count > request.returned and params.logprobs is None:
            # Which sequences are best is decided by their log probability.
            params = params.clone()
            params.logprobs = 0
        others = params
        if params.prompt_logprobs is not None:
            # The prompt is everybody's: its logprobs are computed once.
            others = params.clone()
            others.prompt_logprobs = None
        return Children(request, params, others, seed)


def _truncation(params: object) -> int | None:
    """`truncate_prompt_tokens`, where there is such a parameter."""
    return params.truncate_prompt_tokens if isinstance(params, SamplingParams | PoolingParams) else None


def needs_generation(convert: str) -> str:
    """Why a model that pools does not generate. convert: what was made of its architecture."""
    if convert == "none":
        return (
            "LLM.generate() is only supported for generative models; this model pools: use encode(), embed(), "
            "classify() or score()."
        )
    return (
        "Your model supports the 'generate' runner, but is currently initialized for the 'pooling' runner. "
        "Please initialize vLLM using `--task generate`."
    )


def _after_hook(
    hook: Callable[[LLMInputs], LLMInputs], text: str | None, token_ids: list[int]
) -> tuple[str | None, list[int]]:
    """Text and token ids as the model's own hook (`INPUT_REGISTRY`) wants them."""
    changed = hook(LLMInputs(prompt_token_ids=token_ids, prompt=text))
    refuse_what_needs_other_models(changed)
    return changed.get("prompt"), token_list(changed["prompt_token_ids"])


def _pair_prompt(ids: list[int], second_from: int | None) -> dict[str, Any]:
    start = len(ids) if second_from is None else second_from
    return {"prompt_token_ids": ids, "token_type_ids": [0] * start + [1] * (len(ids) - start)}


def _too_long(length: str, limit: int) -> VLLMValidationError:
    return VLLMValidationError(
        f"The decoder prompt (length {length}) is longer than the maximum model length of {limit}. "
        "Shorten the prompt, set truncate_prompt_tokens, or raise max_model_len if the model allows it.",
        parameter="prompt",
    )


def _sampling_and_beams(
    params: SamplingParams | BeamSearchParams,
) -> tuple[SamplingParams, BeamSearchParams | None]:
    """Both spellings of a beam search as (what all requests have, the search); (params, None) for sampling."""
    if isinstance(params, BeamSearchParams):
        common = SamplingParams(
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            temperature=0.0,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        return common, params
    if not params.use_beam_search:
        return params, None
    if params.max_tokens is None:
        raise VLLMValidationError("Beam search needs max_tokens.", parameter="max_tokens")
    for name, neutral in BEAM_NEUTRAL.items():
        if getattr(params, name) not in neutral:
            raise VLLMValidationError(
                f"{name} has no effect on beam search, which ranks by the model's own distribution. Remove {name}.",
                parameter=name,
            )
    search = BeamSearchParams(
        beam_width=params.num_candidates,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=params.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
    return params, search
