"""Linear layers whose weights are shared by tensor-parallel ranks, Megatron style.

Column-parallel layers split their outputs and need no communication; row-parallel layers split their inputs and add up
the ranks' partial sums. `forward` returns (output, bias), as out-of-tree models expect, the bias only if
`skip_bias_add`; `project` returns the output alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vllm.distributed import TensorParallel, current_tensor_parallel
from vllm.model_executor.layers.linear_method import (
    LinearMethod,
    LinearShape,
    QuantizationConfig,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.sharding import REPLICATED, Part, ShardedParameter, ShardSpec, whole
from vllm.ops.lora import LowRank
from vllm.step.inputs import RowView

__all__ = [
    "ColumnParallelLinear",
    "LinearBase",
    "LinearMethod",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "UnquantizedLinearMethod",
]


class AddsToRows(Protocol):
    """Adds to a layer's output what the adapters of its rows say, in place and before any sum over ranks."""

    matrices: LowRank
    whole: bool

    def add(self, out: Tensor, x: Tensor, rows: RowView) -> None: ...


class LinearBase(nn.Module):
    """A linear map of `shape`, stored and computed by a `LinearMethod`.

    linear_method: the format of the weights; by default what `quant_config` chooses for `prefix`, else unquantized.
    params_dtype: by default torch's default dtype.   tp: by default that of `use_tensor_parallel`.
    """

    weight: ShardedParameter | None
    bias: ShardedParameter | None
    packed: Any
    lora: AddsToRows | None  # what adapters add to the output, where there are any

    def __init__(
        self,
        shape: LinearShape,
        *,
        bias: bool,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        linear_method: LinearMethod | None = None,
        prefix: str = "",
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self.tp = current_tensor_parallel() if tp is None else tp
        self.shape = shape
        self.input_size, self.output_size = shape.in_features, shape.out_features
        self.skip_bias_add = skip_bias_add
        self.prefix = prefix
        self.packed = None
        self.lora = None
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        if linear_method is None and quant_config is not None:
            linear_method = quant_config.get_quant_method(self, prefix)
        self.method: LinearMethod = UnquantizedLinearMethod() if linear_method is None else linear_method
        self.method.create_weights(self, shape, dtype, self.tp)
        if bias:
            cut = shape.split == "out"
            spec = ShardSpec(0, shape.outputs) if shape.split != "in" else REPLICATED
            rank, world = (self.tp.rank, self.tp.world) if cut else (0, 1)
            self.bias = ShardedParameter.empty((shape.out_features,), spec, rank, world, dtype)
        else:
            self.bias = None

    @property
    def repacks_whole(self) -> bool:
        """As the method says."""
        return self.method.repacks_whole

    def process_after_load(self) -> None:
        """Let the method repack the filled weights."""
        self.method.process_after_load(self)

    def restore(self) -> bool:
        """Undo `process_after_load` where that loses nothing; whether it did."""
        return self.method.restore(self)

    def project(self, x: Tensor, view: RowView | None = None) -> Tensor:
        """The layer's output, bias added unless `skip_bias_add`.

        view: of the rows of x; None if none of them uses an adapter.
        """
        out = self.method.apply(self, x, None if self.skip_bias_add else self.bias)
        if view is not None and self.lora is not None:
            self.lora.add(out, x, view)
        return out

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, bias to be added by the caller)."""
        return self.project(x), self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return f"in={self.input_size}, out={self.output_size}, split={self.shape.split}, world={self.tp.world}"


class ReplicatedLinear(LinearBase):
    """Every rank holds all of the weight and computes all of the output."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, skip_bias_add: bool = False, **options: Any
    ) -> None:
        shape = LinearShape(whole(input_size), (whole(output_size),), "none")
        super().__init__(shape, bias=bias, skip_bias_add=skip_bias_add, **options)


