"""The fused decode step in Triton's interpreter against the model's own forward pass: what it covers, and what not."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.models.harness import rotated
from tests.models.spec_flips import BASES, Flip, build, flips
from vllm.lora.layers import ExpertStack, LoRALayers
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.kv_groups import layout_of
from vllm.model_executor.models.spec import Attn, Decoder, HeadNorm, Layout, Mlp, Moe, Norm, Rope
from vllm.sampling_params import SamplingParams
from vllm.step.inputs import GroupInputs, RowView, StepFeatures, StepInputs
from vllm.step.plan import SlotInit
from vllm.worker.device import CpuContext
from vllm.worker.kv_memory import allocate
from vllm.worker.slot_table import SlotTable

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is not chosen", allow_module_level=True)

from vllm.ops.bitmask import apply_bitmask
from vllm.ops.quantized_weights import InputQuant, round_to_fp8, round_to_groups
from vllm.ops.triton import decode_latent, decode_linear, plain_few
from vllm.ops.triton.decode_linear import GATED, STORE, Product
from vllm.ops.triton.decode_parts import Tiling
from vllm.ops.triton.decode_step import IMPOSSIBLE, Drawing
from vllm.ops.triton.float8 import Rounded, float8_weight
from vllm.ops.triton.packed_experts import PackedStack, pack_experts
from vllm.ops.triton.packed_linear import PackedWords
from vllm.step.rng import stream_start
from vllm.worker import decode_program, decode_weights
from vllm.worker.cuda_precompile import stages_of
from vllm.worker.decode_program import DecodeProgram, _first_reads, choose_step_tiling, read_weights
from vllm.worker.decode_weights import Linear, ProgramWeights

BLOCK = 16
LENGTHS = (23, 6)
LIMIT = 1e-4  # relative


@pytest.fixture(autouse=True)
def exact_numbers(monkeypatch):
    """The step in fp32, which nobody would run, but which shows differences that bf16 hides."""
    monkeypatch.setattr(decode_linear, "DTYPES", [torch.float32])
    monkeypatch.setattr(decode_weights, "DTYPES", [torch.float32])
    monkeypatch.setattr(decode_latent, "_TILE", 16)  # so that these sequences have several
    # What fresh memory holds reaches rows that nobody reads; if it is NaN, the interpreter stops at their maximum.
    monkeypatch.setattr(torch, "empty", torch.zeros)


def setting(model: DecoderModel) -> tuple[SlotTable, list[torch.Tensor], StepInputs, torch.Tensor, torch.Tensor]:
    """Two requests among four slots, a cache of random keys, and the step that computes the last token of each."""
    layout, rng = layout_of(model.traits, BLOCK), np.random.default_rng(0)
    table = SlotTable(4, 64, layout, CpuContext())
    slots, groups, free = [2, 0], len(layout.groups), iter(range(1, 100))
    for slot, n in zip(slots, LENGTHS, strict=True):
        ids = rng.integers(0, 96, n).tolist()
        blocks = tuple([next(free) for _ in range(-(-n // BLOCK))] for _ in range(groups))
        table.enter([SlotInit("r", slot, ids, 1, n - 1, blocks, SamplingParams(), 0, ())])
    gen = torch.Generator().manual_seed(1)
    memory = allocate(layout, 100, 1, torch.float32, torch.device("cpu"))
    caches = [torch.randn(cache.shape, generator=gen) for cache in memory.tensors]
    at, rows = torch.tensor(LENGTHS) - 1, torch.tensor(slots)
    inputs = []
    for blocks in table.tables:
        home = blocks[rows, at // BLOCK].long() * BLOCK + at % BLOCK
        inputs.append(GroupInputs(home, blocks[rows]))
    starts, lens = np.arange(3, dtype=np.int32), np.array(LENGTHS, np.int32)
    step = StepInputs.of(
        table.tokens[rows, at].long(), at, torch.from_numpy(starts), torch.from_numpy(lens), inputs,
        max_seq_len=max(LENGTHS), host_query_starts=starts, host_seq_lens=lens,
        features=rotated(model.traits, at, torch.arange(2), list(LENGTHS)),
    )  # fmt: skip
    return table, caches, step, rows.int(), at.int()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative."""
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


