"""Messages between front end and core: msgspec structs, passed as they are in process, as msgpack over a socket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from vllm.pooling_params import PoolingParams
from vllm.reasoning.think import Begins
from vllm.sampling_params import SamplingParams
from vllm.step.result import Pooled, TokenLogprobs
from vllm.structured_output.spec import GrammarSpec

# Log probabilities of prompts that travel in one message: what the front end turns into text in about 10 ms.
PIECE_ENTRIES = 4096


class CoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One sequence to generate. A user's request with `n > 1` becomes n of these, with ids of the form
    `"{index}_{request_id}"`.

    `prompt_token_ids` is validated: every id is below the model's logits width and the length fits `max_model_len`.
    `params` are `PoolingParams`, or `SamplingParams` whose `max_tokens` is resolved (never None). `seed` is the
    resolved 64-bit seed of this sequence.
    `stop_token_ids` are all ids that end the request: eos (unless ignore_eos) and the user's.
    `fork_of` names a live request whose first tokens equal this prompt: its blocks are shared copy-on-write.
    `lora_id` and `lora_path` are the number and the folder of its adapter, 0 and "" for none.
    `account` is the same for all sequences of one user's request (n > 1, beams, many prompts of one call), so that the
    scheduler can be fair between users' requests; None for a sequence by itself.
    `grammar` is the form that the output must have; `params` say nothing about it.
    `content_keys` are (first position, length, content hash) of what stands behind placeholders: cached blocks of the
    same tokens with other content are not found. `encoder_tokens` is the length of the encoder's output for models with
    cross attention, `encoder_key` the hash of its input.
    `virtual` are embeddings, float32, of the first tokens of the prompt, whose ids then only hold their places.
    `parts` are (tokens, position of the second text or -1) of several prompts that are pooled: `prompt_token_ids` holds
    them one after the other, and the answer has a row for each. Only for models that keep nothing between steps, and
    for kinds of pooling that make one row of a prompt; together they fit into one step.
    `lends`: others will be forked from it as soon as its first token is known; until they have come, or for a limited
    time, it computes no more, so that they find it there.
    `begins` is where the output begins, inside thoughts or not, so that its grammar holds from the answer on; None if
    the prompt's tokens are to tell.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    seed: int
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    lora_id: int = 0
    cache_salt: str | None = None
    fork_of: str | None = None
    account: str | None = None
    grammar: GrammarSpec | None = None
    content_keys: tuple[tuple[int, int, bytes], ...] = ()
    encoder_tokens: int = 0
    encoder_key: bytes = b""
    lora_path: str = ""
    virtual: bytes = b""
    parts: tuple[tuple[int, int], ...] = ()
    lends: bool = False
    begins: Begins | None = None


class CoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought for one request; or a few short ones, see `extend`.

    `finish_reason` is None while it runs, else "stop" | "length" | "abort" | "error"; `stop_reason` is the stop token
    id, None for eos. `logprobs` has one entry per new token when asked for. `prompt_logprobs` arrive in order, in
    chunks, without the leading None. `error` is the text for finish_reason "error"; if `refused`, the request itself
    is at fault; if `late`, it has not begun, and may be sent again. `pooled` is the one answer of a request with
    `PoolingParams`, which ends with it. `again`: what it has brought so far is void, and comes once more.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    first_scheduled_time: float = 0.0
    num_preemptions: int = 0
    refused: bool = False
    pooled: Pooled | None = None
    late: bool = False
    again: bool = False

    def extend(self, later: CoreOutput) -> None:
        """Add what the step after this one brought for the same request."""
        self.new_token_ids += later.new_token_ids
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *later.prompt_logprobs]
        if later.num_cached_tokens is not None:
            self.num_cached_tokens, self.first_scheduled_time = later.num_cached_tokens, later.first_scheduled_time
        self.num_preemptions = later.num_preemptions
        self.refused, self.late = later.refused, later.late
        self.pooled = later.pooled or self.pooled


def prompt_pieces(outputs: Iterable[CoreOutput]) -> Iterator[CoreOutput]:
    """Take the log probabilities of prompts out of `outputs` if they are many, and return them in pieces, in order.

    A step may bring tens of thousands. Taken in at once they would hold up the streams of everybody else.
    """
    holders = [output for output in outputs if output.prompt_logprobs]
    if sum(len(o.prompt_logprobs or ()) * _width(o) for o in holders) <= PIECE_ENTRIES:
        return
    for output in holders:
        steps, output.prompt_logprobs = output.prompt_logprobs or [], None
        size = max(1, PIECE_ENTRIES // len(steps[0].token_ids))
        for start in range(0, len(steps), size):
            yield CoreOutput(output.request_id, [], prompt_logprobs=steps[start : start + size])


def _width(output: CoreOutput) -> int:
    """How many log probabilities each position of the prompt has."""
    return len(output.prompt_logprobs[0].token_ids) if output.prompt_logprobs else 0


class CoreStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A snapshot of the core after a step, for the log line and /metrics."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0  # cached but unreferenced blocks count as free
    prefix_cache_queries: int = 0  # tokens, cumulative
    prefix_cache_hits: int = 0  # tokens, cumulative
    num_preemptions: int = 0  # cumulative
    prompt_tokens: int = 0  # computed since the snapshot before
    generation_tokens: int = 0  # sampled since the snapshot before
    step_time_s: float = 0.0
    steps: int = 1  # since the snapshot before, if the core counts them
    engine: int = 0  # which of several cores
    running_adapters: list[int] = []  # LoRA adapters of running requests
    waiting_adapters: list[int] = []  # LoRA adapters of requests that do not run, some of which may be running, too
    alive: bool = True  # False for one of several cores from its end until it is back
