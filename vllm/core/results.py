"""Takes what the device found into the requests of a plan: tokens, logprobs, stops, and what their users are told."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.core.kv_manager import KVManager
from vllm.core.plan_builder import PlanBuilder
from vllm.core.request import Request, Status
from vllm.core.stop import check_stop
from vllm.step.messages import CoreOutput
from vllm.step.plan import StepPlan
from vllm.step.result import Logprobs, Pooled, StepResult


@dataclass(slots=True)
class Taken:
    """What a result came to. finished: requests that end with it.   generated: tokens."""

    outputs: list[CoreOutput] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    generated: int = 0

    def failed(self, request: Request, error: str, kv: KVManager) -> None:
        """A row failed: its request ends, and what it has computed is not to be found."""
        kv.forget(request)
        self.finished.append(request)
        self.outputs.append(CoreOutput(request.id, [], finish_reason="error", error=error))


def take(plan: StepPlan, built: PlanBuilder, result: StepResult, kv: KVManager) -> Taken:
    """The result of a plan, one token a row at most or as many as its `counts` say. The only place where what the
    device found changes requests.
    """
    taken = Taken()
    if result.counts is None:
        _take_single(plan, built, result, kv, taken)
    else:
        _take_counted(plan, built, result, result.counts, kv, taken)
    return taken


def _take_single(plan: StepPlan, built: PlanBuilder, result: StepResult, kv: KVManager, taken: Taken) -> None:
    # This loop runs once per request and step: names are bound once, the common case touches no dictionary.
    outputs, finished, generated = taken.outputs, taken.finished, 0
    logprobs, prompt_logprobs, errors = result.logprobs, result.prompt_logprobs, result.errors
    extras = bool(logprobs or prompt_logprobs or errors)
    block_size = kv.block_size
    finished_status, running_status = Status.FINISHED, Status.RUNNING
    for i, (request, token) in enumerate(zip(built.requests, result.token_ids, strict=True)):
        if request.status is finished_status:
            continue
        if extras and i in errors:
            taken.failed(request, errors[i], kv)
            continue
        if token < 0 and not (extras and i in prompt_logprobs):
            continue  # a chunk of a prompt: nothing to tell
        output = CoreOutput(request.id, [])
        if extras and i in prompt_logprobs:
            output.prompt_logprobs = (
                request.unseen_prompt_logprobs(int(plan.num_computed[i]), prompt_logprobs[i]) or None
            )
        if not request.cached_reported:
            request.cached_reported = True
            output.num_cached_tokens = request.num_cached_tokens
            output.first_scheduled_time = request.first_scheduled_time
        if request.num_preemptions:
            output.num_preemptions = request.num_preemptions
        outputs.append(output)
        if token < 0:
            continue
        tokens = request.tokens
        request.num_pending -= 1
        tokens.append(token)
        generated += 1
        length = len(tokens)
        computed = request.num_computed if request.num_computed < length else length
        if computed // block_size > request.num_registered and request.status is running_status:
            kv.register_full_blocks(request, computed)
        output.new_token_ids.append(token)
        if extras and i in logprobs:
            output.logprobs = [logprobs[i]]
        if length >= request.max_len or token in request.stop_token_ids:
            stop = check_stop(request, token)
            if stop is not None:
                output.finish_reason, output.stop_reason = stop
                finished.append(request)
    taken.generated = generated


def _take_counted(
    plan: StepPlan, built: PlanBuilder, result: StepResult, counts: list[int], kv: KVManager, taken: Taken
) -> None:
    """Results with any number of tokens per row.

    Of the 1 + drafts tokens that the plan counted on, a row brings those that were accepted and one more. What it does
    not bring is taken back, unless the request has lost its slot since: then it starts anew in any case.
    """
    logprobs = {news.row: news.entries for news in result.news if isinstance(news, Logprobs)}
    first = 0
    for i, (request, count) in enumerate(zip(built.requests, counts, strict=True)):
        new_tokens = result.token_ids[first : first + count]
        first += count
        if request.status is Status.FINISHED:
            continue
        if i in result.errors:
            taken.failed(request, result.errors[i], kv)
            continue
        drafts, epoch = built.drafted.get(i, (0, request.epoch))
        if plan.sample[i]:
            request.num_pending -= 1 + drafts
            request.num_drafted -= drafts
            if request.epoch == epoch:
                request.num_computed -= 1 + drafts - count
        if not new_tokens and i not in result.prompt_logprobs:
            continue
        output = _output(request)
        if i in result.prompt_logprobs:
            chunk = result.prompt_logprobs[i]
            output.prompt_logprobs = request.unseen_prompt_logprobs(int(plan.num_computed[i]), chunk) or None
        taken.outputs.append(output)
        for token in new_tokens:
            request.tokens.append(token)
            output.new_token_ids.append(token)
            stop = check_stop(request, token)
            if stop is not None:
                output.finish_reason, output.stop_reason = stop
                taken.finished.append(request)
                break
        taken.generated += len(output.new_token_ids)
        if i in logprobs:
            output.logprobs = logprobs[i][: len(output.new_token_ids)]
        computed = min(request.num_computed, len(request.tokens))
        if computed // kv.block_size > request.num_registered and request.status is Status.RUNNING:
            kv.register_full_blocks(request, computed)


def take_pooled(built: PlanBuilder, result: StepResult, kv: KVManager, taken: Taken) -> None:
    """End the pooled requests whose vectors have come, and those for which there is none at the end of the prompt."""
    found = {news.row: news for news in result.news if isinstance(news, Pooled)}
    rows = zip(built.requests, built.num_computed, built.num_tokens, strict=True)
    for row, (request, start, count) in enumerate(rows):
        if not request.pooled or row in result.errors or request.status is Status.FINISHED:
            continue
        if row in found:
            output = _output(request)
            output.pooled, output.finish_reason = found[row], "stop"
            taken.outputs.append(output)
            taken.finished.append(request)
        elif start + count == request.num_prompt_tokens:
            taken.failed(request, "Pooling gave nothing for this request.", kv)


def _output(request: Request) -> CoreOutput:
    """An output that says, once, what was known when the request started."""
    output = CoreOutput(request.id, [], num_preemptions=request.num_preemptions)
    if not request.cached_reported:
        request.cached_reported = True
        output.num_cached_tokens = request.num_cached_tokens
        output.first_scheduled_time = request.first_scheduled_time
    return output
