"""The fused decode step against the model's own forward pass, on random weights."""

import numpy as np
import pytest
import torch

from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.kv_groups import layout_of
from vllm.model_executor.models.spec import Attn, Block, Decoder, Mlp, Norm, Rope
from vllm.ops import shared_prefix
from vllm.sampling_params import SamplingParams
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.step.plan import SlotInit
from vllm.worker.decode_program import DecodeProgram, read_weights
from vllm.worker.device import CudaContext
from vllm.worker.prefix_sharing import Heads, PrefixSharing
from vllm.worker.slot_table import SlotTable

DEVICE = torch.device("cuda")


def step_of(table, slots, lengths):
    """Inputs of the step that computes the last of `lengths` tokens of each slot; slots: [rows] on the device."""
    rows, at = len(lengths), torch.from_numpy(lengths - 1).to(DEVICE).long()
    blocks = table.tables[0].index_select(0, slots.long())
    home = blocks.gather(1, at[:, None] // 16).long()[:, 0] * 16 + at % 16
    starts, lens = np.arange(rows + 1, dtype=np.int32), lengths.astype(np.int32)
    return StepInputs.of(
        table.tokens[slots.long(), at].long(), at, torch.from_numpy(starts).to(DEVICE),
        torch.from_numpy(lens).to(DEVICE), (GroupInputs(home, blocks),), host_query_starts=starts, host_seq_lens=lens,
    )  # fmt: skip


def build(hidden, heads, kv_heads, head_dim, mlp, vocab, qk_norm=False, bias=False, tied=False):
    norm = Norm("rms", 1e-6)
    attn = Attn(heads, kv_heads, head_dim, Rope(head_dim), qk_norm=norm if qk_norm else None, qkv_bias=bias)
    spec = Decoder(vocab, hidden, (Block(attn, Mlp("silu", mlp), norm),) * 3, norm, tied=tied)
    with DEVICE:
        model = DecoderModel(spec, dtype=torch.bfloat16, max_positions=2048, device=DEVICE)
        for name, p in model.named_parameters():
            if "norm" in name:
                p.data.copy_(1 + 0.2 * torch.randn(p.shape))
            else:
                p.data.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5))
    return model


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ({"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 3072, "vocab": 5003, "qk_norm": True,
        "tied": True}, r) for r in (1, 3, 32)
    ]
    + [
        ({"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336, "vocab": 32000}, r)
        for r in (1, 2, 32, 64, 100)
    ]
    + [({"hidden": 896, "heads": 14, "kv_heads": 2, "head_dim": 64, "mlp": 4864, "vocab": 1000, "bias": True},
    r) for r in (1, 20)],
    ids=lambda v: str(v["hidden"]) if isinstance(v, dict) else str(v),
)  # fmt: skip
def test_fused_step_computes_what_the_model_computes(shape, rows):
    model = build(**shape)
    layout = layout_of(model.traits, 16)
    context = CudaContext(DEVICE)
    table = SlotTable(rows + 2, 2048, layout, context)
    rng = np.random.default_rng(rows)
    lengths = rng.integers(1, 700, rows)
    lengths[0] = 1
    free = iter(rng.permutation(rows * 45) + 1)
    slots = rng.permutation(rows + 2)[:rows].astype(np.int32)
    for slot, n in zip(slots, lengths, strict=True):
        ids = rng.integers(0, shape["vocab"], n).tolist()
        blocks = [int(next(free)) for _ in range(-(-n // 16))]
        table.enter([SlotInit("r", int(slot), ids, 1, int(n) - 1, (blocks,), SamplingParams(), 0, ())])
    caches = [
        torch.randn(rows * 45 + 1, 2, layout.kv_heads, 16, layout.head_dim, device=DEVICE).bfloat16() for _ in range(3)
    ]
    twins = [c.clone() for c in caches]
    weights = read_weights(model, caches)
    assert weights is not None
    size = rows + 1  # one row of padding
    d_slots = torch.tensor([*slots.tolist(), -1], dtype=torch.int32, device=DEVICE)
    d_positions = torch.tensor([*(lengths - 1).tolist(), 0], dtype=torch.int32, device=DEVICE)
    if rows in (1, 64, 100):
        size, d_slots, d_positions = rows, d_slots[:rows], d_positions[:rows]
    program = DecodeProgram(weights, size, 2048, d_slots, d_positions)
    hidden = torch.full((size, shape["hidden"]), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    ids = torch.full((size,), -7, dtype=torch.int32, device=DEVICE)

    step = step_of(table, d_slots[:rows], lengths)
    with torch.inference_mode():
        for _ in range(2):  # twice over the same state: a step may be repeated
            program.run(table, token_ids=ids, hidden=hidden)
        want = model(step, twins)
        logits = model.logits(want)
    for cache, twin in zip(caches, twins, strict=True):
        assert ((cache[1:].float() - twin[1:].float()).norm() / twin[1:].float().norm()) < 1e-2
    assert ((hidden[:rows].float() - want.float()).norm() / want.float().norm()) < 2e-2
    chosen = logits.gather(1, ids[:rows, None].long())[:, 0]
    assert (logits.amax(-1) - chosen < 0.05 * logits.std()).all()  # the same token, or one as good
    written = table.tokens[d_slots[:rows].long(), step.positions + 1]
    assert torch.equal(written, ids[:rows])


@pytest.mark.parametrize("rows", [7, 40, 100])
def test_a_shared_prefix_read_once_gives_what_reading_it_for_everybody_gives(rows, monkeypatch):
    monkeypatch.setattr(shared_prefix, "_WORTH", 0)
    shape = {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 3072, "vocab": 5003, "qk_norm": True}
    model = build(**shape)
    layout, context = layout_of(model.traits, 16), CudaContext(DEVICE)
    table = SlotTable(rows, 2048, layout, context)
    rng = np.random.default_rng(rows)
    free = iter((rng.permutation(rows * 20 + 100) + 1).tolist())
    prefixes = [[next(free) for _ in range(n)] for n in (60, 40, 0)]
    slots, lengths = rng.permutation(rows).astype(np.int32), np.zeros(rows, np.int32)
    for i, slot in enumerate(slots):
        prefix = prefixes[0 if i % 8 < 4 else 1 if i % 8 < 7 else 2]
        n = len(prefix) * 16 + int(rng.integers(1, 300))
        blocks = prefix + [next(free) for _ in range(-(-(n + 1) // 16) - len(prefix))]
        ids = rng.integers(0, shape["vocab"], n).tolist()
        table.enter([SlotInit("r", int(slot), ids, 1, n - 1, (blocks,), SamplingParams(), 0, ())])
        lengths[i] = n
    caches = [
        torch.randn(rows * 20 + 101, 2, layout.kv_heads, 16, layout.head_dim, device=DEVICE).bfloat16()
        for _ in range(3)
    ]
    weights = read_weights(model, caches)
    assert weights is not None
    d_slots = torch.tensor([*slots.tolist(), -1], dtype=torch.int32, device=DEVICE)
    d_positions = torch.tensor([*(lengths - 1).tolist(), 0], dtype=torch.int32, device=DEVICE)
    heads = Heads.of(model.traits, layout)
    assert heads is not None
    sharing = PrefixSharing(table, 0, heads, rows + 1, context)
    assert sharing.find(slots, lengths - 1, rows + 1)
    with DEVICE:
        twin = DecoderModel(model.spec, dtype=torch.float32, max_positions=2048, device=DEVICE)
    twin.load_state_dict({name: p.float() for name, p in model.state_dict().items()})
    step = step_of(table, d_slots[:rows], lengths)
    with torch.inference_mode():
        exact = twin(step, [cache.float() for cache in caches])
    found = []
    for shared in (None, sharing.plan(rows + 1)):
        program = DecodeProgram(weights, rows + 1, 2048, d_slots, d_positions, shared=shared)
        hidden = torch.full((rows + 1, shape["hidden"]), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        with torch.inference_mode():
            for _ in range(2):
                program.run(table, hidden=hidden)
        found.append(hidden[:rows].float())
    alone, together = ((x - exact).norm() / exact.norm() for x in found)
    assert not torch.equal(found[0], found[1]), "the prefix was not shared"
    assert alone < 3e-2
    assert together < 1.1 * alone, "sharing may round differently, but not worse"
