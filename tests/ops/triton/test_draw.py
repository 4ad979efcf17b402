"""The draw's kernels against the reference, token by token: masses are integers, so that both count the same."""

import numpy as np
import pytest
import torch

from vllm.ops.draw import DrawParams
from vllm.ops.draw import draw as op
from vllm.ops.draw import draw_and_finite as op_and_finite
from vllm.ops.triton.draw import draw, draw_and_finite

SETTINGS = {
    "plain": (0, 1.0, 0.0),
    "top_k": (50, 1.0, 0.0),
    "all": (50, 0.95, 0.01),
    "top_p": (0, 0.9, 0.0),
    "wide top_k": (300, 1.0, 0.0),
    "greedy": (1, 1.0, 0.0),
    "tiny top_p": (0, 1e-6, 0.0),
    "min_p": (0, 1.0, 0.2),
}


def params(rows, top_k, top_p, min_p, temperature=0.8):
    ks, ps = np.full(rows, top_k, np.int32), np.full(rows, top_p, np.float32)
    one = torch.ones(rows)
    numbers = torch.linspace(0, 0.999, rows)
    return DrawParams(one * temperature, one * min_p, torch.from_numpy(ks), torch.from_numpy(ps), numbers, ks, ps)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("vocab", "spread"), [(100, 4.0), (4500, 0.3)])
def test_tokens_are_those_of_the_reference(name, vocab, spread):
    torch.manual_seed(vocab)
    logits = (torch.randn(3, vocab) * spread * 8).round() / 8  # many ties
    p = params(3, *SETTINGS[name])
    got, want = draw(logits, p), op.reference(logits, p)
    # exp may differ in the last bit between libraries: a neighbouring token is then as good, and rare
    assert (got != want).sum() <= 1
    assert ((got >= 0) & (got < vocab)).all()


def test_masked_tokens_are_never_drawn():
    logits = torch.full((4, 3000), -float("inf"))
    logits[:, [7, 1500, 2999]] = torch.tensor([1.0, 1.0, 0.5])
    for setting in SETTINGS.values():
        assert set(draw(logits, params(4, *setting)).tolist()) <= {7, 1500, 2999}


def test_a_row_that_may_say_nothing_is_told_from_one_that_may():
    logits = torch.randn(4, 3000)
    logits[1] = -torch.inf
    logits[2, :2999] = -torch.inf
    logits[3, 7] = torch.nan
    one, none = torch.ones(4), np.zeros(4, np.int32)
    numbers = torch.rand(4)
    params = DrawParams(one, torch.zeros(4), torch.from_numpy(none), one, numbers, none, one.numpy())
    ids, finite = draw_and_finite(logits, params)
    assert finite.tolist() == op_and_finite.reference(logits, params)[1].tolist() == [True, False, True, False]
    assert ids[2] == 2999
