"""A toy model with a real paged cache, its dense oracle, and plans written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm.model_executor.models.kv_groups import layout_of
from vllm.model_executor.models.traits import Traits
from vllm.ops.attention import AttentionParams, attend, write_kv
from vllm.sampling_params import SamplingParams
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.step.kv_need import attention_need
from vllm.step.plan import BlockAppend, Column, SlotInit, StepPlan, Transfer
from vllm.worker.device import CpuContext
from vllm.worker.model_runner import ModelRunner
from vllm.worker.pool import Pooler

VOCAB, HEADS, DIM, BLOCK = 97, 2, 8, 4


def attend_as_recorded(
    q: Tensor, kv_cache: Tensor, params: AttentionParams, step: StepInputs, group: GroupInputs
) -> Tensor:
    """`attend` by what stands in the step's tensors alone: what the host knows is that of when it was recorded."""
    out = torch.zeros_like(q)
    starts = step.query_starts.tolist()
    for r, length in enumerate(step.seq_lens.tolist()):
        first, end = starts[r], starts[r + 1]
        blocks = kv_cache[group.block_table[r, : -(-length // BLOCK)].long()]  # [blocks, 2, heads, block, dim]
        k, v = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        scores = q[first:end].transpose(0, 1) @ k.transpose(1, 2) * params.scale
        distance = torch.arange(length - (end - first), length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (params.window or length))
        out[first:end] = (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)
    return out


class Toy(nn.Module):
    """Two layers of attention over token and position embeddings; the last one has a window in its own KV group."""

    def __init__(self, vocab: int = VOCAB, window: int = 6, attend: Callable[..., Tensor] = attend) -> None:
        """attend: one that reads lengths on the device, if steps are to be recorded."""
        super().__init__()
        self.attend = attend
        generator = torch.Generator().manual_seed(0)
        width = HEADS * DIM
        self.embed = torch.randn(vocab, width, generator=generator)
        self.place = torch.randn(512, width, generator=generator) * 0.3
        self.qkv = torch.randn(2, width, 3 * width, generator=generator) * 0.2
        self.head = torch.randn(width, vocab, generator=generator)
        self.windows = (None, window)
        self.poison: set[int] = set()  # token ids whose hidden state becomes NaN
        kv = tuple(attention_need(HEADS, DIM, window) for window in self.windows)
        self.traits = Traits(width, torch.float32, vocab, kv, range(2))

    def forward(self, step: StepInputs, kv_caches: list[Tensor]) -> Tensor:
        x = self.embed[step.token_ids] + self.place[step.positions]
        for layer in range(2):
            q, k, v = (x @ self.qkv[layer]).view(len(x), 3, HEADS, DIM).unbind(1)
            group = step.groups[layer]
            write_kv(k, v, kv_caches[0], group.slot_mapping)
            params = AttentionParams(scale=DIM**-0.5, window=self.windows[layer])
            x = x + self.attend(q, kv_caches[0], params, step, group).flatten(1)
        for token in self.poison:
            x[step.token_ids == token] = float("nan")
        return step.wanted(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head

    def dense(self, token_ids: list[int]) -> Tensor:
        """Logits at every position, without any cache. -> [tokens, vocab]"""
        n = len(token_ids)
        x = self.embed[token_ids] + self.place[:n]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        for layer, window in enumerate(self.windows):
            q, k, v = (x @ self.qkv[layer]).view(n, 3, HEADS, DIM).permute(1, 2, 0, 3)
            scores = q @ k.transpose(1, 2) * DIM**-0.5
            hidden = (distance < 0) | (distance >= (window or n))
            x = x + (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self.logits(x)

    def greedy(self, prompt: list[int], steps: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(steps):
            tokens.append(int(self.dense(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


class Ahead(CpuContext):
    """The host's memory, taken for a device that runs behind."""

    is_async = True


class _Recorded:
    def __init__(self, run: Callable[[], Any]) -> None:
        self.replay = run

    def reset(self) -> None:
        del self.replay


class _Passed:
    def record(self) -> None: ...

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Recording(Ahead):
    """The host's memory, taken for a device that records what is queued. Counts the replays."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = self.replayed = 0

    def pinned(self, *shape: int) -> Tensor:
        return torch.full(shape, -7, dtype=torch.int32)

    def event(self) -> _Passed:
        return _Passed()

    def copy_beside(self, target: Tensor, host: Tensor, after: _Passed) -> None:
        target.copy_(host)

    def new_pool(self) -> None:
        return None

    def keep(self, arrays: Sequence[np.ndarray]) -> tuple[list[Tensor], list[Tensor]]:
        kept = [torch.from_numpy(array.copy()) for array in arrays]
        return kept, kept

    def replace(self, kept: list[Tensor], arrays: Sequence[np.ndarray]) -> None:
        for place, array in zip(kept, arrays, strict=True):
            place.copy_(torch.from_numpy(array))

    def record(self, run: Callable[[], Any], pool: Any) -> _Recorded:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return _Recorded(replay)


class Driver:
    """Plans for a runner: hands out slots and blocks naively, one private block list per group."""

    def __init__(
        self,
        model: Toy,
        num_slots: int = 8,
        num_blocks: int = 256,
        max_model_len: int = 300,
        vocab: int = VOCAB,
        context: CpuContext | None = None,
        columns: tuple[Column, ...] = (),
        pooler: Pooler | None = None,
    ) -> None:
        layout = layout_of(model.traits, BLOCK)
        caches = [torch.zeros(num_blocks, 2, HEADS, layout.block_size, DIM)]
        self.runner = ModelRunner(
            model,
            layout,
            caches,
            context or CpuContext(),
            columns=columns,
            pooler=pooler,
            num_slots=num_slots,
            max_model_len=max_model_len,
            vocab_size=vocab,
        )
        self.free_slots = list(range(num_slots))
        self.next_block = 1
        self.step_id = 0
        self.freed: list[int] = []
        self.slot: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.total: dict[str, int] = {}
        self.blocks: dict[str, list[list[int]]] = {}
        self.new: list[SlotInit] = []

    def _take_blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def add(
        self,
        name: str,
        tokens: list[int],
        prompt: int | None = None,
        seed: int = 0,
        stop: tuple[int, ...] = (),
        **params: object,
    ) -> None:
        """Let a request enter a slot with the next plan. `prompt`: how many of the tokens are prompt (all)."""
        bad_words = params.pop("bad_words_token_ids", None)
        settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 1000, **params})
        settings._bad_words_token_ids = bad_words
        self.slot[name] = self.free_slots.pop(0)
        self.computed[name], self.total[name] = 0, len(tokens)
        self.blocks[name] = [self._take_blocks(-(-len(tokens) // BLOCK)) for _ in range(2)]
        self.new.append(
            SlotInit(
                name,
                self.slot[name],
                list(tokens),
                len(tokens) if prompt is None else prompt,
                0,
                tuple(list(b) for b in self.blocks[name]),
                settings,
                seed,
                stop,
            )  # fmt: skip
        )

    def remove(self, name: str) -> None:
        self.freed.append(self.slot[name])
        self.free_slots.append(self.slot.pop(name))

    def plan(self, chunks: dict[str, int] | None = None, transfers: tuple[Transfer, ...] = ()) -> StepPlan:
        """One step of all requests (at most `chunks[name]` tokens), which may be executed later."""
        names = list(self.slot)
        counts, starts, samples, appends = [], [], [], []
        for name in names:
            start = self.computed[name]
            count = min(self.total[name] - start, (chunks or {}).get(name, 1 << 30))
            for g, blocks in enumerate(self.blocks[name]):
                lack = -(-(start + count) // BLOCK) - len(blocks)
                if lack > 0:
                    more = self._take_blocks(lack)
                    appends.append(BlockAppend(self.slot[name], g, len(blocks), more))
                    blocks += more
            self.computed[name] += count
            samples.append(self.computed[name] == self.total[name])
            self.total[name] += samples[-1]
            counts.append(count)
            starts.append(start)
        plan = StepPlan(
            self.step_id, tuple(self.freed), tuple(self.new), tuple(appends),
            np.array([self.slot[n] for n in names], np.int32), np.array(counts, np.int32),
            np.array(starts, np.int32), np.array(samples, bool), transfers,
        )  # fmt: skip
        self.step_id += 1
        self.freed, self.new = [], []
        return plan

    def step(self, chunks: dict[str, int] | None = None) -> dict[str, int]:
        """Plan and run one step; the token of each request, -1 where none was sampled."""
        names = list(self.slot)
        self.result = self.runner.execute(self.plan(chunks)).result()
        return dict(zip(names, self.result.token_ids, strict=True))

    def generate(self, count: int) -> dict[str, list[int]]:
        """Run steps until every request has `count` new tokens."""
        found: dict[str, list[int]] = {name: [] for name in self.slot}
        while min(len(t) for t in found.values()) < count:
            for name, token in self.step().items():
                found[name] += [token] if token >= 0 else []
        return {name: tokens[:count] for name, tokens in found.items()}
