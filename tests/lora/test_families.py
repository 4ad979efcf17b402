"""Adapters of every family with linear layers, in one batch with the base: logits of weights that peft merged."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor

from tests.models.harness import PagedDriver, load, on_ranks, relative_error, save_random_hf_model
from tests.models.test_against_hugging_face import CASES, SDPA, logits_of
from tests.quantization.harness import plain_model, quantize_folder
from tests.quantization.test_formats import CASES as FORMATS
from vllm.config.hf import HFConfig
from vllm.distributed import TensorParallel
from vllm.lora.adapter import Adapter, read_adapter
from vllm.lora.layers import LoRALayers
from vllm.model_executor.layers.weight_layout import WeightLayout, canonical
from vllm.model_executor.models.registry import family_of
from vllm.step.inputs import RowView, Segment, StepFeatures, StepInputs

MAX_RANK = 128  # gate and up as one parameter get twice the rank
RANKS = (8, 64, 24)
MANY_RANKS = (8, 64, 16, 32, 48, 9, 24, 56)
# families whose files name, join or lay out their matrices in a way of their own
QUICK = [
    "llama-tied-biased", "gemma2", "phi", "phi3", "opt-350m", "gpt2", "bloom", "mpt", "falcon-40b", "gpt_bigcode",
    "gptj", "gpt_neox", "glm", "mixtral", "mamba", "deepseek_v2", "llama4", "qwen2_moe",
]  # fmt: skip
# absorbed parts of latent attention are no layers; peft wants some projections of states left alone
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
TARGETS: dict[str, Any] = {
    **dict.fromkeys(["mamba", "falcon_mamba"], ["in_proj", "x_proj", "dt_proj"]),
    "mamba2": ["in_proj"],
    **dict.fromkeys(["deepseek_v2-lite", "deepseek_v3-plain"], ["q_proj", "kv_a_proj_with_mqa", "o_proj"]),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3", "minicpm3"], LATENT),
}
QUANTIZED = ["gptq act-order asymmetric", "awq", "fp8 channels", "hqq"]


def view_of(slots: Tensor) -> RowView | None:
    """slots: [rows], -1 for the base model."""
    present = [slot for slot in slots.unique().tolist() if slot >= 0]
    if not present:
        return None
    return RowView(slots.int(), tuple(Segment(slot, (slots == slot).nonzero()[:, 0]) for slot in present))


class AdaptedModel:
    """A model of which each row of a step uses an adapter. slots: [rows] of the next step, set before it."""

    def __init__(self, model: Any) -> None:
        self.model, self.traits, self.slots = model, model.traits, torch.empty(0)

    def __call__(self, step: StepInputs, caches: list[Tensor]) -> Tensor:
        view = view_of(self.slots)
        if view is not None:
            step = replace(step, features=replace(step.features or StepFeatures(), adapters=(view, view)))
        hidden: Tensor = self.model(step, caches)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.logits(hidden, view_of(self.slots))
        return logits


class AdaptedDriver(PagedDriver):
    """slots: of each request, the slot of its adapter, -1 for the base model."""

    def __init__(self, model: Any, slots: list[int]) -> None:
        super().__init__(AdaptedModel(model), requests=len(slots))
        self.slots = torch.tensor(slots)

    def step(
        self, chunks: list[tuple[int, int, Tensor]], rows: Tensor | None = None, prompts: list[int] | None = None
    ) -> Tensor:
        lengths = torch.tensor([len(tokens) for _, _, tokens in chunks])
        self.model.slots = self.slots[torch.tensor([request for request, _, _ in chunks])].repeat_interleave(lengths)
        return super().step(chunks, rows, prompts)


def peft_adapters(reference: Any, folder: Path, ranks: tuple[int, ...], targets: Any) -> Any:
    """One random adapter for each rank, written to folder/a<index>; peft's model with all of them, none merged."""
    import peft

    adapted: Any = None
    for index, rank in enumerate(ranks):
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=rank + 3, target_modules=targets, use_rslora=index % 2 == 1
        )
        if adapted is None:
            adapted = peft.get_peft_model(reference, config, adapter_name="a0").eval()
        else:
            adapted.add_adapter(f"a{index}", config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    adapted.save_pretrained(folder, selected_adapters=[f"a{i}" for i in range(len(ranks))])
    return adapted


@contextlib.contextmanager
def merged(adapted: Any, index: int) -> Iterator[Any]:
    """The base model with one adapter's changes in its weights; with none of them for -1."""
    with torch.inference_mode():
        if index < 0:
            with adapted.disable_adapter():
                yield adapted
            return
        adapted.set_adapter(f"a{index}")
        adapted.merge_adapter([f"a{index}"])
        yield adapted
        adapted.unmerge_adapter()


def save_adapters(
    reference: Any, folder: Path, ranks: tuple[int, ...], prompt_of: dict[int, Tensor], targets: Any, case: str = ""
) -> list[Tensor]:
    """One adapter for each rank in folder/a<index>; what the merged weights say about its prompt.

    prompt_of: by index, -1 for the base model, whose logits come last.
    """
    adapted = peft_adapters(reference, folder, ranks, targets)
    expected = []
    for index in (*range(len(ranks)), -1):
        with merged(adapted, index) as model:
            expected.append(logits_of(model.base_model.model, prompt_of[index], case))
    return expected


def read(model_folder: Path, folder: Path, vocabulary: int | None = None) -> Adapter:
    config = HFConfig.load(model_folder)
    family = family_of(config.architectures[0])
    assert family is not None
    heads = [block.heads() for block in family.decoder(config).blocks]

    def in_order(tensor: Tensor, layout: WeightLayout, name: str) -> Tensor:
        return canonical(tensor, layout, *heads[int(name.split(".")[1])])

    return read_adapter(folder, family.resolve, in_order, max_rank=MAX_RANK, max_bytes=1 << 30, vocabulary=vocabulary)


def with_adapters(model: Any, adapters: list[Adapter], sharded: bool = False) -> Any:
    layers = LoRALayers(model.adaptable(), len(adapters), MAX_RANK, torch.float32, torch.device("cpu"), sharded=sharded)
    for slot, adapter in enumerate(adapters):
        layers.load(slot, layers.prepare(adapter))
    return model


def compare(
    reference: Any,
    folder: Path,
    ranks: tuple[int, ...],
    targets: Any,
    *,
    world: int = 1,
    limit: float = 1e-5,
    sharded: bool = False,
    case: str = "",
) -> None:
    """Adapters of `reference`, written to `folder`, on our model of folder/base: mixed in chunks, and one alone.

    case: as of `logits_of`.
    """
    lengths = (23, 1, 38, 12, 30, 7, 19, 26, 9)
    order = [*range(len(ranks)), -1]
    prompts = [torch.randint(0, 131, (length,)) for length in lengths[: len(order)]]
    expected = save_adapters(reference, folder, ranks, dict(zip(order, prompts, strict=True)), targets, case)
    adapters = [read(folder / "base", folder / f"a{index}") for index in range(len(ranks))]

    def work(tp: TensorParallel | None) -> list[Tensor]:
        model = with_adapters(load(folder / "base", tp=tp), adapters, sharded)
        return [
            *AdaptedDriver(model, order).run(prompts, [5, 1, 7, 3]),
            *AdaptedDriver(model, order[:1]).run(prompts[:1], [64]),
            *AdaptedDriver(model, [-1]).run(prompts[:1], [64]),
        ]

    for found in on_ranks(world, work) if world > 1 else [work(None)]:
        for logits, wanted in zip(found[:-1], [*expected, expected[0]], strict=True):
            assert relative_error(logits, wanted) < limit
        assert relative_error(found[-1], expected[0]) > 0.01, "the adapter changes hardly anything"


def base_of(case: str, folder: Path, **changes: int) -> Any:
    config = CASES[case]()
    config.update(changes)
    return save_random_hf_model(config, folder / "base", attention="sdpa" if case in SDPA else "eager")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.soak) for case in CASES]
)
def test_each_row_of_a_mixed_batch_has_the_logits_of_its_merged_weights(case: str, tmp_path: Path) -> None:
    targets = TARGETS.get(case) or TARGETS.get(case.partition("-")[0], "all-linear")
    compare(base_of(case, tmp_path), tmp_path, RANKS, targets, case=case)


