"""Run as a program, outside of Triton's interpreter: compiles attention of prompts for a Hopper GPU, in two forms.

    python -m tests.ops.triton.compile_hopper_prefill

The language of that kernel has no interpreter. Numbers that do not fit into registers would cost its speed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton

from vllm.ops.triton import hopper_prefill
from vllm.ops.triton.precompile import _NoDevice


class Compiled(dict):  # type: ignore[type-arg]
    """Stands in for a kernel: compiles what would be launched, to instructions of the matrix units."""

    def __init__(self, kernel: triton.runtime.jit.JITFunction, instruction: str = "wgmma") -> None:
        self.kernel, self.instruction = kernel, instruction

    def __missing__(self, grid: tuple[int, ...]) -> Any:
        def compile_only(*args: Any, **options: Any) -> Any:
            made = self.kernel.run(*args, grid=grid, warmup=True, **options)
            if self.instruction not in made.asm["ptx"] or ".local" in made.asm["ptx"]:
                raise RuntimeError("Not what was meant.")
            return made

        return compile_only


def attend(head_dim: int, window: int, softcap: bool, sinks: bool, shared: bool) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = empty(512, 8, head_dim, dtype=torch.bfloat16)
    q, k, v = rows.split([4, 2, 2], 1)
    step: Any = SimpleNamespace(query_starts=empty(3), seq_lens=empty(2))
    plan: Any = SimpleNamespace(requests=empty(2, 3), shared=shared)
    out = empty(512, 4, head_dim, dtype=torch.bfloat16)
    hopper_prefill.attend(
        q, k, v, empty(4, dtype=torch.float32) if sinks else None, step, plan, True, (0.1, 0.2), window, softcap, out
    )  # fmt: skip


def main() -> None:
    triton.runtime.driver.set_active(_NoDevice(90))
    hopper_prefill._hopper_kernel = Compiled(hopper_prefill._hopper_kernel)
    attend(128, 0, False, True, True)
    attend(256, 300, True, False, False)


if __name__ == "__main__":
    main()
