"""Running the model over text: the inputs that its layers meet, and its perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel
from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.linear_method import LinearMethod, LinearShape
from vllm.quantize.rounding import Inputs
from vllm.sampling_params import SamplingParams

_SEQUENCE = 256  # tokens


class _Recorder(LinearMethod):
    """A layer's method that notes what comes in."""

    def __init__(self, inner: LinearMethod, inputs: Inputs) -> None:
        self.inner, self.inputs = inner, inputs

    def create_weights(self, layer: Any, shape: LinearShape, dtype: torch.dtype, tp: TensorParallel) -> None:
        raise RuntimeError("A layer that is recorded has its weights.")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        self.inputs.add(x)
        return self.inner.apply(layer, x, bias)


def with_model(llm: LLM, function: Callable[[nn.Module], Any]) -> Any:
    """What `function` returns for the model in this process."""
    return llm.apply_model(function)[0]


@contextmanager
def recording(llm: LLM, paths: Iterable[str]) -> Iterator[dict[str, Inputs]]:
    """While it lasts, the inputs of the linear layers at `paths` are summed up."""
    wanted, found = set(paths), {}

    def start(model: nn.Module) -> None:
        model.__dict__["fused_blocks"] = None  # layers one by one
        for path, module in model.named_modules():
            if path in wanted and isinstance(module, LinearBase):
                found[path] = Inputs(module.input_size)
                module.method = _Recorder(module.method, found[path])

    def stop(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, LinearBase) and isinstance(module.method, _Recorder):
                module.method = module.method.inner

    with_model(llm, start)
    try:
        yield found
    finally:
        with_model(llm, stop)


def texts_of(llm: LLM, file: Path | None, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """(sequences to calibrate with, sequences held out), of about `tokens` tokens in all, a fifth of them held out.

    file: text; None: texts that the model writes itself.
    """
    length = min(_SEQUENCE, llm.llm_engine.vllm_config.model_config.max_model_len - 1)
    if tokens < 5 * length:
        raise ValueError(f"--tokens must be {5 * length} or more for this model, got {tokens}.")
    if file is None:
        return _own_texts(llm, length, tokens // length)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--data {file} cannot be read as UTF-8 text: {error}.") from None
    # four characters are about a token; what is too much is never tokenized
    ids = llm.llm_engine.own_tokenizer.encode(text[: tokens * 16])[:tokens]
    begin = llm.llm_engine.vllm_config.model_config.hf.get("bos_token_id", default=None)
    sequences = documents_of(ids, begin if type(begin) is int else None, length)
    if len(sequences) < 5:
        raise ValueError(f"--data {file} has {len(ids)} tokens, expected at least {5 * length}.")
    held: list[list[int]] = []
    while len(sequences) > 1 and sum(map(len, held)) < len(ids) / 5:
        held.append(sequences.pop())
    return sequences, held


def documents_of(ids: Sequence[int], begin: int | None, length: int) -> list[list[int]]:
    """Sequences of up to `length` tokens, as a model knows them: each begins where a document does, or with the token
    `begin` that documents begin with, if these do.
    """
    starts = [0, *(i for i, token in enumerate(ids) if token == begin and i)]
    found = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        first = [ids[start]] if ids and ids[start] == begin else []
        body = ids[start + len(first) : end]
        step = length - len(first)
        found += [[*first, *body[i : i + step]] for i in range(0, len(body), step)]
    return [sequence for sequence in found if len(sequence) > 1]


def _own_texts(llm: LLM, length: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    config = llm.llm_engine.vllm_config.model_config
    begin = config.hf.get("bos_token_id", default=None)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, config.hf.vocab_size, (count,), generator=generator).tolist()
    prompts = [TokensPrompt(prompt_token_ids=[begin] if type(begin) is int else [start]) for start in starts]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=length - 1, ignore_eos=True) for i in range(count)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    sequences = [[*(o.prompt_token_ids or []), *o.outputs[0].token_ids] for o in outputs]
    held = max(1, count // 5)
    return sequences[:-held], sequences[-held:]


@dataclass(frozen=True)
class Outcome:
    """What a model said about sequences: of each token after a first one the logarithm of its probability, and which
    token was the most likely.
    """

    logprobs: list[float]
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / max(1, len(self.logprobs)))

    def change(self, other: Outcome) -> float:
        """How far another model's logarithms of probabilities are from these (root mean square)."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / max(1, len(self.logprobs)))

    def agreement(self, other: Outcome) -> float:
        """The share of places at which both name the same most likely token."""
        return sum(a == b for a, b in zip(self.best, other.best, strict=True)) / max(1, len(self.best))


def run_over(llm: LLM, sequences: Sequence[Sequence[int]]) -> Outcome:
    """Run the model over sequences of tokens."""
    prompts = [TokensPrompt(prompt_token_ids=list(ids)) for ids in sequences]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    logprobs, best = [], []
    for output in llm.generate(prompts, params, use_tqdm=False):
        for token, entry in zip(output.prompt_token_ids or [], output.prompt_logprobs or [], strict=True):
            if entry is not None:
                logprobs.append(entry[token].logprob)
                best.append(max(entry, key=lambda t: entry[t].logprob))
    return Outcome(logprobs, best)
