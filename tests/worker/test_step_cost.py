"""What a step costs, counted: kernels by name for each kind of step, and transfers and bytes between host and device.

Counts stand in for time, which no test can measure. A change that raises one needs a reason; write it down with the
new number.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worker.toy import Driver, Recording, Toy, attend_as_recorded
from vllm.model_executor.models.spec import Alibi, Attn, Block, Decoder, Layout, Mlp, Moe, Norm, Rope
from vllm.step.plan import RowMasks
from vllm.worker.device import CpuContext, Download
from vllm.worker.model_runner import ModelRunner

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is not chosen")

# views and allocations launch nothing
_FREE = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
    "flatten", "new_empty", "new_empty_strided", "select", "slice", "split", "split_with_sizes", "t", "transpose",
    "unbind", "unsqueeze", "view", "resolve_conj", "resolve_neg",
}  # fmt: skip


class _Launches(TorchDispatchMode):
    """Counts torch's own kernels beside what is added by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        result = func(*args, **(kwargs or {}))
        if name not in _FREE and not (name == "to" and result is args[0]):
            self.count[name] += 1
        return result


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the kernels that are launched on "meta" tensors, and runs none."""
    from triton.runtime.interpreter import InterpretedFunction

    from vllm.ops import linear as linear_ops
    from vllm.ops import triton as kernels
    from vllm.ops.triton.linear import shape_only

    launches = _Launches()

    def run(self: Any, *args: Any, **options: Any) -> None:
        launches.count[self.__name__.strip("_").removesuffix("_kernel")] += 1

    def product(*args: Any, **options: Any) -> torch.Tensor:
        launches.count["cublas"] += 1
        return shape_only(*args, **options)

    kernels.register("meta")
    linear_ops.linear.register("meta", product)
    monkeypatch.setattr(InterpretedFunction, "run", run)
    with launches, torch.inference_mode():
        yield launches.count
    linear_ops.linear.register("meta", shape_only)


_MLP = Mlp("silu", 14336)


def _decoder(window: int | None = None, alibi: bool = False, ffn: Mlp | Moe = _MLP, **kind: Any) -> Decoder:
    norm = Norm()
    slopes = Alibi() if alibi else None
    blocks = [
        Block(Attn(32, 8, 128, Rope(128), window=window if i % 2 else None, alibi=slopes), ffn, norm, **kind)
        for i in range(4)
    ]
    return Decoder(128256, 4096, tuple(blocks), norm, tied=False)


def _decode_step(
    spec: Decoder, rows: int, kind: str, monkeypatch: pytest.MonkeyPatch, masked: bool = False
) -> dict[str, int]:
    """The kernels of a decode step of so many rows that ends as `kind` says. masked: only those of a fused step's end
    under masks.
    """
    from vllm.ops.triton.decode_step import Drawing, argmax_tiles, choose_tokens, draw_tokens, gather_inputs
    from vllm.worker.cuda_precompile import META, DryRun, _Table, mixed_step
    from vllm.worker.decode_program import DecodeProgram, read_weights

    run = DryRun(spec, torch.bfloat16, 131072, 16, torch.bfloat16, 256, [rows])
    run._spec = spec  # every layer, also those that are alike
    model, layout, caches = run._model()
    table: Any = _Table(256, layout)
    slots, positions, ids = (torch.empty(rows, dtype=torch.int32, device=META) for _ in range(3))
    one, hidden = torch.empty(rows, device=META), torch.empty(rows, spec.hidden_size, device=META, dtype=torch.bfloat16)
    starts = torch.empty(rows, dtype=torch.int64, device=META)
    drawing = Drawing(one, one, ids, one, starts) if kind == "drawn" else None
    weights = read_weights(model, caches)
    with recorded(monkeypatch) as count:
        if weights is not None:
            program = DecodeProgram(weights, rows, 1024, slots, positions)
            count.clear()
            if masked:
                program.run(table, hidden=hidden)
                count.clear()
                bits, ring = (torch.empty(rows, n, dtype=torch.int32, device=META) for n in (4008, rows))
                program.finish(table, ring, ids, (ids, bits), drawing)
                return dict(sorted(count.items()))
            program.run(
                table, token_ids=None if kind == "hidden" else ids, hidden=hidden if kind == "hidden" else None,
                drawing=drawing,
            )  # fmt: skip
            return dict(sorted(count.items()))
        step = replace(mixed_step(np.ones(rows, np.int32), layout, cached=1023), logits_rows=None)
        count.clear()
        for g, group in enumerate(step.groups):
            gather_inputs(
                slots, positions, table.tokens, table.tables[g], (step.token_ids, step.positions, step.seq_lens),
                group.slot_mapping, group.block_table, 16, g == 0,
            )  # fmt: skip
        logits = model(step, caches)
        if kind != "hidden":
            logits = model.logits(logits)
        if drawing is not None:
            draw_tokens(logits, slots, positions, drawing, table.tokens, table.device_lengths, ids)
        elif kind == "greedy":
            best = torch.empty(rows, 64, device=META)
            tiles = argmax_tiles(logits, best, torch.empty(rows, 64, dtype=torch.int32, device=META), best)
            choose_tokens(
                slots, positions, best, ids, best, tiles, 128256, table.tokens, table.device_lengths, ids
            )  # fmt: skip
        return dict(sorted(count.items()))


# of 4 layers: 4 products and an attention each, or 3 by cuBLAS and norms of their own for many rows
_FEW = {"decode": 4, "embed": 1}
_MANY = {"cublas": 12, "decode": 4, "embed": 1, "join": 9}
_DRAW = {"deliver": 1, "draw": 1, "draw_rest": 1, "maxima": 1, "uniform": 1}
FUSED = {
    (1, "greedy"): {**_FEW, "gemv": 17, "choose": 1},
    (1, "drawn"): {**_FEW, "gemv": 16, "normalize": 1, "cublas": 1, **_DRAW},
    (1, "hidden"): {**_FEW, "gemv": 16, "normalize": 1},
    (32, "greedy"): {**_FEW, "skinny": 17, "choose": 1},
    (32, "drawn"): {**_FEW, "skinny": 16, "normalize": 1, "cublas": 1, **_DRAW},
    (32, "hidden"): {**_FEW, "skinny": 16, "normalize": 1},
    (256, "greedy"): {**_MANY, "wide": 5, "choose": 1},
    (256, "drawn"): {**_MANY, "wide": 4, "cublas": 13, "copy_": 1, **_DRAW},
    (256, "hidden"): {**_MANY, "wide": 4, "copy_": 1},
}
_GENERAL = {"attend": 4, "combine": 4, "cublas": 16, "gated": 4, "norm": 9, "rotate": 4}
GENERAL = {
    "greedy": {**_GENERAL, "cublas": 17, "argmax": 1, "choose": 1},
    "drawn": {**_GENERAL, "cublas": 17, **_DRAW},
    "hidden": _GENERAL,
}


@interpreted
@pytest.mark.parametrize(("rows", "kind"), FUSED)
def test_kernels_of_a_fused_decode_step(rows: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _decode_step(_decoder(), rows, kind, monkeypatch) == FUSED[rows, kind]
    assert _decode_step(_decoder(window=4096), rows, kind, monkeypatch) == FUSED[rows, kind]


@interpreted
@pytest.mark.parametrize(("rows", "head"), [(1, "gemv"), (32, "skinny"), (256, "wide")])
def test_a_fused_step_ends_under_masks_with_the_kernels_of_its_plain_end(
    rows: int, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _decode_step(_decoder(), rows, "greedy", monkeypatch, masked=True) == {"choose": 1, head: 1}
    assert _decode_step(_decoder(), rows, "drawn", monkeypatch, masked=True) == {"cublas": 1, **_DRAW}


_EXPERTS = Moe("silu", 14336, 8, 2)
# per layer: experts of several rows take whole ones; two branches read one norm
KINDS = {
    "sandwich": ({"layout": Layout.SANDWICH}, {"gemv": 17, "join": 8}, {"join": 9, "cublas": 12, "wide": 5}),
    "parallel": ({"layout": Layout.PARALLEL_SHARED}, {"gemv": 17}, {"join": 9, "cublas": 12, "wide": 5}),
    "experts": (
        {"ffn": _EXPERTS},
        {"gemv": 9, "choose": 1 + 4, "rise": 4, "fall": 4},  # a token, and experts
        {"join": 9, "cublas": 12, "route_and_sort": 4, "grouped": 8, "wide": 1},
    ),
}


@interpreted
@pytest.mark.parametrize("name", KINDS)
def test_kernels_of_fused_steps_of_other_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, few, many = KINDS[name]
    assert _decode_step(_decoder(**kind), 1, "greedy", monkeypatch) == {**_FEW, "choose": 1, **few}
    assert _decode_step(_decoder(**kind), 256, "greedy", monkeypatch) == {**_FEW, **many, "choose": 1}


@interpreted
@pytest.mark.parametrize("kind", GENERAL)
def test_kernels_of_a_general_decode_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = _decode_step(_decoder(window=4096, alibi=True), 32, kind, monkeypatch)
    assert windows == {**GENERAL[kind], "inputs": 2}  # once for each KV group
    assert _decode_step(_decoder(alibi=True, layout=Layout.SANDWICH), 32, kind, monkeypatch) == {
        **GENERAL[kind], "inputs": 1, "norm": 13
    }  # fmt: skip


class _Counting(CpuContext):
    """A device with memory of its own, as far as calls tell: counts transfers and their bytes."""

    is_async = True

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.up, self.up_bytes, self.down, self.down_bytes = 0, 0, 0, 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.up, self.up_bytes, self.down, self.down_bytes

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        self.up += 1
        self.up_bytes += sum(array.nbytes for array in arrays)
        return [torch.from_numpy(array.copy()) for array in arrays]

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        self.down += 1
        self.down_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return super().download(tensors)


def _driver() -> tuple[Driver, _Counting]:
    context = _Counting()
    driver = Driver(Toy())
    runner = driver.runner
    driver.runner = ModelRunner(
        runner.model, runner.layout, runner.kv_caches, context, num_slots=8, max_model_len=300, vocab_size=97
    )
    return driver, context


@pytest.mark.parametrize(
    ("params", "ceiling"),
    [
        # inputs and the place of the new token; ids and whether they are finite
        ({}, (2, 516, 1, 72)),
        ({"temperature": 0.7}, (3, 676, 1, 72)),
        ({"temperature": 0.7, "top_p": 0.5, "top_k": 9}, (3, 676, 1, 72)),
        ({"presence_penalty": 0.5}, (5, 900, 1, 80)),
        ({"logprobs": 2}, (2, 516, 1, 424)),
    ],
)
def test_transfers_of_a_decode_step_of_eight_rows(params: dict[str, Any], ceiling: tuple[int, int, int, int]) -> None:
    driver, context = _driver()
    for i in range(8):
        driver.add(f"r{i}", list(range(i + 1, i + 6)), **params)
    driver.step()
    driver.step()  # no block begins in the next one: 7 of 8 tokens of the second block
    context.clear()
    driver.step()
    assert all(found <= most for found, most in zip(context.counts, ceiling, strict=True)), context.counts


def test_transfers_of_a_prompt() -> None:
    """New rows cost their tokens, where these go, blocks and sampling parameters, once."""
    driver, context = _driver()
    for i in range(4):
        driver.add(f"r{i}", list(range(20)))
    driver.step()
    assert all(found <= most for found, most in zip(context.counts, (5, 4132, 1, 36), strict=True)), context.counts


class _Watched(Recording):
    """Counts what is uploaded by the way of steps that are launched one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0

    def pinned(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        self.uploads += 1
        return super().upload(arrays)


def _cost_behind_the_model(monkeypatch: pytest.MonkeyPatch, masked: int, **params: Any) -> tuple[dict[str, int], int]:
    """Kernels and uploads of a step of eight rows of which `masked` have masks, in graphs, without its forward pass."""
    from triton.runtime.interpreter import InterpretedFunction

    from vllm.worker.cuda_graphs import DecodeGraphs

    context = _Watched()
    driver = Driver(Toy(attend=attend_as_recorded), context=context)
    driver.runner.decode_steps = DecodeGraphs(driver.runner, context, [8], 300)
    for i in range(8):
        driver.add(f"r{i}", [i + 1, i + 2], **params)
    launches = _Launches()
    run, forward = InterpretedFunction.run, driver.runner.model.forward

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        launches.count[self.__name__.strip("_").removesuffix("_kernel")] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *args, **options)

    def uncounted(*args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return forward(*args)

    monkeypatch.setattr(InterpretedFunction, "run", counting)
    monkeypatch.setattr(driver.runner.model, "forward", uncounted)
    rows = np.arange(0, 8, 8 // masked if masked else 8, dtype=np.int32)[:masked]
    masks = RowMasks(rows, np.full((masked, 4), 0xFFFFFFFF, np.uint32)) if masked else None
    for _ in range(6):
        plan = driver.plan()
        launches.count.clear()
        context.uploads = 0
        with launches:
            if masked:
                handle = driver.runner.execute(replace(plan, late=np.isin(np.arange(8), rows)))
                driver.runner.complete(plan.step_id, masks)
            else:
                handle = driver.runner.execute(plan)
        handle.result()
    return dict(sorted(launches.count.items())), context.uploads


_BEHIND = {"argmax": 1, "choose": 1, "inputs": 2, "matmul": 1}
_DRAWN = {"deliver": 1, "draw": 1, "draw_rest": 1, "inputs": 2, "maxima": 1, "matmul": 1, "uniform": 1}
_MASKED = {"copy_": 2}  # hidden states to their place and the masks to theirs


@interpreted
@pytest.mark.parametrize("masked", [0, 1, 4, 8])
def test_a_masked_step_costs_two_copies_more_however_many_rows_have_masks(
    masked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _cost_behind_the_model(monkeypatch, masked) == (_BEHIND | (_MASKED if masked else {}), 0)
    drawn = _cost_behind_the_model(monkeypatch, masked, temperature=0.7)
    assert drawn == (_DRAWN | (_MASKED if masked else {}), 0)


@interpreted
def test_the_sampler_goes_on_where_graphs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties want what was said before, row by row: dozens of small launches, which masks add to."""
    kernels, uploads = _cost_behind_the_model(monkeypatch, 0, presence_penalty=0.5)
    assert kernels["inputs"] == 2
    assert sum(kernels.values()) <= 49 and uploads <= 4
    kernels, uploads = _cost_behind_the_model(monkeypatch, 4, presence_penalty=0.5)
    assert sum(kernels.values()) <= 58 and uploads <= 5
