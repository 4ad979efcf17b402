"""Kernels of selective state spaces against the torch references, and these against a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vllm.ops import ssm as ops
from vllm.ops.triton import ssm as kernels
from vllm.step.inputs import GroupInputs, StepInputs

PAGES = 24


def batch(counts, drafts=None, first_column=True, seed=0):
    """A step of requests with so many tokens; each has pages of its own, and padding page 0."""
    counts = np.array(counts, np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    most = 1 + max(drafts, default=0) if drafts is not None else 1
    order = 1 + np.random.default_rng(seed).permutation(PAGES - 1)[: len(counts) * most].reshape(len(counts), most)
    table = torch.from_numpy(order.astype(np.int32))
    table[torch.from_numpy(counts == 0)] = 0
    first = None if first_column else table[:, most - 1].long()
    group = GroupInputs(torch.empty(0), table, None, first, None if drafts is None else torch.tensor(drafts))
    tokens = int(starts[-1])
    step = StepInputs.of(
        torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64), torch.from_numpy(starts),
        torch.from_numpy(counts), (group,), host_query_starts=starts, host_seq_lens=counts,
    )  # fmt: skip
    return step, group


BATCHES = [
    ([1, 1, 1], None, True),
    ([1, 5, 1, 17], None, True),
    ([2, 1, 0, 0], None, True),
    ([4, 1, 3, 8], [3, 0, 1, 2], True),
    ([4, 1, 3, 3], [3, 0, 2, 2], False),
]


def conv_loop(x, weight, bias, states, step, group):
    """Token by token."""
    out = torch.empty_like(x)
    before = states.clone()
    for r, (begin, end) in enumerate(zip(step.host_query_starts, step.host_query_starts[1:], strict=False)):
        seen = list(before[int(group.states()[r])])
        drafts = 0 if group.drafts is None else int(group.drafts[r])
        for t in range(begin, end):
            seen.append(x[t])
            mixed = sum(weight[:, j] * seen[len(seen) - weight.shape[1] + j] for j in range(weight.shape[1]))
            out[t] = F.silu(mixed if bias is None else mixed + bias)
            if (kept := t - (end - 1 - drafts)) >= 0:
                states[int(group.block_table[r, kept])] = torch.stack(seen[1 - weight.shape[1] :])
    return out


def scan_loop(u, dt, dt_bias, a, b, c, d, gate, states, step, group):
    out = torch.empty_like(u)
    before = states.clone()
    for r, (begin, end) in enumerate(zip(step.host_query_starts, step.host_query_starts[1:], strict=False)):
        h = before[int(group.states()[r])]
        drafts = 0 if group.drafts is None else int(group.drafts[r])
        for t in range(begin, end):
            delta = F.softplus(dt[t] + dt_bias)[:, None]
            into, outof = (x[t].view(-1, a.shape[1]) for x in (b, c))
            into, outof = (x.repeat_interleave(len(a) // len(x), 0) for x in (into, outof))
            h = (delta * a).exp() * h + delta * into * u[t][:, None]
            out[t] = (h * outof).sum(1) + d * u[t]
            out[t] *= 1.0 if gate is None else F.silu(gate[t])
            if (kept := t - (end - 1 - drafts)) >= 0:
                states[int(group.block_table[r, kept])] = h
    return out


@pytest.mark.parametrize(("counts", "drafts", "first_column"), BATCHES)
@pytest.mark.parametrize(("width", "bias"), [(4, True), (2, False)])
def test_convolutions(counts, drafts, first_column, width, bias):
    step, group = batch(counts, drafts, first_column)
    wider = torch.randn(sum(counts), 150)
    args = wider[:, :40], torch.randn(40, width), torch.randn(40) if bias else None
    want, got, loop = (torch.randn(PAGES, 3 * 40 + 7)[:, : (width - 1) * 40].unflatten(1, (-1, 40)) for _ in range(3))
    want.copy_(loop)  # a state is a part of a page
    got.copy_(loop)
    outs = [f(*args, s, step, group) for f, s in (
        (ops.causal_conv.reference, want), (kernels.causal_conv, got), (conv_loop, loop))]  # fmt: skip
    for out, after in ((outs[1], got), (outs[2], loop)):
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[1:], want[1:], rtol=0, atol=0)


@pytest.mark.parametrize(("counts", "drafts", "first_column"), BATCHES)
def test_scans(counts, drafts, first_column):
    check_scan(counts, drafts, first_column, 1, True)


def test_scans_with_several_groups_and_no_gate():
    check_scan([1, 5, 2], [0, 0, 1], True, 4, False)


@pytest.mark.parametrize(("counts", "drafts", "first_column"), [*BATCHES[1:], ([8, 0, 4, 13, 1, 5], None, True)])
def test_scans_in_pieces(counts, drafts, first_column, monkeypatch):
    monkeypatch.setattr(kernels, "_PIECE", 4)
    check_scan(counts, drafts, first_column, 1, True)


def test_pieces_do_not_depend_on_the_company(monkeypatch):
    monkeypatch.setattr(kernels, "_PIECE", 4)
    a, bias, d = -torch.rand(32, 4) * 3, torch.randn(32), torch.randn(32)
    u, dt, b, c = (torch.randn(13, width) for width in (32, 32, 4, 4))
    found = []
    for counts in ([13], [3, 13, 1], [6, 1, 13]):
        step, group = batch(counts, seed=1)
        states, mine = torch.zeros(PAGES, 32, 4), slice(sum(counts[: counts.index(13)]), None)
        wide = [torch.randn(sum(counts), t.shape[1]) for t in (u, dt, b, c)]
        for given, own in zip(wide, (u, dt, b, c), strict=True):
            given[mine][:13] = own
        found.append(kernels.selective_scan(wide[0], wide[1], bias, a, wide[2], wide[3], d, None, states, step, group))
        found[-1] = found[-1][mine][:13]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_scans_of_channels_that_are_all_of_one_group():
    check_scan([1, 5, 2], None, True, 2, False, 64)


def check_scan(counts, drafts, first_column, groups, gated, channels=40):
    numbers = 5
    step, group = batch(counts, drafts, first_column)
    tokens = sum(counts)
    wider = torch.randn(tokens, 150)
    u, dt, gate = torch.randn(tokens, channels), torch.randn(tokens, channels) * 4, wider[:, 75:115] if gated else None
    mixed, half = torch.randn(tokens, 2 * numbers * groups), numbers * groups
    a, d, bias = -torch.rand(channels, numbers) * 3, torch.randn(channels), torch.randn(channels)
    want, got, loop = (
        torch.randn(PAGES, channels * numbers + 9)[:, 3:-6].unflatten(1, (channels, numbers)) for _ in range(3)
    )
    want.copy_(loop)
    got.copy_(loop)
    outs = [f(u, dt, bias, a, mixed[:, :half], mixed[:, half:], d, gate, s, step, group) for f, s in (
        (ops.selective_scan.reference, want), (kernels.selective_scan, got), (scan_loop, loop))]  # fmt: skip
    for out, after in ((outs[1], got), (outs[2], loop)):
        torch.testing.assert_close(out, outs[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after[1:], want[1:], rtol=1e-4, atol=1e-5)


def test_half_precision_is_computed_in_full():
    step, group = batch([1, 9])
    x, weight, states = torch.randn(10, 64).bfloat16(), torch.randn(64, 4).bfloat16(), torch.randn(PAGES, 3, 64)
    other = states.clone()
    got = kernels.causal_conv(x, weight, None, states, step, group)
    want = ops.causal_conv.reference(x.float(), weight.float(), None, other, step, group)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
    assert torch.equal(states[1:], other[1:])