@torch.inference_mode()
def fused(spec: Decoder) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Hidden states and logits by the fused step, or None if it refuses the decoder. Ids and caches are checked."""
    model = build(spec, torch.float32)
    table, caches, step, slots, positions = setting(model)
    if step.features is not None:  # the general path's: none is among those that decode graphs handle
        return None
    twins = [cache.clone() for cache in caches]
    weights = read_weights(model, caches)
    if weights is None:
        return None
    slots, positions = torch.cat([slots, torch.tensor([-1]).int()]), torch.cat([positions, torch.tensor([0]).int()])
    tiling = replace(choose_step_tiling(weights, 3, 64), splits=2, tile=16)
    program = DecodeProgram(weights, 3, 64, slots, positions, tiling=tiling, pdl=False)
    hidden = torch.full((3, spec.hidden_size), float("nan"), dtype=torch.float32)
    ids = torch.full((3,), -7, dtype=torch.int32)
    program.run(table, token_ids=ids, hidden=hidden)
    logits = program._logits(hidden[:2])
    chosen = logits.gather(1, ids[:2, None].long())[:, 0]
    assert (logits.amax(-1) - chosen < 0.05 * logits.std()).all()
    model(step, twins)
    for cache, twin in zip(caches, twins, strict=True):
        assert error(cache[1:], twin[1:]) < LIMIT
    return hidden[:2], logits


@functools.cache
@torch.inference_mode()
def general(spec: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits by the model's own forward pass."""
    model = build(spec, torch.float32)
    _, caches, step, _, _ = setting(model)
    hidden = model(step, caches)
    return hidden, model.logits(hidden)


