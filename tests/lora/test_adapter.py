"""Adapters as peft writes them: every family's matrices in their place; damaged and hostile folders are refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.lora.adapters import save_adapter
from tests.models.harness import load, save_random_hf_model
from tests.models.kernels import kernels
from tests.models.test_against_hugging_face import CASES
from vllm.config.hf import HFConfig
from vllm.distributed import TensorParallel
from vllm.lora.adapter import Adapter, read_adapter
from vllm.lora.config import MAX_HEADER_BYTES, added_tokens, first_match, read_config
from vllm.lora.layers import LinearStack, LoRALayers
from vllm.model_executor.layers.weight_layout import WeightLayout, canonical
from vllm.model_executor.model_loader.safetensors_file import read_entries
from vllm.model_executor.models.registry import ModelRegistry
from vllm.ops.lora import LowRank, add_lora, lay_out_b
from vllm.step.inputs import RowView, Segment


@pytest.fixture(autouse=True)
def reference_ops() -> Iterator[None]:
    """Weights are compared as they were loaded, not as kernels pack them."""
    with kernels("reference"):
        yield


Q = "base_model.model.model.layers.0.self_attn.q_proj"
FAMILIES = ["llama-tied-biased", "qwen3", "gemma2", "phi", "phi3", "opt-350m", "gpt2", "gpt_neox", "mistral"]


def read(model_folder: Path, folder: Path, max_rank: int = 64, max_bytes: int = 1 << 30, **options: Any) -> Adapter:
    config = HFConfig.load(model_folder)
    family = ModelRegistry.resolve(config.architectures)
    attn = family.decoder(config).blocks[0].attn

    def in_order(tensor: torch.Tensor, layout: WeightLayout, name: str) -> torch.Tensor:
        return canonical(tensor, layout, attn.heads, attn.kv_heads)

    return read_adapter(folder, family.resolve, in_order, max_rank=max_rank, max_bytes=max_bytes, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_hf_model(CASES["llama"](), folder)
    return folder


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_gets_the_change_that_peft_merges(case: str, tmp_path: Path) -> None:
    """scale * b @ a of each layer, on each of two ranks too, equals what merging changes in the layer's weight."""
    base = tmp_path / "base"
    save_random_hf_model(CASES[case](), base)
    adapted = save_adapter(base, tmp_path / "adapter", rank=4, lora_alpha=6)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    adapter = read(base, tmp_path / "adapter")
    plain, merged = load(base), load(tmp_path / "merged")
    changed = 0
    layers = LoRALayers(plain.adaptable(), 2, 8, torch.float32, torch.device("cpu"))
    host = layers.prepare(adapter)
    layers.load(1, host)
    for path, module in plain.named_modules():
        stack = getattr(module, "lora", None)
        if stack is None or not hasattr(stack, "parts"):
            continue
        weight, after = module.weight, merged.get_submodule(path).weight
        pieces = [
            stack.b[1, first : first + count] @ stack.a[1, i * 8 : (i + 1) * 8]
            for i, (first, count) in enumerate(stack.parts)
        ]
        delta = torch.cat(pieces)[: len(weight)]
        if path != "head":
            torch.testing.assert_close(weight + delta, after.data, rtol=1e-5, atol=1e-5)
            changed += int(bool(delta.any()))
    assert changed == sum(1 for path in host.matrices if path != "head") > 0