def test_eight_adapters_in_one_batch(tmp_path: Path) -> None:
    compare(base_of("llama", tmp_path), tmp_path, MANY_RANKS, "all-linear")


@pytest.mark.parametrize(("case", "sharded"), [("qwen3", True), ("phi3", False), ("gpt2", False), ("gpt2", True)])
def test_two_ranks_give_the_logits_of_merged_weights(case: str, sharded: bool, tmp_path: Path) -> None:
    """sharded: with matrices that no two ranks hold."""
    reference = base_of(case, tmp_path, **{"n_inner" if case == "gpt2" else "intermediate_size": 78})
    compare(reference, tmp_path, RANKS, "all-linear", world=2, sharded=sharded)


@pytest.mark.parametrize(
    "name", [name if name in QUANTIZED else pytest.param(name, marks=pytest.mark.soak) for name in FORMATS]
)
def test_a_quantized_base_with_adapters_equals_its_numbers_with_them_merged(name: str, tmp_path: Path) -> None:
    write, settings = FORMATS[name]
    (tmp_path / "base").mkdir()
    reference, state = plain_model(tmp_path / "base")
    quantize_folder(tmp_path / "base", reference, state, write, settings)
    compare(reference, tmp_path, RANKS, "all-linear")


@pytest.mark.parametrize("world", [1, 2])
def test_experts_have_adapters_of_their_own(world: int, tmp_path: Path) -> None:
    """Files with a matrix for each expert, as a base model with separate experts has them; not every expert adapted."""
    reference = base_of("mixtral", tmp_path, intermediate_size=78)
    state, hidden = reference.state_dict(), reference.config.hidden_size
    experts, inner = reference.config.num_local_experts, reference.config.intermediate_size
    plain = {name: tensor.clone() for name, tensor in state.items()}
    order, prompts, expected, adapters = [0, 1, -1], [torch.randint(0, 131, (n,)) for n in (23, 31, 12)], [], []
    generator = torch.Generator().manual_seed(2)
    for index, rank in enumerate((8, 12)):
        tensors, scale = {}, 2.0
        for layer in range(reference.config.num_hidden_layers):
            for expert in range(index, experts, 2):
                for name, (inputs, outputs) in {
                    "w1": (hidden, inner), "w3": (hidden, inner), "w2": (inner, hidden)
                }.items():  # fmt: skip
                    a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                    b = torch.randn(outputs, rank, generator=generator) / rank**0.5
                    path = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                    tensors[f"base_model.model.{path}.lora_A.weight"] = a
                    tensors[f"base_model.model.{path}.lora_B.weight"] = b
                    owner = f"model.layers.{layer}.mlp.experts."
                    target = state[owner + ("down_proj" if name == "w2" else "gate_up_proj")][expert]
                    rows = slice(inner, None) if name == "w3" else slice(0, inner if name == "w1" else None)
                    target[rows] += scale * b @ a
        folder = tmp_path / f"a{index}"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["w1", "w2", "w3"]}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        with torch.inference_mode():
            expected.append(reference(prompts[index][None]).logits[0])
        reference.load_state_dict(plain)
        adapters.append(read(tmp_path / "base", folder))
    with torch.inference_mode():
        expected.append(reference(prompts[2][None]).logits[0])

    def work(tp: TensorParallel | None) -> list[Tensor]:
        model = with_adapters(load(tmp_path / "base", tp=tp), adapters)
        return AdaptedDriver(model, order).run(prompts, [5, 1, 7])

    for found in on_ranks(world, work) if world > 1 else [work(None)]:
        for logits, wanted in zip(found, expected, strict=True):
            assert relative_error(logits, wanted) < 1e-5


def test_what_has_no_layer_for_an_adapter_is_said(tmp_path: Path) -> None:
    """Adapters of what latent attention absorbs into others."""
    for case, targets, message in (
        ("deepseek_v2", ["kv_b_proj"], "where this model has no layer that can be adapted"),
    ):
        folder = tmp_path / case
        reference = base_of(case, folder)
        save_adapters(reference, folder, (8,), {0: torch.arange(3), -1: torch.arange(3)}, targets)
        with pytest.raises(ValueError, match=message):
            with_adapters(load(folder / "base"), [read(folder / "base", folder / "a0")])
