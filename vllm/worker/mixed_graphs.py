"""Replays the forward pass of small mixed steps, prompts among decodes, as CUDA graphs.

Launched one by one, the kernels of such a step take the host longer than the device: a prompt of 20 tokens would hold
up every answer in progress for 20 ms. A graph is for up to so many tokens, requests and tokens of context; a step is
padded with empty requests, and with one that owns further tokens, whose keys go to the null block. Long queries take
the attention kernel that reads through block tables, whatever the step looks like. Sampling follows as for every step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from vllm.logger import init_logger
from vllm.step.inputs import RowView, StepFeatures, StepInputs
from vllm.step.sizes import LARGE, rounded_up
from vllm.worker.adapters import ROWS_WITH_ADAPTERS
from vllm.worker.device import CudaContext, Replay
from vllm.worker.input_builder import Laid

if TYPE_CHECKING:
    from vllm.worker.model_runner import ModelRunner
    from vllm.worker.stage_runner import StageRunner

logger = init_logger(__name__)

TOKENS = (32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)
_WITH_LONG_CONTEXTS = 2048  # tokens of a step: in larger ones, long prompts take the attention kernel that gathers
_WORK = 1e13  # tokens x parameters: with more, the device takes longer than the host
_EVEN = 2.5e11  # with fewer, a step of twice as many tokens takes about as long
REQUESTS = (2, 8, 32, 128, 272, 528)  # the last two: 256 and 512 that run, those that end, and the padding
_LONG_QUERY = 17  # tokens: certainly too many for the attention kernel for short queries
CONTEXTS = (1024, 4096, 16384)  # longer ones are better gathered
_EAGER_USES = 2  # so often a kind of step runs one kernel after the other before it is captured
_MOST_GRAPHS = 160


class _Key(NamedTuple):
    """A kind of step: tokens, requests and context that it is padded to, and whether its tokens may use adapters."""

    tokens: int
    requests: int
    context: int
    adapted: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tokens, self.requests, self.context


@dataclass(slots=True)
class _Entry:
    """A kind of step: its inputs' memory, and its graph once it has been captured."""

    uses: int = 0
    kept: Tensor | None = None
    device: list[Tensor] = field(default_factory=list)
    step: StepInputs | None = None
    hidden: Tensor | None = None
    graph: Replay | None = None


def step_sizes(parameters: int) -> tuple[int, ...]:
    """Tokens of the steps that are worth a graph in a model of so many parameters: powers of two, and others where
    padding would take the device longer.
    """
    worth = (size for size in TOKENS if size * parameters <= _WORK)
    return tuple(size for size in worth if size & (size - 1) == 0 or size * parameters > _EVEN)


def bucket(
    tokens: int, requests: int, longest: int, limit: int, sizes: tuple[int, ...] = TOKENS, room: int = CONTEXTS[0]
) -> tuple[int, int, int] | None:
    """The smallest (tokens, requests, context) of a graph that covers a step; None if there is none.

    longest: tokens of the longest sequence.   limit: tokens of the longest sequence that graphs may be used for.
    sizes: tokens that steps are padded to.   room: tokens that a row of the block table has room for, which the
    request that owns the padding must not exceed.
    """
    if longest > limit:
        return None
    rows = _at_least(REQUESTS, requests + 1)  # one for the padding
    # as it is captured, a step has a long query beside all the others, so that both kernels of attention are launched
    size = _at_least(sizes, max(tokens, rows - 1 + _LONG_QUERY))
    context = _at_least(CONTEXTS if size <= _WITH_LONG_CONTEXTS else CONTEXTS[:1], longest)
    return (size, rows, context) if size and rows and context and size - tokens <= room else None


