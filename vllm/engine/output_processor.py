"""From what the core returns to what users receive: text, stop strings, log probabilities, `n`, times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm.engine.beam import Beam, BeamSearch
from vllm.engine.detokenizer import Detokenizer
from vllm.engine.processed import ProcessedRequest, packed_request, pooled_request
from vllm.engine.tokenizer import Tokenizer
from vllm.logger import init_logger
from vllm.logprobs import FlatLogprobs
from vllm.metrics.registry import EngineMetrics
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.sequence import Logprob, RequestMetrics
from vllm.step.messages import CoreOutput, CoreRequest
from vllm.step.result import Pooled, TokenLogprobs

logger = init_logger(__name__)


AnyOutput = RequestOutput | PoolingRequestOutput[Any]


class Refusal(str):
    """Why a request failed that is itself at fault, by which `parameter` if that is known."""

    parameter: str | None = "guided_decoding"  # the core refuses nothing else


class Processed(NamedTuple):
    """What to do with a step: outputs for users, ids for the core to abort, requests for it to run next (beams)."""

    outputs: list[AnyOutput]
    aborts: list[str]
    follow_ups: list[CoreRequest]


class _Sequence:
    """One of the sequences of a request. Without stop strings and streaming, its text is made when it has ended."""

    __slots__ = (
        "cumulative_logprob", "decodes_at_end", "detokenizer", "error", "finish_reason", "index", "last_token_time",
        "logprobs", "new_tokens", "params", "stop_reason", "token_ids", "tokenizer",
    )  # fmt: skip

    def __init__(self, index: int, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None):
        self.index = index
        self.params = params
        self.tokenizer = tokenizer if params.detokenize else None
        self.token_ids: list[int] = []
        self.logprobs: Any = None  # a list, or FlatLogprobs
        if params.logprobs is not None:
            self.logprobs = FlatLogprobs(token_text(self.tokenizer)) if params.flat_logprobs else []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.new_tokens = 0  # since the last delta
        self.last_token_time: float | None = None
        self.detokenizer: Detokenizer | None = None
        if self.tokenizer is not None:
            self.detokenizer = Detokenizer(
                self.tokenizer.stream(
                    prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
                ),
                params.stop or (),
                params.include_stop_str_in_output,
                params.min_tokens,
                params.output_text_buffer_length,
            )
        self.decodes_at_end = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop

    def take(self, output: CoreOutput) -> bool:
        """Add what a step brought. True if a stop string ended the sequence before the core did."""
        tokens = output.new_token_ids
        self.token_ids += tokens
        if output.logprobs is not None and self.logprobs is not None:
            self._take_logprobs(output.logprobs)
        reason = output.finish_reason
        if self.detokenizer is not None and not (self.decodes_at_end and reason is None):
            if self.decodes_at_end:
                tokens = self.token_ids
            stopped = self._detokenize(self.detokenizer, tokens, reason)
            if stopped:
                return reason is None
        if reason is not None:
            self.finish_reason = reason
            self.stop_reason = output.stop_reason
            self.error = Refusal(output.error) if output.refused and output.error is not None else output.error
        return False

    def _detokenize(self, detokenizer: Detokenizer, tokens: list[int], reason: str | None) -> bool:
        """True if a stop string was completed; the tokens after it are dropped."""
        if reason == "stop" and not self.params.include_stop_str_in_output:
            match = detokenizer.push(tokens[:-1])  # the token that stops is no text
        else:
            match = detokenizer.push(tokens)
        surplus = 0 if match is None else len(tokens) - match.num_tokens
        if match is None and reason is not None:
            match = detokenizer.finish()
        if match is None:
            return False
        if surplus:
            del self.token_ids[-surplus:]
            self._drop_logprobs(surplus)
        self.finish_reason = "stop"
        self.stop_reason = match.stop
        return True

    def _take_logprobs(self, steps: list[TokenLogprobs]) -> None:
        assert self.logprobs is not None
        for step in steps:
            self.cumulative_logprob += step.logprobs[0]
            add_logprobs(self.logprobs, step, self.tokenizer)

    def _drop_logprobs(self, surplus: int) -> None:
        """Forget those of the last tokens, which belong to the output no more."""
        if self.logprobs is None:
            return
        kept = len(self.logprobs) - surplus
        self.cumulative_logprob -= sum(next(iter(p.values())).logprob for p in self.logprobs[kept:] if p)
        if isinstance(self.logprobs, FlatLogprobs):
            self.logprobs.truncate(kept)
        else:
            del self.logprobs[kept:]

    def count_tokens(self, count: int, now: float, request: _Request, metrics: EngineMetrics) -> None:
        """Tell the metrics how long the newest tokens took: since the request came, for the first token of all its
        sequences, and since the token before.
        """
        if self.last_token_time is None:
            if request.metrics.first_token_time is None:
                metrics.time_to_first_token.observe(now - request.metrics.arrival_time)
        else:
            metrics.time_per_output_token.observe((now - self.last_token_time) / count, count)
        self.last_token_time = now

    def completion(self, index: int, shows_logprobs: bool) -> CompletionOutput:
        """Everything so far."""
        return CompletionOutput(
            index=index,
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=self.logprobs[:] if self.logprobs is not None and shows_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.error if self.error is not None else self.stop_reason,
        )

    def delta(self) -> CompletionOutput:
        """What is new since the last delta."""
        token_ids = self.token_ids[self.new_tokens :]
        self.new_tokens = len(self.token_ids)
        logprobs = self.logprobs
        if logprobs is not None:  # which nobody asks for a second time
            self.logprobs = FlatLogprobs(token_text(self.tokenizer)) if self.params.flat_logprobs else []
        return CompletionOutput(
            index=self.index,
            text="" if self.detokenizer is None else self.detokenizer.take_delta(),
            token_ids=token_ids,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.error if self.error is not None else self.stop_reason,
        )


class _Request:
    """One request of a user, with all its sequences."""

    __slots__ = (
        "beams", "changed", "core_ids", "held", "is_plain", "kind", "message", "metrics", "num_cached_tokens",
        "prompt_logprobs", "sent_prompt_logprobs", "sequences", "shows_logprobs", "unfinished",
    )  # fmt: skip

    def __init__(self, message: ProcessedRequest, beams: BeamSearch | None, tokenizer: Tokenizer | None) -> None:
        params = message.params
        self.message = message
        self.beams = beams
        self.kind = params.output_kind
        self.shows_logprobs = params.logprobs is not None
        self.sequences: list[_Sequence] = []  # those that have begun
        self.core_ids: list[str] = []  # of those
        # A stream of one text and nothing else: between its first and its last token there is little to think about.
        self.is_plain = False
        self.unfinished = len(message.children)
        self.changed: list[_Sequence] = []  # in this step
        self.prompt_logprobs: Any = None  # the same
        if params.prompt_logprobs is not None:
            text = token_text(tokenizer if params.detokenize else None)
            self.prompt_logprobs = FlatLogprobs(text) if params.flat_logprobs else []
            self.prompt_logprobs.append(None)
        self.held = 0  # log probabilities that are kept until its end
        self.sent_prompt_logprobs = False
        self.num_cached_tokens: int | None = None
        self.metrics = RequestMetrics(
            arrival_time=message.arrival_time,
            last_token_time=message.arrival_time,
            first_scheduled_time=None,
            first_token_time=None,
            time_in_queue=None,
        )

    def begin(self, most: int | None, tokenizer: Tokenizer | None) -> list[CoreRequest]:
        """The messages of the next sequences, at most so many."""
        done, message = len(self.sequences), self.message
        end = len(message.children) if most is None else min(done + most, len(message.children))
        begun = [message.children[i] for i in range(done, end)]
        for i, child in enumerate(begun, done):
            assert isinstance(child.params, SamplingParams)
            self.sequences.append(_Sequence(i, message.prompt_token_ids, child.params, tokenizer))
            self.core_ids.append(child.request_id)
        params = message.params
        self.is_plain = (
            len(message.children) == len(self.sequences) == 1
            and self.kind is RequestOutputKind.DELTA
            and params.logprobs is None
            and params.prompt_logprobs is None
            and (detokenizer := self.sequences[0].detokenizer) is not None
            and not detokenizer.holds_back
        )
        return begun

    def note(self, output: CoreOutput, now: float, tokenizer: Tokenizer | None) -> None:
        """What an output says about the request as a whole."""
        metrics = self.metrics
        if output.new_token_ids:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.last_token_time = now
        if output.num_cached_tokens is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.first_scheduled_time and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
            metrics.time_in_queue = output.first_scheduled_time - metrics.arrival_time
        if output.prompt_logprobs and self.prompt_logprobs is not None:
            shown = tokenizer if self.message.params.detokenize else None
            for step in output.prompt_logprobs:
                add_logprobs(self.prompt_logprobs, step, shown)

    def output(self, completions: list[CompletionOutput], finished: bool) -> RequestOutput:
        message = self.message
        logprobs = self.prompt_logprobs
        if logprobs is not None and self.kind is RequestOutputKind.DELTA:
            # In a stream of differences they are sent once, as soon as they are complete.
            ready = not self.sent_prompt_logprobs and len(logprobs) == len(message.prompt_token_ids)
            self.sent_prompt_logprobs |= ready
            logprobs = logprobs if ready else None
        return RequestOutput(
            request_id=message.request_id,
            prompt=message.prompt,
            prompt_token_ids=message.prompt_token_ids,
            prompt_logprobs=logprobs,
            outputs=completions,
            finished=finished,
            metrics=self.metrics,
            lora_request=message.lora_request,
            num_cached_tokens=self.num_cached_tokens,
        )

    def best(self) -> list[_Sequence]:
        """The sequences to return, of those that have begun: all, or the likeliest of best_of, best first."""
        if self.message.returned == len(self.message.children):
            return self.sequences
        ranked = sorted(self.sequences, key=lambda sequence: -sequence.cumulative_logprob)
        return ranked[: self.message.returned]


class _PooledRequest:
    """A request that is pooled: one prompt, one answer. begun: whether the core has it.   pack: those that share a
    request of the core with it.
    """

    __slots__ = ("begun", "first_scheduled", "message", "num_cached_tokens", "pack")

    def __init__(self, message: ProcessedRequest, pack: list[ProcessedRequest] | None = None) -> None:
        self.message, self.pack = message, pack
        self.begun = pack is not None
        self.first_scheduled: float | None = None
        self.num_cached_tokens = 0

    def note(self, output: CoreOutput) -> None:
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        if output.first_scheduled_time:
            self.first_scheduled = output.first_scheduled_time

    def answer(self, output: CoreOutput) -> PoolingRequestOutput[Any]:
        """What the user receives for the last output."""
        message, pooled = self.message, output.pooled
        data = error = None
        if pooled is not None:
            data = PoolingOutput(_array(pooled))
        else:
            text = output.error or f"The request ended with {output.finish_reason!r} and without an answer."
            error = Refusal(text) if output.refused else text
        return PoolingRequestOutput(
            message.request_id, data, message.prompt_token_ids, True, self.num_cached_tokens, error
        )


def _array(pooled: Pooled) -> np.ndarray:
    """What was pooled, as an array that may be written to."""
    found: np.ndarray = np.frombuffer(bytearray(pooled.data), pooled.dtype).reshape(pooled.shape)
    return found


class OutputProcessor:
    """Owns every request that a user can see, from `add` to its end. `metrics` counts them, if it is given."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        logits_width: int,
        max_model_len: int,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        # How many log probabilities may be kept for answers that are given as a whole; the request with the most of
        # them fails when there are more. None: any number, which is right where the answers are the caller's own.
        self.most_logprobs: int | None = None
        self._held_logprobs = 0
        self._metrics = metrics
        self._logits_width = logits_width
        self._max_model_len = max_model_len
        self._requests: dict[str, _Request] = {}
        self._owner: dict[str, tuple[_Request, _Sequence]] = {}  # id in the core -> sequence
        self._beams: dict[str, _Request] = {}  # id in the core -> request searched by beams
        self._pooled: dict[str, _PooledRequest] = {}
        self._packs: dict[str, list[ProcessedRequest]] = {}  # by the id of the first, which the core has

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._pooled

    @property
    def num_unfinished(self) -> int:
        return len(self._requests) + len(self._pooled)

    @property
    def request_ids(self) -> list[str]:
        return [*self._requests, *self._pooled]

    def add(self, message: ProcessedRequest, most: int | None = None) -> list[CoreRequest]:
        """Register a request. Returns what the core has to run for it. Raises ValueError if its id is in use.

        most: begin at most so many of its sequences; `more` begins the others.
        """
        if message.request_id in self:
            raise ValueError(f"Request {message.request_id} already exists.")
        if message.pooled is not None:
            self._pooled[message.request_id] = _PooledRequest(message)
            return [] if most is not None and most < 1 else self.more(message.request_id, most)
        if message.beams is None:
            request = self._requests[message.request_id] = _Request(message, None, message.tokenizer or self.tokenizer)
            return self.more(message.request_id, most)
        search = BeamSearch(message, self._logits_width, self._max_model_len)
        request = self._requests[message.request_id] = _Request(message, search, message.tokenizer or self.tokenizer)
        first = search.start()
        self._beams.update((child.request_id, request) for child in first)
        return first

    def add_pack(self, messages: Sequence[ProcessedRequest]) -> CoreRequest:
        """Register requests that are pooled alike. Returns the one that the core has to run for all of them."""
        if len(messages) == 1:
            (made,) = self.add(messages[0])
            return made
        for message in messages:
            if message.request_id in self:
                raise ValueError(f"Request {message.request_id} already exists.")
        pack = self._packs[messages[0].request_id] = list(messages)
        self._pooled.update((message.request_id, _PooledRequest(message, pack)) for message in messages)
        return packed_request(pack)

    def _tokenizer_of(self, request: _Request) -> Tokenizer | None:
        """The tokenizer of a request's adapter, or that of the model."""
        return request.message.tokenizer or self.tokenizer

    def prompt_length(self, request_id: str) -> int:
        """In tokens; 0 for a request that is not known (any more)."""
        request = self._requests.get(request_id) or self._pooled.get(request_id)
        return 0 if request is None else len(request.message.prompt_token_ids)

    def more(self, request_id: str, most: int | None) -> list[CoreRequest]:
        """Begin at most so many further sequences of a request; what the core has to run for them."""
        pooled = self._pooled.get(request_id)
        if pooled is not None and not pooled.begun:
            pooled.begun = True
            return [pooled_request(pooled.message)]
        request = self._requests.get(request_id)
        if request is None:
            return []
        done = len(request.sequences)
        begun = request.begin(most, self._tokenizer_of(request))
        for child, sequence in zip(begun, request.sequences[done:], strict=True):
            self._owner[child.request_id] = (request, sequence)
        return begun

    def abort(self, request_ids: Iterable[str]) -> tuple[list[str], list[AnyOutput]]:
        """Forget requests, if known. Returns the ids the core has to abort, and a last output of each that generates:
        half a vector is none.
        """
        core_ids: list[str] = []
        outputs: list[AnyOutput] = []
        for request_id in request_ids:
            pooled = self._pooled.pop(request_id, None)
            if pooled is not None:
                core_ids += self._leave_pack(pooled)
                self._count_pooled(pooled, "abort", time.time())
            request = self._requests.get(request_id)
            if request is None:
                continue
            core_ids += self._forget(request)
            now = time.time()
            self._count_finished(request, [("abort", len(s.token_ids)) for s in request.sequences], now)
            if request.beams is not None:
                outputs.append(request.output([], finished=True))
                continue
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    sequence.take(CoreOutput("", [], finish_reason="abort"))
            outputs.append(request.output(self._completions(request, request.sequences), finished=True))
        return core_ids, outputs

    def process(self, core_outputs: Iterable[CoreOutput]) -> Processed:
        """Take in a step."""
        now = time.time()
        outputs: list[AnyOutput] = []
        aborts: list[str] = []
        follow_ups: list[CoreRequest] = []
        changed: dict[str, _Request] = {}
        owner, metrics = self._owner, self._metrics
        for core_output in core_outputs:
            found = owner.get(core_output.request_id)
            if found is None:
                pack = self._packs.get(core_output.request_id)
                if pack is not None:
                    if core_output.finish_reason is not None:
                        self._process_pack(pack, core_output, now, outputs, follow_ups)
                    continue
                pooled = self._pooled.get(core_output.request_id)
                if pooled is not None:
                    outputs += self._process_pooled(pooled, core_output, now)
                request = self._beams.get(core_output.request_id)
                if request is not None:
                    try:
                        self._process_beam(request, core_output, now, outputs, aborts, follow_ups)
                    except Exception as error:
                        outputs.append(self._fail(request, error, now, aborts))
                continue  # or a token that was under way when the sequence ended
            request, sequence = found
            try:
                if (
                    request.is_plain
                    and sequence.new_tokens
                    and core_output.finish_reason is None
                    and core_output.num_cached_tokens is None
                    and core_output.new_token_ids
                ):  # in the middle of the stream
                    outputs.append(self._take_plain(request, sequence, core_output.new_token_ids, now))
                    continue
                if metrics is not None and core_output.new_token_ids:
                    sequence.count_tokens(len(core_output.new_token_ids), now, request, metrics)
                request.note(core_output, now, self._tokenizer_of(request))
                if sequence.take(core_output):
                    aborts.append(core_output.request_id)
                if core_output.logprobs or core_output.prompt_logprobs:
                    self._hold(request, core_output)
            except Exception as error:
                changed.pop(request.message.request_id, None)
                outputs.append(self._fail(request, error, now, aborts))
                continue
            if sequence.finish_reason is not None:
                del owner[core_output.request_id]
                request.unfinished -= 1
            elif request.kind is RequestOutputKind.FINAL_ONLY:
                continue
            if core_output.new_token_ids or sequence.finish_reason is not None:
                request.changed.append(sequence)
                changed[request.message.request_id] = request
        while self.most_logprobs is not None and self._held_logprobs > self.most_logprobs and self._requests:
            largest = max(self._requests.values(), key=lambda request: request.held)
            changed.pop(largest.message.request_id, None)
            outputs.append(self._refuse_logprobs(largest, now, aborts))
        for request in changed.values():
            try:
                output = self._collect(request, now)
            except Exception as error:
                output = self._fail(request, error, now, aborts)
            if output is not None:
                outputs.append(output)
        return Processed(outputs, aborts, follow_ups)

    def _leave_pack(self, request: _PooledRequest) -> list[str]:
        """What the core has to abort when a pooled request ends early: nothing while others share its request."""
        if request.pack is None:
            return [request.message.request_id]
        if any(message.request_id in self._pooled for message in request.pack):
            return []
        core_id = request.pack[0].request_id
        del self._packs[core_id]
        return [core_id]

    def _process_pack(
        self, pack: list[ProcessedRequest], output: CoreOutput, now: float, outputs: list[AnyOutput],
        follow_ups: list[CoreRequest],
    ) -> None:  # fmt: skip
        """The answers of requests that shared one of the core. If that failed, each is tried by itself."""
        del self._packs[output.request_id]
        left = [(i, found) for i, m in enumerate(pack) if (found := self._pooled.get(m.request_id)) is not None]
        if output.pooled is None:
            for _, request in left:
                request.pack = None
                follow_ups.append(pooled_request(request.message))
            return
        rows = _array(output.pooled)
        for i, request in left:
            message = request.message
            del self._pooled[message.request_id]
            request.first_scheduled = output.first_scheduled_time or None
            self._count_pooled(request, "stop", now)
            outputs.append(
                PoolingRequestOutput(message.request_id, PoolingOutput(rows[i]), message.prompt_token_ids, True)
            )

    def _process_pooled(self, request: _PooledRequest, output: CoreOutput, now: float) -> list[AnyOutput]:
        """The answer of a request that is pooled, once it is there."""
        request.note(output)
        if output.finish_reason is None:
            return []
        del self._pooled[output.request_id]
        self._count_pooled(request, output.finish_reason, now)
        return [request.answer(output)]

    def _count_pooled(self, request: _PooledRequest, reason: str, now: float) -> None:
        if self._metrics is not None:
            length = len(request.message.prompt_token_ids)
            arrival = request.message.arrival_time
            self._metrics.on_finished(
                reason, prompt_tokens=length, generation_tokens=0, longest_generation=0, n=1, best_of=1,
                max_tokens=None, arrival=arrival, first_scheduled=request.first_scheduled, first_token=now,
                finished=now,
            )  # fmt: skip

    def _take_plain(self, request: _Request, sequence: _Sequence, token_ids: list[int], now: float) -> RequestOutput:
        """The output of tokens in the middle of a plain stream; what `process` does otherwise, without the choices.

        Nothing runs more often: it calls little, because a call costs as much as what is done here.
        """
        count, before = len(token_ids), sequence.last_token_time
        if self._metrics is not None and before is not None:
            self._metrics.time_per_output_token.observe((now - before) / count, count)
        sequence.last_token_time = request.metrics.last_token_time = now
        sequence.token_ids += token_ids
        sequence.new_tokens += count
        assert sequence.detokenizer is not None
        completion = CompletionOutput(sequence.index, sequence.detokenizer.push_plain(token_ids), token_ids, None, None)
        message = request.message
        return RequestOutput(
            message.request_id, message.prompt, message.prompt_token_ids, None, [completion], False, request.metrics,
            message.lora_request, num_cached_tokens=request.num_cached_tokens,
        )  # fmt: skip

    def _hold(self, request: _Request, output: CoreOutput) -> None:
        """Count the log probabilities that an output brought, if they are kept for an answer."""
        if request.kind is RequestOutputKind.DELTA:
            positions = output.prompt_logprobs or []
        else:
            positions = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
        more = sum(len(position.token_ids) for position in positions)
        request.held += more
        self._held_logprobs += more

    def _refuse_logprobs(self, request: _Request, now: float, aborts: list[str]) -> RequestOutput:
        """The last output of the request for which more log probabilities are kept than for any other."""
        text = Refusal(
            f"This answer has more than {request.held - 1} log probabilities, and no more can be kept for one that is "
            "given as a whole. Ask for fewer: less logprobs, prompt_logprobs, n, max_tokens or prompts; or stream them."
        )
        text.parameter = "logprobs" if request.shows_logprobs else "prompt_logprobs"
        logger.warning("Request %s is ended: %s", request.message.request_id, text)
        return self._end_with(request, text, now, aborts)

    def _fail(self, request: _Request, error: Exception, now: float, aborts: list[str]) -> RequestOutput:
        """The last output of a request whose text could not be made; the fault stays its own."""
        logger.error("Request %s failed", request.message.request_id, exc_info=error)
        return self._end_with(request, f"{type(error).__name__}: {error}", now, aborts)

    def _end_with(self, request: _Request, text: str, now: float, aborts: list[str]) -> RequestOutput:
        """The last output of a request that ends with an error."""
        aborts += self._forget(request)
        request.metrics.finished_time = now
        self._count_finished(request, [("error", len(s.token_ids)) for s in request.sequences], now)
        completions = [
            CompletionOutput(i, "", [], None, None, finish_reason="error", stop_reason=text)
            for i in range(request.message.returned)
        ]
        return request.output(completions, finished=True)

    def _collect(self, request: _Request, now: float) -> RequestOutput | None:
        """The output of a request that changed in this step, if one is due."""
        finished = request.unfinished == 0
        sequences, request.changed = request.changed, []
        if finished:
            request.metrics.finished_time = now
            request.metrics.num_generation_tokens = sum(len(s.token_ids) for s in request.sequences)
        elif request.kind is RequestOutputKind.FINAL_ONLY:
            return None
        output = request.output(self._completions(request, sequences), finished)
        if finished:
            self._forget(request)
            self._count_finished(request, [(s.finish_reason, len(s.token_ids)) for s in request.sequences], now)
        return output

    def _completions(self, request: _Request, changed: list[_Sequence]) -> list[CompletionOutput]:
        if request.kind is RequestOutputKind.DELTA:
            return [sequence.delta() for sequence in (changed if len(changed) == 1 else dict.fromkeys(changed))]
        return [sequence.completion(i, request.shows_logprobs) for i, sequence in enumerate(request.best())]

    def _count_finished(self, request: _Request, ends: list[tuple[str | None, int]], now: float) -> None:
        """Tell the metrics how a request ended: (finish reason, tokens) of each of its sequences."""
        if self._metrics is None:
            return
        message, times = request.message, request.metrics
        lengths = [length for _, length in ends] or [0]
        self._metrics.on_finished(
            ends[0][0] or "abort" if ends else "abort",
            prompt_tokens=len(message.prompt_token_ids),
            generation_tokens=sum(lengths),
            longest_generation=max(lengths),
            n=message.returned,
            best_of=message.params.num_candidates,
            max_tokens=message.params.max_tokens,
            arrival=times.arrival_time,
            first_scheduled=times.first_scheduled_time,
            first_token=times.first_token_time,
            finished=now,
        )

    def _forget(self, request: _Request) -> list[str]:
        """Drop a request. Returns the ids under which the core may still run parts of it."""
        self._requests.pop(request.message.request_id, None)
        self._held_logprobs -= request.held
        request.held = 0
        if request.beams is not None:
            running = list(request.beams.running_ids)
            for core_id in [i for i, owner in self._beams.items() if owner is request]:
                del self._beams[core_id]
            return running
        return [core_id for core_id in request.core_ids if self._owner.pop(core_id, None) is not None]

    # -- beams ---------------------------------------------------------------------------------------------------------

    def _process_beam(
        self,
        request: _Request,
        core_output: CoreOutput,
        now: float,
        outputs: list[AnyOutput],
        aborts: list[str],
        follow_ups: list[CoreRequest],
    ) -> None:
        search = request.beams
        assert search is not None
        request.note(core_output, now, self._tokenizer_of(request))
        step_is_complete = search.take(core_output)
        if core_output.finish_reason is not None:
            self._beams.pop(core_output.request_id, None)
        if not step_is_complete:
            return
        more = [] if search.error is not None else search.advance()
        if more:
            spent = search.spent()
            for core_id in spent:
                self._beams.pop(core_id, None)
            aborts += spent
            self._beams.update((child.request_id, request) for child in more)
            follow_ups += more
            return
        request.metrics.finished_time = now
        aborts += self._forget(request)
        completions = self._beam_completions(request, search)
        self._count_finished(request, [(c.finish_reason, len(c.token_ids)) for c in completions], now)
        outputs.append(request.output(completions, finished=True))

    def _beam_completions(self, request: _Request, search: BeamSearch) -> list[CompletionOutput]:
        if search.error is not None:
            return [CompletionOutput(0, "", [], None, None, "error", search.error)]
        best = search.best()[: request.message.returned if request.message.params.use_beam_search else None]
        return [self._beam_completion(request, beam, i) for i, beam in enumerate(best)]

    def _beam_completion(self, request: _Request, beam: Beam, index: int) -> CompletionOutput:
        params = request.message.params
        text = ""
        own = self._tokenizer_of(request)
        if own is not None and params.detokenize:
            hidden_end = beam.finish_reason == "stop" and not params.include_stop_str_in_output
            shown = beam.tokens[:-1] if hidden_end else beam.tokens
            stream = own.stream(
                request.message.prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
            text = "".join([*map(stream.feed, shown), stream.finish()])
        logprobs: Any = None
        if not params.use_beam_search or params.logprobs is not None:
            tokenizer = own if params.detokenize else None
            logprobs = FlatLogprobs(token_text(tokenizer)) if params.flat_logprobs else []
            most = params.logprobs if params.use_beam_search else None  # a search compares many more
            for token, step in beam.steps:
                add_logprobs(logprobs, _with_first(step, token, most), tokenizer)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=beam.tokens,
            cumulative_logprob=beam.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )


