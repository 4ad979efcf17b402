"""Signals of ranks that wait for one which is gone."""

import pytest
import torch

from vllm.ops.triton.signals import answer_signals


@pytest.mark.parametrize(("rounds", "rank"), [(0, 0), (1, 0), (3, 2), (4, 1)])
def test_own_signals_are_set_in_every_other_round_and_the_others_cleared(rounds, rank):
    before = [torch.full((66,), 7, dtype=torch.int32) for _ in range(3)]
    pads = [pad.clone() for pad in before]
    answer_signals(torch.tensor([pad.data_ptr() for pad in pads]), 64, rank, rounds)
    for r, (pad, old) in enumerate(zip(pads, before, strict=True)):
        assert torch.equal(pad[64:], old[64:]), "nothing behind the signals changes"
        assert torch.equal(pad[:64], torch.full_like(old[:64], rounds % 2 * (r == rank)) if rounds else old[:64])