class ColumnParallelLinear(LinearBase):
    """Each rank computes its share of the outputs. `output_sizes`: the fused projections' sizes, one by default."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        output_sizes: list[int] | None = None,
        *,
        parts: tuple[Part, ...] | None = None,
        **options: Any,
    ) -> None:
        if parts is None:
            parts = tuple(whole(size) for size in output_sizes or [output_size])
        super().__init__(
            LinearShape(whole(input_size), parts, "out"), bias=bias, skip_bias_add=skip_bias_add, **options
        )
        self.gather_output = gather_output
        self.output_size_per_partition = sum(part.cut(0, self.tp.world)[1] for part in parts)

    def project(self, x: Tensor, view: RowView | None = None) -> Tensor:
        out = super().project(x, view)
        return self.tp.all_gather(out) if self.gather_output else out


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel projections of one input in one product (gate | up).

    Their weights load one by one (shard ids 0, 1, ... or `part_names`) or already fused.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        *,
        part_names: tuple[str, ...] | None = None,
        **options: Any,
    ) -> None:
        if gather_output and len(output_sizes) > 1 and (options.get("tp") or current_tensor_parallel()).world > 1:
            raise ValueError("gather_output would interleave the merged projections; gather each of them separately.")
        names = part_names or ("",) * len(output_sizes)
        parts = tuple(whole(size, name) for size, name in zip(output_sizes, names, strict=True))
        super().__init__(input_size, sum(output_sizes), bias, gather_output, skip_bias_add, parts=parts, **options)
        self.output_sizes = list(output_sizes)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections in one product, dealt by heads: each rank gets q | k | v of its own heads.

    With fewer key/value heads than ranks, neighbouring ranks hold the same ones. Shard ids are "q", "k" and "v".
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        **options: Any,
    ) -> None:
        kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        parts = (
            Part(total_num_heads * head_size, total_num_heads, "q"),
            Part(kv_heads * head_size, kv_heads, "k"),
            Part(kv_heads * head_size, kv_heads, "v"),
        )
        super().__init__(hidden_size, 0, bias, False, skip_bias_add, parts=parts, **options)
        self.hidden_size, self.head_size = hidden_size, head_size
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, kv_heads
        self.num_heads = parts[0].cut(0, self.tp.world)[1] // head_size
        self.num_kv_heads = parts[1].cut(0, self.tp.world)[1] // head_size
        self.num_kv_head_replicas = max(1, self.tp.world // kv_heads)


class RowParallelLinear(LinearBase):
    """Each rank holds the weight's columns for its share of the inputs; the partial outputs are summed.

    input_is_parallel: x is already this rank's share.   reduce_results: sum over ranks (else the caller does).
    units: how many indivisible units (heads) the inputs are made of, for alignment with the layer before.
    The bias is added by the first rank only, so that the sum holds it once.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        *,
        units: int | None = None,
        **options: Any,
    ) -> None:
        inputs = Part(input_size, input_size if units is None else units)
        super().__init__(
            LinearShape(inputs, (whole(output_size),), "in"),
            bias=bias,
            skip_bias_add=skip_bias_add,
            params_dtype=params_dtype,
            **options,
        )
        if inputs.units % self.tp.world:  # replicated inputs would be counted twice in the sum
            raise ValueError(
                f"{self.tp.world} tensor-parallel ranks cannot share the {inputs.units} inputs of {self.prefix!r}. "
                f"Choose a tensor_parallel_size that divides {inputs.units}."
            )
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        self.input_size_per_partition = input_size // self.tp.world

    def project(self, x: Tensor, view: RowView | None = None) -> Tensor:
        if not self.input_is_parallel and self.tp.world > 1:
            x = x.chunk(self.tp.world, -1)[self.tp.rank]
        bias = self.bias if self.tp.is_first and not self.skip_bias_add else None
        out = self.method.apply(self, x, bias)
        if view is not None and self.lora is not None:
            self.lora.add(out, x, view)
        return self.tp.all_reduce(out) if self.reduce_results else out
