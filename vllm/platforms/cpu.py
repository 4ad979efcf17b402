"""The CPU: its instruction sets and memory, read from the operating system without torch."""

from __future__ import annotations

import os
import platform
from functools import cached_property
from pathlib import Path

from vllm.platforms.interface import Platform

# Instruction sets that multiply bfloat16 numbers, under their names in /proc/cpuinfo (x86, then ARM).
_BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
_GIB = 2**30


class CpuPlatform(Platform):
    device_type = "cpu"

    def __init__(self, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
        self._cpuinfo = cpuinfo

    @cached_property
    def flags(self) -> frozenset[str]:
        """Instruction set flags of the first core, empty where the system does not tell."""
        try:
            text = self._cpuinfo.read_text(errors="replace")
        except OSError:
            return frozenset()
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
        return frozenset()

    def get_device_name(self, device_id: int = 0) -> str:
        return platform.processor() or platform.machine() or "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return 4 * _GIB  # the system does not tell; a modest guess
        return min([total, *_cgroup_limits()])

    def device_count(self) -> int:
        return 1

    def supports_bfloat16(self) -> bool:
        return any(flag in self.flags for flag in _BFLOAT16_FLAGS)

    def bfloat16_reason(self) -> str:
        found = [flag for flag in _BFLOAT16_FLAGS if flag in self.flags]
        return f"the CPU has {found[0]}" if self.supports_bfloat16() else "the CPU has no bfloat16 instructions"


def _cgroup_limits() -> list[int]:
    """Memory limits of the container, if any (cgroup v2, then v1)."""
    limits = []
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return limits
