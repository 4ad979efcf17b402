"""A request's own logits processors: Python functions of its tokens and its row of logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Processors:
    """Calls `f(output_token_ids, logits)`, or `f(prompt_token_ids, output_token_ids, logits)` if it takes three."""

    def __init__(self, functions: Sequence[Callable[..., Tensor]]) -> None:
        self._functions = [(f, _takes_prompt(f)) for f in functions]

    def __call__(self, prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        """The processed row. logits: [vocab] fp32, may be changed.

        Raises whatever a function raises, ValueError for bad results.
        """
        for function, takes_prompt in self._functions:
            shape = logits.shape
            result = function(list(prompt), list(output), logits) if takes_prompt else function(list(output), logits)
            if not isinstance(result, Tensor) or result.shape != shape:
                got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise ValueError(f"it returned {got}, expected a tensor of shape {list(shape)}")
            logits = result
        wanted = torch.isposinf(logits)
        if wanted.any():  # a token that must come: nothing else is left
            logits = torch.where(wanted, 0.0, -torch.inf)
        return logits.to(torch.float32)


def _takes_prompt(function: Callable[..., Tensor]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(1 for p in parameters if p.kind in positional and p.default is p.empty) >= 3
