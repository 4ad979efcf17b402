"""How one row's product is cut on Hopper GPUs; the kernel itself is tested in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from vllm.ops.triton import one_row
from vllm.ops.triton.decode_linear import ARGMAX, GATED, RESIDUAL, STORE, Weight
from vllm.ops.triton.float8 import Float8Weight
from vllm.ops.triton.packed_linear import PackedWords

MEMORY = 227 << 10  # shared, of a processor


def weight(kind: str, outputs: int, inputs: int, group: int = 128) -> Weight:
    if kind == "plain":
        return torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    if kind == "float8":
        codes = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="meta")
        return Float8Weight(codes, torch.empty(outputs, device="meta"), None)
    packed = PackedWords.__new__(PackedWords)  # (a weight on the meta device cannot be packed)
    packed.format, packed.shape, packed.group = "int4", torch.Size((outputs, inputs)), group
    width = 64 if group % 128 == 0 and inputs % 256 == 0 else 32
    packed.words = torch.empty(inputs // (4 * width), outputs, width, dtype=torch.int16, device="meta")
    packed.scales = torch.empty(inputs // group, outputs, device="meta")
    packed.order = packed.offsets = None
    return packed


@pytest.mark.parametrize("mode", [STORE, GATED, RESIDUAL, ARGMAX])
@pytest.mark.parametrize("inputs", [1024, 1536, 2304, 4096, 11008, 28672, 53248])
@pytest.mark.parametrize("outputs", [1536, 3056, 4096, 14336, 128256])
@pytest.mark.parametrize("kind", ["plain", "float8", "int4"])
def test_tilings_divide_the_outputs_and_fit_a_processor(kind: str, outputs: int, inputs: int, mode: int) -> None:
    given = weight(kind, (2 if mode == GATED else 1) * outputs, inputs)
    codes = {"plain": 1, "float8": 2, "int4": 4}[kind]
    if not one_row.takes_row(given):
        assert inputs % 256 or inputs > codes * 32768 or given.shape.numel() >= codes << 32
        return
    t = one_row.choose_row_tiling(given, mode)
    if t is None:
        assert kind == "plain"
        return
    assert t.vector and t.registers and outputs % t.rows == 0 and t.rows % (8 if mode == GATED else 16) == 0
    room = t.warps * (t.stages * (2048 + 128 * (codes == 4) + 128 * codes) + 512 + 128)
    assert 2 * room < MEMORY or mode == ARGMAX
    assert 32 * t.warps * t.registers <= 65536


@pytest.mark.parametrize(
    ("mode", "outputs", "inputs", "taken"),
    [
        (GATED, 8192, 2048, True), (GATED, 14336, 4096, False), (STORE, 6144, 4096, True), (STORE, 64, 2048, False),
        (RESIDUAL, 4096, 4096, True), (RESIDUAL, 4096, 14336, False), (RESIDUAL, 5120, 4096, False),
        (RESIDUAL, 2048, 4096, False), (RESIDUAL, 1024, 2048, True), (ARGMAX, 151936, 1024, True),
    ],
)  # fmt: skip
def test_plain_weights_keep_the_general_kernel_where_it_is_faster(
    mode: int, outputs: int, inputs: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_row, "processors", lambda: 132)
    given = weight("plain", (2 if mode == GATED else 1) * outputs, inputs)
    assert (one_row.choose_row_tiling(given, mode) is not None) == taken


def test_what_the_kernel_is_not_cut_for() -> None:
    assert one_row.takes_row(weight("int4", 4096, 4096)) and one_row.takes_row(weight("int4", 4096, 4096, 512))
    assert not one_row.takes_row(weight("int4", 4096, 4096, 64))  # words of a block are fewer
    assert not one_row.takes_row(weight("int4", 4096, 4224))
    assert not one_row.takes_row(weight("plain", 4100, 4096))
    assert not one_row.takes_row(weight("plain", 1 << 20, 4096))  # places are counted in 32 bits
