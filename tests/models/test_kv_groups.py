"""Layers to KV groups: every layer has one place, and groups are equally long where that is possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.harness import load, save_random_hf_model
from vllm.model_executor.models.kv_groups import cache_element_bytes, group_layers, group_size, kv_places, layout_of
from vllm.model_executor.models.traits import Traits, check_traits
from vllm.step.kv_need import TOKENS, KVNeed, KVTensor, attention_need
from vllm.step.kv_policy import KVKind
from vllm.worker.kv_memory import allocate


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([None, 4, 9]), min_size=1, max_size=40))
def test_every_layer_has_one_place_among_layers_of_its_kind(windows: list[int | None]) -> None:
    kv = [attention_need(2, 8, window) for window in windows]
    groups = group_layers(kv)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    size = group_size([windows.count(window) for window in set(windows)])
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {group.window}
        assert group.kind is (KVKind.FULL if group.window is None else KVKind.SLIDING)
        assert 1 <= len(group.layers) <= size
        assert list(group.layers) == sorted(group.layers)
    for window in set(windows):
        assert sum(group.window == window for group in groups) == -(-windows.count(window) // size)
    places = kv_places(groups, kv)
    assert len(set(places.values())) == len(places) == len(windows)
    assert all(groups[place.group].layers[place.tensor] == layer for layer, place in places.items())


@pytest.mark.parametrize(
    ("counts", "size"),
    [([32], 32), ([13, 13], 13), ([4, 22], 4), ([1, 1], 1), ([10, 50], 10), ([12, 36], 12), ([], 0)],
)
def test_the_group_size_wastes_no_memory_where_kinds_divide_evenly(counts: list[int], size: int) -> None:
    assert group_size(counts) == size


@pytest.mark.parametrize("layers", [24, 32, 64])
def test_one_odd_layer_does_not_make_a_group_of_every_other(layers: int) -> None:
    """At most ten groups, and at most two fifths of the memory in vain."""
    size = group_size([1, layers - 1])
    groups = 1 + -(-(layers - 1) // size)
    assert groups <= 10 and groups * size <= 1.4 * layers


def test_gemma2_has_a_group_of_each_kind_unless_no_sequence_outgrows_the_window(tmp_path: Path) -> None:
    config = hf.Gemma2Config(
        vocab_size=131,
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=77,
        max_position_embeddings=64,
        sliding_window=16,
    )
    save_random_hf_model(config, tmp_path)
    layout = layout_of(load(tmp_path, max_model_len=64).traits, 8)
    assert [(g.kind, g.layers, g.window) for g in layout.groups] == [
        (KVKind.FULL, (1, 3), None),
        (KVKind.SLIDING, (0, 2), 16),
    ]
    assert [t.shape for t in layout.tensors] == [(2, 2, 8, 12)] * 2
    assert (layout.block_size, layout.bytes_per_element, layout.bytes_per_block) == (8, 4, 2 * 2 * 2 * 8 * 12 * 4)
    relaxed = layout_of(load(tmp_path, max_model_len=16).traits, 8, "fp8")
    assert [(g.kind, g.layers) for g in relaxed.groups] == [(KVKind.FULL, (0, 1, 2, 3))]
    assert relaxed.bytes_per_element == 1


def test_cache_dtypes() -> None:
    assert cache_element_bytes("auto", torch.bfloat16) == 2
    assert cache_element_bytes(torch.float32, torch.bfloat16) == 4
    assert cache_element_bytes("fp8_e5m2", torch.bfloat16) == 1
    with pytest.raises(ValueError, match="int3"):
        cache_element_bytes("int3", torch.bfloat16)


def test_learned_positions_limit_the_length(tmp_path: Path) -> None:
    save_random_hf_model(hf.GPT2Config(vocab_size=131, n_embd=48, n_layer=1, n_head=6, n_positions=32), tmp_path)
    load(tmp_path, max_model_len=32)
    with pytest.raises(ValueError, match="max_model_len of at most 32"):
        load(tmp_path, max_model_len=33)


def traits(*kv: KVNeed | None, **others: Any) -> Traits:
    return Traits(48, torch.float32, 131, kv, range(len(kv)), **others)


def test_layers_may_keep_nothing_or_share() -> None:
    reader = KVNeed(KVKind.FULL, (), same_as=1)
    kv = (None, attention_need(2, 8), attention_need(2, 8, 4), reader)
    groups = group_layers(kv)
    assert [group.layers for group in groups] == [(1,), (2,)]
    places = kv_places(groups, kv)
    assert sorted(places) == [1, 2, 3]
    assert places[3] == places[1] != places[2]
    layout = layout_of(traits(*kv), 16, "fp8")
    assert [t.shape for t in layout.tensors] == [(2, 2, 16, 8)] and layout.bytes_per_element == 1
    assert layout_of(traits(), 16).groups == ()


LATENT = KVNeed(KVKind.FULL, (KVTensor((TOKENS, 40)),))
STATE = KVNeed(KVKind.RECURRENT, (KVTensor((7, 3)), KVTensor((7, 5), "float32")))


def test_layers_of_one_group_may_keep_tensors_of_any_shapes() -> None:
    """Keys of unlike heads, a latent without values, and two tensors in one block."""
    pair = KVNeed(KVKind.FULL, (KVTensor((2, 1, TOKENS, 3)), KVTensor((TOKENS,), "float32")))
    kv = (attention_need(4, 8), attention_need(1, 8), LATENT, pair)
    layout = layout_of(traits(*kv), 4, torch.bfloat16)
    assert [g.layers for g in layout.groups] == [(0, 1, 2, 3)]
    assert [t.shape for t in layout.tensors] == [(2, 4, 4, 8), (2, 1, 4, 8), (4, 40), (2, 1, 4, 3), (4,)]
    assert layout.page_bytes == (512, 128, 320, 48 + 16)
    places = kv_places(layout.groups, kv)
    assert [places[i].tensors for i in range(4)] == [(0,), (1,), (2,), (3, 4)]
    memory = allocate(layout, 5, 0, torch.bfloat16, torch.device("cpu"))
    assert [t.shape for t in memory.tensors] == [(5, *t.shape) for t in layout.tensors]
    assert [t.dtype for t in memory.tensors] == [torch.bfloat16] * 4 + [torch.float32]
    for i, tensor in enumerate(memory.tensors):
        tensor[3] = i + 1
    for i, tensor in enumerate(memory.tensors):
        assert (tensor[3] == i + 1).all() and not tensor[[0, 1, 2, 4]].any(), "tensors lie in one another"


@pytest.mark.parametrize("block_size", [1, 2])
def test_tensors_of_unlike_dtypes_begin_where_their_numbers_may(block_size: int) -> None:
    need = KVNeed(KVKind.FULL, (KVTensor((TOKENS, 3), "fp8"), KVTensor((TOKENS,), "float32")))
    memory = allocate(layout_of(traits(need, need), block_size), 3, 0, torch.float32, torch.device("cpu"))
    assert [(t.dtype, t.data_ptr() % 4) for t in memory.tensors[1::2]] == [(torch.float32, 0)] * 2


def test_a_layer_may_see_less_than_the_one_whose_blocks_it_reads() -> None:
    kv = (attention_need(1, 8, 4), KVNeed(KVKind.SLIDING, (), window=3, same_as=0))
    assert [group.layers for group in group_layers(kv)] == [(0,)]


def test_groups_with_less_per_token_have_more_tokens_in_a_block() -> None:
    kv = (attention_need(4, 16), attention_need(1, 16, 9), attention_need(4, 16), attention_need(1, 12, 9))
    layout = layout_of(traits(*kv), 8)
    assert [(g.layers, g.units) for g in layout.groups] == [((0, 2), 1), ((1, 3), 4)]
    assert [t.shape for t in layout.tensors] == [(2, 4, 8, 16), (2, 4, 8, 16), (2, 1, 32, 16), (2, 1, 32, 12)]
    assert [t.memory for t in layout.tensors] == [0, 1, 0, 1]
    assert layout.bytes_per_block == 2 * 2 * 4 * 8 * 16 * 4


def test_states_have_a_pool_of_their_own() -> None:
    kv = (STATE, attention_need(2, 8), STATE, None)
    layout = layout_of(traits(*kv), 16, snapshots=6, num_drafts=2)
    assert [(g.kind, g.layers) for g in layout.groups] == [(KVKind.FULL, (1,)), (KVKind.RECURRENT, (0, 2))]
    assert layout.state_bytes == (96 + 144,) * 2 and len(layout.page_bytes) == 1
    assert (layout.policy.states_per_slot, layout.policy.num_states(4)) == (3, 1 + 4 * 3 + 6)
    assert layout.bytes_of_states(4) == 19 * 480
    places = kv_places(layout.groups, kv)
    assert [places[i].tensors for i in range(3)] == [(1, 2), (0,), (3, 4)]
    memory = allocate(layout, 3, 19, torch.float32, torch.device("cpu"))
    assert [len(t) for t in memory.tensors] == [3, 19, 19, 19, 19]
    assert [[len(m) for m in pool] for pool in memory.pools] == [[3], [19, 19]]
    large = KVNeed(KVKind.RECURRENT, (KVTensor((1 << 22,), "float32"),))  # 16 MiB
    assert layout_of(traits(*[large] * 4), 16, snapshots=256).policy.snapshots == 64
    assert layout_of(traits(*[large] * 64), 16, snapshots=256).policy.snapshots == 8
    only = layout_of(traits(STATE), 16)
    assert only.bytes_per_block == 0 and only.policy.blocks_for(100, 10) == 0


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ((KVNeed(KVKind.RECURRENT, (KVTensor((TOKENS, 8)),)),), "no dimension of tokens"),
        ((KVNeed(KVKind.FULL, (KVTensor((2, 8)),)),), "one dimension must be TOKENS"),
        ((KVNeed(KVKind.FULL, (KVTensor((TOKENS, 8), "int3"),)),), "its dtype must be one of"),
        ((KVNeed(KVKind.FULL, ()),), "names no tensor"),
        ((KVNeed(KVKind.CROSS, LATENT.tensors),), "cross attention, and nothing else, has encoder_tokens"),
        ((attention_need(1, 8), KVNeed(KVKind.SLIDING, (), same_as=0)), "blocks of the same kind"),
        ((KVNeed(KVKind.FULL, (), same_as=5),), "reads the blocks of layer 5"),
        ((KVNeed(KVKind.FULL, (), same_as=0),), "reads the blocks of layer 0"),
        ((KVNeed(KVKind.FULL, (), same_as=1), attention_need(1, 8)), "must come before it"),
        (
            (attention_need(1, 8, 4), KVNeed(KVKind.SLIDING, (), window=5, same_as=0)),
            "a window of 5 tokens in the blocks of layer 0, .* window of 4 passes: it can be no wider",
        ),
        ((KVNeed(KVKind.FULL, LATENT.tensors, window=5),), "a sliding KV group, and no other, has a window"),
        ((KVNeed(KVKind.SLIDING, LATENT.tensors),), "has a window of at least one token"),
        ((KVNeed(KVKind.RECURRENT, (KVTensor((0, 8)),)),), "every dimension must be at least 1"),
        (("full",), "keeps 'full', expected a KVNeed"),
    ],
)
def test_what_no_cache_can_be_laid_out_for_is_refused(kv: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(traits(*kv), 16)


def test_a_model_that_the_engine_cannot_run_as_it_is_set_up_is_refused() -> None:
    usual: dict[str, Any] = {"name": "M", "chunked": True, "prefix_caching": True, "features": frozenset()}
    check_traits(traits(), **usual)
    for changes, message in [
        ({"heads": ("pooled",)}, "computes no logits"),
        ({"takes": frozenset({"images"})}, "needs images"),
        ({"chunkable": False}, "enable_chunked_prefill=False"),
        ({"prefix": 0}, "enable_prefix_caching=False"),
        ({"known_prompt": 16}, "more than 16 tokens otherwise than shorter ones, but its family says None"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_traits(traits(**changes), **usual)
    check_traits(traits(known_prompt=16), **usual, known_prompt=16)
    check_traits(traits(chunkable=False, prefix=0), **usual | {"chunked": False, "prefix_caching": False})
