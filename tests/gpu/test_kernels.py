"""Every kernel on the device, over a grid of shapes and dtypes, against the fp32 reference."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from tests.ops.triton.batches import make_batch
from vllm.ops import activation, attention, draw, norm, rotary
from vllm.ops.shared_prefix import Group, cut, find_groups
from vllm.ops.triton.decode_attention import DecodeAttention, DecodeRows, decode_attention
from vllm.step.inputs import GroupInputs, StepInputs
from vllm.worker.prefix_sharing import Heads, plan_views, static_plans, tiles

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


def error(got, want):
    assert not torch.isnan(got.float()).any()
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


MIXES = {
    "decode": ([1] * 5, [1, 17, 500, 64, 2000]),
    "fresh prompts": ([300, 1, 77], [300, 1, 77]),
    "chunks and decodes": ([1, 200, 1, 130, 2], [333, 700, 3, 130, 40]),
}
FEATURES = {
    "plain": {},
    "window": {"window": 100},
    "softcap": {"softcap": 8.0},
    "alibi": {"alibi": True},
    "all": {"window": 33, "softcap": 8.0, "alibi": True},
}
SHAPES = {
    (8, 8, 64, 16): DTYPES,
    (32, 8, 128, 16): DTYPES,
    (14, 2, 64, 32): [torch.bfloat16],
    (4, 1, 256, 8): [torch.bfloat16],
    (12, 4, 80, 64): [torch.float16],
    (9, 3, 112, 128): [torch.bfloat16],
    (71, 1, 64, 16): [torch.bfloat16],
}


def gather_plan(queries, lens, groups=()):
    """The plan of a batch that gathers."""
    found = attention.plan_gathering(queries, lens, groups)
    return found.on_device(torch.from_numpy(found.pieces).cuda(), torch.from_numpy(found.requests).cuda())


def attention_error(mix, shape, features, dtype, cache_dtype=None):
    query_lens, seq_lens = MIXES[mix]
    heads, kv_heads, head_dim, block = shape
    window = features.get("window")
    batch = make_batch(query_lens, seq_lens, heads, kv_heads, head_dim, block, dtype, window, device="cuda")
    slopes = torch.rand(heads, device="cuda") if features.get("alibi") else None
    cache = batch.cache
    scales = {}
    if cache_dtype is not None:
        cache, scales = cache.nan_to_num().to(cache_dtype), {"k_scale": 0.5, "v_scale": 2.0}
    params = attention.AttentionParams(head_dim**-0.5, window, features.get("softcap"), slopes, **scales)
    got = attention.attend(batch.q, cache, params, batch.step, batch.group)
    clean = cache.float().nan_to_num()
    return error(got, attention.attend.reference(batch.q.float(), clean, params, batch.step, batch.group))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_shapes(shape):
    for mix, dtype in itertools.product(MIXES, SHAPES[shape]):
        assert attention_error(mix, shape, {}, dtype) < TOLERANCE[dtype], (mix, dtype)


@pytest.mark.parametrize("features", FEATURES)
def test_attention_features(features):
    for mix in MIXES:
        assert attention_error(mix, (32, 8, 128, 16), FEATURES[features], torch.bfloat16) < 1e-2, mix


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_attention_over_a_float8_cache(cache_dtype):
    for mix in MIXES:
        assert attention_error(mix, (32, 8, 128, 16), {}, torch.bfloat16, cache_dtype) < TOLERANCE[torch.bfloat16], mix


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64)])
def test_long_queries_over_gathered_keys(heads, kv_heads, head_dim, cache_dtype):
    queries, lens = [700, 1, 300, 129, 17, 9], [700, 50, 900, 129, 40, 9]
    batch = make_batch(queries, lens, heads, kv_heads, head_dim, 16, torch.bfloat16, device="cuda")
    plan = gather_plan(np.array(queries), np.array(lens))
    cache, scales = batch.cache, {}
    if cache_dtype != torch.bfloat16:
        cache, scales = cache.nan_to_num().to(cache_dtype), {"k_scale": 0.5, "v_scale": 2.0}
    params = attention.AttentionParams(head_dim**-0.5, **scales)
    # queries lie inside a fused projection
    fused = torch.randn(batch.q.shape[0], heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    fused[:, :heads] = batch.q
    got = attention.attend(fused[:, :heads], cache, params, batch.step, msgspec.structs.replace(batch.group, plan=plan))
    clean = cache.float().nan_to_num()
    assert error(got, attention.attend.reference(batch.q.float(), clean, params, batch.step, batch.group)) < 1e-2


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize(
    ("queries", "lens"),
    [([700, 1, 300, 129, 17, 9], [700, 50, 300, 129, 17, 9]), ([2048, 2048, 2048], [2048, 2048, 2048])],
)
def test_fresh_prompts_read_the_step_s_own_keys(queries, lens, heads, kv_heads, head_dim):
    batch = make_batch(queries, lens, heads, kv_heads, head_dim, 16, torch.bfloat16, device="cuda")
    plan = gather_plan(np.array(queries), np.array(lens))
    assert plan is not None
    assert plan.fresh
    group = msgspec.structs.replace(
        batch.group, plan=replace(plan, runs=attention.dense_runs(np.array(queries), np.array(lens)))
    )
    slot = batch.group.slot_mapping
    fused = torch.empty(batch.q.shape[0], heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    q.copy_(batch.q)
    for own, side in ((k, 0), (v, 1)):
        own.copy_(batch.cache[:, side][slot // 16, :, slot % 16])
    params = attention.AttentionParams(head_dim**-0.5)
    got = attention.attend(q, batch.cache, params, batch.step, group, (k, v))
    gathered = attention.attend(q, batch.cache, params, batch.step, group)
    if not group.plan.runs:
        assert torch.equal(got, gathered)
    clean = batch.cache.float().nan_to_num()
    assert error(got, attention.attend.reference(q.float(), clean, params, batch.step, group)) < 1e-2
    # what is read is the step's own, not the cache
    batch.cache.fill_(torch.nan)
    long = batch.step.host_query_starts[:1] if 1 in queries else batch.step.host_query_starts[:-1]
    again = attention.attend(q, batch.cache, params, batch.step, group, (k, v))
    for start in long:
        assert torch.equal(again[start : start + queries[0]], got[start : start + queries[0]])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64)])
def test_long_queries_over_common_keys(heads, kv_heads, head_dim):
    own, cached = [40, 1, 300, 130, 128, 5], [1500, 60, 1024, 1090, 10, 17]
    lens = [c + n for c, n in zip(cached, own, strict=True)]
    batch = make_batch(own, lens, heads, kv_heads, head_dim, 16, torch.bfloat16, device="cuda")
    for r in (2, 3):
        batch.group.block_table[r, :64] = batch.group.block_table[0, :64]
    plan = gather_plan(np.array(own), np.array(lens), [Group(np.array([0, 2, 3]), 1024)])
    params = attention.AttentionParams(head_dim**-0.5)
    got = attention.attend(batch.q, batch.cache, params, batch.step, msgspec.structs.replace(batch.group, plan=plan))
    clean = batch.cache.float().nan_to_num()
    assert error(got, attention.attend.reference(batch.q.float(), clean, params, batch.step, batch.group)) < 1e-2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (32, 8, 128, torch.bfloat16),
        (6, 2, 128, torch.float16),
        (16, 8, 256, torch.bfloat16),
        (3, 3, 256, torch.float16),
    ],
)
@pytest.mark.parametrize("window", [None, 5, 200, 700])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_long_queries_with_windows_caps_and_sinks(softcap, window, heads, kv_heads, head_dim, dtype):
    """Behind cached tokens, also some in common, and without."""
    own = [900, 1, 333, 129]
    for cached in ([0, 0, 0, 0], [300, 60, 256, 290]):
        lens = [c + n for c, n in zip(cached, own, strict=True)]
        batch = make_batch(own, lens, heads, kv_heads, head_dim, 16, dtype, window, device="cuda")
        batch.cache[1:].nan_to_num_()
        shared = any(cached) and window is None
        if shared:
            batch.group.block_table[2, :12] = batch.group.block_table[0, :12]
        groups = [Group(np.array([0, 2]), 192)] if shared else []
        group = msgspec.structs.replace(batch.group, plan=gather_plan(np.array(own), np.array(lens), groups))
        for sinks in (None, torch.randn(heads, device="cuda")):
            params = attention.AttentionParams(head_dim**-0.5, window, softcap, sinks=sinks)
            got = attention.attend(batch.q, batch.cache, params, batch.step, group)
            again = attention.attend(batch.q, batch.cache, params, batch.step, group)
            clean = batch.cache.float().nan_to_num()
            want = attention.attend.reference(batch.q.float(), clean, params, batch.step, batch.group)
            assert torch.equal(got, again)
            assert error(got, want) < TOLERANCE[dtype], (cached, sinks is not None)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [(32, 8, 128, torch.bfloat16), (14, 2, 64, torch.float16), (16, 8, 256, torch.bfloat16), (4, 2, 80, torch.float32)],
)
def test_decode_batches_over_shared_prefixes(heads, kv_heads, head_dim, dtype):
    """Both kernels: of the general path, over finished queries, and of the fused step, without rotation."""
    block, rows = 16, 40
    table = torch.randperm(rows * 80).view(rows, 80).to(torch.int32) + 1
    table[1::2, :60], table[::4, :40] = table[1, :60].clone(), table[0, :40].clone()  # two groups, and ten alone
    cached = np.random.default_rng(0).integers(970, 1270, rows).astype(np.int32)
    cache = torch.randn(rows * 80 + 1, 2, kv_heads, block, head_dim, device="cuda").to(dtype)
    shape = Heads(heads, kv_heads, head_dim, dtype.itemsize)
    groups = find_groups(table.numpy(), np.arange(rows), cached, block, tiles(shape, rows).members)
    assert [(len(g.rows), g.keys) for g in groups] == [(20, 960), (10, 640)]
    work, plan = cut(groups, rows, tiles(shape, rows)), plan_views(shape, rows, static_plans(shape, rows, "cuda"))
    plan.rows.copy_(torch.from_numpy(work.rows))
    plan.members[: len(work.members)] = torch.from_numpy(work.members)
    plan.items[: len(work.items)] = torch.from_numpy(work.items)

    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    q, k, v = qkv.view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    at, d_table = torch.from_numpy(cached).cuda(), table.cuda()
    home = d_table.gather(1, at[:, None].long() // block)[:, 0].long() * block + at % block
    written = cache.clone()
    attention.write_kv.reference(k, v, written, home)
    starts, lens = np.arange(rows + 1, dtype=np.int32), cached + 1
    group = GroupInputs(home, d_table, plan)
    step = StepInputs.of(
        at, at, torch.from_numpy(starts).cuda(), torch.from_numpy(lens).cuda(), (group,), max_seq_len=1280,
        host_query_starts=starts, host_seq_lens=lens,
    )  # fmt: skip
    params = attention.AttentionParams(head_dim**-0.5)
    want = attention.attend.reference(q.float(), written.float(), params, step, group)
    assert error(attention.attend(q, written, params, step, group), want) < TOLERANCE[dtype]
    if dtype != torch.bfloat16 or head_dim > 128:
        return
    no_turn = torch.cat([torch.ones(1280, head_dim // 2), torch.zeros(1280, head_dim // 2)], 1).cuda()
    a = DecodeAttention(heads, params.scale, cache, no_turn, None, None, 0.0, 0.0)
    for splits in (1, 4):
        part = torch.empty(rows * heads * splits, head_dim, device="cuda")
        decode_rows = DecodeRows(
            torch.arange(rows, dtype=torch.int32, device="cuda"), at, [d_table], part, part[:, 0].contiguous(),
            torch.zeros(rows * kv_heads, dtype=torch.int32, device="cuda"), splits, shared=plan,
        )  # fmt: skip
        out = torch.empty(rows, heads * head_dim, device="cuda", dtype=dtype)
        decode_attention(qkv, out, a, decode_rows)
        assert error(out, want.flatten(1)) < TOLERANCE[dtype]


@pytest.mark.parametrize("lengths", [[2048, 2048, 1], [1600], [4000, 2048, 5]])
def test_long_fresh_prompts_through_dense_attention(lengths):
    heads, kv_heads, head_dim = 16, 8, 128
    counts = np.array(lengths)
    seen = np.where(counts < 16, 300, counts)
    batch = make_batch(lengths, seen.tolist(), heads, kv_heads, head_dim, 16, torch.bfloat16, device="cuda")
    runs = attention.dense_runs(counts, seen)
    assert bool(runs) == (1600 not in lengths)
    plan = replace(gather_plan(counts, seen), runs=runs)
    params = attention.AttentionParams(head_dim**-0.5)
    fused = torch.randn(batch.q.shape[0], heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    fused[:, :heads] = batch.q
    got = attention.attend(
        fused[:, :heads], batch.cache, params, batch.step, msgspec.structs.replace(batch.group, plan=plan)
    )
    clean = batch.cache.float().nan_to_num()
    assert error(got, attention.attend.reference(batch.q.float(), clean, params, batch.step, batch.group)) < 1e-2


DRAWS = {
    "plain": (0, 1.0, 0.0),
    "usual": (50, 0.95, 0.0),
    "nucleus": (0, 0.9, 0.0),
    "wide": (500, 0.8, 0.0),
    "min_p": (0, 1.0, 0.1),
}


@pytest.mark.parametrize("spread", [0.05, 3.0])
@pytest.mark.parametrize("name", DRAWS)
def test_draw_matches_the_reference(name, spread):
    rows, vocab = 9, 151936
    k, p, m = DRAWS[name]
    one = torch.ones(rows)
    ks, ps = np.full(rows, k, np.int32), np.full(rows, p, np.float32)
    vectors = (one * 0.8, one * m, torch.from_numpy(ks), torch.from_numpy(ps), torch.rand(rows))
    logits = torch.randn(rows, vocab) * spread
    want = draw.draw.reference(logits, draw.DrawParams(*vectors, ks, ps))
    params = draw.DrawParams(*(v.cuda() for v in vectors), ks, ps)
    got = draw.draw(logits.cuda(), params)
    # the last bit of exp differs, which moves the borders between neighbours, by a token of 151936 at most
    assert (got.cpu() != want).sum() <= 2
    assert torch.equal(draw.draw(logits[5:6].cuda(), params.take(np.array([5]))), got[5:6]), "alone as in company"


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("with_norm", ["none", "each", "joint"])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "interleaved"), [(128, 128, False), (80, 32, True), (64, 64, True)])
def test_rotate_and_write(head_dim, rotary_dim, interleaved, with_norm, cache_dtype):
    heads, kv_heads, block, tokens = 12, 4, 16, 37
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device="cuda", dtype=torch.bfloat16) * 30
    cos_sin = torch.rand(512, rotary_dim, device="cuda")
    positions = torch.randint(0, 512, (tokens,), device="cuda")
    slots = torch.randperm(20 * block, device="cuda")[:tokens]
    weights = None
    if with_norm != "none":
        sizes = (heads * head_dim, kv_heads * head_dim) if with_norm == "joint" else (head_dim, head_dim)
        given = (torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in sizes)
        weights = rotary.QKNorm(*given, 1e-6, joint=with_norm == "joint")
    caches = [torch.full((20, 2, kv_heads, block, head_dim), 3.0, device="cuda") for _ in range(2)]
    caches[1] = caches[1].to(cache_dtype)
    rest = (positions, cos_sin, interleaved)
    scales = (1.0, 1.0) if cache_dtype == torch.bfloat16 else (0.3, 0.7)
    fused = qkv.clone()
    wants = rotary.rotate_and_write_kv.reference(qkv, heads, *rest, caches[0], slots, 1.0, 1.0, weights)
    got, (k, v) = rotary.rotate_and_write_kv(fused, heads, *rest, caches[1], slots, *scales, weights)
    want, (want_k, want_v) = wants
    assert error(got, want) < 1e-2
    assert error(k, want_k) < 1e-2
    assert torch.equal(v, want_v)
    ulp = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 0.035, torch.float8_e5m2: 0.07}[cache_dtype]
    limit = float("inf") if cache_dtype == torch.bfloat16 else torch.finfo(cache_dtype).max
    used = torch.zeros(20 * block, dtype=torch.bool, device="cuda").index_fill_(0, slots, True).view(20, 1, block, 1)
    for side in (0, 1):
        stored = caches[1][:, side].float()
        wanted = torch.where(used, (caches[0][:, side] / scales[side]).clamp(-limit, limit), stored)
        assert error(stored, wanted) < ulp
        assert (torch.where(used, 3.0, stored) == 3.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 1000, 4096, 11008])
def test_norms_and_activations(dim, dtype):
    x, r, w, b = (torch.randn(33, dim, device="cuda").to(dtype) for _ in range(4))
    got, total = norm.add_rms_norm(x, r.clone(), w[0], 1e-6, 1.0)
    want, want_total = norm.add_rms_norm.reference(x, r, w[0], 1e-6, 1.0)
    assert torch.equal(total, want_total)
    assert error(got, want) < TOLERANCE[dtype]
    got, total = norm.add_layer_norm(x, r.clone(), w[0], b[0], 1e-5)
    want, want_total = norm.add_layer_norm.reference(x, r, w[0], b[0], 1e-5)
    assert torch.equal(total, want_total)
    assert error(got, want) < TOLERANCE[dtype]
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        assert error(activation.activate(x, kind), activation.activate.reference(x, kind)) < TOLERANCE[dtype]
        assert (
            error(activation.activate_gated(x, kind), activation.activate_gated.reference(x, kind)) < TOLERANCE[dtype]
        )
