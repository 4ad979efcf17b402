"""One rank: its device, its share of the model, its KV cache and its runner.

`collective_rpc` calls its methods by name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from vllm import envs, ops
from vllm.distributed.parallel_state import SINGLE, TensorParallel
from vllm.distributed.ranks import ALONE, Ranks
from vllm.faults import Faults
from vllm.logger import init_logger
from vllm.model_executor.layers.dtypes import dtype_of
from vllm.model_executor.model_loader import rank_state
from vllm.model_executor.model_loader.live_weights import unpacked
from vllm.model_executor.models.blocks import experts_of, serve_experts
from vllm.model_executor.models.kv_groups import layout_of
from vllm.model_executor.models.traits import Model, OwnPoolingModel, PoolingModel, Traits, check_traits
from vllm.ops import attention_backends
from vllm.ops.linear import linear
from vllm.platforms import cuda_early
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.step.known import Known
from vllm.step.kv_policy import KVKind, KVLayout
from vllm.step.plan import RowMasks, StepPlan
from vllm.step.sizes import large_sizes
from vllm.worker import cpu_blocks, kv_memory
from vllm.worker.adapters import WorkerAdapters
from vllm.worker.cache_scales import scales_of_file, use_cache_scales
from vllm.worker.cpu_threads import bind_threads
from vllm.worker.device import CudaContext, DeviceContext, create_context
from vllm.worker.expert_balance import ExpertBalancer
from vllm.worker.kv_memory import CacheMemory, CacheRequest
from vllm.worker.model_runner import ModelRunner
from vllm.worker.pool import OwnPooler, Pooler, PoolingKind
from vllm.worker.profiler import WorkerProfiler
from vllm.worker.stage_runner import StageRunner, StageTokens
from vllm.worker.step_handle import Handle
from vllm.worker.virtual_tokens import VirtualTokenTable

if TYPE_CHECKING:
    from vllm.config import (
        CacheConfig,
        LoadConfig,
        LoRAConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.ops.triton.precompile import Precompilation
    from vllm.worker.cuda_graphs import DecodeGraphs
    from vllm.worker.mixed_graphs import MixedGraphs
    from vllm.worker.stage_graphs import StageGraphs

logger = init_logger(__name__)

_ANY_NUMBER = 1 << 40  # of blocks, on a rank whose layers keep nothing
_CPU_HINT = " On the CPU, the cache's size is set by VLLM_CPU_KVCACHE_SPACE (in GiB)."


def compile_ahead(config: VllmConfig, tp: TensorParallel = SINGLE) -> Precompilation | None:
    """Start to compile the first rank's kernels in processes of their own, while weights are loaded here. The other
    ranks find what it has compiled.
    """
    if config.device_config.device != "cuda" or config.model_config.pooling is not None:  # no step decodes
        return None
    from vllm.worker.cuda_precompile import start

    cuda_early.finish()
    ops.setup("cuda")  # the processes start with what this has imported
    return start(config, torch.cuda.get_device_capability(config.parallel_config.first_device), tp)


class Worker:
    """Made in three steps, as ranks must agree on the number of blocks: the model, `count_blocks()`, `start(n)`."""

    def __init__(self, config: VllmConfig, ranks: Ranks = ALONE, compiling: Precompilation | None = None) -> None:
        """compiling: what `compile_ahead` has started, on the first rank."""
        self.config = config
        self.ranks, self.tp = ranks, ranks.tp
        self.device = self._open_device()
        self.context: DeviceContext = create_context(self.device)
        attention_backends.claim(config.model_config.attention_backend, self.device, self)
        ops.setup(self.device.type)
        attention = attention_backends.use(config.model_config.attention_backend, self.device)
        self._compiling = compiling
        of_file = scales_of_file(config, self.tp)  # what is wrong with it need not wait for the weights
        self.model = self._load()
        self._check_experts()
        check_traits(
            self.model.traits,
            name=" or ".join(config.model_config.architectures) or "The model",
            chunked=config.scheduler_config.enable_chunked_prefill is not False,
            prefix_caching=config.cache_config.enable_prefix_caching is not False,
            features=frozenset({"token_types"}),
            stages=ranks.pp.world,
            pools=config.model_config.pooling is not None,
            known_prompt=config.model_config.known_prompt,
        )
        cache = config.cache_config
        self.layout: KVLayout = layout_of(
            self.model.traits,
            cache.block_size,
            cache.cache_dtype,
            snapshots=self._snapshots(),
            num_drafts=config.scheduler_config.num_drafts,
        )
        use_cache_scales(self.model, config, self.context, of_file)
        self._balancer = ExpertBalancer.of(cast(torch.nn.Module, self.model), self.tp, config.parallel_config)
        self.adapters = None
        if config.lora_config is not None:
            self.adapters = WorkerAdapters(config, self.model, self.context)
        self._fuse()
        if attention is not None:
            stored = kv_memory.cache_dtype(cache.cache_dtype, config.model_config.dtype)
            dtype = kv_memory.cache_dtype("auto", config.model_config.dtype)
            for head_dim in head_sizes(self.model.traits):
                attention_backends.check(attention, cast(torch.nn.Module, self.model), head_dim, dtype, stored)
        self.runner: ModelRunner | StageRunner | None = None
        self._tokens: StageTokens | None = None  # on a pipeline's last stage
        self._graphs: DecodeGraphs | StageGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._profiler: WorkerProfiler | None = None
        self._unloaded: list[tuple[Tensor, int]] = []  # products whose kernels are to be loaded, the next one last

    def _snapshots(self) -> int:
        """Recurrent states kept for prefixes beyond those of running requests."""
        scheduler = self.config.scheduler_config
        return scheduler.max_num_seqs if self.config.cache_config.enable_prefix_caching else 0

    def _fuse(self) -> None:
        """Run layers as native calls, which go by one size of blocks, where the device has them."""
        one_size = all(group.units == 1 for group in self.layout.groups)
        if self.config.model_config.attention_backend != "TORCH_SDPA" and self.device.type == "cpu" and one_size:
            cpu_blocks.fuse(self.model)

    def _open_device(self) -> torch.device:
        kind = self.config.device_config.device
        if kind == "cpu":
            bind_threads(envs.VLLM_CPU_OMP_THREADS_BIND, *self.ranks.local)
            return torch.device("cpu")
        if kind == "cuda":
            device = torch.device("cuda", self.ranks.device)
            torch.cuda.set_device(device)
            self._began = kv_memory.DeviceMemory.now(device)
            return device
        raise RuntimeError(f"Not support device type: {kind}")

    def _check_experts(self) -> None:
        """Say that there are no experts to deal out, or refuse what cannot do without them. Raises ValueError."""
        if not self.config.parallel_config.enable_expert_parallel or experts_of(cast(torch.nn.Module, self.model)):
            return
        if self.tp.exchange is not None:
            raise ValueError(
                "enable_expert_parallel with data_parallel_size deals out experts to all copies of the engine, and "
                "this model has none that can be dealt out. Leave out enable_expert_parallel: then the copies are "
                "independent."
            )
        if self.tp.world > 1 and self.tp.rank == 0:  # with one rank the configuration has said so
            layers = "this model's layers" if self.ranks.pp.world == 1 else "the layers of this pipeline stage"
            logger.warning("enable_expert_parallel changes nothing: %s have no experts to deal out.", layers)

    def _load(self) -> Model:
        from vllm.model_executor.model_loader import load_model

        try:
            return load_model(self.config, self.device, self.tp, self.ranks.pp.rank)
        except torch.OutOfMemoryError as error:
            remedy = "tensor_parallel_size or a smaller dtype"
            raise ValueError(self._does_not_fit("The model's weights", remedy)) from error

    def _does_not_fit(self, what: str, remedy: str) -> str:
        free, total = torch.cuda.mem_get_info(self.device)
        mine = torch.cuda.memory_reserved(self.device)
        return (
            f"{what} do not fit into the device's memory: {total / kv_memory.GIB:.2f} GiB, of which this process held "
            f"{mine / kv_memory.GIB:.2f} and others {(total - free - mine) / kv_memory.GIB:.2f} GiB when it ran out. "
            f"Try {remedy}."
        )

    @property
    def _request(self) -> CacheRequest:
        scheduler, cache = self.config.scheduler_config, self.config.cache_config
        return CacheRequest(
            max_model_len=self.config.model_config.max_model_len,
            max_num_seqs=self.config.num_slots,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            override=cache.num_gpu_blocks_override,
            fixed_bytes=cache.kv_cache_memory_bytes,
        )

    def count_blocks(self) -> int:
        """Blocks that fit into this rank's memory, the null block included. Runs the largest step once on a GPU."""
        if self.device.type == "cuda":
            self._load_libraries()
        if self._compiling is not None:
            logger.info("Compiling kernels took %.2f s, beside loading", self._compiling.wait())
        if self.device.type == "cuda":
            self.tp.barrier()
        if not self.layout.page_bytes and any(group.kind is not KVKind.RECURRENT for group in self.layout.groups):
            return _ANY_NUMBER  # other stages say how many there are
        request = self._request
        if not self.layout.groups:
            return kv_memory.NO_CACHE
        if request.override is not None or request.fixed_bytes is not None:
            return kv_memory.count_blocks(self.layout, request, 0, "", bounded=False)
        if self.device.type == "cpu":
            available, bounded = kv_memory.cpu_available(envs.VLLM_CPU_KVCACHE_SPACE, self.ranks.local[1])
            return kv_memory.count_blocks(self.layout, request, available, _CPU_HINT, bounded=bounded)
        share = self.config.cache_config.gpu_memory_utilization
        try:
            available, table = kv_memory.cuda_available(
                self.device, share, self._began, self._run_largest_step, self._largest_captured_step()
            )
        except torch.OutOfMemoryError as error:
            remedy = "a smaller max_num_batched_tokens or max_num_seqs, or tensor_parallel_size"
            raise ValueError(self._does_not_fit("The activations of the largest step", remedy)) from error
        logger.info(table)
        return kv_memory.count_blocks(self.layout, request, available, "", bounded=False)

    def _largest_batch(self) -> tuple[int, int]:
        """Tokens and requests of the largest step."""
        scheduler = self.config.scheduler_config
        return scheduler.max_num_batched_tokens, min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)

    def _load_libraries(self) -> None:
        """Compute the plain products of steps once, here while other processes compile our kernels.

        cuBLAS and PyTorch load theirs at first use, which waits for all that is queued on the device: those of all its
        tokens, and of the rows that it samples, in its last layer and to make logits.
        """
        tokens, requests = self._largest_batch()
        sampled = sorted({self.context.product_rows(rows) for rows in range(1, requests + 1)})
        parts = [tokens >> n for n in range(8) if tokens >> n > sampled[-1]]
        weights = {p.shape: p for p in self.model.parameters() if p.dim() == 2 and p.is_floating_point()}
        logits = self.model.traits.vocab_size // self.tp.world  # of this rank, or more where shares are padded
        with torch.inference_mode(), contextlib.suppress(RuntimeError):  # which the steps themselves will explain
            for shape, weight in weights.items():
                x = torch.empty(max(tokens, sampled[-1]), shape[1], dtype=weight.dtype, device=self.device)
                for rows in parts if shape[0] < logits else ():
                    F.linear(x[:rows], weight)
                for rows in sampled:
                    out = linear(x[:rows], weight, None, torch.float32 if shape[0] >= logits else None)
                if shape[0] >= logits:
                    out.sort(-1)
        others = [weight for shape, weight in weights.items() if shape[0] < logits]
        captured, sizes = self._largest_captured_tokens(), reversed(large_sizes(tokens))
        self._unloaded = [(weight, size) for size in sizes if size > captured for weight in others]

    def _load_one(self) -> bool:
        """Compute one product of a size that steps are rounded to; whether there are more."""
        if not self._unloaded or self._mixed_graphs is None:
            return False
        weight, size = self._unloaded.pop()
        with contextlib.suppress(RuntimeError):
            F.linear(torch.empty(size, weight.shape[1], dtype=weight.dtype, device=self.device), weight)
        return True

    def _largest_captured_tokens(self) -> int:
        """Tokens of the largest step that becomes a graph; 0 without graphs."""
        from vllm.worker.mixed_graphs import step_sizes

        sizes = self.config.compilation_config.cudagraph_capture_sizes
        parameters = sum(p.numel() for p in self.model.parameters())
        return max([*sizes, *step_sizes(parameters)]) if sizes else 0

    def _largest_captured_step(self) -> float:
        """The same as a share of the largest step."""
        return min(1.0, self._largest_captured_tokens() / self.config.scheduler_config.max_num_batched_tokens)

    def start(self, num_blocks: int) -> None:
        """Allocate the cache and become ready for plans."""
        num_states = self.layout.policy.num_states(self.config.num_slots)
        self.runner = runner = self._make_runner(self._allocate(num_blocks, num_states))
        if isinstance(runner, ModelRunner) and self.ranks.pp.tokens is not None:
            self._tokens = StageTokens(runner.table, self.context, self.ranks.pp.tokens)
        graphs = self.config.compilation_config.cudagraph_capture_sizes
        if self.device.type == "cuda" and graphs:
            self._use_graphs(self.runner)
        if self.device.type == "cuda" and not self.layout.groups:
            self._try_largest_step()
        if self.ranks.is_first:
            kv_memory.log_cache(self.device.type, self.layout, self._request, num_blocks)
            if self._tier_blocks:
                logger.info("Host memory keeps %d further blocks of the KV cache for later.", self._tier_blocks)

    def _try_largest_step(self) -> None:
        """Run the largest step once where no cache had to be measured: kernels are compiled, and there is memory."""
        started = time.perf_counter()
        try:
            self._run_largest_step()
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError as error:
            remedy = "a smaller max_num_batched_tokens, or tensor_parallel_size"
            raise ValueError(self._does_not_fit("The activations of the largest step", remedy)) from error
        logger.info("The largest step and its kernels took %.2f s", time.perf_counter() - started)

    def _allocate(self, num_blocks: int, num_states: int) -> CacheMemory:
        dtype = kv_memory.cache_dtype(self.config.cache_config.cache_dtype, self.config.model_config.dtype)
        return kv_memory.allocate(self.layout, num_blocks, num_states, dtype, self.device)

    @property
    def _tier_blocks(self) -> int:
        return self.layout.places_in(self.config.kv_offloading_bytes)

    def _make_runner(self, caches: CacheMemory) -> ModelRunner | StageRunner:
        model, scheduler = self.config.model_config, self.config.scheduler_config
        length = model.max_model_len
        if not self.layout.groups:  # then prompts may share a request, up to a whole step
            length = max(length, scheduler.max_num_batched_tokens)
        if not self.ranks.pp.is_last:
            return StageRunner(
                self.model,
                self.layout,
                caches.tensors,
                self.context,
                self.ranks.pp,
                num_slots=self.config.num_slots,
                max_model_len=length,
                tp=self.tp,
                adapters=self.adapters,
                pools=caches.pools,
            )
        return ModelRunner(
            Faults.from_env().around_model(self.model),
            self.layout,
            caches.tensors,
            self.context,
            num_slots=self.config.num_slots,
            max_model_len=length,
            vocab_size=model.logits_width,
            tp=self.tp,
            adapters=self.adapters,
            pools=caches.pools,
            tier_blocks=self._tier_blocks,
            pipeline=self.ranks.pp,
            pooler=self._pooler(),
            virtual=self._virtual_tokens(),
            serve_experts=partial(serve_experts, cast(torch.nn.Module, self.model)),
            added_tokens=0 if self.config.lora_config is None else self.config.lora_config.lora_extra_vocab_size,
        )

    def _virtual_tokens(self) -> VirtualTokenTable | None:
        """Where requests bring embeddings of prompt adapters. Raises ValueError if the model cannot take them."""
        if self.config.prompt_adapter_config is None:
            return None
        traits = self.model.traits
        if "virtual" not in traits.handles or self.config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("Prompt adapters are not available for this model, nor with pipeline parallelism.")
        return VirtualTokenTable(traits.hidden_size, traits.dtype, self.context)

    def _pooler(self) -> Pooler | None:
        """How the model pools, None for one that generates."""
        settings = self.config.model_config.pooling
        if settings is None:
            return None
        types = "token_types" in self.model.traits.takes
        if "pooler" in self.model.traits.heads:
            return OwnPooler(cast(OwnPoolingModel, self.model).pool, takes_types=types)
        if settings.labels and "pooled" not in self.model.traits.heads:
            raise ValueError(
                "This model has no head for classes: it is a class of your own, or runs through transformers. It can "
                "embed (task='embed')."
            )
        return Pooler(
            PoolingKind(settings.type),
            normalize=settings.normalize,
            activation=settings.activation,
            head=cast(PoolingModel, self.model).pooled if "pooled" in self.model.traits.heads else None,
            step_tag=settings.step_tag,
            takes_types=types,
        )

    def _use_graphs(self, runner: ModelRunner | StageRunner) -> None:
        """Let captured CUDA graphs run decode steps: those of one request are there at once, the others in idle moments
        or when their batch size has been seen a few times.
        """
        from vllm.worker.cuda_graphs import DecodeGraphs
        from vllm.worker.mixed_graphs import MixedGraphs
        from vllm.worker.rehearsal import rehearse
        from vllm.worker.stage_graphs import StageGraphs
        from vllm.worker.static_steps import graphs_know

        sizes, context = self.config.compilation_config.cudagraph_capture_sizes, self.context
        longest = self.config.model_config.max_seq_len_to_capture
        traits = runner.model.traits
        if not isinstance(context, CudaContext) or not traits.capturable or not graphs_know(self.layout):
            return
        if isinstance(runner, StageRunner):
            self._graphs = runner.decode_steps = StageGraphs(runner, context, sizes, longest, self._compiling)
        else:
            self._graphs = runner.decode_steps = DecodeGraphs(runner, context, sizes, longest, self._compiling)
        ours = self.config.model_config.attention_backend in (None, "TRITON_ATTN")
        if ours and traits.replayable:
            self._mixed_graphs = runner.mixed_steps = MixedGraphs(
                runner, context, longest, self.config.scheduler_config.max_num_batched_tokens
            )
        if self.ranks.world == 1 and isinstance(runner, ModelRunner):
            rehearse(runner, self.config.model_config.max_model_len)
            with torch.inference_mode():
                while self._graphs.prepare(first=True):
                    pass

    def prepare(self) -> bool:
        """Do a piece of what later steps would have to wait for, tens of milliseconds long; whether there is more.

        Nothing may be in flight. Stages do it each for itself; ranks that share layers would have to do it together, to
        the last piece that fits into memory, and capture as they go.
        """
        if self.tp.world > 1 or self.tp.exchange is not None:
            return False
        try:
            with torch.inference_mode():
                steps = (self._mixed_graphs, self._graphs)
                return self._load_one() or any(graphs is not None and graphs.prepare() for graphs in steps)
        except torch.OutOfMemoryError:
            logger.warning("There is no memory for more CUDA graphs; steps without one are launched kernel by kernel.")
            return False

    def close(self) -> None:
        """Let go of captured graphs, which hold on to the collectives in them, and of the cache.

        Nothing can be executed afterwards.
        """
        if self.tp.one_shot is not None:
            self.tp.one_shot.release()
        self.ranks.pp.close()
        for shared in (self.tp.exchange, self.ranks.peers):
            if shared is not None:
                shared.close()
        if self.adapters is not None:
            self.adapters.close()
        for graphs in (self._graphs, self._mixed_graphs):
            if graphs is not None:
                graphs.close()
        if self.runner is not None:
            self.runner.decode_steps = self.runner.mixed_steps = None  # which know the runner: memory is free at once
        self._graphs = self._mixed_graphs = self.runner = self._tokens = None

    def _run_largest_step(self) -> None:
        """A step of max_num_batched_tokens tokens and max_num_seqs rows of logits, all in the null block."""
        tokens, requests = self._largest_batch()
        if self.tp.exchange is not None:  # all copies do the same now
            self.tp.exchange.expect(tokens)
        step = dummy_step(tokens, requests, self.layout, self.context)
        stream, pp = None, self.ranks.pp
        if not pp.is_first:
            traits = self.model.traits
            stream = torch.zeros(tokens, traits.hidden_size, dtype=traits.dtype, device=self.device)
        with torch.inference_mode():
            hidden = self.model(step, self._allocate(1, 1).tensors, stream)
            if not pp.is_last or self.config.model_config.pooling is not None:
                return
            logits = self.model.logits(hidden[:requests])
            logits.sort(-1)  # stands for what sampling needs at most

    def execute(self, plan: StepPlan) -> Handle:
        """Queue one step."""
        if not isinstance(self.runner, ModelRunner):
            raise RuntimeError("The worker has no KV cache yet, call start() first; or it does not sample.")
        self._balance(plan)
        handle = self.runner.execute(plan)
        if self._tokens is not None:
            with torch.inference_mode():
                self._tokens.send(plan)
        return handle

    def _balance(self, plan: StepPlan) -> None:
        """Let experts change places before a step, where that is asked for and due: on all ranks before the same."""
        if self._balancer is not None and (plan.exchanged or len(plan.slots)):
            self._balancer.step()

    def follow(self, plan: StepPlan, known: Known | None, told: int) -> None:
        """Queue one step whose result is nobody's business here. known, told: see `StageRunner.execute`."""
        if isinstance(self.runner, StageRunner):
            self._balance(plan)
            self.runner.execute(plan, known, told)
        else:
            self.execute(plan)

    def complete(self, step_id: int, masks: RowMasks | None) -> None:
        """Give the last step the masks that it waits for."""
        if not isinstance(self.runner, ModelRunner):
            raise RuntimeError("The worker has no KV cache yet, call start() first; or it does not sample.")
        self.runner.complete(step_id, masks)

    def begin_loading_adapter(self, adapter_id: int, folder: str) -> None:
        """Read a LoRA adapter into host memory, beside the steps."""
        self._known_adapters().begin_loading(adapter_id, folder)

    def loaded_adapters(self) -> list[list[Any]]:
        """[id, digest, None] or [id, None, why not] of each adapter whose reading has ended since the last call."""
        return self._known_adapters().loaded()

    def drop_adapter(self, adapter_id: int) -> None:
        """Forget a LoRA adapter in host memory."""
        self._known_adapters().drop(adapter_id)

    def _known_adapters(self) -> WorkerAdapters:
        if self.adapters is None:
            raise ValueError("LoRA is not enabled.")
        return self.adapters

    # -- for functions that are given the worker, under the names that vLLM's workers have ----------------------------

    @property
    def worker(self) -> Worker:
        """This one: vLLM's `driver_worker` is a wrapper, whose `worker` programs ask for."""
        return self

    @property
    def rank(self) -> int:
        """This worker's number, which is also its place in the results of `collective_rpc`."""
        return self.ranks.index

    @property
    def local_rank(self) -> int:
        """The rank among those of this host."""
        return self.ranks.local[0]

    @property
    def vllm_config(self) -> VllmConfig:
        return self.config

    @cached_property
    def model_config(self) -> ModelConfig:
        """The settings of the model, with a torch dtype in place of its name."""
        found = copy(self.config.model_config)
        object.__setattr__(found, "dtype", dtype_of(found.dtype))
        return found

    @property
    def parallel_config(self) -> ParallelConfig:
        return self.config.parallel_config

    @property
    def cache_config(self) -> CacheConfig:
        return self.config.cache_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.config.scheduler_config

    @property
    def load_config(self) -> LoadConfig:
        return self.config.load_config

    @property
    def lora_config(self) -> LoRAConfig | None:
        return self.config.lora_config

    @property
    def is_driver_worker(self) -> bool:
        """Whether this is the core's own worker."""
        return self.ranks.is_first

    @property
    def model_runner(self) -> ModelRunner | StageRunner:
        """What executes steps; `model_runner.model` is the model."""
        if self.runner is None:
            raise RuntimeError("The worker has no KV cache yet: call start() first.")
        return self.runner

    def get_model(self) -> Model:
        """The model. Weights that were repacked for this device are no parameters: see `apply_model`."""
        self._return_experts()
        return self.model

    def _return_experts(self) -> None:
        """Bring experts back that have changed places; all ranks do."""
        if self._balancer is not None:
            self._balancer.restore()

    def apply_model(self, function: Callable[[Any], Any]) -> Any:
        """Call `function` with the model, each weight as it came from the checkpoint; changes to them stay."""
        self._return_experts()
        try:
            with unpacked(list(self.model.modules())):
                return function(self.model)
        finally:
            self._fuse()

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write this rank's weights for load_format="sharded_state". Raises ValueError for the model's own folder."""
        folder, rank = Path(path).expanduser(), rank_state.number(self.tp, self.ranks.pp.rank)
        if folder.exists() and folder.samefile(self.config.model_config.path):
            raise ValueError(f"{path} is the model's own folder: its weights would be mixed with these. Name another.")
        self._save(lambda tensors: rank_state.write_files(tensors, folder, rank, pattern, max_size))

    def save_tensorized(self, settings: dict[str, Any]) -> None:
        """Write this rank's weights for load_format="tensorizer". settings: of a `TensorizerConfig`."""
        from vllm.model_executor.model_loader import tensorizer

        config = tensorizer.TensorizerConfig.of(settings)
        rank, world = rank_state.number(self.tp, self.ranks.pp.rank), self.ranks.world
        self._save(lambda tensors: tensorizer.write(tensors, config, rank, world))

    def _save(self, write: Callable[[Iterator[tuple[str, Tensor]]], object]) -> None:
        from vllm.model_executor.model_loader.loader import save_tensors

        if self.config.lora_config is not None:
            raise ValueError("Weights cannot be saved with enable_lora=True. Load the model without it.")
        stage = self.ranks.pp.rank
        self.apply_model(lambda model: write(save_tensors(model, self.config, self.device, self.tp, stage)) and None)

    def start_profile(self) -> None:
        """Begin a torch.profiler trace, written to VLLM_TORCH_PROFILER_DIR."""
        folder = envs.VLLM_TORCH_PROFILER_DIR
        if folder is None:
            raise RuntimeError("Profiler is not enabled. Set VLLM_TORCH_PROFILER_DIR to a folder for the traces.")
        if self._profiler is None:
            self._profiler = WorkerProfiler(folder, self.ranks.index)
        self._profiler.start()

    def stop_profile(self) -> None:
        """End the trace and write it."""
        if self._profiler is None:
            raise RuntimeError("Profiler is not enabled. Call start_profile first.")
        self._profiler.stop()

    def check_health(self) -> None:
        """Raises if the device does not answer."""
        self.context.synchronize()


