"""The modules of Weir's blocks: written as an author would who has read docs/adding_a_model.md, without fast paths
beyond one for steps of single tokens, which can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tenants.weir import ReaderBlock, WeirBlock
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.sharding import REPLICATED, ShardedParameter
from vllm.model_executor.models.blocks import BuildContext, add_norm, build_norm, pick
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.ops.attention import AttentionParams, attend
from vllm.step.inputs import GroupInputs, StepInputs


class WeirLayer(nn.Module):
    def __init__(self, spec: WeirBlock, hidden: int, place: KVPlace | None, ctx: BuildContext, prefix: str) -> None:
        super().__init__()
        assert place is not None
        self.place, self.width = place, spec.width
        self.norms = nn.ModuleList([build_norm(spec.norm, hidden, ctx.dtype)])
        self.inner = ReplicatedLinear(hidden, 3 * spec.width, bias=False, params_dtype=ctx.dtype, tp=ctx.tp)
        self.out = ReplicatedLinear(spec.width, hidden, bias=False, params_dtype=ctx.dtype, tp=ctx.tp)
        self.kernel = ShardedParameter.empty((3, spec.width), REPLICATED, 0, 1, ctx.dtype)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepInputs,
        kv_caches: Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        x, stream = add_norm(self.norms[0], x, residual)
        u, gate, forget = self.inner.project(x, step.view(picked=False)).chunk(3, -1)
        states, inputs = (kv_caches[i] for i in self.place.tensors)
        group = step.groups[self.place.group]
        scan = self._decode if step.max_query_len == 1 and group.drafts is None else self._scan
        h = scan(u, forget.float().sigmoid(), states, inputs, step, group)
        out = pick(h.to(x.dtype) * F.silu(gate), rows)
        return self.out.project(out, step.view(picked=rows is not None)), pick(stream, rows)

    def _step(self, u: Tensor, f: Tensor, h: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """One token of some requests: [n, width] each, before: [n, 2, width] -> its state and its inputs."""
        mixed = self.kernel[0] * u + self.kernel[1] * before[:, 1] + self.kernel[2] * before[:, 0]
        return f * h + (1 - f) * mixed.float(), torch.stack([before[:, 1], u], 1)

    def _decode(
        self, u: Tensor, f: Tensor, states: Tensor, inputs: Tensor, step: StepInputs, group: GroupInputs
    ) -> Tensor:
        read, write = group.states().long(), group.block_table[:, 0].long()
        h, before = self._step(u, f, states[read], inputs[read].to(u.dtype))
        states[write], inputs[write] = h, before.to(inputs.dtype)
        return h

    def _scan(
        self, u: Tensor, f: Tensor, states: Tensor, inputs: Tensor, step: StepInputs, group: GroupInputs
    ) -> Tensor:
        out, starts = torch.empty_like(f), step.host_query_starts.tolist()
        for r, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
            page, drafts = int(group.states()[r]), 0 if group.drafts is None else int(group.drafts[r])
            h, before = states[page : page + 1].clone(), inputs[page : page + 1].to(u.dtype)
            for t in range(first, end):
                h, before = self._step(u[t : t + 1], f[t : t + 1], h, before)
                out[t] = h[0]
                if (kept := t - (end - 1 - drafts)) >= 0:
                    to = int(group.block_table[r, kept])
                    states[to], inputs[to] = h[0], before[0].to(inputs.dtype)
        return out


class ReaderLayer(nn.Module):
    def __init__(self, spec: ReaderBlock, hidden: int, place: KVPlace | None, ctx: BuildContext, prefix: str) -> None:
        super().__init__()
        assert place is not None
        self.place, self.spec = place, spec.attn
        width = spec.attn.heads * spec.attn.head_dim
        self.norms = nn.ModuleList([build_norm(spec.norm, hidden, ctx.dtype)])
        self.q = ReplicatedLinear(hidden, width, bias=False, params_dtype=ctx.dtype, tp=ctx.tp)
        self.o = ReplicatedLinear(width, hidden, bias=False, params_dtype=ctx.dtype, tp=ctx.tp)
        self.params = AttentionParams(spec.attn.head_dim**-0.5)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepInputs,
        kv_caches: Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        x, stream = add_norm(self.norms[0], x, residual)
        if rows is not None and not len(rows):
            return x[:0], None
        q = self.q.project(x, step.view(picked=False)).view(len(x), self.spec.heads, self.spec.head_dim)
        out = attend(q, kv_caches[self.place.tensor], self.params, step, step.groups[self.place.group])
        return self.o.project(pick(out.flatten(1), rows), step.view(picked=rows is not None)), pick(stream, rows)


MODULES = {WeirBlock: WeirLayer, ReaderBlock: ReaderLayer}
