"""What front end and core process say to each other: msgpack with a schema, in frames over a socket pair."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from vllm.ipc import frames
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats
from vllm.structured_output.spec import GrammarSpec

MAX_SHARED = 32  # parameters and grammars that a core knows by number, below 128


class AddRequests(msgspec.Struct, tag="add", gc=False):
    """Queue these requests.

    common: (number, content) of what these and later requests have as parameters or grammar, where they have the number
    in its place; what had the number before is not used any more.
    """

    requests: list[CoreRequest]
    common: list[tuple[int, msgspec.Raw]] = []


class Added(msgspec.Struct, tag="add", gc=False):
    """`AddRequests` as the core reads it: each request by itself, with `decode_unread`."""

    requests: list[msgspec.Raw]
    common: list[tuple[int, msgspec.Raw]] = []


class UnreadRequest(CoreRequest, array_like=True, omit_defaults=True, gc=False):
    """A request of which only what is short was read; `unread.read` reads the rest when its turn comes."""

    prompt_token_ids: msgspec.Raw  # type: ignore[assignment]
    params: msgspec.Raw  # type: ignore[assignment]
    grammar: msgspec.Raw = msgspec.Raw(b"\xc0")  # type: ignore[assignment]  # None


class _CheckedSampling(SamplingParams, tag="sampling", omit_defaults=True, dict=True):
    """As the front end has checked them: that takes milliseconds where there are many values."""

    def __post_init__(self) -> None:
        pass


class _CheckedPooling(PoolingParams, tag="pooling", omit_defaults=True):
    """The same."""

    def __post_init__(self) -> None:
        pass


class Abort(msgspec.Struct, tag="abort", gc=False):
    """End these requests; unknown ids are ignored. The answer is `StepOutputs` with this number."""

    request_ids: list[str]
    number: int = 0


class Call(msgspec.Struct, tag="call", gc=False):
    """Run one of the core's named utility methods and answer with a `CallResult` of the same id."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Stop(msgspec.Struct, tag="stop", gc=False):
    """End the core process now; running requests are the front end's business."""


ToCore = AddRequests | Abort | Call | Stop


class Ready(msgspec.Struct, tag="ready", gc=False):
    """The core is up. `info` describes the cache and what a front end needs to know of the resolved configuration."""

    info: dict[str, Any]


class StepOutputs(msgspec.Struct, tag="step", omit_defaults=True, gc=False):
    """Everything one step brought, or a few short ones. aborted: the number of the `Abort` that this answers."""

    outputs: list[CoreOutput]
    stats: CoreStats
    aborted: int = 0


class CallResult(msgspec.Struct, tag="result", gc=False):
    """Answer to a `Call`: `value`, or `error` (a text) if it failed."""

    call_id: int
    value: Any = None
    error: str | None = None


class Pulse(msgspec.Struct, tag="pulse", gc=False):
    """Sent a few times a second by a thread of its own, so that a stuck step shows.

    `busy_seconds` is how long the core has been busy without finishing a step (0 when idle), less what the step's size
    explains.
    """

    busy_seconds: float = 0.0


class Fatal(msgspec.Struct, tag="fatal", gc=False):
    """The core is about to end because of this error."""

    error: str


FromCore = Ready | StepOutputs | CallResult | Pulse | Fatal

_encoder = msgspec.msgpack.Encoder()


class _Named(msgspec.Struct, array_like=True):
    """A request as far as its name."""

    request_id: str


_decode_name = msgspec.msgpack.Decoder(_Named).decode


def name_of(request: msgspec.Raw) -> str:
    """The name of a request that was not read yet; "" if it has none."""
    try:
        return _decode_name(request).request_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


class Sharing:
    """What a core was sent once, since many requests of an account have it."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[int, object]] = OrderedDict()  # by identity; the newest last

    def message(self, requests: list[CoreRequest]) -> AddRequests:
        """These requests, and what is new of what they have in common."""
        made, used = AddRequests([], []), set[int]()
        try:
            for request in requests:
                if request.account is not None:
                    params, grammar = (self._shared(made, used, x) for x in (request.params, request.grammar))
                    request = msgspec.structs.replace(request, params=params, grammar=grammar)
                made.requests.append(request)
        except Exception:
            self._known.clear()
            raise
        return made

    def _shared(self, made: AddRequests, used: set[int], content: object) -> object:
        """The number of a request's parameters or grammar; themselves if the message uses all numbers already."""
        if content is None:
            return None
        number, _ = self._known.get(id(content), (len(self._known), None))
        if id(content) not in self._known:
            if number == MAX_SHARED:
                number, _ = next(iter(self._known.values()))
                if number in used:
                    return content
                self._known.popitem(last=False)
            made.common.append((number, msgspec.Raw(_encoder.encode(content))))
            self._known[id(content)] = number, content
        self._known.move_to_end(id(content))
        used.add(number)
        return number


decode_to_core = msgspec.msgpack.Decoder(Added | Abort | Call | Stop).decode
decode_unread = msgspec.msgpack.Decoder(UnreadRequest).decode
decode_token_ids = msgspec.msgpack.Decoder(list[int]).decode
decode_params = msgspec.msgpack.Decoder(_CheckedSampling | _CheckedPooling).decode
decode_grammar = msgspec.msgpack.Decoder(GrammarSpec | None).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode


def frame(message: ToCore | FromCore) -> bytes:
    """A message as it is sent."""
    return frames.frame(_encoder.encode(message))