def head_sizes(traits: Traits) -> list[int]:
    """The sizes of the heads whose keys and values a rank's layers keep."""
    paged = (need for need in traits.kv if need is not None and need.kind is not KVKind.RECURRENT)
    return sorted({tensor.shape[-1] for need in paged for tensor in need.tensors})


def dummy_step(tokens: int, requests: int, layout: KVLayout, context: DeviceContext) -> StepInputs:
    """Inputs of `tokens` tokens evenly over `requests` requests, which live in the null block."""
    counts: np.ndarray = np.full(requests, tokens // requests, np.int32)
    counts[: tokens % requests] += 1
    starts: np.ndarray = np.zeros(requests + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(tokens, dtype=np.int64) - np.repeat(starts[:-1].astype(np.int64), counts)
    longest = int(counts.max())
    table: np.ndarray = np.zeros((requests, -(-longest // layout.block_size)), np.int32)
    token_ids, d_positions, d_starts, d_lens, rows, mapping, d_table = context.upload(
        [
            np.zeros(tokens, np.int64),
            positions,
            starts,
            counts,
            starts[1:].astype(np.int64) - 1,
            positions % layout.block_size,
            table,
        ]
    )
    group = GroupInputs(slot_mapping=mapping, block_table=d_table)
    no_keys = replace(group, slot_mapping=mapping[:0], key_lens=torch.zeros_like(d_lens))
    groups = [no_keys if kind.kind is KVKind.CROSS else group for kind in layout.groups]
    return StepInputs.of(
        token_ids, d_positions, d_starts, d_lens, groups, logits_rows=rows,
        host_query_starts=starts, host_seq_lens=counts,
    )  # fmt: skip
