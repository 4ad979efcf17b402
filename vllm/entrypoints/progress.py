"""The progress bar of a batch, with tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.outputs import PoolingRequestOutput, RequestOutput

if TYPE_CHECKING:
    from tqdm import tqdm

ProgressBar = bool | Callable[..., Any]  # whether there is one, or what to make it with instead of tqdm


class Progress:
    """The bar with tokens per second; nothing if it is not wanted."""

    def __init__(self, total: int, use_tqdm: ProgressBar) -> None:
        self._bar: tqdm[Any] | None = None
        self._in = self._out = 0
        if use_tqdm:
            self._bar = (use_tqdm if callable(use_tqdm) else _default_bar())(
                total=total, desc="Processed prompts", dynamic_ncols=True, postfix=speeds(0.0, 0.0)
            )

    def update(self, output: RequestOutput | PoolingRequestOutput[Any]) -> None:
        bar = self._bar
        if bar is None:
            return
        if isinstance(output, RequestOutput):
            self._in += len(output.prompt_token_ids or ()) * len(output.outputs)
            self._out += sum(len(completion.token_ids) for completion in output.outputs)
        else:
            self._in += len(output.prompt_token_ids)
        elapsed = bar.format_dict["elapsed"] or 1e-9
        bar.postfix = speeds(self._in / elapsed, self._out / elapsed)
        bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def speeds(tokens_in: float, tokens_out: float) -> str:
    return f"est. speed input: {tokens_in:.2f} toks/s, output: {tokens_out:.2f} toks/s"


def _default_bar() -> Callable[..., Any]:
    from tqdm import tqdm

    return tqdm
