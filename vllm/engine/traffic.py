"""What is in progress in an asynchronous engine: its consumers' streams, and what each call has in the queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.engine.admission import Account, Admission
from vllm.engine.output_processor import AnyOutput, OutputProcessor
from vllm.engine.request_state import Delay, Refusal
from vllm.engine.request_stream import Apart, RequestStream, Wakeups
from vllm.exceptions import EngineDeadError, EngineGenerateError, RetryableRequestError, VLLMValidationError
from vllm.outputs import failure_of

if TYPE_CHECKING:
    from vllm.engine.core_client import AsyncCoreClient
    from vllm.engine.processed import ProcessedRequest
    from vllm.step.messages import CoreOutput

# Of sequences that are sent to the core at once: beyond this many tokens of prompts others have their turn first. What
# else there is in a message is as much as so many tokens.
TOKENS_PER_TURN = 16 * 1024
TOKENS_PER_MESSAGE = 256


class Traffic:
    """Between the consumers on an event loop and the core: requests go in, outputs come out."""

    def __init__(self, core: AsyncCoreClient, output_processor: OutputProcessor, admission: Admission) -> None:
        self._core = core
        self._outputs = output_processor
        self._admission = admission
        self._streams: dict[str, RequestStream] = {}
        self._wakeups = Wakeups()
        self._accounts: dict[str, Account] = {}  # of what has one, see `ProcessedRequest.account`
        self._account_of: dict[str, str] = {}  # by request
        self._ended = False

    def __len__(self) -> int:
        return len(self._streams)

    def is_known(self, account: str | None) -> bool:
        """Whether requests of this account are in progress."""
        return account in self._accounts

    def begin(self, request: ProcessedRequest) -> RequestStream:
        """Send the core as much of a request as has room in the queue. Raises what the core's client raises, with
        nothing left of the request.
        """
        request_id, length = request.request_id, len(request.prompt_token_ids)
        account, most, apart = None, None, Apart()
        if request.account is not None:
            account = self._join_account(request_id, request.account)
            apart = account.apart
            most = min(self._admission.room(account, length), max(1, TOKENS_PER_TURN // (length + TOKENS_PER_MESSAGE)))
        messages = self._outputs.add(request, most)
        try:
            if messages or self._ended:  # what has ended says so
                self._core.add(messages)
        except Exception:
            self._outputs.abort([request_id])
            self._leave_account(request_id)
            raise
        stream = self._streams[request_id] = RequestStream(
            request_id,
            request.params.output_kind,
            self._wakeups,
            self._abandon,
            apart if request.params.stream_interval == 1 else None,
        )
        self._admission.enter(messages, account)
        if account is not None and len(messages) < max(1, len(request.children)):
            self._admission.hold_back(account, request_id)
            self._send_held_back(account)
        return stream

    def take(self, outputs: list[CoreOutput]) -> None:
        """Hand what a step has brought to those who wait for it."""
        roomy: dict[Account, None] = {}
        if self._admission.waiting:
            for core_output in outputs:
                account = self._admission.leave(core_output.request_id)
                if account is not None:
                    roomy[account] = None
        processed = self._outputs.process(outputs)
        if processed.aborts:
            self._core.abort(processed.aborts)
            for core_id in processed.aborts:  # of which nothing is heard any more
                account = self._admission.leave(core_id)
                if account is not None:
                    roomy[account] = None
        if processed.follow_ups:
            self._core.add(processed.follow_ups)
        streams = self._streams
        for output in processed.outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue
            failed = None
            if output.finished:
                del streams[output.request_id]
                self._leave_account(output.request_id)
                failed = failure_of(output)
            if isinstance(failed, Refusal):  # nothing was generated, and there is no answer to begin
                stream.fail(VLLMValidationError(failed, parameter=failed.parameter))
                continue
            if isinstance(failed, Delay):
                stream.fail(RetryableRequestError(failed))
                continue
            stream.put(output)
            if failed is not None:
                stream.fail(EngineGenerateError(str(failed)))
        for account in roomy:
            self._send_held_back(account)
        self._admission.step_taken()

    def hand_over(self, output: AnyOutput) -> None:
        """Give an output to its consumer, if there is one."""
        take = self._streams.pop if output.finished else self._streams.get
        stream = take(output.request_id, None)
        if stream is not None:
            stream.put(output)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests; their streams get a last output. Returns what the core has to abort."""
        request_ids = list(request_ids)
        core_ids, outputs = self._outputs.abort(request_ids)
        for core_id in core_ids:
            self._admission.leave(core_id)
        for request_id in request_ids:
            self._leave_account(request_id)
        for output in outputs:
            stream = self._streams.pop(output.request_id, None)
            if stream is not None:
                stream.put(output)
        return core_ids

    def end(self, error: BaseException) -> None:
        """Nothing comes from the core any more: all streams fail."""
        self._ended = True
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            self._outputs.abort([request_id])
            stream.fail(error)
            self._leave_account(request_id)
        self._admission.clear()

    def _abandon(self, stream: RequestStream) -> None:
        """The consumer is gone: abort what still runs for it."""
        if self._streams.get(stream.request_id) is stream:
            core_ids = self.abort([stream.request_id])
            if core_ids and not self._ended:
                self._core.abort(core_ids)

    def _send_held_back(self, account: Account) -> None:
        """Send the core what an account has room for, at most as much as takes a few milliseconds, the rest soon."""
        left = TOKENS_PER_TURN
        while account.held_back and not self._ended:
            request_id = next(iter(account.held_back))
            tokens = self._outputs.prompt_length(request_id)
            room = self._admission.room(account, tokens)
            if not room:
                return
            if left <= 0:
                asyncio.get_running_loop().call_soon(self._send_held_back, account)
                return
            most = min(room, max(1, left // (tokens + TOKENS_PER_MESSAGE)))
            messages = self._outputs.more(request_id, most)
            if len(messages) < most:
                self._admission.let_go(account, request_id)  # that was all of it
            if not messages:
                continue
            left -= len(messages) * (tokens + TOKENS_PER_MESSAGE)
            self._admission.enter(messages, account)
            with contextlib.suppress(EngineDeadError):  # which everybody hears of in another way
                self._core.add(messages)

    def _join_account(self, request_id: str, name: str) -> Account:
        account = self._accounts.setdefault(name, Account())
        account.requests += 1
        self._account_of[request_id] = name
        return account

    def _leave_account(self, request_id: str) -> None:
        """A request has ended, however it did."""
        name = self._account_of.pop(request_id, None)
        if name is None:
            return
        account = self._accounts[name]
        account.requests -= 1
        self._admission.let_go(account, request_id)
        if not account.requests:
            del self._accounts[name]