def test_ranks_hold_the_adapter_as_they_hold_the_layers(tmp_path: Path) -> None:
    """b @ a of two ranks: inputs cut and outputs cut fit together to the whole, part by part."""
    base = tmp_path / "base"
    save_random_hf_model(
        hf.LlamaConfig(**{**CASES["llama"]().to_dict(), "num_key_value_heads": 2, "intermediate_size": 78}), base
    )
    save_adapter(
        base, tmp_path / "adapter", targets=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"], rank=4
    )
    adapter = read(base, tmp_path / "adapter")
    changes: list[dict[str, list[torch.Tensor]]] = []
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        layers = LoRALayers(
            load(base, tp=TensorParallel(rank, world)).adaptable(), 1, 4, torch.float32, torch.device("cpu")
        )
        layers.load(0, layers.prepare(adapter))
        changes.append(
            {
                path: [
                    stack.b[0, first : first + count] @ stack.a[0, i * 4 : (i + 1) * 4]
                    for i, (first, count) in enumerate(stack.parts)
                ]
                for path, stack in layers._stacks.items()
                if isinstance(stack, LinearStack)
            }
        )
    whole, first, second = changes
    for path, parts in whole.items():
        for i, part in enumerate(parts):
            dim = 1 if path.endswith((".o", ".down")) else 0
            joined = torch.cat([first[path][i], second[path][i]], dim)[: len(part)]
            assert torch.equal(joined[: 131 if path == "head" else None], part[: 131 if path == "head" else None]), path


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 3, "model.layers.1.mlp.down_proj": 7}, "alpha_pattern": {"q_proj": 5}},
        {"rank_pattern": {"^model.layers.1.self_attn.o_proj": 2}},
        {"targets": ["q_proj", "v_proj"]},
        {"targets": ["embed_tokens", "lm_head", "down_proj"]},
        {"targets": r".*layers\.1\..*k_proj"},
    ],
    ids=str,
)
def test_settings_of_peft_mean_what_they_mean_there(options: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    adapted = save_adapter(llama, tmp_path / "adapter", **options)
    adapter = read(llama, tmp_path / "adapter")
    by_suffix = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "gate", "up_proj": "up"}
    seen = set()
    for name, module in adapted.named_modules():
        if not hasattr(module, "get_delta_weight") or not hasattr(module, "r"):
            continue
        path = name.removeprefix("base_model.model.")
        words = path.split(".")
        if len(words) > 2:
            part = by_suffix.get(words[-1], "down")
            canonical_name = f"blocks.{words[2]}.{'attn' if words[3] == 'self_attn' else 'ffn'}.{part}"
        else:
            canonical_name = {"model.embed_tokens": "embed", "lm_head": "head"}[path]
        weights = adapter.layers[canonical_name]
        seen.add(canonical_name)
        delta = weights.scale * (weights.b @ weights.a)
        expected = module.get_delta_weight("default")
        torch.testing.assert_close(delta if canonical_name != "embed" else delta.t(), expected)
    assert seen == set(adapter.layers)


