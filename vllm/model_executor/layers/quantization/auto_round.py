"""AutoRound: checkpoints in the layouts of GPTQ or AWQ, with exceptions by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.model_executor.layers.quantization.awq import AwqReader
from vllm.model_executor.layers.quantization.base_config import Format, Reader, group_size, names_of, setting
from vllm.model_executor.layers.quantization.gptq import BITS, GptqReader

_PLAIN_BITS = 16


class AutoRound(Format):
    """`packing_format` says which layout; only "auto_gptq" stores zero points minus 1."""

    name = "auto-round"
    leaves = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        setting(settings, "data_type", str, "int", among=("int",))
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
        group = group_size(fields, "group_size", 128)
        if "awq" in self._layout:
            return AwqReader(group, "gemm")
        if bits not in BITS:
            raise ValueError(f"The quantization config's `bits` is {bits}, expected one of {BITS}.")
        return GptqReader(bits, group, setting(fields, "sym", bool, True), int(self._layout.endswith("auto_gptq")))
