"""Filling weights: what is copied and what is handed over where it lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vllm.model_executor.layers.sharding import Part, ShardedParameter, ShardSpec, whole
from vllm.model_executor.model_loader.filler import WeightFiller

CPU = torch.device("cpu")


class Repacker(nn.Module):
    """Has one weight; says where it lay when it was repacked, and keeps it or not."""

    def __init__(self, *parts: Part, keeps: bool, repacks_whole: bool = True, world: int = 1) -> None:
        super().__init__()
        full = (sum(part.size for part in parts), 3)
        self.weight: ShardedParameter | None = ShardedParameter.empty(
            full, ShardSpec(0, parts), 0, world, torch.float32
        )
        self.keeps, self.repacks_whole = keeps, repacks_whole
        self.packed = torch.empty(0)
        self.place = 0

    def process_after_load(self) -> None:
        assert self.weight is not None
        self.place = self.weight.data_ptr()
        if not self.keeps:
            self.packed = self.weight.data.clone()
            self.weight = None


def filled(tensor: Tensor, *parts: Part, keeps: bool, repacks_whole: bool = True, world: int = 1) -> Repacker:
    with torch.device("meta"):
        module = Repacker(*parts, keeps=keeps, repacks_whole=repacks_whole, world=world)
    filler = WeightFiller(nn.ModuleDict({"layer": module}), CPU)
    filler.fill("layer.weight", tensor)
    assert not list(filler.missing())
    return module


def test_a_whole_weight_is_repacked_from_where_it_lies() -> None:
    tensor = torch.randn(4, 3)
    module = filled(tensor, whole(4), keeps=False)
    assert module.place == tensor.data_ptr()
    assert torch.equal(module.packed, tensor)


def test_a_weight_that_is_not_repacked_is_copied() -> None:
    tensor = torch.randn(4, 3)
    expected = tensor.clone()
    module = filled(tensor, whole(4), keeps=True)
    tensor.zero_()  # as if the file had changed
    assert module.weight is not None and torch.equal(module.weight.data, expected)


def test_a_module_that_may_keep_views_gets_a_copy() -> None:
    tensor = torch.randn(4, 3)
    assert filled(tensor, whole(4), keeps=False, repacks_whole=False).place != tensor.data_ptr()


@pytest.mark.parametrize(("dtype", "world"), [(torch.bfloat16, 1), (torch.float32, 2)])
def test_what_must_be_cast_or_cut_is_copied(dtype: torch.dtype, world: int) -> None:
    tensor = torch.randn(4, 3).to(dtype)
    module = filled(tensor, whole(4), keeps=False, world=world)
    assert module.place != tensor.data_ptr()
    assert torch.equal(module.packed, tensor[: 4 // world].float())


def fused(*names: str) -> Repacker:
    return Repacker(*(whole(2, name) for name in names), keeps=False)


def test_weights_that_are_put_together_and_repacked_use_the_same_memory_in_turn() -> None:
    with torch.device("meta"):
        layers = nn.ModuleDict({str(i): nn.ModuleDict({"ab": fused("a", "b")}) for i in range(3)})
        layers["3"] = nn.ModuleDict({"ab": Repacker(whole(2, "a"), whole(2, "b"), keeps=True)})
    filler = WeightFiller(layers, CPU)
    parts = torch.randn(4, 2, 2, 3)
    # the first two layers are filled at the same time, the others one after the other
    for i, part in ((0, 0), (1, 1), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)):
        filler.fill(f"{i}.{'ab'[part]}.weight", parts[i, part])
    modules = [layers[str(i)]["ab"] for i in range(4)]
    for module, expected in zip(modules[:3], parts, strict=False):
        assert torch.equal(module.packed, expected.reshape(4, 3))
    assert modules[0].place != modules[1].place
    assert modules[2].place in (modules[0].place, modules[1].place)
    assert torch.equal(modules[3].weight.data, parts[3].reshape(4, 3))


def weight_of(*names: str) -> ShardedParameter:
    """A parameter of parts of two rows each."""
    return ShardedParameter.empty(
        (2 * len(names), 3), ShardSpec(0, tuple(whole(2, name) for name in names)), 0, 1, torch.float32
    )


class Layer(nn.Module):
    """A block with a parameter of its own beside a module's, whose parts may be called alike."""

    def __init__(self, own: tuple[str, ...], **modules: nn.Module) -> None:
        super().__init__()
        self.conv = weight_of(*own)
        for name, module in modules.items():
            self.add_module(name, module)


def test_parts_of_a_parameter_on_the_block_itself_are_named_with_the_layer() -> None:
    with torch.device("meta"):
        layers = nn.ModuleList(Layer(("q", "k"), qkv=fused("q", "k")) for _ in range(2))
    filler = WeightFiller(nn.ModuleDict({"blocks": layers}), CPU)
    parts = {f"blocks.{i}.conv.{part}": torch.randn(2, 3) for i in range(2) for part in "qk"}
    for name, part in parts.items():
        filler.fill(name, part)
    expected = [f"blocks.{i}.{part}.weight" for i in range(2) for part in "qk"]
    assert list(filler.missing()) == expected
    for i in range(2):
        assert torch.equal(layers[i].conv, torch.cat([parts[f"blocks.{i}.conv.{part}"] for part in "qk"]))


def test_parts_of_a_parameter_of_the_model_itself_are_named_behind_it() -> None:
    with torch.device("meta"):
        filler = WeightFiller(Layer(("a", "b"), ab=fused("")), CPU)
    assert list(filler.missing()) == ["conv.a", "conv.b", "ab.weight"]


@pytest.mark.parametrize("other", ["conv", "q"])
def test_a_second_parameter_of_the_same_name_is_refused(other: str) -> None:
    second = fused("v", "q") if other == "conv" else fused("")
    with torch.device("meta"):
        layer = nn.ModuleDict({"qkv": fused("q", "k"), other: second})
    owners = rf"'blocks\.0\.q\.weight' would belong to 'blocks\.0\.qkv\.weight' and to 'blocks\.0\.{other}\.weight'"
    with pytest.raises(ValueError, match=owners + r"\. .* unique in a block"):
        WeightFiller(nn.ModuleDict({"blocks": nn.ModuleList([layer])}), CPU)
