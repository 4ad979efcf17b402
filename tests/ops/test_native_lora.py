"""What adapters add on the native CPU kernels: against float64, each row as alone, in the call of all layers."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from tests.models.harness import PagedDriver, load
from tests.ops.test_cpu_blocks import _prompts, folders, registered, unregistered
from vllm.lora.layers import LoRALayers
from vllm.ops import lora as ops
from vllm.ops.cpu.lora import NativeLora, lay_out_b
from vllm.step.inputs import RowView, StepFeatures
from vllm.worker import cpu_blocks

__all__ = ["folders", "registered", "unregistered"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
CPU = torch.device("cpu")


def matrices(slots, inputs, parts, rank, dtype, used):
    """Random ones; slot i uses `used[i]` of the rank."""
    height, outputs = len(parts) * rank, sum(count for _, count in parts)
    a = (torch.randn(slots, height, inputs) / inputs**0.5).to(dtype)
    b = (torch.randn(slots, outputs, rank) / rank**0.5).to(dtype)
    for slot, count in enumerate(used):
        a[slot].view(len(parts), rank, inputs)[:, count:] = 0.0
        b[slot, :, count:] = 0.0
    return ops.LowRank(a, lay_out_b(b), torch.tensor(used, dtype=torch.int32), tuple(parts))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "inputs", "parts", "rank"),
    [(1, 64, [(0, 48)], 16), (37, 131, [(0, 70), (70, 33)], 5), (50, 96, [(0, 40), (40, 300), (340, 7)], 33)],
)
def test_adapters_add_what_loops_in_float64_add(native, dtype, rows, inputs, parts, rank):
    m = matrices(4, inputs, parts, rank, dtype, [rank, 0, rank - 3, 1])
    adapters = torch.randint(-1, 4, (rows,), dtype=torch.int32)
    x = torch.randn(rows, inputs + 3).to(dtype)[:, :inputs]  # rows that do not lie one behind the other
    outputs = sum(count for _, count in parts)
    for out_dtype in {dtype, torch.float32}:
        start = torch.randn(rows, outputs + 5).to(out_dtype)[:, :outputs]
        got, want = start.clone(), start.double().clone()
        NativeLora(native.library).add_lora(got, x, m, RowView(adapters, ()))
        for row, slot in enumerate(adapters.tolist()):
            for part, (first, count) in enumerate(parts) if slot >= 0 else ():
                small = m.a[slot, part * rank : (part + 1) * rank].double() @ x[row].double()
                want[row, first : first + count] += m.b[slot, first : first + count].double() @ small
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        changed = (adapters >= 0) & (adapters != 1)
        assert torch.equal(got[~changed], start[~changed])
        for row in range(0, rows, 7):
            alone = start[row : row + 1].clone()
            NativeLora(native.library).add_lora(alone, x[row : row + 1], m, RowView(adapters[row : row + 1], ()))
            assert torch.equal(alone[0], got[row])


def test_matrices_of_another_type_take_the_reference(native):
    m = matrices(1, 32, [(0, 24)], 8, torch.float32, [8])
    x, out = torch.randn(3, 32).bfloat16(), torch.zeros(3, 24, dtype=torch.bfloat16)
    view = RowView(torch.tensor([0, -1, 0], dtype=torch.int32), ())
    NativeLora(native.library).add_lora(out, x, m, view)
    torch.testing.assert_close(out[0].float(), m.b[0] @ (m.a[0] @ x[0].float()), rtol=2e-2, atol=2e-2)
    assert not out[1].any()


@pytest.mark.parametrize("name", ["qwen2", "opt"])
def test_all_layers_in_one_call_give_the_bits_of_layers_one_by_one(registered, folders, name):
    """With rows of several adapters and of none, of all tokens and of wanted rows only."""
    model = load(folders[name][0])
    layers = LoRALayers(model.adaptable(), 3, 6, model.dtype, CPU)
    generator = torch.Generator().manual_seed(3)
    for path, stack in layers._stacks.items():
        stack.a.normal_(generator=generator)
        stack.b.normal_(generator=generator).mul_(0.02)
        stack.ranks.fill_(6)
        if path.endswith((".o", ".down")):
            for tensor in (stack.a, stack.b, stack.ranks):
                tensor[1].zero_()
    prompts, chosen, forward = _prompts(), torch.tensor([2, -1, 1, 0], dtype=torch.int32), model.forward
    chunks = [(i, 0, prompt) for i, prompt in enumerate(prompts)]
    by_token = chosen.repeat_interleave(torch.tensor([len(prompt) for prompt in prompts]))

    def states(rows=None):
        def adapted(step, caches):
            wanted = by_token if step.logits_rows is None else by_token[step.logits_rows]
            features = StepFeatures(adapters=(RowView(by_token, ()), RowView(wanted, ())))
            return forward(replace(step, features=features), caches)

        model.forward = adapted
        found = PagedDriver(model, requests=4).step(chunks, rows)
        model.forward = forward
        return found

    plain, one_by_one = PagedDriver(model, requests=4).step(chunks), states()
    model.fused_blocks = fused = cpu_blocks.fuse_layers(registered.library, model)
    assert fused is not None and fused.handles == {"adapters"}
    assert torch.equal(states(), one_by_one)
    rows = torch.tensor([30, 31, 81, 98])
    assert torch.equal(states(rows), one_by_one[rows])
    assert torch.equal(PagedDriver(model, requests=4).step(chunks), plain)
    base = by_token < 0
    assert torch.equal(plain[base], one_by_one[base])
    assert ((plain - one_by_one)[~base].abs().amax(1) > 1e-3).all()
