"""The kernels of the fused decode step against plain torch."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vllm.ops import rotary as rotary_ops
from vllm.ops.activation import activate, activate_gated
from vllm.ops.attention import AttentionParams, attend, write_kv
from vllm.ops.bitmask import apply_bitmask
from vllm.ops.draw import DrawParams, draw
from vllm.ops.norm import rms_norm
from vllm.ops.triton import plain_few
from vllm.ops.triton.decode_attention import DecodeAttention, DecodeRows, decode_attention
from vllm.ops.triton.decode_join import Chosen, NormWeights, join_rows
from vllm.ops.triton.decode_linear import (
    ARGMAX,
    GATED,
    RESIDUAL,
    STORE,
    Folded,
    Product,
    Stream,
    Tiling,
    choose_tiling,
    run_product,
)
from vllm.ops.triton.decode_parts import processors
from vllm.ops.triton.decode_step import (
    IMPOSSIBLE,
    NOT_FINITE,
    NOTHING,
    Drawing,
    Entrance,
    argmax_tiles,
    choose_tokens,
    draw_tokens,
    elect,
    embed_rows,
    gather_inputs,
    nominate,
    normalize_rows,
    resume_rows,
    verify_tokens,
)
from vllm.ops.triton.wide_linear import WideTiling, argmax_product, gated_product
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.step.rng import stream_start, uniform

EPS = 1e-5
TILINGS = [Tiling(True, 4, 64, 4, unroll=2), Tiling(False, 16, 64, 4), Tiling(False, 32, 64, 4, split=2)]


def stream(rows, width, outputs):
    return Stream(
        rows, width, torch.randn(rows, width), torch.empty(rows, width), torch.empty(rows * 512),
        torch.full((8 * 16 * max(outputs, width),), float("nan")), torch.zeros(512, dtype=torch.int32),
        torch.empty(rows, 512), torch.empty(rows, 512, dtype=torch.int32), torch.empty(rows, 512),
    )  # fmt: skip


def folded(x, norm, tiles):
    """x as the product before would leave it: times the norm's weight, its squares summed in `tiles` parts."""
    squares = torch.stack([p.pow(2).sum(-1) for p in x.chunk(tiles, -1)], -1).contiguous()
    return Folded(x * norm, squares, tiles, EPS)


@pytest.mark.parametrize("tiling", TILINGS, ids=["vector", "skinny", "split"])
@pytest.mark.parametrize("act", [None, "gelu_tanh", "relu2"])
def test_products_store_and_activate(tiling, act):
    rows, width, outputs = 1 if tiling.vector else 5, 128, 64
    x, norm = torch.randn(rows, width), torch.randn(width)
    s = stream(rows, width, outputs)
    w, bias, out = torch.randn(outputs, width), torch.randn(outputs), torch.empty(rows, outputs)
    run_product(Product(w, bias, STORE, tiling, act), s, folded(x, norm, 4), out)
    kind = (lambda y: y) if act is None else functools.partial(activate.reference, kind=act)
    want = kind(F.linear(rms_norm.reference(x, norm, EPS), w, bias))
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-3)
    run_product(Product(w, None, STORE, tiling, act), s, x, out)
    torch.testing.assert_close(out, kind(F.linear(x, w)), rtol=1e-4, atol=1e-3)
    assert not s.arrived.any()


