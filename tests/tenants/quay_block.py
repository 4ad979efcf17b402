"""The module of cross attention: the encoder's keys are written in the first step of a request, and read in all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.tenants.quay import CrossBlock
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.sharding import REPLICATED, ShardedParameter
from vllm.model_executor.models.blocks import BuildContext, add_norm, build_norm, pick
from vllm.model_executor.models.kv_groups import KVPlace
from vllm.ops.attention import write_kv
from vllm.step.inputs import StepInputs


class CrossLayer(nn.Module):
    def __init__(self, spec: CrossBlock, hidden: int, place: KVPlace | None, ctx: BuildContext, prefix: str) -> None:
        super().__init__()
        assert place is not None
        self.place, self.spec = place, spec
        width = spec.heads_ * spec.dim
        self.norms = nn.ModuleList([build_norm(spec.norm, hidden, ctx.dtype)])
        sizes = {"q": (hidden, width), "k": (hidden, width), "v": (hidden, width), "o": (width, hidden)}
        for name, (into, out) in sizes.items():
            setattr(self, name, ReplicatedLinear(into, out, bias=False, params_dtype=ctx.dtype, tp=ctx.tp))
        self.table = ShardedParameter.empty((spec.longest, hidden), REPLICATED, 0, 1, ctx.dtype)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepInputs,
        kv_caches: Sequence[Tensor],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        x, stream = add_norm(self.norms[0], x, residual)
        cache, group = kv_caches[self.place.tensor], step.groups[self.place.group]
        heads, dim = self.spec.heads_, self.spec.dim
        assert group.key_lens is not None
        lens = group.key_lens.tolist()
        if len(group.slot_mapping):
            said = torch.cat([self.table[: lens[r]] for r in group.entering])
            k, v = (layer.project(said).view(-1, heads, dim) for layer in (self.k, self.v))
            write_kv(k, v, cache, group.slot_mapping)
        q, out = self.q.project(x).view(-1, heads, dim), x.new_zeros(len(x), heads, dim)
        starts = step.host_query_starts.tolist()
        for r, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
            if lens[r]:
                blocks = group.block_table[r, : -(-lens[r] // cache.shape[3])].long()
                k, v = (cache[blocks, i].transpose(1, 2).reshape(-1, heads, dim)[: lens[r]] for i in range(2))
                scores = torch.einsum("thd,shd->hts", q[first:end], k) * dim**-0.5
                out[first:end] = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
        return self.o.project(pick(out.flatten(1), rows)), pick(stream, rows)


MODULES = {CrossBlock: CrossLayer}