def differs(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return any(x.shape != y.shape or error(x, y) > 100 * LIMIT for x, y in zip(a, b, strict=True))


def with_windows(*windows: int | None) -> Decoder:
    block = BASES["plain"].blocks[0]
    blocks = [replace(block, attn=replace(block.attn, window=window)) for window in windows]
    return replace(BASES["plain"], blocks=tuple(blocks))


def with_block(**changes: Any) -> Decoder:
    """The plain decoder with other blocks."""
    block = replace(BASES["plain"].blocks[0], **changes)
    return replace(BASES["plain"], blocks=(block, block))


_LAYER = Norm("layer", bias=True)
_GEMMA_ATTN = Attn(2, 1, 64, Rope(64), scale=0.3, softcap=2.0)
GEMMA = replace(
    with_block(
        norm=Norm(offset=1.0), layout=Layout.SANDWICH, ffn=Mlp("gelu_pytorch_tanh", 64), attn=_GEMMA_ATTN,
    ),
    norm=Norm(offset=1.0), embed_scale=8.0, logit_softcap=3.0, tied=True,
)  # fmt: skip
_PHI_ATTN = Attn(8, 8, 40, Rope(16), qkv_bias=True, out_bias=True)
PHI = replace(
    with_block(
        norm=_LAYER, layout=Layout.PARALLEL_SHARED, ffn=Mlp("gelu_new", 64, gated=False, bias=True), attn=_PHI_ATTN
    ),
    norm=_LAYER, head_bias=True,
)  # fmt: skip
_EXPERTS = Moe("silu", 64, 5, 2, renormalize=False)
COVERED = {
    "sandwich, soft-caps, scaled embedding": GEMMA,
    "layer norm, parallel, partial rotation, biases": PHI,
    "experts": with_block(ffn=_EXPERTS),
    "parallel experts": with_block(ffn=_EXPERTS, layout=Layout.PARALLEL_SHARED),
    "experts in sandwich": with_block(ffn=_EXPERTS, layout=Layout.SANDWICH, residual_scale=0.4),
    "gated with biases": with_block(ffn=Mlp("silu", 64, bias=True)),
    "learned positions": BASES["positions"],
    "heads of 256": with_block(attn=Attn(2, 1, 256, Rope(256))),
    "plain": BASES["plain"],
    "head norms": BASES["head norms"],
    "a norm of all heads, OLMo 2": with_block(
        attn=Attn(4, 2, 32, Rope(32), qk_norm=Norm("rms", 1e-5), qk_norm_over=HeadNorm.ALL), layout=Layout.BRANCH
    ),
    "a norm of all heads, OLMoE": with_block(
        attn=Attn(4, 4, 32, Rope(32), qk_norm=Norm("rms", 1e-5), qk_norm_over=HeadNorm.ALL), ffn=_EXPERTS
    ),
    "yarn": BASES["yarn"],
    "one window": with_windows(5, 5),
    "every second layer": with_windows(17, None, 17, None),
    "two windows, three groups": with_windows(None, 4, 9),
    "shared experts": BASES["experts"],
    "shared experts in sandwich": with_block(ffn=BASES["experts"].blocks[0].ffn, layout=Layout.SANDWICH),
    "experts behind an MLP": replace(
        BASES["plain"], blocks=(BASES["plain"].blocks[0], replace(BASES["plain"].blocks[0], ffn=_EXPERTS))
    ),
    "latent": BASES["latent"],
    "latent experts": BASES["latent experts"],
}


@pytest.mark.parametrize("walk", ["few", "many"])
@pytest.mark.parametrize("name", COVERED)
def test_what_is_covered_is_what_the_model_computes(name, walk, monkeypatch):
    if walk == "many":
        monkeypatch.setattr(decode_program, "MAX_ROWS", 0)
    found = fused(COVERED[name])
    assert found is not None
    for ours, wanted in zip(found, general(COVERED[name]), strict=True):
        assert error(ours, wanted) < LIMIT


@torch.inference_mode()
@pytest.mark.parametrize("name", [name for name in COVERED if "expert" in name or "latent" in name])
def test_a_row_alone_gets_what_the_model_computes(name):
    """Experts of one row have kernels of their own."""
    spec = COVERED[name]
    model = build(spec, torch.float32)
    wanted, logits = general(spec)
    table, caches, _, slots, positions = setting(model)
    program = DecodeProgram(read_weights(model, caches), 1, 64, slots[:1], positions[:1], pdl=False)
    hidden, ids = torch.full((1, spec.hidden_size), float("nan")), torch.full((1,), -7, dtype=torch.int32)
    program.run(table, token_ids=ids, hidden=hidden)
    assert error(hidden, wanted[:1]) < LIMIT
    assert ids.item() == logits[0].argmax()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "walk", "drawn"),
    [
        ("plain", "few", False),
        ("plain", "few", True),
        ("plain", "many", False),
        ("plain", "no wide head", False),
        ("sandwich, soft-caps, scaled embedding", "few", True),
    ],
)
def test_a_step_that_ends_under_masks_leaves_rows_without_one_as_they_are(name, walk, drawn, monkeypatch):
    """Masks of two rows of five: one allows some tokens, one none."""
    if walk != "few":
        monkeypatch.setattr(decode_program, "MAX_ROWS", 0)
    spec, rows = COVERED[name], 5
    model = build(spec, torch.float32)
    table, caches, _, slots, positions = setting(model)
    slots, positions = slots[[0, 1, 0, 1, 0]], positions[[0, 1, 0, 1, 0]]
    weights = read_weights(model, caches)
    assert weights is not None
    tiling = choose_step_tiling(weights, rows, 64)
    if walk == "no wide head":
        tiling = replace(tiling, wide_head=None)
    seeds = np.arange(rows, dtype=np.uint64)
    one, none = torch.full((rows,), 0.9), torch.zeros(rows, dtype=torch.int32)
    drawing = Drawing(one, none.float(), none, one, torch.from_numpy(stream_start(seeds).view(np.int64)))
    bits = torch.from_numpy(
        np.random.default_rng(3).integers(0, 2**32, (2, -(-spec.vocab_size // 32)), dtype=np.uint32)
    )
    bits = bits.view(torch.int32)
    bits[1] = 0
    index, turns = torch.tensor([-1, 0, -1, 1, -1], dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    program = DecodeProgram(weights, rows, 64, slots, positions, tiling=tiling, pdl=False)
    with pytest.raises(RuntimeError, match="has left hidden states"):
        program.finish(table, none, turns, (index, bits))
    ids, ring = (torch.full((2, rows), -7, dtype=torch.int32) for _ in range(2))
    hidden, at = torch.full((rows, spec.hidden_size), float("nan")), positions.clone()
    program.run(table, hidden=hidden)
    program.finish(table, ring, turns, (index, bits), drawing if drawn else None)
    assert turns.tolist() == [1] * rows and torch.equal(positions, at + 1)
    positions.copy_(at)
    program.run(table, token_ids=ids, turns=turns.zero_(), drawing=drawing if drawn else None)
    assert ring[0, index < 0].tolist() == ids[0, index < 0].tolist() and ring[0, 3] == IMPOSSIBLE
    token = int(ring[0, 1])
    assert 0 <= token < spec.vocab_size and (int(bits[0, token // 32]) >> (token % 32)) & 1
    if not drawn:
        logits = program._logits(hidden)[1:2].contiguous()
        apply_bitmask.reference(logits, torch.zeros(1, dtype=torch.int64), bits[:1])
        assert token == logits.argmax()


@torch.inference_mode()
@pytest.mark.parametrize("walk", ["few", "many"])
@pytest.mark.parametrize("name", ["plain", "experts", "sandwich, soft-caps, scaled embedding", "learned positions"])
def test_stages_one_after_the_other_give_what_all_layers_do(name, walk, monkeypatch):
    """The stream stands where the stage before has left it, and a stage leaves its own there."""
    if walk == "many":
        monkeypatch.setattr(decode_program, "MAX_ROWS", 0)
    spec = COVERED[name]
    model = build(spec, torch.float32)
    table, caches, step, slots, positions = setting(model)
    weights = read_weights(model, caches)
    assert weights is not None
    first, last, middle = stages_of(weights, 3)
    count, stream = len(weights.layers), torch.full((2, spec.hidden_size), float("nan"))
    hidden, ids = torch.empty(2, spec.hidden_size), torch.full((2,), -7, dtype=torch.int32)
    parts = [(first, 0, 1), (last, 1, count)] if count < 3 else [(first, 0, 1), (middle, 1, 2), (last, 2, count)]
    for stage, begin, end in parts:
        stage = replace(stage, layers=weights.layers[begin:end])
        tiling = replace(choose_step_tiling(stage, 2, 64), splits=2, tile=16)
        program = DecodeProgram(stage, 2, 64, slots, positions, tiling=tiling, pdl=False, stream=stream)
        if stage.head is None:
            program.run(table)
        else:
            program.run(table, token_ids=ids, hidden=hidden)
    wanted, logits = general(spec)
    assert error(hidden, wanted) < LIMIT
    assert ids.tolist() == logits.argmax(-1).tolist()


def of_shapes(spec: Decoder, qkv: tuple[int, int], up: tuple[int, int], **changes: Any) -> ProgramWeights:
    """The weights of a small model whose products are as large as these, and which has nothing in them."""
    model = build(spec, torch.float32)
    _, caches, _, _, _ = setting(model)
    weights = read_weights(model, caches)
    assert weights is not None

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(torch.empty_strided((outputs, inputs), (inputs, 1), dtype=torch.bfloat16, device="meta"))

    layers = []
    for layer in weights.layers:
        down = linear(up[1], up[0] // (2 if layer.ffn.gated else 1))
        ffn = replace(layer.ffn, up=linear(*up), down=down)
        layers.append(replace(layer, qkv=linear(*qkv), o=linear(qkv[1], qkv[1]), ffn=ffn, **changes))
    return replace(weights, layers=layers)


@pytest.fixture
def hopper(monkeypatch):
    """Tilings as for a Hopper GPU."""
    monkeypatch.setattr(decode_linear, "has_warp_roles", lambda: True)
    monkeypatch.setattr(plain_few, "processors", lambda: 132)


def test_a_parallel_mlp_multiplies_before_attention_has_ended(hopper):
    """Where its inputs are those of qkv, which lets attention begin when they are there."""
    shapes = (7680, 2560), (10240, 2560)
    weights = of_shapes(PHI, *shapes)
    t = choose_step_tiling(weights, 32, 256)
    assert (t.qkv.late, t.up.late, t.up.split) == (1, 3, 1)
    norm = replace(weights.layers[0].norms[0], bias=None, center=False)
    others = {
        "a norm that folds": of_shapes(PHI, *shapes, norms=(norm,)),
        "a norm of its own": of_shapes(PHI, *shapes, layout=Layout.PARALLEL),
        "behind attention": of_shapes(PHI, *shapes, layout=Layout.PRE),
        "qkv in many programs": of_shapes(PHI, (16384, 2560), (10240, 2560)),
    }
    for name, other in others.items():
        assert choose_step_tiling(other, 32, 256).up.late == 0, name
    assert choose_step_tiling(weights, 1, 256).up.late == 0
    assert choose_step_tiling(weights, 100, 256).up.late == 0
    assert choose_step_tiling(weights, 32, 256, adapted=True).up.late == 0


def test_a_tiling_that_would_read_what_is_not_there_is_refused():
    model = build(PHI, torch.float32)
    _, caches, _, slots, positions = setting(model)
    weights = read_weights(model, caches)
    chosen = choose_step_tiling(weights, 2, 64)
    up, qkv = replace(chosen.up, whole=True, split=1, late=3), replace(chosen.qkv, late=1)
    good = replace(chosen, up=up, qkv=qkv)
    DecodeProgram(weights, 2, 64, slots, positions, tiling=good)
    pre = replace(weights, layers=[replace(layer, layout=Layout.PARALLEL) for layer in weights.layers])
    for w, t in (
        (weights, replace(good, qkv=replace(qkv, late=0))),
        (weights, replace(good, qkv=replace(qkv, vector=True))),
        (weights, replace(good, up=replace(up, split=2))),
        (weights, replace(good, up=replace(up, whole=False))),
        (pre, good),
    ):
        with pytest.raises(ValueError, match="cannot begin before attention"):
            DecodeProgram(w, 2, 64, slots, positions, tiling=t)


def test_before_attention_of_large_heads_qkv_takes_all_the_room(hopper):
    specs = BASES["plain"], with_block(attn=Attn(2, 1, 256, Rope(256)))
    weights = [of_shapes(spec, (4096, 2304), (18432, 2304)) for spec in specs]
    stages = [choose_step_tiling(w, 32, 256).qkv.stages for w in weights]
    assert stages == [5, 9]


def test_a_stage_without_a_head_needs_room_for_its_stream():
    model = build(BASES["plain"], torch.float32)
    _, caches, _, slots, positions = setting(model)
    first, _ = stages_of(read_weights(model, caches), 2)
    with pytest.raises(ValueError, match="needs room for its stream"):
        DecodeProgram(first, 2, 64, slots, positions)


@pytest.mark.parametrize("flip", list(flips()), ids=lambda flip: flip.name)
def test_a_field_that_is_not_at_its_default_is_heeded_or_refused(flip: Flip):
    found = fused(flip.spec)
    if flip.whole:
        assert found is None
        return
    wanted = general(flip.spec)
    assert differs(wanted, general(flip.base)) == flip.seen, "the value must show, or the test shows nothing"
    if found is not None:
        for ours, want in zip(found, wanted, strict=True):
            assert error(ours, want) < LIMIT


@torch.inference_mode()
@pytest.mark.parametrize("walk", ["few", "many", "very many"])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_packed_weights_give_what_their_numbers_give(kind, walk, monkeypatch):
    if walk != "few":
        monkeypatch.setattr(decode_program, "MAX_ROWS", 0)
    if walk == "very many":
        monkeypatch.setattr(decode_program, "MAX_PACKED_ROWS", 0)
    model = build(BASES["plain"], torch.float32)
    table, caches, step, slots, positions = setting(model)
    weights = read_weights(model, [cache.clone() for cache in caches])
    assert weights is not None

    def packed(part: Linear) -> Linear:
        dense = part.weight
        rounded = round_to_fp8(dense, "channel") if kind == "fp8" else round_to_groups(dense, 4, 32, symmetric=False)
        part.weight.copy_(rounded.dequantize())
        return replace(part, weight=PackedWords(rounded))

    layers = []
    for layer in weights.layers:
        ffn = replace(layer.ffn, up=packed(layer.ffn.up), down=packed(layer.ffn.down))
        layers.append(replace(layer, qkv=packed(layer.qkv), o=packed(layer.o), ffn=ffn))
    weights = replace(weights, layers=tuple(layers))
    program = DecodeProgram(weights, 2, 64, slots, positions, pdl=False)
    hidden = torch.empty(2, 64)
    program.run(table, hidden=hidden)
    assert error(hidden, model(step, caches)) < LIMIT


@torch.inference_mode()
@pytest.mark.parametrize("layout", [Layout.PRE, Layout.SANDWICH, Layout.PARALLEL_SHARED])
def test_rows_are_rounded_where_they_are_normalised_and_activated(layout, monkeypatch):
    """What is rounded there for products of 8-bit floats is what they would have rounded themselves."""
    monkeypatch.setattr(decode_program, "MAX_ROWS", 0)
    monkeypatch.setattr(
        torch, "_scaled_mm",
        lambda a, b, scale_a, scale_b, **_: (a.float() * scale_a) @ (b.float() * scale_b),
    )  # fmt: skip
    block = BASES["plain"].blocks[0]
    block = replace(block, layout=layout, ffn=replace(block.ffn, hidden=256))
    spec = replace(BASES["plain"], hidden_size=128, blocks=(block,) * 2)
    model = build(spec, torch.float32)
    table, caches, _, slots, positions = setting(model)
    weights = read_weights(model, [cache.clone() for cache in caches])
    assert weights is not None

    def packed(part: Linear) -> Linear:
        made = float8_weight(round_to_fp8(part.weight, "channel", InputQuant("fp8")))
        assert made is not None
        return replace(part, weight=made)

    layers = []
    for layer in weights.layers:
        ffn = replace(layer.ffn, up=packed(layer.ffn.up), down=packed(layer.ffn.down))
        layers.append(replace(layer, qkv=packed(layer.qkv), o=packed(layer.o), ffn=ffn))
    weights, found = replace(weights, layers=tuple(layers)), []
    rounded = []
    original = decode_program.join_rows

    def join(h, out, *args, **options):
        rounded.append(isinstance(out, Rounded))
        original(h, out, *args, **options)

    monkeypatch.setattr(decode_program, "join_rows", join)
    for takes in (True, False):
        if not takes:
            monkeypatch.setattr(decode_program, "_takes_rounded", lambda p: False)
        rounded.clear()
        program, hidden = DecodeProgram(weights, 2, 64, slots, positions, pdl=False), torch.empty(2, 128)
        program.run(table, hidden=hidden)
        assert any(rounded) == takes
        found.append(hidden)
    assert error(*found) < 1e-3  # an activation may differ in its last bit, and then a rounding


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["experts", "experts in sandwich", "shared experts"])
def test_packed_experts_give_what_their_numbers_give(name, rows):
    model = build(COVERED[name], torch.float32)
    table, caches, step, slots, positions = setting(model)
    weights = read_weights(model, [cache.clone() for cache in caches])
    assert weights is not None

    def packed(stack: torch.Tensor) -> PackedStack:
        rounded = [round_to_groups(weight, 4, 32, symmetric=False) for weight in stack]
        made = pack_experts(rounded, stack.device, torch.float32)
        assert isinstance(made, PackedStack)
        stack.copy_(made.numbers())
        return made

    layers = [
        replace(layer, ffn=replace(layer.ffn, gate_up=packed(layer.ffn.gate_up), down=packed(layer.ffn.down)))
        for layer in weights.layers
    ]
    program = DecodeProgram(replace(weights, layers=tuple(layers)), rows, 64, slots[:rows], positions[:rows], pdl=False)
    hidden = torch.empty(rows, 64)
    program.run(table, hidden=hidden)
    assert error(hidden, model(step, caches)[:rows]) < LIMIT


ADAPTED = ["sandwich, soft-caps, scaled embedding", "layer norm, parallel, partial rotation, biases", "experts", "tied"]


@torch.inference_mode()
@pytest.mark.parametrize(("walk", "rank"), [("few", 5), ("few", 16), ("many", 5)])
@pytest.mark.parametrize("name", ADAPTED)
def test_rows_of_several_adapters_get_what_the_model_computes(name, walk, rank, monkeypatch):
    """Adapters of every layer, one of some only, and rows without."""
    if walk == "many":
        monkeypatch.setattr(decode_program, "MAX_ROWS", 0)
    monkeypatch.setattr("vllm.lora.layers.lay_out_b", lambda b: b)  # as on a GPU, whatever CPU kernels are there
    torch.manual_seed(0)
    spec = COVERED.get(name) or replace(BASES["plain"], tied=True)
    model = build(spec, torch.float32)
    stacks, slots_on_device = LoRALayers(model.adaptable(), 3, rank, torch.float32, torch.device("cpu")), 3
    gen = torch.Generator().manual_seed(5)
    products = {path: stack for path, stack in stacks._stacks.items() if not isinstance(stack, ExpertStack)}
    for path, stack in products.items():
        stack.a.normal_(generator=gen).mul_(0.1)
        stack.b.normal_(generator=gen).mul_(0.3)
        stack.ranks.fill_(rank)
        if path.endswith((".o", "head", "embed")):  # the second adapter leaves these layers alone
            for tensor in (stack.a, stack.b, stack.ranks):
                tensor[1].zero_()
    table, caches, step, slots, positions = setting(model)
    twins = [cache.clone() for cache in caches]
    weights = read_weights(model, caches)
    assert weights is not None and weights.takes_adapters
    program = None
    for chosen in ([1, 2], [-1, 0]):
        by_slot = torch.full((4,), -1, dtype=torch.int32)
        by_slot[slots.long()] = torch.tensor(chosen, dtype=torch.int32)
        if program is None:
            padded = torch.cat([slots, torch.tensor([-1]).int()]), torch.cat([positions, torch.tensor([0]).int()])
            column, tiling = by_slot, choose_step_tiling(weights, 3, 64, adapted=True)
            tiling = replace(tiling, splits=2, tile=16)
            program = DecodeProgram(weights, 3, 64, *padded, pdl=False, adapters=column, tiling=tiling)
        column.copy_(by_slot)
        hidden, ids = torch.empty(3, spec.hidden_size), torch.full((3,), -7, dtype=torch.int32)
        program.run(table, token_ids=ids, hidden=hidden)
        logits = program._logits(hidden)[:2]
        view = RowView(torch.tensor(chosen, dtype=torch.int32), ())
        want = model(structs.replace(step, features=StepFeatures(adapters=(view, view))), twins)
        assert error(hidden[:2], want) < LIMIT
        want = model.logits(want, view)
        assert error(logits, want) < LIMIT
        best = want.gather(1, ids[:2, None].long())[:, 0]
        assert (want.amax(-1) - best < 0.05 * want.std()).all()
        padded[1][:2] = positions  # the step has moved on
        table.tokens[slots.long(), positions.long() + 1] = 0
        for cache, twin in zip(caches, twins, strict=True):
            assert error(cache[1:], twin[1:]) < LIMIT
    assert slots_on_device == stacks.slots


@pytest.mark.parametrize(("field", "value"), [("sinks", True), ("chunk", 4)])
def test_what_is_not_fused_is_said_by_name(field, value):
    blocks = [replace(block, attn=replace(block.attn, **{field: value})) for block in PHI.blocks]
    assert decode_weights.unknown(replace(PHI, blocks=tuple(blocks))) == f"it does not compute layer.attn.{field}"
    assert "unlike or odd sizes" in decode_weights.unknown(replace(PHI, logit_scale=-1.0))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["plain", "int4", "fp8"])
def test_what_is_brought_nearer_are_the_rows_that_programs_read_first(kind, gated):
    outputs, inputs = 64, 512
    dense = torch.randn(outputs * (2 if gated else 1), inputs)
    tiling = Tiling(True, 8, 64, 4)
    weight: Any = dense
    if kind != "plain":
        rounded = round_to_fp8(dense, "channel") if kind == "fp8" else round_to_groups(dense, 4, 128, symmetric=True)
        weight = float8_weight(rounded) if kind == "fp8" else PackedWords(rounded)
    product = Product(weight, None, GATED if gated else STORE, tiling)
    stored = dense if kind == "plain" else weight.codes if kind == "fp8" else weight.words
    found = _first_reads(product, 24 << 10)
    assert found.weight is stored
    assert 0 < found.size * found.chunks <= 24 << 10
    at = torch.cat([torch.arange(found.size) + i * found.stride for i in range(found.chunks)])
    read = torch.zeros(stored.numel() * stored.element_size(), dtype=torch.bool)
    read[at] = True  # nothing beyond the end
    rows = read.view(-1, 2 if gated else 1, outputs, stored.shape[-1] * stored.element_size())  # of each block
    first = outputs * found.size // found.stride
    assert rows[:, :, :first].all()
    assert not rows[:, :, first + 1 :].any()
    assert _first_reads(product, 100) is None
