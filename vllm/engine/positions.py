"""Log probabilities of a position: from what the core says to either form that users receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.engine.tokenizer import Tokenizer
from vllm.logprobs import FlatLogprobs
from vllm.sequence import Logprob
from vllm.step.result import TokenLogprobs


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


def with_first(step: TokenLogprobs, token: int, most: int | None) -> TokenLogprobs:
    """The same position with `token`, one of its most likely, in the place of the sampled one; and at most so many
    others.
    """
    position = step.token_ids.index(token, 1) if token in step.token_ids[1:] else 0
    end = None if most is None else most + 1
    values = [step.logprobs[position], *step.logprobs[1:end]]
    return TokenLogprobs([token, *step.token_ids[1:end]], values, position or step.rank)