def test_files_of_other_writers_are_read(llama: Path, tmp_path: Path) -> None:
    """Without the prefix, with the adapter's name in it, and as a .bin file."""
    save_adapter(llama, tmp_path, targets=["q_proj"])
    expected = read(llama, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for change in (
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace("lora_A.weight", "lora_A.default.weight"),
    ):
        save_file({change(name): tensor for name, tensor in tensors.items()}, tmp_path / "adapter_model.safetensors")
        found = read(llama, tmp_path)
        assert found.layers.keys() == expected.layers.keys()
        assert all(torch.equal(found.layers[n].b, expected.layers[n].b) for n in found.layers)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(tensors, tmp_path / "adapter_model.bin")
    assert read(llama, tmp_path).layers.keys() == expected.layers.keys()


def test_the_digest_tells_adapters_apart(llama: Path, tmp_path: Path) -> None:
    digests = set()
    for i, (seed, alpha) in enumerate([(0, 8), (1, 8), (0, 9)]):
        save_adapter(llama, tmp_path / str(i), targets=["q_proj"], seed=seed, lora_alpha=alpha)
        digests.add(read(llama, tmp_path / str(i)).digest)
        assert read(llama, tmp_path / str(i)).digest in digests
    assert len(digests) == 3


def test_rows_of_several_adapters_are_changed_by_their_own() -> None:
    """Against a loop over rows; ranks and parts differ, some rows have no adapter."""
    torch.manual_seed(0)
    parts, rank = ((0, 5), (5, 3), (8, 7)), 4
    for dtype in (torch.float32, torch.bfloat16):
        x, out = torch.randn(11, 6).to(dtype), torch.randn(11, 15).to(dtype)
        a, b = torch.randn(3, 3 * rank, 6).to(dtype), torch.randn(3, 15, rank).to(dtype)
        slots = torch.tensor([0, 2, -1, 2, 1, 1, 0, -1, 2, 2, 0], dtype=torch.int32)
        expected = out.double()
        for row, slot in enumerate(slots.tolist()):
            for i, (first, count) in enumerate(parts):
                if slot >= 0:
                    change = b[slot, first : first + count].double() @ (
                        a[slot, i * rank : (i + 1) * rank].double() @ x[row].double()
                    )
                    expected[row, first : first + count] += change
        matrices = LowRank(a, lay_out_b(b), torch.full((3,), rank, dtype=torch.int32), parts)
        segments = tuple(Segment(s, torch.nonzero(slots == s)[:, 0]) for s in (0, 1, 2))
        found = out.clone()
        add_lora(found, x, matrices, RowView(slots, segments))
        torch.testing.assert_close(
            found.double(),
            expected,
            rtol=2e-2 if dtype is torch.bfloat16 else 1e-5,
            atol=0.2 if dtype is torch.bfloat16 else 1e-5,
        )
        everywhere = out.clone()
        add_lora(everywhere, x, matrices, RowView(torch.ones_like(slots), (Segment(1, None),)))
        listed = out.clone()
        add_lora(listed, x, matrices, RowView(torch.ones_like(slots), (Segment(1, torch.arange(11)),)))
        assert torch.equal(everywhere, listed)


CONFIG_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected \"LORA\""),
    ({"use_dora": True}, r"weight-decomposed adapters \(DoRA\) are not supported"),
    ({"modules_to_save": ["lm_head"]}, "retrained modules are not supported"),
    ({"bias": "all"}, "biases"),
    ({"lora_bias": True}, "biases"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the base model"),
    ({"r": 128}, "LoRA rank 128 is greater than max_lora_rank 64"),
    ({"r": 0}, "r must be an integer from 1"),
    ({"r": True}, "r must be an integer from 1"),
    ({"r": 10**30}, "r must be an integer from 1"),
    ({"lora_alpha": "8"}, "lora_alpha must be a number"),
    ({"lora_alpha": 1e300}, "lora_alpha must be a number"),
    ({"rank_pattern": {"(a+)+$": 4}}, "only names of layers are supported"),
    ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    ({"r": 16}, "has the rank 8, but adapter_config.json says 16"),
    ({"layer_replication": [[0, 1]]}, "replicated layers"),
    ({"target_parameters": ["experts.w"]}, "no layers"),
    ({"target_parameters": ["self_attn.q_proj.w"]}, "q_proj.w, a parameter that is no layer"),
    ({"target_parameters": [5]}, "target_parameters must be a list"),
    ({"context_length": 2**50}, "context_length must be an integer"),
]


