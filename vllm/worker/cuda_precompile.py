"""Which kernels a model will need: a dry run of its steps on tensors without memory, for `ops/triton/precompile`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm.distributed.parallel_state import SINGLE, TensorParallel
from vllm.lora.layers import LoRALayers
from vllm.model_executor.layers.dtypes import dtype_of
from vllm.model_executor.layers.quantization import format_of
from vllm.model_executor.layers.quantization.method import ModelQuantization
from vllm.model_executor.model_loader.loader import build_decoder
from vllm.model_executor.model_loader.quantized_weights import fill_quantized_without_memory
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.kv_groups import layout_of
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.spec import Decoder
from vllm.model_executor.models.traits import Model
from vllm.ops.attention import plan_gathering
from vllm.ops.draw import DrawParams
from vllm.ops.shared_prefix import SharedPlan
from vllm.ops.triton.decode_step import (
    ARGMAX_BLOCK,
    Drawing,
    argmax_tiles,
    choose_tokens,
    draw_tokens,
    gather_inputs,
)
from vllm.ops.triton.draw import draw
from vllm.ops.triton.precompile import Precompilation, precompile
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.step.kv_policy import KVLayout
from vllm.worker.adapters import adapter_dtype
from vllm.worker.decode_program import DecodeProgram, ProgramWeights, read_weights
from vllm.worker.kv_memory import allocate, cache_dtype
from vllm.worker.prefix_sharing import Heads, plan_views, static_plans
from vllm.worker.static_steps import SPANS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.lora import LoRAConfig

META = torch.device("meta")
_TABLE_WIDTH = 4096  # tokens per row of a new slot table


def start(config: VllmConfig, capability: tuple[int, int], tp: TensorParallel = SINGLE) -> Precompilation | None:
    """Start to compile what this rank's share of the configured model needs; None if it is not a decoder of ours."""
    model, cache = config.model_config, config.cache_config
    family = None if model.model_impl == "transformers" else ModelRegistry.resolve(model.hf.architectures)
    if not isinstance(family, Family):
        return None
    run = DryRun(
        family.decoder_of(model.hf),
        dtype_of(model.dtype),
        model.max_model_len,
        cache.block_size,
        cache_dtype(cache.cache_dtype, model.dtype),
        config.num_slots,
        config.compilation_config.cudagraph_capture_sizes,
        tp,
        family.modules,
        config.parallel_config.pipeline_parallel_size,
        config.lora_config,
        None
        if model.quantized is None
        else ModelQuantization(
            format_of(model.quantized), family, packs_experts=not config.parallel_config.enable_eplb
        ),
    )
    return precompile([run.first, run.sampling], [run.larger], capability[0] * 10 + capability[1])


class _Table:
    """A slot table without memory."""

    def __init__(self, slots: int, layout: KVLayout) -> None:
        self.block_size = layout.block_size
        self.tokens = torch.empty(slots, _TABLE_WIDTH, dtype=torch.int32, device=META)
        self.device_lengths = torch.empty(slots, dtype=torch.int32, device=META)
        columns = _TABLE_WIDTH // layout.block_size + 1
        self.tables = [torch.empty(slots, columns, dtype=torch.int32, device=META) for _ in layout.groups]


