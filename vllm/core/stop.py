"""When a sequence ends by its tokens. Stop strings are the front end's: the core sees no text."""

from __future__ import annotations

from vllm.core.request import Request


def check_stop(request: Request, token: int) -> tuple[str, int | None] | None:
    """(finish_reason, stop_reason) if `token`, just appended to `request.tokens`, ends the request, else None.

    stop_reason is the stop token id, None for the model's own end-of-sequence token and for length.
    """
    length = len(request.tokens)
    if token in request.stop_token_ids and length > request.min_len:
        return "stop", None if token == request.eos_token_id else token
    if length >= request.max_len:
        return "length", None
    return None
