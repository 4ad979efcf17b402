"""Dealing weights to ranks: what one rank gets, and that all ranks together get everything exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed import TensorParallel
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec, load_weight, shard, whole
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.layers.weight_layout import WeightLayout, canonical, stored_shape

worlds = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def attention_shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(world, heads, kv_heads, head_dim) that the ranks can share."""
    world = draw(worlds)
    kv_heads = draw(st.sampled_from([k for k in range(1, 13) if k % world == 0 or world % k == 0]))
    per_rank = draw(st.integers(1, 3))
    # heads are a multiple of both the ranks and the key/value heads
    heads = world * kv_heads * per_rank if kv_heads % world and world % kv_heads else max(world, kv_heads) * per_rank
    return world, heads, kv_heads, draw(st.integers(1, 5))


@settings(max_examples=50, deadline=None)
@given(attention_shapes(), st.integers(1, 7))
def test_each_rank_gets_its_heads_and_the_kv_heads_they_read(shape: tuple[int, int, int, int], width: int) -> None:
    world, heads, kv_heads, dim = shape
    q, k, v = (torch.randn(n * dim, width) for n in (heads, kv_heads, kv_heads))
    parts = (Part(heads * dim, heads, "q"), Part(kv_heads * dim, kv_heads, "k"), Part(kv_heads * dim, kv_heads, "v"))
    spec = ShardSpec(0, parts)
    group = heads // kv_heads
    for rank in range(world):
        local = shard(torch.cat([q, k, v]), spec, rank, world)
        mine = range(rank * heads // world, (rank + 1) * heads // world)
        read = sorted({head // group for head in mine})
        expected = [q.view(heads, dim, width)[list(mine)]]
        expected += [t.view(kv_heads, dim, width)[read] for t in (k, v)]
        assert torch.equal(local, torch.cat([t.reshape(-1, width) for t in expected]))
        assert local.shape == spec.local_shape(((heads + 2 * kv_heads) * dim, width), world)


@settings(max_examples=50, deadline=None)
@given(worlds, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 5), st.sampled_from([0, 1]))
def test_ranks_together_hold_every_row_once(world: int, sizes: list[int], width: int, dim: int) -> None:
    parts = tuple(whole(size * world, f"p{i}") for i, size in enumerate(sizes))
    spec = ShardSpec(dim, parts)
    total = sum(part.size for part in parts)
    tensor = torch.randn((total, width) if dim == 0 else (width, total))
    locals_ = [shard(tensor, spec, rank, world) for rank in range(world)]
    pieces = [local.split([part.size // world for part in parts], dim) for local in locals_]
    assert torch.equal(torch.cat([torch.cat(column, dim) for column in zip(*pieces, strict=True)], dim), tensor)


@settings(max_examples=50, deadline=None)
@given(worlds, st.integers(1, 200), st.sampled_from([1, 8, 64]))
def test_vocabulary_shards_are_padded_with_zeros(world: int, rows: int, padding: int) -> None:
    step = padding * world
    padded = -(-rows // step) * step
    spec = ShardSpec(0, (Part(rows, padded, padding=padded - rows),))
    tensor = torch.randn(rows, 3)
    joined = torch.cat([shard(tensor, spec, rank, world) for rank in range(world)])
    assert joined.shape == (padded, 3)
    assert torch.equal(joined[:rows], tensor)
    assert not joined[rows:].any()


@settings(max_examples=50, deadline=None)
@given(attention_shapes(), st.integers(1, 4), st.data())
def test_loading_part_by_part_equals_sharding_the_whole(
    shape: tuple[int, int, int, int], width: int, data: st.DataObject
) -> None:
    world, heads, kv_heads, dim = shape
    parts = (Part(heads * dim, heads, "q"), Part(kv_heads * dim, kv_heads, "k"), Part(kv_heads * dim, kv_heads, "v"))
    full = torch.randn((heads + 2 * kv_heads) * dim, width)
    rank = data.draw(st.integers(0, world - 1))
    param = ShardedParameter.empty(tuple(full.shape), ShardSpec(0, parts), rank, world, torch.float32)
    by_name = dict(zip("qkv", full.split([p.size for p in parts]), strict=True))
    for name in data.draw(st.permutations("qkv")):
        load_weight(param, by_name[name], name)
    assert torch.equal(param.data, shard(full, param.shard_spec, rank, world))
    again = ShardedParameter.empty(tuple(full.shape), ShardSpec(0, parts), rank, world, torch.float32)
    load_weight(again, full)
    assert torch.equal(again.data, param.data)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_fused_layouts_become_q_then_k_then_v(kv_heads: int, group: int, dim: int, width: int) -> None:
    heads = kv_heads * group
    q, k, v = torch.randn(heads, dim, width), torch.randn(kv_heads, dim, width), torch.randn(kv_heads, dim, width)
    expected = torch.cat([t.reshape(-1, width) for t in (q, k, v)])
    rows = []
    for kv in range(kv_heads):
        rows += [*q[kv * group : (kv + 1) * group], k[kv], v[kv]]
    stored = torch.cat(rows)
    assert torch.equal(canonical(stored, WeightLayout.QKV_BY_GROUP, heads, kv_heads), expected)
    assert torch.equal(canonical(stored[:, 0], WeightLayout.QKV_BY_GROUP, heads, kv_heads), expected[:, 0])
    if group == 1:
        assert torch.equal(canonical(stored, WeightLayout.QKV_BY_HEAD, heads, kv_heads), expected)
    assert torch.equal(canonical(expected.t(), WeightLayout.TRANSPOSED, heads, kv_heads), expected)
    assert stored_shape((2, 3), WeightLayout.TRANSPOSED) == (3, 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_stacked_experts_load_one_by_one_or_together(experts: int, world: int) -> None:
    inter, hidden = 2 * world, 5
    spec = ShardSpec(1, (whole(inter, "gate"), whole(inter, "up")), stack=1)
    full = torch.randn(experts, 2 * inter, hidden)
    for rank in range(world):
        one_by_one, together = (
            ShardedParameter.empty(tuple(full.shape), spec, rank, world, torch.float32) for _ in range(2)
        )
        for expert in range(experts):
            gate, up = full[expert].chunk(2)
            load_weight(one_by_one, up, "up", expert)
            load_weight(one_by_one, gate, "gate", expert)
        load_weight(together, full)
        assert torch.equal(one_by_one.data, together.data)
        assert torch.equal(together.data, shard(full, spec, rank, world))


def test_wrong_shapes_and_unknown_parts_are_refused() -> None:
    param = ShardedParameter.empty((8, 3), ShardSpec(0, (whole(4, "gate"), whole(4, "up"))), 0, 2, torch.float32)
    with pytest.raises(ValueError, match=r"got \[5, 3\], expected \[4, 3\]"):
        load_weight(param, torch.zeros(5, 3), "up")
    with pytest.raises(ValueError, match=r"got \[4, 3\], expected \[8, 3\]"):
        load_weight(param, torch.zeros(4, 3))
    with pytest.raises(ValueError, match="'gate', 'up'"):
        load_weight(param, torch.zeros(4, 3), "down")


def test_layers_that_ranks_cannot_share_say_so() -> None:
    with pytest.raises(ValueError, match=r"q has 6 parts.*4 tensor-parallel ranks.*divides 6"):
        QKVParallelLinear(8, 4, 6, 2, tp=TensorParallel(0, 4))
    with pytest.raises(ValueError, match="divides 7"):
        RowParallelLinear(7, 8, tp=TensorParallel(0, 2))
    with pytest.raises(ValueError, match="interleave"):
        MergedColumnParallelLinear(8, [4, 4], gather_output=True, tp=TensorParallel(1, 2))
    with pytest.raises(ValueError, match="rank"):
        TensorParallel(2, 2)


def test_weight_loader_of_a_parameter_takes_shard_ids() -> None:
    layer = QKVParallelLinear(5, 2, 4, 2, bias=True, tp=TensorParallel(1, 2))
    assert (layer.num_heads, layer.num_kv_heads, layer.num_kv_head_replicas) == (2, 1, 1)
    k = torch.randn(4, 5)
    assert layer.weight is not None
    layer.weight.weight_loader(layer.weight, k, "k")
    assert torch.equal(layer.weight.data[4:6], k[2:])
    merged = MergedColumnParallelLinear(5, [4, 6], bias=False, tp=TensorParallel(0, 2))
    assert merged.weight is not None
    up = torch.randn(6, 5)
    merged.weight.weight_loader(merged.weight, up, 1)
    assert torch.equal(merged.weight.data[2:], up[:3])


def test_embedding_of_extra_rows_beyond_the_checkpoint_is_zero() -> None:
    layer = VocabParallelEmbedding(13, 4, org_num_embeddings=10, padding_size=8)
    table = torch.randn(10, 4)
    layer.weight.weight_loader(layer.weight, table)
    assert torch.equal(layer(torch.tensor([9, 12])), torch.stack([table[9], torch.zeros(4)]))