@pytest.mark.parametrize(("change", "message"), CONFIG_CHANGES, ids=[str(c) for c, _ in CONFIG_CHANGES])
def test_settings_that_mean_something_else_are_refused_by_name(
    change: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    save_adapter(llama, tmp_path, targets=["q_proj"])
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        read(llama, tmp_path)


@given(
    patterns=st.dictionaries(
        st.lists(st.sampled_from("ab"), min_size=1, max_size=3)
        .map(".".join)
        .flatmap(lambda name: st.sampled_from([name, f"^{name}"])),
        st.integers(1, 9),
    ),
    path=st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(".".join),
)
def test_the_first_pattern_that_names_a_layer_or_its_end_counts(patterns: dict[str, int], path: str) -> None:
    wanted = 0
    for name, value in reversed(patterns.items()):
        if path == name.removeprefix("^") or path.endswith("." + name):
            wanted = value
    assert first_match(patterns, path, 0) == wanted


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [(100, "is longer than any name of a tensor of an adapter"), (100_000, "with names of at most 4096 characters")],
)
def test_names_without_end_are_refused(wrappers: int, message: str, llama: Path, tmp_path: Path) -> None:
    save_adapter(llama, tmp_path, targets=["q_proj"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.experts" + ".base_layer" * wrappers + ".lora_A.weight"
    save_file({**tensors, name: torch.zeros(8, 48)}, tmp_path / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings["target_parameters"] = [f"m{i}.experts.down_proj" for i in range(4000)]
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        read(llama, tmp_path)


def write_header(file: Path, header: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def header_of(names: Iterable[str], shape: tuple[int, int] = (0, 0)) -> bytes:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    return json.dumps(dict.fromkeys(names, entry)).encode()


def test_headers_of_adapters_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Front ends look for added tokens there: what is too long is not parsed, what is no entry not to its end."""
    file = tmp_path / "adapter_model.safetensors"
    write_header(file, header_of(["model.embed_tokens.weight"], (70, 0)))
    assert added_tokens(tmp_path, file, 64) == 6
    write_header(file, b'{"a":{"dtype":"F32","shape":[' + b"0," * 1_000_000 + b'0],"data_offsets":[0,0]}}')
    with pytest.raises(ValueError, match="entry of tensor 'a' is not an object") as refused:
        read_entries(file)
    assert len(str(refused.value)) < 500
    assert added_tokens(tmp_path, file, 64) == 0
    with file.open("r+b") as stream:
        stream.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(ValueError, match=f"has a header of {MAX_HEADER_BYTES + 1} bytes, expected at most"):
        added_tokens(tmp_path, file, 64)
    monkeypatch.setattr("vllm.lora.config.MAX_TENSORS", 10)
    write_header(file, header_of(map(str, range(11))))
    with pytest.raises(ValueError, match="more than 10 tensors"):
        added_tokens(tmp_path, file, 64)


def test_only_so_much_is_read_of_an_adapter_of_another_model(llama: Path, tmp_path: Path) -> None:
    save_adapter(llama, tmp_path, targets=["q_proj"])
    rests: list[None] = []
    names = [f"base_model.model.model.layers.{i}.x.lora_{c}.weight" for i in range(300) for c in "AB"]
    save_file({name: torch.ones(8, 8) for name in names}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"layers that the base model does not have: .*x and more\.") as refused:
        read(llama, tmp_path, rest=lambda: rests.append(None))
    assert len(rests) < 600 / 2 and len(str(refused.value)) < 600
    with pytest.raises(ValueError, match="has more than 599 tensors"):
        read(llama, tmp_path, max_tensors=599)
    torch.save({name: torch.ones(8, 8) for name in names}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="has more than 100 tensors"):
        read(llama, tmp_path, max_tensors=100)
    torch.save({"x" * 200_000: torch.ones(8, 8)}, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match="describes its tensors in 200[0-9]{3} bytes"):
        read(llama, tmp_path, max_tensors=2)


def test_a_model_says_how_many_tensors_its_adapters_may_have(llama: Path, tmp_path: Path) -> None:
    save_adapter(llama, tmp_path)
    layers = LoRALayers(load(llama).adaptable(), 1, 8, torch.float32, torch.device("cpu"))
    layers.prepare(read(llama, tmp_path, max_tensors=layers.max_tensors()))
    assert layers.max_tensors() < 5000


PLAIN = torch.ones(8, 48)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (PLAIN.to(torch.float8_e4m3fn), "is torch.float8_e4m3fn, which is not supported"),
        (PLAIN.to(torch.complex64), "is torch.complex64, which is not supported"),
        (PLAIN.to("meta"), "is a torch.strided, meta tensor, expected a plain one"),
        (PLAIN.to_sparse(), "is a torch.sparse_coo, cpu tensor, expected a plain one"),
        (torch.quantize_per_tensor(PLAIN, 0.1, 0, torch.qint8), "is a quantized tensor, expected a plain one"),
        (torch.zeros(1).expand(2**33, 4), r"\[8589934592, 4\] repeats what is stored"),
    ],
)
def test_tensors_of_other_kinds_are_refused_by_name(
    tensor: torch.Tensor, message: str, llama: Path, tmp_path: Path
) -> None:
    save_adapter(llama, tmp_path, targets=["q_proj"])
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({f"{Q}.lora_A.weight": tensor}, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=f"q_proj.lora_A.weight'.*{message}"):
        read(llama, tmp_path)


def test_tensors_that_share_what_is_stored_are_not_copied_without_end(llama: Path, tmp_path: Path) -> None:
    save_adapter(llama, tmp_path, targets=["q_proj"])
    (tmp_path / "adapter_model.safetensors").unlink()
    names = [f"base_model.model.model.layers.0.{i}.self_attn.q_proj.lora_A.weight" for i in range(4)]
    torch.save(dict.fromkeys(names, PLAIN), tmp_path / "adapter_model.bin")
    size = (tmp_path / "adapter_model.bin").stat().st_size
    with pytest.raises(ValueError, match=f"its tensors have more than {size} bytes"):
        read(llama, tmp_path, max_bytes=size)


def test_parameters_are_tensors_too(llama: Path, tmp_path: Path) -> None:
    save_adapter(llama, tmp_path, targets=["q_proj"])
    expected = read(llama, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({k: torch.nn.Parameter(v) for k, v in tensors.items()}, tmp_path / "adapter_model.bin")
    found = read(llama, tmp_path)
    assert all(torch.equal(found.layers[name].b, weights.b) for name, weights in expected.layers.items())


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"peft_type": "LORA", "r": NaN}'])
def test_settings_that_are_no_settings_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="adapter_config.json"):
        read_config(file)


def weights_with(tmp_path: Path, llama: Path, change: Any) -> None:
    save_adapter(llama, tmp_path, targets=["q_proj"])
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.lora_A.weight"), "expected lora_A and lora_B"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(5, 48)}), r"A \[5, 48\] and B \[72, 8\]"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(8, 48, dtype=torch.int32)}), "expected a matrix"),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.zeros(72)}), "DoRA"),
        (lambda t: t.update({f"{Q}.lora_B.bias": torch.zeros(72)}), "biases"),
        (lambda t: t.update({"model.layers.0.other": torch.zeros(2)}), "no part of a LoRA adapter"),
        (
            lambda t: t.update({f"{Q[:-6]}x_proj.lora_{c}.weight": torch.zeros(8, 8) for c in "AB"}),
            "layers that the base model does not have: model.layers.0.self_attn.x_proj",
        ),
        (lambda t: t.clear(), "holds no LoRA weights"),
    ],
)
def test_weights_that_do_not_belong_together_are_refused(
    change: Any, message: str, llama: Path, tmp_path: Path
) -> None:
    weights_with(tmp_path, llama, change)
    with pytest.raises(ValueError, match=message):
        read(llama, tmp_path)


def test_an_adapter_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_random_hf_model(hf.LlamaConfig(**{**CASES["llama"]().to_dict(), "hidden_size": 60}), other)
    save_adapter(other, tmp_path / "adapter", targets=["q_proj"])
    layers = LoRALayers(load(llama).adaptable(), 1, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="map 60 inputs to 72 outputs, but the layer has 48 and 72"):
        layers.prepare(read(llama, tmp_path / "adapter"))


def test_links_out_of_the_folder_pickles_and_large_files_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    save_adapter(llama, folder, targets=["q_proj"])
    file = folder / "adapter_model.safetensors"
    with pytest.raises(ValueError, match="Is it the right file"):
        read(llama, folder, max_bytes=1000)
    secret = tmp_path / "secret"
    file.rename(secret)
    file.symlink_to(secret)
    with pytest.raises(ValueError, match="leads out of the adapter's folder"):
        read(llama, folder)
    file.unlink()

    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "executed").touch, ())

    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"x": Evil()}))
    with pytest.raises(ValueError):
        read(llama, folder)
    torch.save({"x": Evil()}, folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="could run code"):
        read(llama, folder)
    assert not (tmp_path / "executed").exists()
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(ValueError, match="neither adapter_model.safetensors nor adapter_model.bin"):
        read(llama, folder)
    with pytest.raises(ValueError, match="does not exist"):
        read(llama, tmp_path / "nowhere")


class Evil:
    """What a pickle would execute when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self._mark,))


CONFIG_LIES: list[dict[str, Any]] = [
    {"r": 10**9}, {"r": -1}, {"r": "8"}, {"r": None}, {"r": 7}, {"r": 8.0}, {"lora_alpha": None}, {"lora_alpha": 1e308},
    {"peft_type": "PROMPT_TUNING"}, {"peft_type": ["LORA"]}, {"use_dora": True}, {"modules_to_save": ["lm_head"]},
    {"bias": "all"}, {"rank_pattern": {"(a*)*b": 8}}, {"rank_pattern": {"q_proj": 4096}}, {"rank_pattern": [[]]},
    {"alpha_pattern": {"q_proj": {}}}, {"init_lora_weights": "pissa"}, {"context_length": -5}, {"use_qalora": 1},
    {"target_parameters": ["experts.down_proj"]}, {"target_parameters": "experts"}, {"context_length": 10**9},
]  # fmt: skip


def damage(folder: Path, outside: Path, rng: random.Random) -> str:
    """Do one thing to an adapter's folder that makes it another one, or none; what was done."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    file = rng.choice([config, weights])
    data = bytearray(file.read_bytes())
    kind = rng.choice(
        [
            "cut",
            "flip",
            "length",
            "longer",
            "config",
            "header",
            "tensors",
            "link",
            "pickle",
            "folder",
            "pipe",
            "archive",
        ]
    )
    mark = outside / "executed"
    match kind:
        case "cut":
            file.write_bytes(data[: rng.randrange(len(data))])
        case "flip":
            for _ in range(rng.randrange(1, 9)):
                data[rng.randrange(min(len(data), 2000))] = rng.randrange(256)
            file.write_bytes(data)
        case "length":
            file.write_bytes(rng.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 1]).to_bytes(8, "little") + data[8:])
        case "longer":
            file.write_bytes(data + bytes(rng.randrange(1, 99)))
        case "config":
            config.write_text(json.dumps({**json.loads(config.read_text()), **rng.choice(CONFIG_LIES)}))
        case "header":
            raw = weights.read_bytes()
            end = 8 + int.from_bytes(raw[:8], "little")
            fields = json.loads(raw[8:end])
            entry = fields[rng.choice([name for name in fields if name != "__metadata__"])]
            entry[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(
                [None, [2**62, 2**62], [-1, 5], "F4", {}, [0, 2**63], [0], [1.5, 2], "BF16"]
            )
            changed = json.dumps(fields).encode()
            weights.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[end:])
        case "tensors":
            tensors = load_file(weights)
            name = rng.choice(sorted(tensors))
            tensor = tensors.pop(name)
            match rng.randrange(5):
                case 0:
                    tensors[name] = torch.full_like(tensor, rng.choice([float("nan"), float("inf")]))
                case 1:
                    tensors[name] = tensor.t().contiguous()[:-1]
                case 2:
                    tensors[f"{name}.evil"] = tensor
                case 3:
                    tensors[name] = torch.zeros(5000, tensor.shape[1])
            save_file(tensors, weights)
        case "link":
            target = outside / file.name
            target.write_bytes(data)
            file.unlink()
            file.symlink_to(rng.choice([target, Path("/dev/zero"), outside, folder / "nowhere", file]))
        case "pickle" | "archive":
            weights.unlink()
            tensors = {f"{Q}.lora_A.weight": Evil(mark)}
            if kind == "pickle":
                (folder / "adapter_model.bin").write_bytes(pickle.dumps(tensors))
            else:
                torch.save(tensors, folder / "adapter_model.bin")
        case "folder":
            file.unlink()
            file.mkdir()
        case "pipe":
            file.unlink()
            os.mkfifo(file)
    return kind


def test_damaged_and_hostile_folders_are_refused_with_a_reason(llama: Path, tmp_path: Path) -> None:
    """500 of them: an error that says where, or an adapter that can be used; nothing is executed, memory is bounded."""
    original, folder, outside = tmp_path / "original", tmp_path / "adapter", tmp_path / "outside"
    save_adapter(llama, original, targets=["q_proj"])
    outside.mkdir()
    layers = LoRALayers(load(llama).adaptable(), 1, 64, torch.float32, torch.device("cpu"))
    rng = random.Random(0)
    refused: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(500):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        kind = damage(folder, outside, rng)
        try:
            layers.prepare(read(llama, folder, max_bytes=layers.max_file_bytes()))
        except ValueError as error:
            assert str(folder) in str(error) or "adapter" in str(error), error
            refused[kind] += 1
    assert not (outside / "executed").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "in KiB"
    assert sum(refused.values()) > 400
    assert all(
        refused[kind] > 20 for kind in ("cut", "config", "header", "link", "pickle", "folder", "pipe", "archive")
    )