def token_text(tokenizer: Tokenizer | None) -> Callable[[int], str | None]:
    """What the text of a token is; None without a tokenizer."""
    return _no_text if tokenizer is None else tokenizer.token_text


def add_logprobs(found: list[Any] | FlatLogprobs, step: TokenLogprobs, tokenizer: Tokenizer | None) -> None:
    """Append a position, in either form."""
    if not isinstance(found, FlatLogprobs):
        found.append(logprob_dict(step, tokenizer))
        return
    ids, values, ranks = step.token_ids, step.logprobs, range(1, len(step.token_ids))
    try:
        again = ids.index(ids[0], 1)  # the token itself is among the most likely
    except ValueError:
        found.append_fast(ids, values, [step.rank, *ranks])
    else:
        places = [*range(again), *range(again + 1, len(ids))]
        found.append_fast([ids[i] for i in places], [values[i] for i in places], [step.rank, *places[1:]])


def logprob_dict(step: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """One position as users receive it: the token itself first, with its true rank, then the most likely ones."""
    ids, values = step.token_ids, step.logprobs
    text = token_text(tokenizer)
    found = {ids[0]: Logprob(values[0], step.rank, text(ids[0]))}
    for rank in range(1, len(ids)):
        token_id = ids[rank]
        if token_id != ids[0]:
            found[token_id] = Logprob(values[rank], rank, text(token_id))
    return found


def _no_text(token_id: int) -> str | None:
    return None


def _with_first(step: TokenLogprobs, token: int, most: int | None) -> TokenLogprobs:
    """The same position with `token`, one of its most likely, in the place of the sampled one; and at most so many
    others.
    """
    position = step.token_ids.index(token, 1) if token in step.token_ids[1:] else 0
    end = None if most is None else most + 1
    values = [step.logprobs[position], *step.logprobs[1:end]]
    return TokenLogprobs([token, *step.token_ids[1:end]], values, position or step.rank)
