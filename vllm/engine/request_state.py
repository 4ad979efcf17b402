"""What is known of one request of a user until it ends: its sequences, their text, log probabilities, times."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm.engine.beam import BeamSearch
from vllm.engine.detokenizer import Detokenizer
from vllm.engine.positions import add_logprobs, token_text
from vllm.engine.processed import ProcessedRequest
from vllm.engine.tokenizer import Tokenizer
from vllm.logprobs import FlatLogprobs
from vllm.metrics.registry import EngineMetrics
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.sequence import RequestMetrics
from vllm.step.messages import CoreOutput, CoreRequest
from vllm.step.result import Pooled, TokenLogprobs


class Refusal(str):
    """Why a request failed that is itself at fault, by which `parameter` if that is known."""

    parameter: str | None = "guided_decoding"  # the core refuses nothing else


class Delay(str):
    """Why a request was not begun that may be sent again."""


def reason_of(output: CoreOutput) -> str | None:
    """Why a sequence ended with an error, None if it did not."""
    if output.error is None or not (output.refused or output.late):
        return output.error
    return Refusal(output.error) if output.refused else Delay(output.error)


class SequenceState:
    """One of the sequences of a request. Without stop strings and streaming, its text is made when it has ended."""

    __slots__ = (
        "cumulative_logprob", "decodes_at_end", "detokenizer", "error", "finish_reason", "held", "index",
        "last_token_time", "logprobs", "new_tokens", "params", "stop_reason", "token_ids", "tokenizer",
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
        self.held = 0  # as of its request, of which it is a part
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
            self.error = reason_of(output)
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

    def count_tokens(self, count: int, now: float, request: RequestState, metrics: EngineMetrics) -> None:
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


class RequestState:
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
        self.sequences: list[SequenceState] = []  # those that have begun
        self.core_ids: list[str] = []  # of those
        # A stream of one text and nothing else: between its first and its last token there is little to think about.
        self.is_plain = False
        self.unfinished = len(message.children)
        self.changed: list[SequenceState] = []  # in this step
        self.prompt_logprobs: Any = self._first_prompt_logprobs(tokenizer if params.detokenize else None)
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
            self.sequences.append(SequenceState(i, message.prompt_token_ids, child.params, tokenizer))
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

    def begin_again(self, sequence: SequenceState) -> SequenceState:
        """Take an unfinished sequence for one of which nothing is known yet; what replaces it."""
        again = SequenceState(sequence.index, self.message.prompt_token_ids, sequence.params, sequence.tokenizer)
        self.sequences[sequence.index] = again
        self.held -= sequence.held
        if sequence.index == 0:  # from which all is known that is said about the prompt
            self.prompt_logprobs, self.num_cached_tokens = self._first_prompt_logprobs(sequence.tokenizer), None
        return again

    def _first_prompt_logprobs(self, tokenizer: Tokenizer | None) -> Any:
        """Those of the first token, of which there are none; None if nobody wants any."""
        params = self.message.params
        if params.prompt_logprobs is None:
            return None
        found: Any = FlatLogprobs(token_text(tokenizer)) if params.flat_logprobs else []
        found.append(None)
        return found

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

    def best(self) -> list[SequenceState]:
        """The sequences to return, of those that have begun: all, or the likeliest of best_of, best first."""
        if self.message.returned == len(self.message.children):
            return self.sequences
        ranked = sorted(self.sequences, key=lambda sequence: -sequence.cumulative_logprob)
        return ranked[: self.message.returned]


class PooledState:
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
            data = PoolingOutput(pooled_array(pooled))
        else:
            text = output.error or f"The request ended with {output.finish_reason!r} and without an answer."
            error = Refusal(text) if output.refused else text
        return PoolingRequestOutput(
            message.request_id, data, message.prompt_token_ids, True, self.num_cached_tokens, error
        )


def pooled_array(pooled: Pooled) -> np.ndarray:
    """What was pooled, as an array that may be written to."""
    found: np.ndarray = np.frombuffer(bytearray(pooled.data), pooled.dtype).reshape(pooled.shape)
    return found