def _at_least(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest size that is enough, 0 if none is."""
    return next((size for size in sizes if size >= wanted), 0)


class MixedGraphs:
    """The graphs of one runner's model, which must be `replayable`, on this package's own attention kernels."""

    # prompts whose logprobs are wanted in this step are refused by `forward`, which sees which these are
    handles = frozenset({"masks", "late", "exact", "prompt_logprobs", ROWS_WITH_ADAPTERS})

    def __init__(
        self, runner: ModelRunner | StageRunner, context: CudaContext, max_seq_len: int, most_tokens: int
    ) -> None:
        """max_seq_len: longer sequences are left to the eager path.   most_tokens: of any step."""
        self._runner, self._context, self._max_seq_len = runner, context, max_seq_len
        self._most_tokens = most_tokens
        self._rounds = all(cache.dim() == 5 for cache in runner.kv_caches)  # attention over keys and values only
        self._entries: dict[_Key, _Entry] = {}
        self._kinds = (False,) if runner.adapters is None else (False, True)
        self._most = len(self._kinds) * _MOST_GRAPHS
        self._pool = context.new_pool()
        self._width = runner.table.width
        self._sizes = step_sizes(sum(p.numel() for p in runner.model.parameters()))
        self._stream: Tensor | None = None  # what the stage before computes, in a pipeline
        if not runner.pipeline.is_first and self._sizes:
            traits = runner.model.traits
            shape = self._sizes[-1], traits.hidden_size
            self._stream = torch.zeros(shape, dtype=traits.dtype, device=context.device)

    @property
    def _room(self) -> int:
        """Tokens that a row of every block table has room for, as far as graphs read it."""
        table = self._runner.table
        return min(CONTEXTS[0], min(int(t.shape[1]) for t in table.host_tables) * table.block_size)

    def close(self) -> None:
        """Destroy the graphs, without waiting for the device."""
        for entry in self._entries.values():
            if entry.graph is not None:
                entry.graph.reset()
        self._entries.clear()

    def forward(self, laid: Laid, adapters: np.ndarray | None = None) -> tuple[StepInputs, Tensor] | None:
        """The step's inputs and [at least its rows of logits, hidden]; None for a step that no graph is there for.

        adapters: [tokens] int32, as in `RowView`; None if none of them uses one.
        """
        if laid.prompt_rows:
            return None
        tokens, longest = len(laid.positions), laid.max_seq_len
        sizes = bucket(tokens, len(laid.slots), longest, self._max_seq_len, self._sizes, self._room)
        if sizes is None:
            return None
        key = _Key(*sizes, adapters is not None)
        if self._runner.table.width != self._width:  # the table moved to other memory
            self.close()
            self._pool = self._context.new_pool()
            self._width = self._runner.table.width
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= self._most:
                return None
            entry = self._entries[key] = _Entry()
        entry.uses += 1
        if entry.uses <= _EAGER_USES:
            return None
        padded = laid.padded(key.tokens, key.requests)
        arrays = _arrays(key, padded, adapters)
        if self._stream is not None:
            self._runner.pipeline.receive_into(self._stream[:tokens])
        if entry.graph is None:
            done = self._warm(entry, key, padded, arrays)
            self._capture(entry, key, padded)
            return done
        if entry.kept is None or entry.step is None or entry.hidden is None:
            raise RuntimeError("A captured step has no result.")
        self._context.replace(entry.kept, arrays)
        entry.graph.replay()
        return entry.step, entry.hidden

    def rounded(self, laid: Laid) -> Laid:
        """A step that no graph is there for, with tokens of nobody behind its own, so that its products are of a size
        that others have too; itself where it is of such a size, or what keeps it is not one block table of tokens.
        """
        tokens = len(laid.positions)
        size = min(rounded_up(tokens), self._most_tokens)
        plain = self._rounds and laid.key_lens is None and laid.drafts is None
        if tokens <= LARGE or size <= tokens or laid.every or laid.pooled_rows or not plain:
            return laid
        return laid.followed(size)

    def prepare(self) -> bool:
        """Run or capture one kind of step that will come; whether there are more. Nothing may be in flight.

        The largest first, but for those that only many requests at once need.
        """
        rows = [n for n in REQUESTS if n <= 2 * len(self._runner.table.num_prompt)]
        sizes = sorted(self._sizes, key=lambda n: (n > _WITH_LONG_CONTEXTS, -n))
        wanted = (
            _Key(n, r, CONTEXTS[0], adapted)
            for adapted in self._kinds
            for n in sizes
            for r in rows[::-1]
            if r - 1 + _LONG_QUERY <= n
        )
        found, room = self._entries, self._room
        longest, groups = min(room, self._max_seq_len), len(self._runner.table.tables)
        missing = (k for k in wanted if k not in found or found[k].graph is None)
        shapes = ((k, made_up(k.sizes, room, longest, groups)) for k in missing)
        key, laid = next(((k, shape) for k, shape in shapes if shape is not None), (None, None))
        if key is None or laid is None or (key not in found and len(found) >= self._most // 2):
            return False
        entry, laid = found.setdefault(key, _Entry()), laid.padded(key.tokens, key.requests)
        if entry.kept is None:
            self._warm(entry, key, laid, _arrays(key, laid, None))
        else:
            self._capture(entry, key, laid)
        entry.uses = _EAGER_USES
        return True

    def _warm(self, entry: _Entry, key: _Key, laid: Laid, arrays: list[np.ndarray]) -> tuple[StepInputs, Tensor]:
        """Run the padded step once, so that all its kernels are there."""
        entry.kept, entry.device = self._context.keep(arrays)
        return self._run(key, _shape(key, laid), entry.device)

    def _capture(self, entry: _Entry, key: _Key, laid: Laid) -> None:
        """Capture the padded step for the next time."""
        begun = time.perf_counter()

        def run() -> None:
            entry.step, entry.hidden = self._run(key, _shape(key, laid), entry.device)

        entry.graph = self._context.record(run, self._pool)
        logger.debug("Captured a step of %s in %.3f s.", key, time.perf_counter() - begun)

    def _run(self, key: _Key, shape: Laid, device: list[Tensor]) -> tuple[StepInputs, Tensor]:
        runner, features = self._runner, None
        if key.adapted:
            *device, adapters = device
            of_logits = adapters.index_select(0, device[_LOGITS_ROWS])
            features = StepFeatures(adapters=(RowView(adapters, ()), RowView(of_logits, ())))
        step = runner.builder.inputs(shape, device, key.context, features=features)
        if self._stream is None:
            return step, runner.model(step, runner.kv_caches)
        return step, runner.model(step, runner.kv_caches, self._stream[: len(step.positions)])


_LOGITS_ROWS = Laid.__struct_fields__.index("logits_rows")  # as in `Laid.arrays`


def _arrays(key: _Key, padded: Laid, adapters: np.ndarray | None) -> list[np.ndarray]:
    """What is uploaded of a padded step, at last each token's adapter; padding has none."""
    if not key.adapted:
        return padded.arrays
    of_tokens: np.ndarray = np.full(key.tokens, -1, np.int32)
    if adapters is not None:
        of_tokens[: len(adapters)] = adapters
    return [*padded.arrays, of_tokens]


def _shape(key: _Key, laid: Laid) -> Laid:
    """The padded step as the host sees it: one long query and single tokens (`bucket`)."""
    tokens, requests, context = key.sizes
    starts: np.ndarray = np.arange(requests + 1, dtype=np.int32)
    starts[1:] += tokens - requests
    lens: np.ndarray = np.full(requests, context, np.int32)
    longest = tokens - requests + 1
    return replace(laid, starts=starts, lens=lens, max_query_len=longest, max_seq_len=context)


def made_up(key: tuple[int, int, int], room: int, longest: int, groups: int) -> Laid | None:
    """A step for a graph of (tokens, requests, context): fresh prompts in slot 0 and in the null block, which leave the
    request that owns the padding as many tokens as its row of the block table has room for. None if no such step fits
    into so many requests.

    room: as for `bucket`.   longest: tokens of a prompt.   groups: of the cache.
    """
    tokens, requests, _ = key
    rest = tokens - min(room, tokens - 1)
    count = -(-rest // longest)
    if count >= requests:
        return None
    lens: np.ndarray = np.full(count, rest // count, np.int32)
    lens[: rest % count] += 1
    starts: np.ndarray = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    nowhere: np.ndarray = np.zeros(rest, np.int64)
    return Laid(
        index=nowhere,
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lens]),
        starts=starts,
        lens=lens,
        logits_rows=starts[1:].astype(np.int64) - 1,
        slots=np.zeros(count, np.int64),
        mappings=(nowhere,) * groups,
        sample_rows=nowhere[:0],
        max_query_len=int(lens[0]),
        max_seq_len=int(lens[0]),
        prompt_rows=(),
    )
