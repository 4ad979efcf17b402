"""From what the core returns to what users receive: text, stop strings, log probabilities, `n`, times."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.engine.beam import Beam, BeamSearch
from vllm.engine.positions import add_logprobs, token_text, with_first
from vllm.engine.processed import ProcessedRequest, packed_request, pooled_request
from vllm.engine.request_state import PooledState, Refusal, RequestState, SequenceState, pooled_array
from vllm.engine.tokenizer import Tokenizer
from vllm.logger import init_logger
from vllm.logprobs import FlatLogprobs
from vllm.metrics.registry import EngineMetrics
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.step.messages import CoreOutput, CoreRequest

logger = init_logger(__name__)


AnyOutput = RequestOutput | PoolingRequestOutput[Any]


class Processed(NamedTuple):
    """What to do with a step: outputs for users, ids for the core to abort, requests for it to run next (beams)."""

    outputs: list[AnyOutput]
    aborts: list[str]
    follow_ups: list[CoreRequest]


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
        self._requests: dict[str, RequestState] = {}
        self._owner: dict[str, tuple[RequestState, SequenceState]] = {}  # id in the core -> sequence
        self._beams: dict[str, RequestState] = {}  # id in the core -> request searched by beams
        self._pooled: dict[str, PooledState] = {}
        self._packs: dict[str, list[ProcessedRequest]] = {}  # by the id of the first, which the core has

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._pooled

    @property
    def num_unfinished(self) -> int:
        return len(self._requests) + len(self._pooled)

    @property
    def num_sequences(self) -> int:
        """Those that the core has, at least: with those that have ended before others of their request."""
        return len(self._owner) + len(self._beams) + len(self._pooled)

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
            self._pooled[message.request_id] = PooledState(message)
            return [] if most is not None and most < 1 else self.more(message.request_id, most)
        if message.beams is None:
            request = self._requests[message.request_id] = RequestState(
                message, None, message.tokenizer or self.tokenizer
            )
            return self.more(message.request_id, most)
        search = BeamSearch(message, self._logits_width, self._max_model_len)
        request = self._requests[message.request_id] = RequestState(
            message, search, message.tokenizer or self.tokenizer
        )
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
        self._pooled.update((message.request_id, PooledState(message, pack)) for message in messages)
        return packed_request(pack)

    def _tokenizer_of(self, request: RequestState) -> Tokenizer | None:
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
        changed: dict[str, RequestState] = {}
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
                if core_output.again:
                    self._held_logprobs -= sequence.held
                    owner[core_output.request_id] = (request, request.begin_again(sequence))
                    continue
                if metrics is not None and core_output.new_token_ids:
                    sequence.count_tokens(len(core_output.new_token_ids), now, request, metrics)
                request.note(core_output, now, self._tokenizer_of(request))
                if sequence.take(core_output):
                    aborts.append(core_output.request_id)
                if core_output.logprobs or core_output.prompt_logprobs:
                    self._hold(request, sequence, core_output)
                if sequence.error is not None and request.unfinished > 1:  # an answer without it is none
                    del owner[core_output.request_id]
                    changed.pop(request.message.request_id, None)
                    outputs.append(self._end_with(request, sequence.error, now, aborts))
                    continue
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

    def _leave_pack(self, request: PooledState) -> list[str]:
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
        rows = pooled_array(output.pooled)
        for i, request in left:
            message = request.message
            del self._pooled[message.request_id]
            request.first_scheduled = output.first_scheduled_time or None
            self._count_pooled(request, "stop", now)
            outputs.append(
                PoolingRequestOutput(message.request_id, PoolingOutput(rows[i]), message.prompt_token_ids, True)
            )

    def _process_pooled(self, request: PooledState, output: CoreOutput, now: float) -> list[AnyOutput]:
        """The answer of a request that is pooled, once it is there."""
        request.note(output)
        if output.finish_reason is None:
            return []
        del self._pooled[output.request_id]
        self._count_pooled(request, output.finish_reason, now)
        return [request.answer(output)]

    def _count_pooled(self, request: PooledState, reason: str, now: float) -> None:
        if self._metrics is not None:
            length = len(request.message.prompt_token_ids)
            arrival = request.message.arrival_time
            self._metrics.on_finished(
                reason, prompt_tokens=length, generation_tokens=0, longest_generation=0, n=1, best_of=1,
                max_tokens=None, arrival=arrival, first_scheduled=request.first_scheduled, first_token=now,
                finished=now,
            )  # fmt: skip

    def _take_plain(
        self, request: RequestState, sequence: SequenceState, token_ids: list[int], now: float
    ) -> RequestOutput:
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

    def _hold(self, request: RequestState, sequence: SequenceState, output: CoreOutput) -> None:
        """Count the log probabilities that an output brought, if they are kept for an answer."""
        if request.kind is RequestOutputKind.DELTA:
            positions = output.prompt_logprobs or []
        else:
            positions = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
        more = sum(len(position.token_ids) for position in positions)
        sequence.held += more
        request.held += more
        self._held_logprobs += more

    def _refuse_logprobs(self, request: RequestState, now: float, aborts: list[str]) -> RequestOutput:
        """The last output of the request for which more log probabilities are kept than for any other."""
        text = Refusal(
            f"This answer has more than {request.held - 1} log probabilities, and no more can be kept for one that is "
            "given as a whole. Ask for fewer: less logprobs, prompt_logprobs, n, max_tokens or prompts; or stream them."
        )
        text.parameter = "logprobs" if request.shows_logprobs else "prompt_logprobs"
        logger.warning("Request %s is ended: %s", request.message.request_id, text)
        return self._end_with(request, text, now, aborts)

    def _fail(self, request: RequestState, error: Exception, now: float, aborts: list[str]) -> RequestOutput:
        """The last output of a request whose text could not be made; the fault stays its own."""
        logger.error("Request %s failed", request.message.request_id, exc_info=error)
        return self._end_with(request, f"{type(error).__name__}: {error}", now, aborts)

    def _end_with(self, request: RequestState, text: str, now: float, aborts: list[str]) -> RequestOutput:
        """The last output of a request that ends with an error."""
        aborts += self._forget(request)
        request.metrics.finished_time = now
        self._count_finished(request, [("error", len(s.token_ids)) for s in request.sequences], now)
        completions = [
            CompletionOutput(i, "", [], None, None, finish_reason="error", stop_reason=text)
            for i in range(request.message.returned)
        ]
        return request.output(completions, finished=True)

    def _collect(self, request: RequestState, now: float) -> RequestOutput | None:
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

    def _completions(self, request: RequestState, changed: list[SequenceState]) -> list[CompletionOutput]:
        if request.kind is RequestOutputKind.DELTA:
            return [sequence.delta() for sequence in (changed if len(changed) == 1 else dict.fromkeys(changed))]
        return [sequence.completion(i, request.shows_logprobs) for i, sequence in enumerate(request.best())]

    def _count_finished(self, request: RequestState, ends: list[tuple[str | None, int]], now: float) -> None:
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

    def _forget(self, request: RequestState) -> list[str]:
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
        request: RequestState,
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

    def _beam_completions(self, request: RequestState, search: BeamSearch) -> list[CompletionOutput]:
        if search.error is not None:
            return [CompletionOutput(0, "", [], None, None, "error", search.error)]
        best = search.best()[: request.message.returned if request.message.params.use_beam_search else None]
        return [self._beam_completion(request, beam, i) for i, beam in enumerate(best)]

    def _beam_completion(self, request: RequestState, beam: Beam, index: int) -> CompletionOutput:
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
                add_logprobs(logprobs, with_first(step, token, most), tokenizer)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=beam.tokens,
            cumulative_logprob=beam.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )
