"""Pipeline stages computed one after the other give what the whole model gives; each loads only what it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.test_against_hugging_face import CASES
from vllm.config import ParallelConfig
from vllm.config.parallel import read_partition, stage_sizes
from vllm.model_executor.models.kv_groups import layout_of
from vllm.worker.kv_memory import allocate

# Tied and untied tables, tables of positions, norms and projections around the blocks, windows, every layout of blocks.
FAMILIES = [
    "llama", "mistral", "mixtral", "gemma2", "gemma3", "gpt2", "opt-350m", "bloom", "mpt", "falcon-40b", "falcon-rw",
    "cohere2", "olmo2", "phi", "granite", "qwen2_moe-mixed", "gpt_neox", "dbrx",
]  # fmt: skip


class Chain:
    """The stages of a model as one model, each with a cache of its own."""

    def __init__(self, stages: list[Any]) -> None:
        self.stages = stages
        self.traits = replace(stages[-1].traits, layers=range(len(stages[-1].traits.kv)))
        self._caches: list[list[Tensor]] = []

    def __call__(self, step: Any, kv_caches: list[Tensor]) -> Tensor:
        if not self._caches:
            blocks, block_size = kv_caches[0].shape[0], kv_caches[0].shape[3]
            layouts = [layout_of(stage.traits, block_size) for stage in self.stages]
            memories = [allocate(layout, blocks, 0, torch.float32, torch.device("cpu")) for layout in layouts]
            self._caches = [list(memory.tensors) for memory in memories]
            assert sum(map(len, self._caches)) <= len(kv_caches) + len(self.stages)
        stream = None
        for stage, caches in zip(self.stages, self._caches, strict=True):
            stream = stage(step, caches, stream)
        assert stream is not None
        return stream

    def logits(self, hidden: Tensor, view: Any = None) -> Tensor:
        return self.stages[-1].logits(hidden)


def stages_of(folder: Path, count: int, **settings: Any) -> list[Any]:
    parallel = ParallelConfig(pipeline_parallel_size=count, distributed_executor_backend="mp", **settings)
    return [load(folder, stage=stage, parallel_config=parallel) for stage in range(count)]


@pytest.mark.parametrize("case", FAMILIES)
def test_stages_compute_what_the_whole_model_does(case: str, tmp_path: Path) -> None:
    save_random_hf_model(CASES[case](), tmp_path)
    whole = load(tmp_path)
    stages = stages_of(tmp_path, min(3, len(whole.spec.blocks)))
    prompts = [torch.randint(0, 131, (n,)) for n in (23, 1, 9)]
    expected = PagedDriver(whole, requests=3).run(prompts, [5, 1, 8])
    found = PagedDriver(Chain(stages), requests=3).run(prompts, [5, 1, 8])
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5


def test_a_stage_has_only_its_own_weights(tmp_path: Path) -> None:
    save_random_hf_model(CASES["llama"](), tmp_path)
    whole = sum(p.numel() for p in load(tmp_path).parameters())
    stages = stages_of(tmp_path, 3)
    assert [list(stage.layer_numbers) for stage in stages] == [[0], [1], [2]]
    assert sum(p.numel() for stage in stages for p in stage.parameters()) == whole
    assert stages[1].is_elsewhere("head.weight") and stages[1].is_elsewhere("blocks.0.attn.qkv.weight")
    assert not stages[1].is_elsewhere("blocks.1.attn.qkv.weight") and not stages[1].is_elsewhere("blocks.9.norms.0")


def test_a_tied_table_is_on_the_first_and_the_last_stage(tmp_path: Path) -> None:
    save_random_hf_model(CASES["gpt2"](), tmp_path)
    first, middle, last = stages_of(tmp_path, 3)
    with torch.inference_mode():  # through what layers compute: weights may be repacked for the processor
        rows = first.embed(torch.arange(131))
        columns = last.head.project(torch.eye(48))[:, :131]
    torch.testing.assert_close(columns.T, rows)
    assert not hasattr(middle, "embed") and not hasattr(middle, "head")


def test_a_checkpoint_that_lacks_a_stages_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_random_hf_model(CASES["llama"](), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    tensors["model.layers.3.mlp.down_proj.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    parallel = ParallelConfig(pipeline_parallel_size=3, distributed_executor_backend="mp")
    with pytest.raises(ValueError, match=r"missing 'model.layers.1.mlp.down_proj.weight'.*unexpected 'model.layers.3"):
        load(tmp_path, stage=1, parallel_config=parallel)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(7, 3, (2, 3, 2)), (8, 3, (3, 3, 2)), (32, 4, (8, 8, 8, 8)), (2, 2, (1, 1)), (5, 1, (5,)), (3, 2, (2, 1))],
)
def test_layers_are_dealt_out_evenly(layers: int, stages: int, sizes: tuple[int, ...]) -> None:
    assert stage_sizes(layers, stages) == sizes


def test_the_user_may_say_who_gets_which_layers() -> None:
    config = ParallelConfig(
        pipeline_parallel_size=3, distributed_executor_backend="mp", layer_partition=read_partition(" 1,4, 2")
    )
    assert [config.layers_of(stage, 7) for stage in range(3)] == [range(0, 1), range(1, 5), range(5, 7)]
    with pytest.raises(ValueError, match="deals out 7 layers, but the model has 8"):
        config.layers_of(0, 8)
    with pytest.raises(ValueError, match="names the layers of 2 stages, but pipeline_parallel_size is 3"):
        ParallelConfig(pipeline_parallel_size=3, distributed_executor_backend="mp", layer_partition=(3, 4))
    with pytest.raises(ValueError, match="2 layers cannot be dealt out to 3 pipeline stages"):
        stage_sizes(2, 3)
    for text in ("3,x", "0,7", "-1,8", "3;4"):
        with pytest.raises(ValueError, match="VLLM_PP_LAYER_PARTITION=.* is not a list"):
            read_partition(text)