@pytest.mark.parametrize("tiling", TILINGS[:2], ids=["vector", "skinny"])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_products_gate(tiling, act):
    rows, width, outputs = 1 if tiling.vector else 5, 128, 64
    x, norm = torch.randn(rows, width), torch.randn(width)
    s = stream(rows, width, outputs)
    w, bias, out = torch.randn(2 * outputs, width), torch.randn(2 * outputs), torch.empty(rows, outputs)
    run_product(Product(w, bias, GATED, tiling, act), s, folded(x, norm, 4), out)
    want = activate_gated.reference(F.linear(rms_norm.reference(x, norm, EPS), w, bias), act)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-3)
    run_product(Product(w, None, GATED, tiling, act), s, x, out)
    torch.testing.assert_close(out, activate_gated.reference(F.linear(x, w), act), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tiling", TILINGS, ids=["vector", "skinny", "split"])
def test_product_adds_to_the_stream_and_prepares_the_next_norm(tiling):
    rows, width, inputs = 1 if tiling.vector else 5, 64, 128
    x, w, norm, bias = torch.randn(rows, inputs), torch.randn(width, inputs), torch.randn(width), torch.randn(width)
    s = stream(rows, width, width)
    p = Product(w, bias, RESIDUAL, tiling, scale=0.5)
    want = s.h + 0.5 * F.linear(x, w, bias)
    run_product(p, s, x, s.h, norm)
    torch.testing.assert_close(s.h, want, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(s.scaled, want * norm, rtol=1e-4, atol=1e-3)
    squares = s.squares[: rows * p.tiles].view(rows, p.tiles)
    torch.testing.assert_close(squares.sum(-1), want.pow(2).sum(-1), rtol=1e-4, atol=1e-3)
    out = torch.empty(rows, width)
    normalize_rows(Folded(s.scaled, squares, p.tiles, EPS), out)
    torch.testing.assert_close(out, rms_norm.reference(want, norm, EPS), rtol=1e-4, atol=1e-4)
    s.scaled.fill_(-1.0)
    run_product(p, s, x, s.h)  # and without a norm behind it
    torch.testing.assert_close(s.h, want + 0.5 * F.linear(x, w, bias), rtol=1e-4, atol=1e-3)
    assert (s.scaled == -1.0).all()


NORMS = {
    "none": None,
    "rms": NormWeights(torch.randn(48), None, EPS, False),
    "plain": NormWeights(None, None, EPS, False),
    "layer": NormWeights(torch.randn(48), torch.randn(48), EPS, True),
}


def normed(x, norm):
    if norm is None:
        return x
    if norm.center:
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    return rms_norm.reference(x, norm.weight, norm.eps)


@pytest.mark.parametrize("branch", NORMS)
@pytest.mark.parametrize("after", NORMS)
def test_a_branch_joins_the_stream_between_two_norms(branch, after):
    h, y, out = torch.randn(3, 48), torch.randn(3, 48), torch.full((3, 48), -5.0)
    want = h + 0.3 * normed(y, NORMS[branch])
    join_rows(h, out, y, None, NORMS[branch], NORMS[after], 0.3)
    torch.testing.assert_close(h, want)
    torch.testing.assert_close(out, torch.full_like(h, -5.0) if after == "none" else normed(want, NORMS[after]))
    join_rows(h, h, None, None, None, NORMS["layer"])  # nothing is added, and the stream itself is normalised
    torch.testing.assert_close(h, normed(want, NORMS["layer"]))


def test_experts_join_the_stream_in_the_order_of_choices():
    h, out, y, weights = torch.randn(5, 48), torch.empty(5, 48), torch.randn(15, 48), torch.rand(5, 3)
    home = torch.randperm(15).int()
    want = h + (y[home.long()].view(5, 3, 48) * weights[:, :, None]).sum(1)
    join_rows(h, out, y, Chosen(weights, home), None, NORMS["rms"])
    torch.testing.assert_close(h, want)
    torch.testing.assert_close(out, normed(want, NORMS["rms"]))


@pytest.mark.parametrize("tiling", TILINGS[:2], ids=["vector", "skinny"])
def test_greedy_token_goes_to_the_slot_table(tiling):
    rows, width, vocab = 1 if tiling.vector else 3, 64, 150
    x, w = torch.randn(rows, width), torch.randn(vocab, width)
    w[99] = w[17]  # a tie: the lower id wins
    x[0] = w[17] * 100
    p = Product(w, None, ARGMAX, tiling)
    s = stream(rows, width, vocab)
    run_product(p, s, folded(x, torch.ones(width), 2), x)
    tokens, out = torch.zeros(6, 20, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    lengths = torch.zeros(6, dtype=torch.int32)
    slots = torch.tensor([4, -1, 2][:rows], dtype=torch.int32)
    positions = torch.tensor([7, 3, 0][:rows], dtype=torch.int32)
    choose_tokens(slots, positions, s.best, s.best_at, s.sums, p.tiles, vocab, tokens, lengths, out)
    want = F.linear(x, w).argmax(-1).tolist()
    assert want[0] == 17 == out[0] == tokens[4, 8]
    if rows == 3:
        assert (out[2], tokens[2, 1]) == (want[2], want[2])
    assert tokens.count_nonzero() == (tokens == tokens[4, 8]).sum() + (rows == 3 and want[2] != want[0])


@pytest.mark.parametrize(
    "tiling", [*TILINGS[:2], Tiling(False, 64, 64, 4)], ids=["vector", "parts of a mask's word", "whole words"]
)
def test_maxima_of_a_product_are_of_what_masks_allow(tiling):
    rows, width, vocab = 1 if tiling.vector else 5, 64, 150
    x, w, norm = torch.randn(rows, width), torch.randn(vocab, width), torch.ones(width)
    bits = torch.from_numpy(np.random.default_rng(3).integers(0, 2**32, (3, 5), dtype=np.uint32).view(np.int32))
    bits[2] = 0  # nothing at all
    index = torch.tensor([0, -1, 2, 1, 0][:rows], dtype=torch.int32)
    p, plain, masked = Product(w, None, ARGMAX, tiling), stream(rows, width, vocab), stream(rows, width, vocab)
    run_product(p, plain, folded(x, norm, 2), x)
    run_product(p, masked, folded(x, norm, 2), x, masks=(index, bits))
    found = [s.best.view(-1)[: rows * p.tiles].view(rows, -1) for s in (plain, masked)]
    places = [s.best_at.view(-1)[: rows * p.tiles].view(rows, -1) for s in (plain, masked)]
    sums = [s.sums.view(-1)[: rows * p.tiles] for s in (plain, masked)]
    assert torch.equal(*sums), "of all of them"
    want = F.linear(rms_norm.reference(x, norm, EPS), w)
    apply_bitmask.reference(want, torch.arange(rows)[index >= 0], bits[index[index >= 0].long()])
    for row in range(rows):
        if index[row] < 0:
            assert torch.equal(found[0][row], found[1][row]) and torch.equal(places[0][row], places[1][row])
        for tile, logits in enumerate(want[row].split(tiling.rows)):
            torch.testing.assert_close(found[1][row, tile], logits.max(), rtol=1e-4, atol=1e-4)
            assert logits.max() == -torch.inf or places[1][row, tile] == tile * tiling.rows + logits.argmax()
    run_product(p, masked, folded(x, norm, 2), x, masks=(torch.full((rows,), -1, dtype=torch.int32), bits))
    assert torch.equal(masked.best.view(-1)[: rows * p.tiles], plain.best.view(-1)[: rows * p.tiles])


def test_rows_go_on_by_themselves_and_fill_the_ring():
    best, sums = torch.tensor([[1.0, 3.0], [5.0, 2.0], [1.0, 4.0]]), torch.zeros(3, 2)
    sums[2, 1] = float("nan")
    best_at = torch.tensor([[4, 9], [3, 8], [1, 7]], dtype=torch.int32)
    slots, positions = torch.tensor([1, -1, 0], dtype=torch.int32), torch.tensor([5, 2, 0], dtype=torch.int32)
    turns, ring = torch.tensor([2, 0, 1], dtype=torch.int32), torch.full((3, 4), -9, dtype=torch.int32)
    tokens = torch.zeros(2, 9, dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int32)
    for _ in range(2):
        choose_tokens(slots, positions, best, best_at, sums, 2, 20, tokens, lengths, ring, turns)
    assert positions.tolist() == [7, 2, 2]
    assert lengths.tolist() == [3, 8]
    assert turns.tolist() == [1, 0, 0]
    assert ring.tolist() == [[9, -9, -9, -9], [-9, -9, -1, -9], [9, -9, -1, -9]]
    assert tokens.tolist() == [[0, 7, 7, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 9, 9, 0]]


@pytest.mark.parametrize(("rows", "outputs"), [(70, 96), (33, 64)])
def test_wide_products_gate_and_find_the_maximum(rows, outputs):
    t = WideTiling(64, 32, 32, 4, 2)
    x, w, out = torch.randn(rows, 128), torch.randn(2 * outputs, 128), torch.full((rows, outputs), float("nan"))
    for act in ("silu", "gelu_tanh"):
        gated_product(x, w, out, act, t)
        torch.testing.assert_close(out, activate_gated.reference(F.linear(x, w), act), rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="not a multiple"):
        gated_product(x, w[:100], out, "silu", t)
    vocab = 2 * outputs - 5
    # small whole numbers: products are exact, so that a tie is one however they are summed
    x, w = torch.randint(-9, 10, (rows, 128)).float(), torch.randint(-9, 10, (vocab, 128)).float()
    w[40] = w[7]  # a tie: the lower id wins
    x[3] = 100 * w[7]
    x[5, 0] = float("inf")
    best, sums = torch.empty(rows, 9), torch.empty(rows, 9)
    best_at = torch.empty(rows, 9, dtype=torch.int32)
    tiles = argmax_product(x, w, best, best_at, sums, t)
    ids, tokens = torch.empty(rows, dtype=torch.int32), torch.zeros(rows, 4, dtype=torch.int32)
    lengths = torch.zeros(rows, dtype=torch.int32)
    slots, positions = torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    choose_tokens(slots, positions, best, best_at, sums, tiles, vocab, tokens, lengths, ids)
    logits = F.linear(x, w)
    want = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1).int()
    want[5] = -1
    assert want[3] == 7
    assert torch.equal(ids, want)
    index = torch.arange(rows, dtype=torch.int32) % 3 - 1
    bits = torch.from_numpy(np.random.default_rng(3).integers(0, 2**32, (2, -(-vocab // 32)), dtype=np.uint32))
    argmax_product(x, w, best, best_at, sums, t, masks=(index, bits.view(torch.int32)))
    choose_tokens(slots, positions, best, best_at, sums, tiles, vocab, tokens, lengths, ids, masked=True)
    apply_bitmask.reference(logits, (index >= 0).nonzero()[:, 0], bits.view(torch.int32)[index[index >= 0].long()])
    masked = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1).int()
    masked[5] = -1
    assert torch.equal(ids, masked)
    assert torch.equal(ids[index < 0], want[index < 0])


def test_argmax_of_logits_marks_what_is_not_finite():
    logits = torch.randn(3, 5000)
    logits[0, 4500] = logits[0, 4200] = 50.0
    logits[1, 33] = float("nan")
    best, sums = torch.empty(3, 2), torch.empty(3, 2)
    best_at = torch.empty(3, 2, dtype=torch.int32)
    tiles = argmax_tiles(logits, best, best_at, sums)
    tokens, out = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    lengths = torch.zeros(3, dtype=torch.int32)
    ids = torch.arange(3, dtype=torch.int32)
    choose_tokens(ids, torch.zeros(3, dtype=torch.int32), best, best_at, sums, tiles, 5000, tokens, lengths, out)
    assert out.tolist() == [4200, -1, int(logits[2].argmax())]
    assert 0 <= int(tokens[1, 1]) < 5000


def test_rows_are_gathered_from_the_slot_table():
    tokens = torch.randint(0, 99, (4, 64), dtype=torch.int32)
    table = torch.arange(1, 33, dtype=torch.int32).view(4, 8)
    slots, positions = torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([19, 55, 7], dtype=torch.int32)
    ids, at = torch.full((3,), -5), torch.full((3,), -5)
    lens, mapping = torch.full((3,), -5, dtype=torch.int32), torch.full((3,), -5)
    blocks = torch.full((3, 8), -5, dtype=torch.int32)
    gather_inputs(slots, positions, tokens, table, (ids, at, lens), mapping, blocks, 8, True)
    assert ids.tolist() == [int(tokens[2, 19]), 0, int(tokens[0, 7])]
    assert at.tolist() == [19, 0, 7]
    assert lens.tolist() == [20, 1, 8]
    assert mapping.tolist() == [int(table[2, 2]) * 8 + 3, 0, int(table[0, 0]) * 8 + 7]
    assert blocks[0, :3].tolist() == table[2, :3].tolist()
    assert blocks[1, 0] == 0


@pytest.mark.parametrize("query", [2, 3])
def test_tokens_behind_the_first_are_gathered_as_far_as_they_are_real(query):
    tokens = torch.randint(1, 99, (4, 64), dtype=torch.int32)
    table = torch.arange(1, 33, dtype=torch.int32).view(4, 8)
    slots, positions = torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([6, 55, 7], dtype=torch.int32)
    drafts = torch.tensor([query - 1, 0, 0], dtype=torch.int32)
    ids, at, mapping = (torch.full((3 * query,), -5) for _ in range(3))
    lens, blocks = torch.full((3,), -5, dtype=torch.int32), torch.full((3, 8), -5, dtype=torch.int32)
    gather_inputs(slots, positions, tokens, table, (ids, at, lens), mapping, blocks, 8, True, drafts)
    zeros = [0] * query
    assert ids.tolist() == [*tokens[2, 6 : 6 + query].tolist(), *zeros, int(tokens[0, 7]), *zeros[1:]]
    assert at.tolist() == [*range(6, 6 + query), *range(query), *range(7, 7 + query)]
    assert lens.tolist() == [6 + query, query, 7 + query]
    home = [int(table[2, p // 8]) * 8 + p % 8 for p in range(6, 6 + query)]
    behind = [p % 8 for p in range(8, 7 + query)]  # in the null block
    assert mapping.tolist() == [*home, *range(query), int(table[0, 0]) * 8 + 7, *behind]
    assert blocks[0, : (6 + query - 1) // 8 + 1].tolist() == table[2, : (6 + query - 1) // 8 + 1].tolist()


def test_rows_resume_where_their_slots_end():
    slots, positions = torch.tensor([2, -1, 0, 1], dtype=torch.int32), torch.tensor([-1, -1, 7, -1], dtype=torch.int32)
    resume_rows(slots, positions, torch.tensor([5, 9, 33], dtype=torch.int32))
    assert positions.tolist() == [32, -1, 7, 8]


@pytest.mark.parametrize("drawn", [False, True])
def test_samples_are_delivered_as_far_as_drafts_hold(drawn):
    """Against the rule, row by row: rows with 0 to 3 drafts, right up to a place; one is padding, one no number."""
    rows, query, vocab = 7, 4, 5000
    logits = torch.randn(rows * query, vocab)
    slots = torch.tensor([4, 0, -1, 2, 6, 1, 3], dtype=torch.int32)
    positions, drafts = torch.arange(3, 10, dtype=torch.int32), torch.tensor([3, 3, 2, 0, 2, 1, 3], dtype=torch.int32)
    places = (positions[:, None] + torch.arange(query)).reshape(-1).long()
    seeds = np.random.default_rng(1).integers(0, 2**64, rows * query, dtype=np.uint64)
    one, none = torch.ones(rows * query), torch.zeros(rows * query, dtype=torch.int32)
    drawing = Drawing(one, none.float(), none, one, torch.from_numpy(stream_start(seeds).view(np.int64)))
    if drawn:
        numbers = torch.from_numpy(uniform(stream_start(seeds), places.numpy() + 1))
        host = np.zeros(rows * query, np.int32)
        params = DrawParams(one, none.float(), none, one, numbers, host, one.numpy())
        samples = draw.reference(logits, params).view(rows, query).int()
    else:
        samples = logits.argmax(-1).view(rows, query).int()
    tokens, lengths = torch.full((7, 20), 4999, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    right = [3, 1, 0, 0, 2, 0, 3]  # drafts that are what is sampled, from the first on
    for i in range(rows):
        if slots[i] >= 0:
            tokens[slots[i], positions[i] + 1 : positions[i] + 1 + right[i]] = samples[i, : right[i]]
    logits[6 * query + 1, 9] = float("nan")
    ring, turns = torch.full((2, rows * query + 4), -9, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    before = positions.clone()
    verify_tokens(
        logits, slots, positions, drafts, tokens, lengths, ring, turns, places=places,
        drawing=drawing if drawn else None,
    )  # fmt: skip
    for i, slot in enumerate(slots.tolist()):
        found = ring[1, i * query : (i + 1) * query].tolist()
        if slot < 0:
            assert found == [-9] * query and positions[i] == before[i]
            continue
        count = min(right[i], int(drafts[i])) + 1
        want = samples[i, :count].tolist()
        if i == 6:  # nothing holds behind what is no number
            want = [want[0], -1]
        assert found == want + [NOTHING] * (query - len(want))
        assert lengths[slot] == before[i] + 1 + len(want) and positions[i] == before[i] + len(want)
        if i != 6:
            assert tokens[slot, before[i] + 1 : before[i] + 1 + count].tolist() == want
    assert turns.tolist() == [0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("drawn", [False, True])
def test_masked_rows_say_what_they_may_and_free_rows_what_they_would(drawn):
    rows, vocab = 6, 9000
    rng = np.random.default_rng(3)
    logits = torch.randn(rows, vocab + 8)[:, :vocab]  # as behind a padded head
    bits = torch.from_numpy(rng.integers(0, 2**32, (3, -(-vocab // 32)), dtype=np.uint32).view(np.int32))
    bits[2] = 0  # nothing at all
    index = torch.tensor([-1, 1, 2, 0, -1, 0], dtype=torch.int32)
    want = logits.clone()
    apply_bitmask.reference(want, torch.tensor([1, 2, 3, 5]), bits[index[[1, 2, 3, 5]].long()])
    logits[4, 8999], logits[5, 3] = float("nan"), float("inf")
    slots, positions = torch.arange(rows, dtype=torch.int32), torch.full((rows,), 2, dtype=torch.int32)
    tokens, lengths = torch.zeros(rows, 9, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    out = torch.full((rows,), -9, dtype=torch.int32)
    if drawn:
        one, none = torch.ones(rows), torch.zeros(rows, dtype=torch.int32)
        seeds = rng.integers(0, 2**64, rows, dtype=np.uint64)
        drawing = Drawing(one, none.float(), none, one, torch.from_numpy(stream_start(seeds).view(np.int64)))
        draw_tokens(logits, slots, positions, drawing, tokens, lengths, out, masks=(index, bits))
        numbers = torch.from_numpy(uniform(stream_start(seeds), np.full(rows, 3)))
        params = DrawParams(one, none.float(), none, one, numbers, none.numpy(), one.numpy())
        ids = draw.reference(want, params).tolist()
    else:
        best, sums = torch.empty(rows, 3), torch.empty(rows, 3)
        best_at = torch.empty(rows, 3, dtype=torch.int32)
        before = logits.clone()
        tiles = argmax_tiles(logits, best, best_at, sums, (index, bits))
        assert tiles == 3 and torch.equal(logits.nan_to_num(), before.nan_to_num()), "logits stay"
        choose_tokens(slots, positions, best, best_at, sums, tiles, vocab, tokens, lengths, out, masked=True)
        ids = want.argmax(-1).tolist()
    assert out.tolist() == [ids[0], ids[1], IMPOSSIBLE, ids[3], NOT_FINITE, NOT_FINITE]
    assert int(tokens.min()) >= 0 and int(tokens.max()) < vocab
    assert [int(tokens[i, 3]) for i in (0, 1, 3)] == [ids[0], ids[1], ids[3]]


@pytest.mark.parametrize("late", [False, True])
def test_embedding_begins_the_stream(late):
    embedding, weight, places = torch.randn(50, 48), torch.randn(48), torch.randn(11, 48)
    tokens = torch.randint(0, 50, (3, 9), dtype=torch.int32)
    slots, positions = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([4, 0], dtype=torch.int32)
    h, scaled, squares = torch.empty(2, 48), torch.empty(2, 48), torch.empty(2, 3)
    embed_rows(slots, positions, tokens, Entrance(embedding), h, (weight, scaled, squares, 3))
    want = embedding[[int(tokens[1, 4]), int(tokens[2, 0])]]
    assert torch.equal(h, want)
    torch.testing.assert_close(scaled, want * weight)
    torch.testing.assert_close(squares.sum(-1), want.pow(2).sum(-1))
    embed_rows(slots, positions, tokens, Entrance(embedding, 0, 7.0, places, 2, late), h)
    place = places[[6, 2]]
    torch.testing.assert_close(h, (want + place) * 7.0 if late else want * 7.0 + place)


def test_the_ranks_embeddings_add_up():
    embedding = torch.randn(50, 48)
    tokens = torch.tensor([[3, 49, 20], [0, 24, 25]], dtype=torch.int32)
    slots, positions = torch.tensor([0, 1, 1, 0, -1], dtype=torch.int32), torch.tensor([1, 0, 2, 2, 9]).int()
    parts, places = torch.full((2, 5, 48), float("nan")), torch.randn(10, 48)
    for rank in range(2):
        mine = Entrance(embedding[25 * rank : 25 * rank + 25].contiguous(), 25 * rank, 2.0, places)
        embed_rows(slots, positions, tokens, mine, parts[rank])
    want = embedding[[49, 0, 25, 20, 0]] * 2.0 + places[[1, 0, 2, 2, 0]]
    torch.testing.assert_close(parts.sum(0), want)
    assert not parts[1, 1].any() and not parts[0, 0].any()


def test_ranks_elect_the_best_token_of_all():
    world, rows, share = 3, 6, 5000
    logits = torch.randn(rows, world * share)
    logits[0, 700] = logits[0, 12345] = 50.0
    logits[1, 9000], logits[2, 3] = float("nan"), float("inf")
    nominees = torch.empty(world, rows, 3)
    for rank in range(world):
        best, sums = torch.empty(rows, 2), torch.empty(rows, 2)
        best_at = torch.empty(rows, 2, dtype=torch.int32)
        first = rank * share
        tiles = argmax_tiles(logits[:, first : first + share].contiguous(), best, best_at, sums)
        nominate(best, best_at, sums, tiles, first, nominees[rank])
    slots, positions = torch.tensor([3, 0, 1, 2, -1, 4], dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    tokens, out = torch.zeros(5, 9, dtype=torch.int32), torch.full((rows,), 7, dtype=torch.int32)
    lengths = torch.zeros(5, dtype=torch.int32)
    elect(slots, positions, nominees.view(-1, 3), world, world * share, tokens, lengths, out)
    want = logits.argmax(-1).tolist()
    assert out.tolist() == [700, -1, -1, want[3], 7, want[5]]
    assert tokens[2, 4] == want[3] and tokens[3, 1] == 700 and 0 <= int(tokens[0, 2]) < world * share


def normed_jointly(qkv, weights):
    """qkv with all queries and all keys of a row normalised together."""
    parts = (len(weights.q_weight), len(weights.k_weight))
    q, k, v = qkv.split([*parts, qkv.shape[1] - sum(parts)], 1)
    q, k = (rms_norm.reference(x, w, EPS, 1.0) for x, w in ((q, weights.q_weight), (k, weights.k_weight)))
    return torch.cat([q, k, v], 1)


@pytest.mark.parametrize(("splits", "early", "least"), [(1, False, 0), (4, False, 64), (1, True, 0), (4, True, 0)])
@pytest.mark.parametrize(
    ("norm", "window", "dim", "rotated", "interleaved", "softcap"),
    [
        (False, None, 16, 16, False, None),
        (True, None, 16, 16, False, None),
        (True, 1, 16, 16, True, None),
        (False, 70, 16, 0, False, 0.5),
        (True, None, 24, 8, False, None),
        (False, None, 40, 16, True, 2.0),
        (True, None, 40, 16, False, None),  # as two tiles of 32 and 16
        (False, None, 80, 80, False, None),
        ("joint", None, 40, 40, True, None),
        ("joint", None, 16, 16, False, None),
        ("joint", 70, 24, 8, False, None),
    ],
)
def test_decode_attention_is_rotation_write_and_attention_in_one(
    norm, window, dim, rotated, interleaved, softcap, splits, early, least
):
    heads, kv_heads, block = 6, 2, 8
    lengths = torch.tensor([0 if early else 1, 40, 150])  # tokens in the cache before this step
    slots = torch.tensor([3, 0, 2], dtype=torch.int32)
    table = (torch.randperm(100) + 1)[:80].view(4, 20).to(torch.int32)
    cache = torch.randn(101, 2, kv_heads, block, dim)
    angle = torch.arange(200)[:, None] * 100.0 ** (-torch.arange(rotated // 2) / max(rotated / 2, 1))
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    qkv = torch.randn(3, (heads + 2 * kv_heads) * dim)
    weights = rotary_ops.QKNorm(torch.randn(dim), torch.randn(dim), EPS, 1.0) if norm else None
    normal = qkv
    if norm == "joint":
        weights = rotary_ops.QKNorm(torch.randn(heads * dim), torch.randn(kv_heads * dim), EPS, 1.0)
        normal = normed_jointly(qkv, weights)

    want_cache = cache.clone()
    home = table[slots.long(), lengths // block].long() * block + lengths % block
    if rotated:
        rotary = (lengths, cos_sin, interleaved, want_cache, home)
        each = None if norm == "joint" else weights
        q, _ = rotary_ops.rotate_and_write_kv.reference(normal, heads, *rotary, qk_norm=each)
    else:
        q, k, v = qkv.view(3, -1, dim).split([heads, kv_heads, kv_heads], 1)
        write_kv.reference(k, v, want_cache, home)
    starts, lens = torch.arange(4, dtype=torch.int32), (lengths + 1).to(torch.int32)
    group = GroupInputs(home, table[slots.long()])
    step = StepInputs.of(
        lengths, lengths, starts, lens, (group,), logits_rows=lengths, max_seq_len=151,
        host_query_starts=starts.numpy(), host_seq_lens=lens.numpy(),
    )  # fmt: skip
    want = attend.reference(q, want_cache, AttentionParams(0.25, window, softcap), step, group)

    a = DecodeAttention(
        heads, 0.25, cache, cos_sin if rotated else None, None if weights is None else weights.q_weight,
        None if weights is None else weights.k_weight, EPS, 1.0, 1, window, softcap, interleaved, joint=norm == "joint",
    )  # fmt: skip
    rows = DecodeRows(
        slots, lengths.to(torch.int32), [table[:0], table], torch.empty(3 * heads * splits, dim),
        torch.empty(3 * heads * splits), torch.zeros(3 * kv_heads, dtype=torch.int32), splits, early=early,
        least=least,
    )  # fmt: skip
    out = torch.empty(3, heads * dim)
    decode_attention(qkv, out, a, rows)
    torch.testing.assert_close(out, want.flatten(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, want_cache)
    assert not rows.arrived.any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("splits", "early", "dim"), [(1, False, 16), (3, True, 24)])
def test_decode_attention_reads_and_writes_a_cache_of_eight_bits(dtype, splits, early, dim):
    """The new token's key and value count as the cache keeps them, beyond its range at its ends."""
    heads, kv_heads, block = 6, 2, 8
    lengths = torch.tensor([1, 40, 150])
    slots = torch.tensor([3, 0, 2], dtype=torch.int32)
    table = (torch.randperm(100) + 1)[:80].view(4, 20).to(torch.int32)
    cache = torch.randn(101, 2, kv_heads, block, dim).to(dtype)
    # numbers of the format itself: the interpreter rounds others wrongly
    qkv = (torch.randn(3, heads + 2 * kv_heads, dim).to(dtype).float() * 0.5).flatten(1)
    qkv[0, -1], qkv[1, -dim] = 1e6, -1e6
    want_cache = cache.clone()
    home = table[slots.long(), lengths // block].long() * block + lengths % block
    q, k, v = qkv.view(3, -1, dim).split([heads, kv_heads, kv_heads], 1)
    write_kv.reference(k, v, want_cache, home, 0.5, 0.25)
    starts, lens = torch.arange(4, dtype=torch.int32), (lengths + 1).to(torch.int32)
    group = GroupInputs(home, table[slots.long()])
    step = StepInputs.of(
        lengths, lengths, starts, lens, (group,), logits_rows=lengths, max_seq_len=151,
        host_query_starts=starts.numpy(), host_seq_lens=lens.numpy(),
    )  # fmt: skip
    want = attend.reference(q, want_cache, AttentionParams(0.25, k_scale=0.5, v_scale=0.25), step, group)

    a = DecodeAttention(heads, 0.25, cache, None, k_scale=0.5, v_scale=0.25)
    rows = DecodeRows(
        slots, lengths.to(torch.int32), [table], torch.empty(3 * heads * splits, dim),
        torch.empty(3 * heads * splits), torch.zeros(3 * kv_heads, dtype=torch.int32), splits, early=early,
    )  # fmt: skip
    out = torch.empty(3, heads * dim)
    decode_attention(qkv, out, a, rows)
    torch.testing.assert_close(out, want.flatten(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(cache.view(torch.uint8), want_cache.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 2, 16, 64])
@pytest.mark.parametrize("inputs", [64, 320, 896, 1024, 2304, 4096, 8960, 14336])
def test_chosen_tilings_divide_the_product(rows, inputs):
    for mode in (STORE, GATED, RESIDUAL, ARGMAX):
        for outputs in (64, 896, 2048, 4096, 8192, 28672, 128256):
            t = choose_tiling(rows, outputs, inputs, mode)
            if not t.vector:
                assert inputs % (t.depth * t.split) == 0
            if mode == GATED:
                assert outputs % t.rows == 0


@pytest.mark.parametrize("rows", [2, 16, 32, 64])
@pytest.mark.parametrize("outputs", [1024, 1536, 2048, 2560, 3072, 4096, 14336])
@pytest.mark.parametrize("inputs", [896, 2048, 2304, 4096, 11008, 14336])
@pytest.mark.parametrize("mode", [STORE, GATED, RESIDUAL, ARGMAX])
def test_tilings_of_plain_weights_divide_the_product_into_blocks_and_fit_a_processor(rows, outputs, inputs, mode):
    pair = 2 if mode == GATED else 1
    t = plain_few.choose_plain_tiling(rows, torch.empty(pair * outputs, inputs, dtype=torch.half, device="meta"), mode)
    if t is not None:
        assert inputs % t.depth == outputs % t.rows == 0 and 2 <= t.stages <= inputs // t.depth // t.split
        assert t.split == 1 or outputs // t.rows * t.split <= processors()
        assert t.stages * (pair * t.rows + max(16, rows)) * t.depth * 2 < 227 << 10
    assert t is None or mode != ARGMAX


@pytest.mark.parametrize(("outputs", "rows"), [(3072, 32), (9216, 32), (12288, 32), (8192, 64), (14336, 64)])
def test_gated_products_have_half_tiles_where_these_spread_more_evenly(outputs, rows, monkeypatch):
    monkeypatch.setattr(plain_few, "processors", lambda: 132)
    t = plain_few.choose_plain_tiling(32, torch.empty(2 * outputs, 4096, dtype=torch.half, device="meta"), GATED)
    assert t.rows == rows


@pytest.mark.parametrize(
    ("outputs", "inputs", "shares"),
    [
        (2560, 10240, 3), (2304, 9216, 3), (2048, 11008, 4), (2048, 8192, 4), (3584, 14336, 2), (4096, 14336, 2),
        (5120, 13824, 1), (2560, 2560, 2), (2304, 2048, 2), (2048, 2048, 2), (1536, 1536, 4), (1536, 8960, None),
        (2048, 10944, None),
    ],
)  # fmt: skip
def test_second_products_take_as_many_shares_as_there_are_processors_for(outputs, inputs, shares, monkeypatch):
    monkeypatch.setattr(plain_few, "processors", lambda: 132)
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    t = plain_few.choose_plain_tiling(32, weight, RESIDUAL)
    assert (t and t.split) == shares
    more = plain_few.choose_plain_tiling(64, weight, RESIDUAL)
    assert (more and more.split) == (None if (outputs, inputs) == (2048, 11008) else shares)


def test_drawn_tokens_are_those_of_the_sampler():
    rows, vocab = 6, 700
    rng = np.random.default_rng(0)
    logits = torch.randn(rows, vocab) * 3
    seeds = rng.integers(0, 2**64, rows, dtype=np.uint64)
    top_k, top_p = np.array([0, 5, 0, 40, 0, 1], np.int32), np.array([1, 1, 0.9, 0.8, 1, 1], np.float32)
    temperature, min_p = torch.rand(rows) + 0.5, torch.tensor([0.0, 0.0, 0.0, 0.1, 0.2, 0.0])
    slots = torch.tensor([2, 0, 1, -1, 5, 4], dtype=torch.int32)
    positions = torch.tensor([0, 9, 3, 4, 2**20, 77], dtype=torch.int32)
    tokens = torch.zeros(6, 2**20 + 3, dtype=torch.int32)
    lengths = torch.zeros(6, dtype=torch.int32)
    starts = torch.from_numpy(stream_start(seeds).view(np.int64))
    drawing = Drawing(temperature, min_p, torch.from_numpy(top_k), torch.from_numpy(top_p), starts)
    ring, turns = torch.full((2, rows), -9, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    at = positions.numpy() + 1
    numbers = uniform(stream_start(seeds), at)
    want = draw.reference(logits, DrawParams(temperature, min_p, drawing.top_k, drawing.top_p,
        torch.from_numpy(numbers), top_k, top_p)).int()  # fmt: skip
    logits[4, 650] = float("nan")
    draw_tokens(logits, slots, positions, drawing, tokens, lengths, ring, turns)
    want[3], want[4] = -9, -1
    assert torch.equal(ring[1], want)
    assert (ring[0] == -9).all()
    assert turns.tolist() == [0, 0, 0, 1, 0, 0]
    assert positions.tolist() == [1, 10, 4, 4, 2**20 + 1, 78]
    assert [int(tokens[s, p]) for s, p in zip(slots[:3].tolist(), at[:3].tolist(), strict=True)] == want[:3].tolist()
