"""Random batches over a shuffled paged cache whose unused memory is NaN."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm.step.inputs import GroupInputs, StepInputs


@dataclass
class Batch:
    q: torch.Tensor
    cache: torch.Tensor
    step: StepInputs
    group: GroupInputs


def make_batch(
    query_lens, seq_lens, heads, kv_heads, head_dim, block_size, dtype=torch.float32, window=None, device="cpu", seed=0
):
    """Requests of `query_lens` new tokens that end sequences of `seq_lens`. Blocks behind `window` are the null
    block.
    """
    rng = torch.Generator().manual_seed(seed)
    blocks = [-(-n // block_size) for n in seq_lens]
    order = (torch.randperm(sum(blocks), generator=rng) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    cache = torch.full((sum(blocks) + 1, 2, kv_heads, block_size, head_dim), float("nan"))
    slots, positions = [], []
    for r, (m, n) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first = 0 if window is None else max(0, n - m - window + 1)
        for p in range(n):
            if p % block_size == 0:
                table[r, p // block_size] = order.pop()
            if p >= first:
                cache[table[r, p // block_size], :, :, p % block_size] = torch.randn(
                    2, kv_heads, head_dim, generator=rng
                )
            if p >= n - m:
                slots.append(int(table[r, p // block_size]) * block_size + p % block_size)
                positions.append(p)
        table[r, : first // block_size] = 0
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.asarray(seq_lens, np.int32)
    group = GroupInputs(torch.tensor(slots).to(device), table.to(device))
    step = StepInputs.of(
        token_ids=torch.zeros(len(slots), dtype=torch.int64, device=device),
        positions=torch.tensor(positions).to(device),
        query_starts=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        logits_rows=torch.from_numpy(starts[1:].astype(np.int64) - 1).to(device),
        groups=(group,),
        host_query_starts=starts,
        host_seq_lens=lens,
    )
    q = torch.randn(len(slots), heads, head_dim, generator=rng).to(device, dtype)
    return Batch(q, cache.to(device, dtype), step, group)
