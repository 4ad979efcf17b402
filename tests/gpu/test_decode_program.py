"""The fused decode step against the model's own forward pass, on random weights."""

import numpy as np
import pytest
import torch

from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.families.deepseek import LatentAttn, LatentBlock
from vllm.model_executor.models.families.latent_block import MODULES
from vllm.model_executor.models.kv_groups import layout_of
from vllm.model_executor.models.spec import Attn, Block, Decoder, Layout, Mlp, Moe, Norm, Rope
from vllm.ops import shared_prefix
from vllm.sampling_params import SamplingParams
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.step.plan import SlotInit
from vllm.worker.decode_program import DecodeProgram, read_weights
from vllm.worker.device import CudaContext
from vllm.worker.kv_memory import allocate
from vllm.worker.prefix_sharing import Heads, PrefixSharing
from vllm.worker.slot_table import SlotTable

DEVICE = torch.device("cuda")


def step_of(table, slots, lengths):
    """Inputs of the step that computes the last of `lengths` tokens of each slot; slots: [rows] on the device."""
    rows, at = len(lengths), torch.from_numpy(lengths - 1).to(DEVICE).long()
    groups = []
    for blocks in (t.index_select(0, slots.long()) for t in table.tables):
        groups.append(GroupInputs(blocks.gather(1, at[:, None] // 16).long()[:, 0] * 16 + at % 16, blocks))
    starts, lens = np.arange(rows + 1, dtype=np.int32), lengths.astype(np.int32)
    return StepInputs.of(
        table.tokens[slots.long(), at].long(), at, torch.from_numpy(starts).to(DEVICE),
        torch.from_numpy(lens).to(DEVICE), tuple(groups), host_query_starts=starts, host_seq_lens=lens,
    )  # fmt: skip


def random_caches(layout, blocks, dtype):
    return [cache.normal_() for cache in allocate(layout, blocks, 1, dtype, DEVICE).tensors]


def build(hidden, heads, kv_heads, head_dim, mlp, vocab, qk_norm=False, bias=False, tied=False):
    norm = Norm("rms", 1e-6)
    attn = Attn(heads, kv_heads, head_dim, Rope(head_dim), qk_norm=norm if qk_norm else None, qkv_bias=bias)
    return filled(Decoder(vocab, hidden, (Block(attn, Mlp("silu", mlp), norm),) * 3, norm, tied=tied))


def filled(spec, dtype=torch.bfloat16):
    with DEVICE:
        model = DecoderModel(spec, dtype=dtype, max_positions=2048, device=DEVICE, modules=MODULES)
        for name, p in model.named_parameters():
            if "norm" in name:
                p.data.copy_(1 + 0.2 * torch.randn(p.shape))
            else:
                p.data.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5))
    return model


GEMMA_NORM, LAYER_NORM, RMS = Norm(offset=1.0), Norm("layer", 1e-5, bias=True), Norm()
GEMMA = Decoder(
    8000, 2304, (
        Block(Attn(8, 4, 256, Rope(256), window=100, softcap=50.0), Mlp("gelu_pytorch_tanh", 9216), GEMMA_NORM,
              Layout.SANDWICH),
        Block(Attn(8, 4, 256, Rope(256), softcap=50.0), Mlp("gelu_pytorch_tanh", 9216), GEMMA_NORM, Layout.SANDWICH),
    ), GEMMA_NORM, tied=True, embed_scale=48.0, logit_softcap=30.0,
)  # fmt: skip
PHI = Decoder(
    5120, 2560, (
        Block(Attn(32, 32, 80, Rope(32), qkv_bias=True, out_bias=True), Mlp("gelu_new", 10240, gated=False, bias=True),
              LAYER_NORM, Layout.PARALLEL_SHARED),
    ) * 2, LAYER_NORM, tied=False, head_bias=True,
)  # fmt: skip
MIXTRAL = Decoder(3200, 1024, (Block(Attn(16, 4, 128, Rope(128)), Moe("silu", 3584, 8, 2), RMS),) * 2, RMS, tied=False)
MANY_EXPERTS = Decoder(
    3200, 2048, (Block(Attn(32, 4, 128, Rope(128), qk_norm=RMS), Moe("silu", 768, 128, 8), RMS),) * 2, RMS, tied=False
)
LATENT_ATTN = LatentAttn(16, None, 512, 128, 64, 128, Rope(64, interleaved=True), 192**-0.5, RMS)
LATENT = Decoder(
    3200, 2048, (
        LatentBlock(LATENT_ATTN, Mlp("silu", 10944), RMS),
        LatentBlock(LATENT_ATTN, Moe("silu", 1408, 64, 6, False, shared=Mlp("silu", 2816)), RMS),
    ), RMS, tied=False,
)  # fmt: skip
PLAIN = Decoder(
    3200, 2048, (Block(Attn(32, 8, 64, Rope(64, interleaved=True), qkv_bias=True), Mlp("silu", 5632), RMS),) * 2, RMS,
    tied=False,
)  # fmt: skip


@pytest.mark.parametrize("rows", [1, 9, 33, 100])
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(GEMMA, "bfloat16"), (PHI, "float16"), (PHI, "bfloat16"), (MIXTRAL, "bfloat16"), (MANY_EXPERTS, "bfloat16"),
     (PLAIN, "float16"), (LATENT, "bfloat16")],
    ids=["gemma", "phi, float16", "phi", "mixtral", "many experts", "float16", "latent"],
)  # fmt: skip
def test_fused_steps_of_other_blocks_are_as_near_to_fp32_as_the_model(spec, dtype, rows):
    dtype = getattr(torch, dtype)
    model = filled(spec, dtype)
    layout, context = layout_of(model.traits, 16), CudaContext(DEVICE)
    table, rng = SlotTable(rows, 2048, layout, context), np.random.default_rng(rows)
    lengths, groups = rng.integers(1, 700, rows), len(layout.groups)
    free = iter(rng.permutation(rows * 45 * groups) + 1)
    slots = rng.permutation(rows).astype(np.int32)
    for slot, n in zip(slots, lengths, strict=True):
        blocks = tuple([int(next(free)) for _ in range(-(-n // 16))] for _ in range(groups))
        ids = rng.integers(0, spec.vocab_size, n).tolist()
        table.enter([SlotInit("r", int(slot), ids, 1, int(n) - 1, blocks, SamplingParams(), 0, ())])
    caches = random_caches(layout, rows * 45 * groups + 1, dtype)
    exact_caches = [cache.float() for cache in caches]
    weights = read_weights(model, caches)
    assert weights is not None
    d_slots, at = torch.from_numpy(slots).to(DEVICE), torch.from_numpy(lengths - 1).to(DEVICE).int()
    program = DecodeProgram(weights, rows, 2048, d_slots, at)
    hidden = torch.full((rows, spec.hidden_size), float("nan"), device=DEVICE, dtype=dtype)
    ids = torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)
    step = step_of(table, d_slots, lengths)
    with DEVICE:
        twin = DecoderModel(spec, dtype=torch.float32, max_positions=2048, device=DEVICE, modules=MODULES)
    twin.load_state_dict({name: p.float() for name, p in model.state_dict().items()})
    with torch.inference_mode():
        exact = twin(step, exact_caches)
        general = model(step, [cache.clone() for cache in caches])
        for _ in range(2):  # twice over the same state: a step may be repeated
            program.run(table, token_ids=ids, hidden=hidden)
        logits = twin.logits(exact)
    fused, usual = (((x.float() - exact).norm(dim=1) / exact.norm(dim=1)).median() for x in (hidden, general))
    assert fused < (1.5 if rows == 1 else 1.2) * usual + 1e-3  # of one row, chance decides more
    chosen = logits.gather(1, ids[:, None].long())[:, 0]
    near = logits.amax(-1) - chosen < 0.1 * logits.std()
    assert near.float().mean() > 0.8  # a token whose experts differ by rounding may choose another
    for cache, exactly in zip(caches, exact_caches, strict=True):
        assert ((cache[1:].float() - exactly[1:]).norm() / exactly[1:].norm()) < 1e-2


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
    caches = random_caches(layout, rows * 45 + 1, torch.bfloat16)
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
        logits = model.logits(hidden[:rows])
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
    caches = random_caches(layout, rows * 20 + 101, torch.bfloat16)
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
