"""Sums over ranks, one rank's kernel at a time, with the others' words already in its inbox."""

import numpy as np
import pytest
import torch

from vllm.ops.triton.rank_sum import Exchange, sum_ranks


def words_of(x):
    return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def rounded(x, dtype):
    """fp32 x in `dtype`, as the interpreter does it: it cuts bf16 off."""
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16() if dtype == torch.bfloat16 else x.to(dtype)


class Ranks:
    """The memory of all ranks, in this process."""

    def __init__(self, world, rows, words, epoch):
        self.world, self.rows, self.words = world, rows, words
        self.inboxes = [torch.zeros(2, world, rows, words, dtype=torch.int64) for _ in range(world)]
        self.addresses = torch.tensor([inbox.data_ptr() for inbox in self.inboxes])
        self.epochs = [torch.full((rows,), epoch, dtype=torch.int32) for _ in range(world)]
        self.stopped = torch.zeros(1, dtype=torch.int32)

    def exchange(self, rank):
        return Exchange(rank, self.world, self.rows, self.words, self.addresses, self.epochs[rank], self.stopped)

    def send(self, sender, x, epoch):
        """What `sender` will have written into the others' inboxes."""
        letters = words_of(x) | torch.tensor(np.int64(np.int32(epoch)) << 32)
        for rank, inbox in enumerate(self.inboxes):
            if rank != sender:
                inbox[epoch & 1, sender, : len(x)] = letters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("world", "rows", "width", "before"), [(2, 1, 64, 0), (2, 5, 250, 7), (4, 3, 96, 2**31 - 1)])
def test_every_rank_gets_the_sum_and_sends_its_row(dtype, world, rows, width, before):
    generator = torch.Generator().manual_seed(width)
    ranks = Ranks(world, rows + 2, width * dtype.itemsize // 4, before)
    xs = [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(world)]
    epoch = before + 1 if before < 2**31 - 1 else -(2**31)
    for sender, x in enumerate(xs):
        ranks.send(sender, x, epoch)
    complete = [inbox.clone() for inbox in ranks.inboxes]
    for rank, x in enumerate(xs):
        for other, inbox in enumerate(ranks.inboxes):
            if other != rank:
                inbox[:, rank] = 0
        total = sum_ranks(ranks.exchange(rank), x)
        want = xs[0].float()
        for y in xs[1:]:
            want = want + y.float()
        assert torch.equal(total, rounded(want, dtype))
        assert all(map(torch.equal, ranks.inboxes, complete)), "the others have its words again, and nothing else"
        assert ranks.epochs[rank].tolist() == [epoch] * rows + [before] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_residual_and_norm(dtype, weight_dtype):
    generator = torch.Generator().manual_seed(3)
    rows, width, eps = 3, 200, 1e-5
    ranks = Ranks(2, rows, width * dtype.itemsize // 4, 4)
    xs = [torch.randn(rows, width, generator=generator).to(dtype) for _ in range(2)]
    residual = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.rand(width, generator=generator).to(weight_dtype)
    ranks.send(0, xs[0], 5)
    stream = residual.clone()
    out = sum_ranks(ranks.exchange(1), xs[1], stream, weight, eps)
    h = rounded(rounded(xs[0].float() + xs[1].float(), dtype).float() + residual.float(), dtype)
    assert torch.equal(stream, h)
    want = h.double() / (h.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=max(step, 1e-6), atol=1e-6)


def test_words_of_an_exchange_before_do_not_count_and_a_stopped_rank_waits_no_longer():
    ranks = Ranks(2, 1, 8, 2)
    x = torch.ones(1, 8)
    ranks.send(0, x, 1)  # lies in the place that the third exchange uses too
    ranks.stopped.fill_(1)
    total = sum_ranks(ranks.exchange(1), x)  # returns, with whatever was there
    assert total.shape == x.shape
    assert ranks.epochs[1].tolist() == [3]
