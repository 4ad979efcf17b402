"""AutoRound: checkpoints in the layouts of GPTQ, AWQ or (floats) compressed-tensors, with exceptions by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.model_executor.layers.quantization.awq import AwqReader
from vllm.model_executor.layers.quantization.base_config import Format, Reader, group_size, names_of, setting
from vllm.model_executor.layers.quantization.compressed_tensors import reader_of
from vllm.model_executor.layers.quantization.gptq import BITS, GptqReader

_PLAIN_BITS = 16
_FLOATS = {
    ("fp", 8): "float-quantized", ("mx_fp", 8): "mxfp8-quantized",
    ("mx_fp", 4): "mxfp4-pack-quantized", ("nv_fp", 4): "nvfp4-pack-quantized",
}  # fmt: skip


class AutoRound(Format):
    """`packing_format` says which layout; only "auto_gptq" stores zero points minus 1."""

    name = "auto-round"
    leaves = (
        "qweight", "qzeros", "scales", "g_idx",
        "weight_packed", "weight_scale", "weight_scale_inv", "weight_global_scale", "input_scale",
    )  # fmt: skip
    ignored = ("input_global_scale",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._layout = setting(settings, "packing_format backend", str, "auto_round:auto_gptq")
        self._settings = settings
        self._blocks = settings.get("block_name_to_quantize") or []
        if isinstance(self._blocks, str):
            self._blocks = self._blocks.split(",")
        self._extra = setting(settings, "extra_config", dict, {})
        names_of({"block_name_to_quantize": self._blocks}, "block_name_to_quantize")

    def reader(self, names: Sequence[str]) -> Reader | None:
        for name in names:
            fields = self._extra.get(name)
            if isinstance(fields, Mapping):
                return self._reader({**self._settings, **fields})
        inside = not self._blocks or any(name.startswith(block) for name in names for block in self._blocks)
        return self._reader(self._settings) if inside else None

    def head_reader(self, names: Sequence[str]) -> Reader | None:
        return self.reader(names) if any(isinstance(self._extra.get(name), Mapping) for name in names) else None

    def _reader(self, fields: Mapping[str, Any]) -> Reader | None:
        bits = setting(fields, "bits", int, 4)
        if bits >= _PLAIN_BITS:
            return None
        kind = setting(fields, "data_type", str, "int")
        if kind != "int":
            return _floats(fields, kind, bits)
        group = group_size(fields, "group_size", 128)
        if "awq" in self._layout:
            return AwqReader(group, "gemm")
        if bits not in BITS:
            raise ValueError(f"The quantization config's `bits` is {bits}, expected one of {BITS}.")
        return GptqReader(bits, group, setting(fields, "sym", bool, True), int(self._layout.endswith("auto_gptq")))


def _floats(fields: Mapping[str, Any], kind: str, bits: int) -> Reader | None:
    """Floats are stored as compressed-tensors stores them; a list of two group sizes is a block."""
    if (kind, bits) not in _FLOATS:
        there = ", ".join(f"{name} of {width}" for name, width in _FLOATS)
        raise ValueError(f"The quantization config's `data_type` is {kind!r} of {bits} bits, expected int, {there}.")
    size = fields.get("group_size")
    group = {"strategy": "block", "block_structure": size} if isinstance(size, list) else {"group_size": size}
    inputs = None
    if kind == "fp" and fields.get("act_bits") == bits:
        per = {0: "tensor", -1: "token"}.get(setting(fields, "act_group_size", int, -1), "group")
        inputs = {"num_bits": bits, "type": "float", "strategy": per}
    weights = {"num_bits": bits, "type": "float", **group}
    return reader_of({"weights": weights, "input_activations": inputs}, _FLOATS[kind, bits])