class DryRun:
    """Every kind of step of one model, without a device."""

    def __init__(
        self, spec: Decoder, dtype: torch.dtype, max_positions: int, block_size: int, cache_dtype: torch.dtype,
        num_slots: int, graphs: Sequence[int], tp: TensorParallel = SINGLE, modules: str | None = None,
        stages: int = 1, lora: LoRAConfig | None = None, quantization: ModelQuantization | None = None,
    ) -> None:  # fmt: skip
        """graphs: batch sizes whose decode steps are captured, and fused where that is possible.   stages: of the
        pipeline; the model's kernels are then those of all of them.   lora: where rows may have adapters.
        quantization: of a quantized model, whose weights are taken to be stored as this format usually stores them.
        """
        kinds = tuple(dict.fromkeys(spec.blocks))  # layers that are alike need the same kernels
        self._spec = replace(spec, blocks=kinds)
        self._dtype, self._max_positions, self._block_size = dtype, max_positions, block_size
        self._cache_dtype, self._num_slots, self._graphs, self._tp = cache_dtype, num_slots, graphs, tp
        self._modules, self._stages, self._lora, self._quantization = modules, stages, lora, quantization

    def _model(self) -> tuple[Model, KVLayout, list[Tensor]]:
        model = build_decoder(
            self._spec, self._dtype, self._max_positions, META, self._tp, self._quantization, self._modules
        )
        if self._quantization is not None:
            fill_quantized_without_memory(model, self._quantization)
        layout = layout_of(model.traits, self._block_size, self._cache_dtype)
        if self._lora is not None:
            LoRALayers(
                model.adaptable(),
                self._lora.max_loras,
                self._lora.max_lora_rank,
                adapter_dtype(self._lora, self._dtype),
                META,
            )
        return model, layout, allocate(layout, 1000, 100, self._cache_dtype, META).tensors

    def first(self) -> None:
        """What the first requests need: prompts and mixed batches, and decode steps of one row."""
        model, layout, caches = self._model()
        queries_of_steps: list[list[int]] = [[1024], [300], [200, 40], [1, 1]]
        if self._quantization is not None:  # kernels for packed weights differ by tokens, and requests at the end
            queries_of_steps += [[2] * 10, [2] * 20, [2] * 40]
        for queries in queries_of_steps:
            model.logits(model(mixed_step(np.array(queries, np.int32), layout), caches)[:2])
        self._decode(model, layout, caches, self._graphs[:1])

    def larger(self) -> None:
        """Decode steps of more rows, prompts of very different lengths, and few long sequences among prompts."""
        model, layout, caches = self._model()
        model(mixed_step(np.array([1024, 40, 1], np.int32), layout), caches)
        model(mixed_step(np.array([1, 40], np.int32), layout, cached=_TABLE_WIDTH), caches)
        for window in {need.window for need in model.traits.kv if need is not None and need.window is not None}:
            model(mixed_step(np.array([window + 1], np.int32), layout), caches)  # the first prompt to outgrow it
        for shared in (False, True):
            model(mixed_step(np.array([1024], np.int32), layout, cached=64, shared=shared), caches)
        self._decode(model, layout, caches, self._graphs[1:])

    def sampling(self) -> None:
        """The kernels that requests with a temperature need."""
        logits = torch.empty(2, self._spec.vocab_size, device=META)
        one = torch.empty(2, device=META)
        none: np.ndarray = np.zeros(2, np.int32)
        draw(logits, DrawParams(one, one, torch.empty(2, dtype=torch.int32, device=META), one, one, none, none))
        ids, starts = torch.empty(2, dtype=torch.int32, device=META), torch.empty(2, dtype=torch.int64, device=META)
        tokens = torch.empty(2, _TABLE_WIDTH, dtype=torch.int32, device=META)
        drawing = Drawing(one, one, ids, one, starts)
        draw_tokens(logits, ids, ids, drawing, tokens, ids, ids)
        bits = torch.empty(2, -(-logits.shape[1] // 32), dtype=torch.int32, device=META)
        draw_tokens(logits, ids, ids, drawing, tokens, ids, ids, masks=(ids, bits))
        shape = 2, -(-logits.shape[1] // ARGMAX_BLOCK)
        best, best_at = (torch.empty(shape, dtype=t, device=META) for t in (torch.float32, torch.int32))
        tiles = argmax_tiles(logits, best, best_at, best, (ids, bits))
        choose_tokens(ids, ids, best, best_at, best, tiles, logits.shape[1], tokens, ids, ids, masked=True)

    def _decode(self, model: Model, layout: KVLayout, caches: list[Tensor], sizes: Sequence[int]) -> None:
        if not sizes:
            return
        table: Any = _Table(self._num_slots, layout)
        weights = read_weights(model, caches)
        heads = Heads.of(model.traits, layout)
        heads = heads if heads is not None and heads.fit else None
        # as wide as the real ones: where a row of them begins decides how it is read
        inputs = torch.empty(2, self._graphs[-1], dtype=torch.int32, device=META)
        ids = torch.empty(self._graphs[-1], dtype=torch.int32, device=META)
        for size, span in itertools.product(sizes, SPANS[:1]):
            slots, positions = inputs[0, :size], inputs[1, :size]
            plan = None if heads is None or size < 3 else shared_plan(heads, size)  # two gain nothing
            if weights is not None and weights.covers(size, False):
                hidden = torch.empty(size, self._spec.hidden_size, dtype=self._dtype, device=META)
                for part in stages_of(weights, self._stages):
                    stream = None if self._stages == 1 else torch.empty_like(hidden)
                    found, last = (None, None) if part.head is None else (ids, hidden)
                    program = DecodeProgram(part, size, span, slots, positions, stream=stream)
                    program.run(table, token_ids=found, hidden=last)
                    self._finish(program, table)
                    if self._lora is not None and part.takes_adapters:
                        by_slot = torch.empty(self._num_slots, dtype=torch.int32, device=META)
                        program = DecodeProgram(part, size, span, slots, positions, stream=stream, adapters=by_slot)
                        program.run(table, token_ids=found, hidden=last)
                        self._finish(program, table)
                    if plan is not None:
                        program = DecodeProgram(part, size, span, slots, positions, shared=plan, stream=stream)
                        program.run(table, token_ids=found)
                continue
            step = mixed_step(np.ones(size, np.int32), layout, cached=span - 1)
            shared = (step.token_ids, step.positions, step.seq_lens)
            for g, group in enumerate(step.groups):
                gather_inputs(
                    slots, positions, table.tokens, table.tables[g], shared, group.slot_mapping, group.block_table,
                    self._block_size, g == 0,
                )  # fmt: skip
            if plan is not None:
                groups = (msgspec.structs.replace(step.groups[0], plan=plan), *step.groups[1:])
                model(msgspec.structs.replace(step, groups=groups), caches)
            logits = model.logits(model(step, caches))
            best = torch.empty(size, 64, device=META)
            tiles = argmax_tiles(logits, best, torch.empty(size, 64, dtype=torch.int32, device=META), best)
            choose_tokens(
                slots, positions, best, ids, best, tiles, logits.shape[1], table.tokens, table.device_lengths, ids
            )

    def _finish(self, program: DecodeProgram, table: Any) -> None:
        """The end of a step whose rows have masks, where there is one of its own."""
        if self._tp.world > 1 or program.weights.head is None:
            return
        rows, words = program.rows, -(-self._spec.vocab_size // 32)
        index = torch.empty(rows, dtype=torch.int32, device=META)
        bits = torch.empty(rows, words, dtype=torch.int32, device=META)
        ring = torch.empty(2, rows, dtype=torch.int32, device=META)
        program.finish(table, ring, index, (index, bits))


def stages_of(weights: ProgramWeights, stages: int) -> list[ProgramWeights]:
    """What the stages of a pipeline run of a model's decode step, as far as kernels can tell them apart."""
    if stages == 1:
        return [weights]
    first, last = replace(weights, head=None, head_bias=None, norm=None), replace(weights, entrance=None)
    return [first, last] if stages == 2 else [first, last, replace(first, entrance=None)]


def shared_plan(heads: Heads, rows: int) -> SharedPlan:
    """Where a plan for shared keys would stand, without memory."""
    return plan_views(heads, rows, static_plans(heads, rows, META))


def mixed_step(queries: np.ndarray, layout: KVLayout, cached: np.ndarray | int = 0, shared: bool = False) -> StepInputs:
    """Inputs of requests with so many tokens each, without memory.

    cached: tokens that were computed before.   shared: long requests have keys in common.
    """
    starts: np.ndarray = np.zeros(len(queries) + 1, np.int32)
    np.cumsum(queries, out=starts[1:])
    lens: np.ndarray = (queries + cached).astype(np.int32)
    tokens, longest = int(starts[-1]), int(lens.max())

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    gathered, plan = plan_gathering(queries, lens), None
    if gathered is not None:
        pieces, requests = (empty(*x.shape, dtype=torch.int32) for x in (gathered.pieces, gathered.requests))
        plan = replace(gathered, shared=shared).on_device(pieces, requests)
    table = empty(len(queries), -(-longest // layout.block_size), dtype=torch.int32)
    group = GroupInputs(empty(tokens), table, plan)
    return StepInputs.of(
        empty(tokens), empty(tokens), empty(len(queries) + 1, dtype=torch.int32),
        empty(len(queries), dtype=torch.int32), (group,) * len(layout.groups), logits_rows=empty(len(queries)),
        host_query_starts=starts, host_seq_lens=lens,
    )  # fmt: skip
