"""The LoRA adapters of one rank: read beside the steps, kept in host memory, copied to slots on the device by plans."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from vllm.lora.adapter import read_adapter
from vllm.lora.config import MAX_TENSORS, check_stretch
from vllm.lora.layers import HostAdapter, LoRALayers
from vllm.model_executor.layers.dtypes import dtype_of
from vllm.model_executor.layers.weight_layout import WeightLayout, canonical
from vllm.model_executor.models.registry import family_of
from vllm.step.inputs import RowView, Segment, StepFeatures
from vllm.step.plan import AdapterLoad, Column, StepPlan
from vllm.worker.device import DeviceContext
from vllm.worker.input_builder import Laid

ROWS_WITH_ADAPTERS = "rows with adapters"
_STRETCHED = "divided positions"
_ADDED = "added tokens"
_NICE = 10  # of the thread that reads adapters: steps come first
_LONGEST = 60.0  # seconds that reading an adapter may take, and for the largest that there may be
_SLOWEST = 10e6  # bytes a second more
_AT_ONCE = 0.001  # seconds that it works without a rest
_QUIET = 0.1  # seconds after the last step from which on nobody has to be let in

if TYPE_CHECKING:
    from vllm.config import LoRAConfig, VllmConfig
    from vllm.model_executor.models.traits import AdaptableModel, Model


class WorkerAdapters:
    """Owns what adapters there are on this rank. Methods are called by the worker's own thread.

    column: of a request's slot, the slot of its adapter on the device, -1 for none.
    """

    column = Column("adapter", "int32", -1)

    def __init__(self, config: VllmConfig, model: Model, context: DeviceContext) -> None:
        """Raises ValueError if the model does not know adapters."""
        lora = config.lora_config
        if lora is None:
            raise ValueError("LoRA is not enabled.")
        self._context = context
        names = [name for name in config.model_config.architectures if family_of(name) is not None]
        if "adapters" not in model.traits.handles or not names:
            raise ValueError(f"{config.model_config.architectures[0]} does not support LoRA yet.")
        self._family = family_of(names[0])
        self._model = cast("AdaptableModel", model)  # as its traits say
        dtype = adapter_dtype(lora, model.traits.dtype)
        self._max_rank = lora.max_lora_rank
        self._layers = LoRALayers(
            self._model.adaptable(), lora.max_loras, lora.max_lora_rank, dtype, context.device,
            sharded=lora.fully_sharded_loras, extra=lora.lora_extra_vocab_size,
        )  # fmt: skip
        factors = sorted({*(lora.long_lora_scaling_factors or ())} - {1.0})
        self._positions = config.model_config.hf.get_int("max_position_embeddings", default=None)
        self._rotary = dict(zip(factors, self._model.stretch(factors), strict=True)) if factors else {}
        self._rows: np.ndarray = np.zeros(lora.max_loras + 1, np.int64)  # of rotary tables, by slot; last: without
        self._max_bytes = config.parallel_config.pipeline_parallel_size * self._layers.max_file_bytes()
        whole = config.parallel_config.pipeline_parallel_size == 1  # of the other stages' layers there may be more
        self._max_tensors = min(MAX_TENSORS, self._layers.max_tensors()) if whole else MAX_TENSORS
        self._host: dict[int, HostAdapter] = {}
        self._pace = _Pace()
        self._patience = _LONGEST + self._max_bytes / _SLOWEST
        self._loading: dict[int, Future[HostAdapter]] = {}
        self._unwanted: set[int] = set()  # of those that are being read
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters", initializer=_give_way)
        self._slots: np.ndarray = np.full(config.num_slots, self.column.neutral, np.int32)

    # -- host memory ---------------------------------------------------------------------------------------------------

    def begin_loading(self, adapter_id: int, folder: str) -> None:
        """Read an adapter in another thread; `loaded` tells when that is done."""
        self._unwanted.discard(adapter_id)
        self._loading[adapter_id] = self._reader.submit(self._read, adapter_id, Path(folder))

    def loaded(self) -> list[list[Any]]:
        """[id, digest as hex, None] of the adapters that have been read since the last call, [id, None, why] of those
        that cannot be.
        """
        news: list[list[Any]] = []
        for adapter_id, future in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[adapter_id]
            error = future.exception()
            if error is not None:
                known = isinstance(error, ValueError | OSError)
                news.append([adapter_id, None, str(error) if known else f"{type(error).__name__}: {error}"])
                continue
            self._host[adapter_id] = future.result()
            news.append([adapter_id, self._host[adapter_id].digest.hex(), None])
        return news

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter in host memory; what has been copied to the device stays there. One that is being read is
        not read to its end, which `loaded` tells as an error.
        """
        self._host.pop(adapter_id, None)
        if adapter_id in self._loading:
            self._unwanted.add(adapter_id)

    def _read(self, adapter_id: int, folder: Path) -> HostAdapter:
        assert self._family is not None
        started = time.monotonic()

        def rest() -> None:
            if adapter_id in self._unwanted:
                raise ValueError("It is not wanted any more.")
            if time.monotonic() - started > self._patience:
                raise ValueError(f"{folder}: reading the adapter took longer than {self._patience:.0f} seconds.")
            self._pace.rest()

        adapter = read_adapter(
            folder, self._family.resolve, self._canonical, max_rank=self._max_rank, max_bytes=self._max_bytes,
            max_tensors=self._max_tensors, vocabulary=self._model.traits.vocab_size, rest=rest,
        )  # fmt: skip
        stretch = check_stretch(adapter.config, self._positions, self._rotary)
        prepared = self._layers.prepare(adapter, self._model.is_elsewhere, rest).moved(self._context.host_bytes, rest)
        return replace(prepared, rotary_row=self._rotary.get(stretch, 0))

    def _canonical(self, tensor: Tensor, layout: WeightLayout, name: str) -> Tensor:
        return canonical(tensor, layout, *self._model.heads_of(int(name.split(".")[1])))

    def close(self) -> None:
        """End the thread that reads."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def follow(self, slots: np.ndarray) -> None:
        """slots: the values of `column` on the host, by slot of a request."""
        self._slots = slots

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        """Copy adapters to the device. What is queued there already still reads the ones before them."""
        for load in loads:
            self._layers.load(load.slot, self._host[load.adapter_id])
            self._rows[load.slot] = self._host[load.adapter_id].rotary_row

    def features(self, plan: StepPlan) -> frozenset[str]:
        """What the adapters of a plan's requests ask of a step beyond the usual: "rows with adapters", "adapted
        experts" where one changes experts, "added tokens" where one adds some to the vocabulary, and "divided
        positions" where one is for longer sequences.
        """
        self._pace.last_step = time.monotonic()
        present = set(self._slots[plan.slots].tolist()) - {self.column.neutral}
        if not present:
            return frozenset()
        experts = {"adapted experts"} if present & self._layers.with_experts else set()
        added = {_ADDED} if present & self._layers.with_added else set()
        stretched = {_STRETCHED} if self._rows[list(present)].any() else set()
        return frozenset({ROWS_WITH_ADAPTERS, *experts, *added, *stretched})

    def views(self, plan: StepPlan, laid: Laid) -> StepFeatures | None:
        """What the layers need to know of the step's tokens and of its wanted rows; None without adapters."""
        by_token = self.of_tokens(plan)
        rows, rotary = self._rows[by_token], None  # -1, for none, is the last one
        if rows.any():
            (rotary,) = self._context.upload([laid.positions + rows])
        views = self.view(by_token), self.view(by_token[laid.logits_rows])
        return StepFeatures(adapters=views, rotary=rotary)

    def of_tokens(self, plan: StepPlan) -> np.ndarray:
        """Each token's adapter, as in `RowView`: [tokens] int32."""
        by_token: np.ndarray = np.repeat(self._slots[plan.slots], plan.num_tokens)
        return by_token

    def view_of_slots(self, slots: np.ndarray) -> RowView | None:
        """The view of one row for each of these requests."""
        return self.view(self._slots[slots])

    def view(self, adapters: np.ndarray) -> RowView | None:
        """The view of rows that use these adapters, [rows] int32; None if none of them uses one."""
        present = np.unique(adapters)
        present = present[present >= 0]
        if not len(present):
            return None
        if len(present) == 1 and (adapters >= 0).all():
            (device,) = self._context.upload([adapters.astype(np.int32)])
            return RowView(device, (Segment(int(present[0]), None),))
        rows = [np.flatnonzero(adapters == slot) for slot in present]
        device, *indices = self._context.upload([adapters.astype(np.int32), *rows])
        segments = zip(present.tolist(), indices, strict=True)
        return RowView(device, tuple(Segment(slot, index) for slot, index in segments))


class _Pace:
    """Of the thread that reads: between steps it works for about a millisecond, then rests for as long, so that a step
    waits no longer for the interpreter or for a processor.

    last_step: when a step has begun last, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.last_step = 0.0
        self._since = 0.0

    def rest(self) -> None:
        """Called between two pieces of work."""
        now = time.monotonic()
        worked = now - self._since
        if worked < _AT_ONCE:
            return
        if now - self.last_step < _QUIET:
            time.sleep(min(worked, 10 * _AT_ONCE))
        self._since = time.monotonic()


def adapter_dtype(lora: LoRAConfig, model: torch.dtype) -> torch.dtype:
    """Of the adapters' matrices, for a model of this dtype."""
    return model if lora.lora_dtype in (None, "auto") else dtype_of(lora.lora_dtype)


def _give_way() -> None:
    """Let this thread have what processors the others leave, where threads have priorities of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def adapter_view(adapters: WorkerAdapters | None, slots: np.ndarray) -> RowView | None:
    """The view of one row for each of these requests, None where there are no adapters at all."""
    return None if adapters is None else adapters.view_of_slots(slots)
