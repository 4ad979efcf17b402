"""What model tests share: tiny Hugging Face models on disk, configs for the loader, and a driver of the paged cache."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm.config import ParallelConfig
from vllm.config.hf import HFConfig
from vllm.config.quantization import resolve_quantization
from vllm.distributed import TensorParallel
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.models.kv_groups import layout_of
from vllm.model_executor.models.traits import Traits
from vllm.step.inputs import GroupInputs, StepFeatures, StepInputs
from vllm.step.kv_policy import KVKind
from vllm.worker.kv_memory import allocate


class _ModelConfig(SimpleNamespace):
    @cached_property
    def hf_config(self) -> Any:
        return self.hf.to_transformers()


def engine_config(
    folder: Path,
    *,
    max_model_len: int,
    load_format: str = "auto",
    dtype: str = "float32",
    quantization: str | None = None,
    model_impl: str = "vllm",
    parallel_config: ParallelConfig | None = None,
    extra: dict[str, Any] | None = None,
) -> Any:
    """As much of a VllmConfig as the loader reads."""
    hf = HFConfig.load(folder)
    if model_impl == "transformers":
        hf = hf.completed()
    quantized = resolve_quantization(quantization, hf, folder)
    model_config = _ModelConfig(
        hf=hf,
        path=folder,
        dtype=dtype,
        max_model_len=max_model_len,
        seed=0,
        quantized=quantized,
        model_impl=model_impl,
        trust_remote_code=False,
        pooling=None,
        convert_type="none",
    )
    return SimpleNamespace(
        model_config=model_config,
        load_config=SimpleNamespace(
            load_format=load_format,
            model_loader_extra_config=extra or {},
            pt_load_map_location="cpu",
            use_tqdm_on_load=False,
        ),
        cache_config=None,
        quant_config=None,
        lora_config=None,
        scheduler_config=None,
        parallel_config=parallel_config or ParallelConfig(),
    )


def save_random_hf_model(
    hf_config: Any, folder: Path, *, seed: int = 0, attention: str = "eager", **save: Any
) -> nn.Module:
    """A Hugging Face model with random weights, biases and norms included, saved to `folder`."""
    import transformers

    torch.manual_seed(seed)
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(hf_config, **options).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **save)
    return model


def load(
    folder: Path, *, max_model_len: int = 64, tp: TensorParallel | None = None, stage: int = 0, **config: Any
) -> Any:
    """Our model of a folder, on the CPU."""
    return load_model(engine_config(folder, max_model_len=max_model_len, **config), "cpu", tp, stage)


def rotated(traits: Traits, positions: Tensor, owner: Tensor, prompts: list[int]) -> StepFeatures | None:
    """Which rows of rotary tables tokens read, where that depends on the length of the prompt that they belong to."""
    if traits.known_prompt is None:
        return None
    stages = torch.tensor([max(0, math.ceil(math.log2(length / traits.known_prompt))) for length in prompts])
    return StepFeatures(rotary=positions + stages[owner] * traits.rotary_rows)


class PagedDriver:
    """Feeds requests through a model step by step, with block tables that are scattered over the cache on purpose."""

    def __init__(self, model: Any, *, block_size: int = 4, max_len: int = 64, requests: int = 1, seed: int = 0) -> None:
        self.model, self.block_size = model, block_size
        self.layout = layout_of(model.traits, block_size)
        per_request = -(-max_len // block_size)
        groups = len(self.layout.groups)
        num_blocks = 1 + groups * requests * per_request
        memory = allocate(self.layout, num_blocks, 1 + requests, model.traits.dtype, torch.device("cpu"))
        self.caches = memory.tensors
        for cache, kind in zip(self.caches, self.layout.tensors, strict=True):
            cache.fill_(1e4)  # garbage that shows if it is ever read
            if kind.pool == 1:
                cache[1:] = 0  # as for every request that begins
        ids = np.random.default_rng(seed).permutation(np.arange(1, num_blocks, dtype=np.int32))
        self.tables = torch.from_numpy(ids.reshape(groups, requests, per_request))

    def step(
        self, chunks: list[tuple[int, int, Tensor]], rows: Tensor | None = None, prompts: list[int] | None = None
    ) -> Tensor:
        """chunks: (request, tokens computed before, new token ids). Logits of all new tokens, [tokens, vocabulary], or
        of those that `rows` names. prompts: lengths of all requests' prompts, for models that ask for it.
        """
        ids = torch.cat([tokens for _, _, tokens in chunks])
        positions = torch.cat([torch.arange(start, start + len(tokens)) for _, start, tokens in chunks])
        lengths = [len(tokens) for _, _, tokens in chunks]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        seq_lens = np.array([start + len(tokens) for _, start, tokens in chunks], dtype=np.int32)
        requests = [request for request, _, _ in chunks]
        owner = torch.repeat_interleave(torch.tensor(requests), torch.tensor(lengths))
        groups = []
        for kind, table in zip(self.layout.groups, self.tables, strict=True):
            if kind.kind is KVKind.RECURRENT:
                groups.append(GroupInputs(positions[:0], 1 + torch.tensor(requests)[:, None]))
                continue
            size = self.block_size * kind.units
            block = table[owner, positions // size].long()
            groups.append(GroupInputs(block * size + positions % size, table[requests]))
        step = StepInputs.of(
            token_ids=ids,
            positions=positions,
            query_starts=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            logits_rows=rows,
            groups=tuple(groups),
            host_query_starts=starts,
            host_seq_lens=seq_lens,
            features=None if prompts is None else rotated(self.model.traits, positions, owner, prompts),
        )
        with torch.inference_mode():
            return self.model.logits(self.model(step, self.caches))

    def run(self, prompts: list[Tensor], chunk_sizes: list[int]) -> list[Tensor]:
        """Logits at every position of every prompt, computed together in chunks of cycling sizes."""
        done, turn = [0] * len(prompts), 0
        parts: list[list[Tensor]] = [[] for _ in prompts]
        while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
            chunks = []
            for request, prompt in enumerate(prompts):
                size = chunk_sizes[turn % len(chunk_sizes)]
                turn += 1
                if done[request] < len(prompt):
                    chunks.append((request, done[request], prompt[done[request] : done[request] + size]))
            logits = self.step(chunks, prompts=[len(prompt) for prompt in prompts]).split(
                [len(tokens) for _, _, tokens in chunks]
            )
            for (request, start, tokens), piece in zip(chunks, logits, strict=True):
                parts[request].append(piece)
                done[request] = start + len(tokens)
        return [torch.cat(pieces) for pieces in parts]


class _Meeting:
    """Where the ranks of a test meet: threads of one process."""

    def __init__(self, world: int) -> None:
        self.brought: list[Tensor] = [torch.empty(0)] * world
        self._barrier = threading.Barrier(world, timeout=60)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """What every rank brings, on every rank."""
        self.brought[rank] = x.clone()
        self._barrier.wait()
        found = list(self.brought)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        """Wake those who wait for a rank that failed."""
        self._barrier.abort()


@dataclass(frozen=True)
class ThreadRank(TensorParallel):
    """A rank that is a thread."""

    meeting: Any = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim)


def on_ranks(world: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    """What `work` returns on each of `world` ranks."""
    meeting = _Meeting(world)

    def run(rank: int) -> Any:
        try:
            return work(ThreadRank(rank, world, meeting=meeting))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(world) as pool:
        return [done.result() for done in [pool.submit(run, rank) for rank in range(world)]]


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """The largest norm-wise relative error over positions; infinite if not the same tokens are never said."""
    silent = reference < -1e29
    if not torch.equal(ours < -1e29, silent):
        return float("inf")
    ours, reference = ours.masked_fill(silent, 0.0), reference.masked_fill(silent, 0.0)
    difference = (ours.double() - reference.double()).norm(dim=-1)
    return (difference / reference.double().norm(dim=-1)).max().item()
