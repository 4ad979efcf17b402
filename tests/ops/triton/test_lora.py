"""LoRA kernels against the torch reference: rows of several adapters, of none, odd sizes, fused projections."""

import pytest
import torch

from vllm.ops import lora as ops
from vllm.ops.triton import decode_lora
from vllm.ops.triton import lora as kernels
from vllm.step.inputs import RowView, Segment


def views(adapters):
    """The rows' adapters as the device knows them alone, and with what the host knows."""
    device = torch.tensor(adapters, dtype=torch.int32)
    segments = tuple(
        Segment(slot, torch.tensor([i for i, s in enumerate(adapters) if s == slot]))
        for slot in sorted({s for s in adapters if s >= 0})
    )
    return RowView(device, ()), RowView(device, segments)


def low_rank(a, b, parts):
    return ops.LowRank(a, b, torch.full((len(a),), b.shape[2], dtype=torch.int32), parts)


def mixed(rows, slots):
    return torch.randint(-1, slots, (rows,)).tolist()


@pytest.fixture(params=["few", "many"])
def few_or_many(request, monkeypatch):
    """Kernels of few rows, or those of many."""
    if request.param == "many":
        monkeypatch.setattr(kernels, "_MANY_ROWS", 0)
        monkeypatch.setattr(kernels, "_MANY", 16)


@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies bfloat16 wrongly
@pytest.mark.parametrize(
    ("adapters", "inputs", "parts", "rank"),
    [
        ([0], 64, ((0, 48),), 8),
        ([2, -1, 0, 2, 1], 130, ((0, 32), (32, 16), (48, 16)), 16),
        (mixed(37, 3), 1000, ((0, 70), (70, 70)), 5),
        (mixed(20, 3), 96, ((0, 129),), 33),
        ([1] * 9 + [-1] * 20 + [2] * 9, 96, ((0, 40), (40, 40)), 40),
        ([-1, -1, -1], 64, ((0, 48),), 8),
    ],
)
def test_adapters_add_what_the_reference_adds(adapters, inputs, parts, rank, dtype):
    rows, outputs = len(adapters), sum(size for _, size in parts)
    x = torch.randn(rows, inputs + 3).to(dtype)[:, :inputs]  # rows that do not lie one behind the other
    a = (torch.randn(3, len(parts) * rank, inputs) / inputs**0.5).to(dtype)
    b = (torch.randn(3, outputs, rank) / rank**0.5).to(dtype)
    got = torch.randn(rows, outputs).to(dtype)
    want = got.clone()
    on_device, known = views(adapters)
    kernels.add_lora(got, x, low_rank(a, b, parts), on_device)
    ops.add_lora.reference(want, x, low_rank(a, b, parts), known)
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    untouched = torch.tensor(adapters) < 0
    assert torch.equal(got[untouched], want[untouched])


@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("adapters", "inputs", "dim", "rank", "kind", "limit"),
    [
        ([2, -1, 0, 2, 1], 130, 70, 16, "silu", None),
        ([1] * 20 + [-1] * 20 + [0] * 9, 96, 129, 5, "gelu_tanh", 1.5),
        ([-1] * 17 + [2] * 3, 64, 32, 33, "relu2", None),
    ],
)
def test_gated_activations_know_adapters(adapters, inputs, dim, rank, kind, limit, dtype):
    x, y = torch.randn(len(adapters), inputs).to(dtype), torch.randn(len(adapters), 2 * dim).to(dtype)
    a = (torch.randn(3, 2 * rank, inputs) / inputs**0.5).to(dtype)
    b = (torch.randn(3, 2 * dim, rank) / rank**0.5).to(dtype)
    on_device, known = views(adapters)
    matrices = low_rank(a, b, ((0, dim), (dim, dim)))
    got = kernels.activate_gated_lora(y.clone(), x, matrices, on_device, kind, limit)
    want = ops.activate_gated_lora.reference(y, x, matrices, known, kind, limit)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_row_is_the_same_in_any_company():
    adapters = mixed(40, 4)
    x, a, b = (torch.randint(-9, 9, shape).float() for shape in ((40, 200), (4, 16, 200), (4, 50, 8)))  # exact sums
    parts = ((0, 20), (20, 30))
    together = torch.zeros(40, 50)
    kernels.add_lora(together, x, low_rank(a, b, parts), views(adapters)[0])
    for half in (slice(0, 17), slice(19, 40)):
        alone = torch.zeros(len(adapters[half]), 50)
        kernels.add_lora(alone, x[half], low_rank(a, b, parts), views(adapters[half])[0])
        assert torch.equal(alone, together[half])


@pytest.mark.parametrize("rank", [4, 16, 20])
def test_embeddings_add_what_the_reference_adds(rank):
    adapters = mixed(19, 3)
    ids = torch.randint(0, 50, (19,))
    a, b = torch.randn(3, 50, rank), torch.randn(3, 33, rank)
    got = torch.randn(19, 33)
    want = got.clone()
    on_device, known = views(adapters)
    matrices = low_rank(a, b, ((0, 33),))
    kernels.add_embedding_lora(got, ids, matrices, on_device)
    ops.add_embedding_lora.reference(want, ids, matrices, known)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adapters", [1, 3, 8, 20])
def test_a_step_looks_up_its_adapters_and_which_there_are(adapters):
    """Padding has none; the counters of all products begin at zero."""
    column, slots = torch.randint(-1, adapters, (12,)).int(), torch.randperm(12)[:9].int()
    slots[-1] = -1
    rows, order, ready = torch.full((9,), 7).int(), torch.full((1 + adapters,), 7).int(), torch.ones(300).int()
    decode_lora.look_up(slots, column, rows, order, ready)
    want = [int(column[slot]) if slot >= 0 else -1 for slot in slots.tolist()]
    there = sorted(set(want) - {-1})
    assert rows.tolist() == want and not ready.any()
    assert order[: 1 + len(there)].tolist() == [len(there), *there]
