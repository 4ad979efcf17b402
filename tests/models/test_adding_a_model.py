"""docs/adding_a_model.md, followed literally: its files become models, which agree with Hugging Face."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.executor.configs import config_for
from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.spec_flips import BASES, flips
from tests.tenants.drive import core_of, greedy
from vllm.config.hf import _NAMES as HF_NAMES
from vllm.config.hf import HFConfig
from vllm.model_executor.model_loader.filler import WeightFiller
from vllm.model_executor.models import ModelRegistry, spec
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.models.families import llama
from vllm.model_executor.models.family import renames
from vllm.model_executor.models.spec import Attn, Block, BlockSpec, Decoder, Layout, Rope

PAGE = (Path(__file__).parents[2] / "docs" / "adding_a_model.md").read_text()
FILES = dict(re.findall(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
REGISTRATIONS = dict(re.findall(r'^ModelRegistry\.register_family\("(\w+)", "([\w.:]+)"\)$', PAGE, re.MULTILINE))
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with the page's files."""
    folder = tmp_path / "package"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(ModelRegistry, "_families", dict(REGISTRATIONS))
    yield folder
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def save(folder: Path, weights: dict[str, Tensor], architecture: str, **fields: object) -> None:
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))


def check(folder: Path, reference: nn.Module, scale: float = 1.0) -> None:
    prompts = [torch.randint(0, 131, (length,)) for length in (21, 30)]
    ours = PagedDriver(load(folder), requests=2).run(prompts, [5, 1, 7])
    with torch.inference_mode():
        for prompt, logits in zip(prompts, ours, strict=True):
            embeds = reference.get_input_embeddings()(prompt[None]) * scale
            assert relative_error(logits, reference(inputs_embeds=embeds).logits[0]) < 1e-5


def test_the_page_has_the_files_and_registrations() -> None:
    assert set(FILES) == {"heron.py", "egret.py", "egret_block.py", "teal.py", "teal_block.py"}
    names = {"MyLlamaForCausalLM", "HeronForCausalLM", "EgretForCausalLM", "TealForCausalLM"}
    assert names == set(REGISTRATIONS)


def canonical_names() -> set[str]:
    """All that a `Decoder` of usual blocks can have, as the page writes them; fields of layers and experts stand for
    their numbers.
    """
    names = set()
    for decoder in [*BASES.values(), *(flip.spec for flip in flips())]:
        if all(type(block) is Block for block in decoder.blocks):
            with torch.device("meta"):
                model = DecoderModel(decoder, dtype=torch.float32, max_positions=64)
            names |= set(WeightFiller(model, torch.device("meta")).names())
    numbers = {r"^blocks\.\d+": "blocks.{i}", r"(experts|_norm)\.\d+": r"\1.{e}"}
    for pattern, field in numbers.items():
        names = {re.sub(pattern, field, name) for name in names}
    return names


def test_the_page_lists_all_canonical_names_and_no_others() -> None:
    top = re.search(r"^\| canonical name \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    block = re.search(r"^\| of a block, behind `blocks\.{i}\.` \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert top is not None and block is not None
    listed = []
    for prefix, table in (("", top[0]), ("blocks.{i}.", block[0])):
        for row in table.strip().splitlines()[2:]:
            listed += [prefix + name for name in re.findall(r"`(.*?)`", row.split("|")[1])]
    assert len(listed) == len(set(listed))
    found = canonical_names()
    last = {name: [name.replace("{p}", word) for word in ("weight", "bias")] for name in listed}
    assert [name for name, concrete in last.items() if not found & set(concrete)] == []
    assert found - {name for concrete in last.values() for name in concrete} == set()


def test_sizes_are_found_under_the_fields_that_the_page_lists() -> None:
    table = re.search(r"^\| property of `hf` \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert table is not None
    usual = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 131}
    rows = dict(row.split("|")[1:3] for row in table[0].strip().splitlines()[2:])
    names = {name.strip(" `"): re.findall(r"`(\w+)`", fields) for name, fields in rows.items()}
    assert {"hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size"} <= names.keys()
    for name, fields in names.items():
        for field in fields:
            others = {key: value for key, value in usual.items() if key not in fields}
            assert getattr(HFConfig({**others, field: 2}), name) == 2
        if len(fields) > 2:
            assert tuple(fields) == HF_NAMES[name]
    assert HFConfig.from_dict({"head_dim": 9, **usual}).head_dim == 9
    assert HFConfig.from_dict(usual).num_kv_heads == 6 and HFConfig.from_dict(usual).head_dim == 8


def test_the_example_of_each_argument_makes_a_decoder() -> None:
    (example,) = re.findall(r"^```python example\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    fields = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rotary_dim": 4, "model_type": "none"}
    hf = HFConfig.from_dict({**SIZES, **fields, "num_hidden_layers": 4})
    made = eval(example, {"hf": hf, "replace": replace, **vars(spec), **vars(llama)})
    assert [block.attn.window for block in made.blocks] == [4096, None, 4096, None]
    assert [block.attn.rope and block.attn.rope.dim for block in made.blocks] == [4, 4, 4, None]
    assert {block.layout for block in made.blocks} == {Layout.SANDWICH}


@pytest.mark.usefixtures("package")
def test_a_known_family_under_another_name(tmp_path: Path) -> None:
    reference = save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    save(tmp_path, load_file(tmp_path / "model.safetensors"), "MyLlamaForCausalLM")
    check(tmp_path, reference)


@pytest.mark.usefixtures("package")
def test_a_family_in_one_file(tmp_path: Path) -> None:
    reference = save_random_hf_model(hf.Qwen2Config(**SIZES, layer_types=["full_attention"] * 3), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for i in range(3):
        parts = [weights.pop(f"model.layers.{i}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        weights[f"model.layers.{i}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    save(tmp_path, weights, "HeronForCausalLM", embedding_multiplier=3.0)
    check(tmp_path, reference, scale=3.0)


@pytest.mark.usefixtures("package")
def test_a_block_of_its_own_in_two_files(tmp_path: Path) -> None:
    reference = save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for i, layer in enumerate(reference.model.layers):
        gate = torch.randn(48)
        weights[f"model.layers.{i}.self_attn.gate"] = gate
        layer.self_attn.register_forward_hook(lambda _, __, out, gate=gate: (out[0] * gate.sigmoid(), *out[1:]))
    save(tmp_path, weights, "EgretForCausalLM")
    check(tmp_path, reference)


@pytest.mark.usefixtures("package")
def test_a_block_with_a_state(tmp_path: Path) -> None:
    reference = save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    weights = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if ".self_attn." not in k}
    for i in range(3):
        layer = f"model.layers.{i}.mean."
        weights |= {layer + "value.weight": torch.randn(48, 48) * 0.2, layer + "out.weight": torch.randn(48, 48) * 0.2}
        weights[layer + "decay"] = torch.randn(48)
    save(tmp_path, weights, "TealForCausalLM")
    prompts = [torch.randint(0, 131, (length,)) for length in (21, 30)]
    ours = PagedDriver(load(tmp_path), requests=2).run(prompts, [5, 1, 7])
    with torch.inference_mode():
        for prompt, logits in zip(prompts, ours, strict=True):
            x = reference.model.embed_tokens(prompt)
            for i, layer in enumerate(reference.model.layers):
                value, out, decay = (
                    weights[f"model.layers.{i}.mean.{n}"] for n in ("value.weight", "out.weight", "decay")
                )
                means, mean = [], torch.zeros(48)
                for v in layer.input_layernorm(x) @ value.T:
                    mean = decay.sigmoid() * mean + (1 - decay.sigmoid()) * v
                    means.append(mean)
                x = x + torch.stack(means) @ out.T
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            assert relative_error(logits, reference.lm_head(reference.model.norm(x))) < 1e-5


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda out, rows: (out[0][:1], out[1]), r"Layer 0 \(TealLayer\) returned 1 rows, expected all 16 tokens"),
        (lambda out, rows: out if rows is None else (torch.cat([out[0]] * 2), None), "Layer 2 .* returned 2 rows"),
    ],
)
def test_a_block_that_returns_other_rows_is_named(tmp_path: Path, lie: Any, message: str) -> None:
    engine = core_of(config_for(teal_folder(tmp_path), skip_tokenizer_init=True))
    model: Any = engine.executor.worker.runner.model  # type: ignore[attr-defined]
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *args, f=forward: lie(f(*args), args[4])
    assert not engine.add_requests([greedy("0", list(range(21)), 3)])
    errors = [out.error or "" for _ in range(4) for out in engine.step()]
    assert len(errors) == 1 and re.search(message, errors[0])
    engine.shutdown()


def teal_folder(folder: Path) -> Path:
    """A checkpoint of the page's Teal."""
    save_random_hf_model(hf.LlamaConfig(**SIZES), folder)
    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if ".self_attn." not in k}
    for i in range(3):
        layer = f"model.layers.{i}.mean."
        weights |= {layer + "value.weight": torch.eye(48), layer + "out.weight": torch.eye(48)}
        weights[layer + "decay"] = torch.zeros(48)
    save(folder, weights, "TealForCausalLM")
    return folder


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        (
            "teal_block.py",
            "MODULES = {TealBlock: TealLayer}",
            "",
            r"`modules` of the family with blocks of teal\.TealBlock is 'teal_block', which has no table MODULES",
        ),
        (
            "teal.py",
            '"teal_block"',
            '"teel_block"',
            r"`modules` of .* teal\.TealBlock is 'teel_block', but importing it says: No module named 'teel_block'\.",
        ),
        ("teal.py", "    return Decoder(", "    Decoder(", r"^teal\.teal, .* returned None, expected a Decoder"),
        ("teal.py", "def need(", "def needs(", r"^blocks\.0 has no place in the cache: `need` of the block's spec"),
        (
            "teal.py",
            "class TealBlock(BlockSpec)",
            "class TealBlock",
            r"^Block 0 of the Decoder is a TealBlock, expected .* derives from `BlockSpec`",
        ),
        (
            "teal.py",
            '"blocks.{i}.decay"',
            '"blocks.{i}.dekay"',
            r"missing 'blocks\.0\.decay'.*'blocks\.0\.dekay' by the family's names, which this model does not have\. "
            r"Do config.json and the weights belong together, and are the family's names right\?$",
        ),
        (
            "teal.py",
            '            "model.layers.{i}.mean.decay": "blocks.{i}.decay",\n',
            "",
            r"unexpected 'model\.layers\.0\.mean\.decay'.* and is the download complete\?$",
        ),
    ],
)
def test_a_mistake_in_a_family_is_named(
    package: Path, tmp_path: Path, file: str, right: str, wrong: str, message: str
) -> None:
    assert right in FILES[file]
    (package / file).write_text(FILES[file].replace(right, wrong))
    with pytest.raises(ValueError, match=message):
        load(teal_folder(tmp_path))


def test_a_family_that_rotates_by_the_prompt_says_so_to_the_engine(package: Path, tmp_path: Path) -> None:
    """Else prompts that are rotated unlike would share cached prefixes."""
    save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    save(tmp_path, {}, "HeronForCausalLM", embedding_multiplier=1.0)
    rope = 'attn={"rope": replace(rope_of(hf), scaling=PromptScaling(16))}'
    text = FILES["heron.py"].replace('attn={"qkv_bias": True}', rope).replace("llama_like\n", "llama_like, rope_of\n")
    text = text.replace(
        "\n\n\n", "\nfrom dataclasses import replace\nfrom vllm.model_executor.layers.rope import PromptScaling\n", 1
    )
    (package / "heron.py").write_text(text)
    config = config_for(tmp_path, skip_tokenizer_init=True, load_format="dummy", max_model_len=64)
    with pytest.raises(ValueError, match=r"more than 16 tokens .* says None, .* `Facts` must have the same `known_pro"):
        core_of(config)
    core_of(config_for(tmp_path, skip_tokenizer_init=True, load_format="dummy", max_model_len=16)).shutdown()
    (package / "heron.py").write_text(text.replace("Facts(Wi", "Facts(known_prompt=lambda hf: 16, windows=Wi"))
    sys.modules.pop("heron")
    core_of(config_for(tmp_path, skip_tokenizer_init=True, load_format="dummy", max_model_len=64)).shutdown()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("lie", "got"),
    [(lambda out: out[0], "one Tensor"), (lambda out: (*out, 1), "3 values"), (lambda out: None, "one No")],
)
def test_a_block_that_returns_no_pair_is_named(tmp_path: Path, lie: Any, got: str) -> None:
    model = load(teal_folder(tmp_path))
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda *args: lie(forward(*args))
    with pytest.raises(
        ValueError, match=rf"^Layer 1 \(TealLayer\) returned {got}.*, expected two: the output, and the r"
    ):
        PagedDriver(model, requests=1).run([torch.arange(21)], [5])


@pytest.mark.parametrize(
    "table", [{"tok.{q}": "embed.{q}"}, {"tok.weight": "embed.{p}"}, {"h.{i}.norm.{p}": "norm.{p}"}, {"a.{}": "b.{}"}]
)
def test_fields_of_a_name_are_known_and_stand_on_both_sides(table: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"expected the same fields in both, out of {i}, {e}, {p}"):
        renames(table)


@pytest.mark.parametrize("dim", [0, 11, 12])
def test_a_rotation_of_nothing_or_of_more_than_a_head_is_refused(dim: int) -> None:
    assert Attn(4, 2, 10, Rope(6)).rope == Rope(6)
    with pytest.raises(ValueError, match=f"turns {dim} dimensions of each head, in pairs, expected 1 to the 10"):
        Attn(4, 2, 10, Rope(dim))


def test_a_block_without_a_module_is_named() -> None:
    class Grebe(BlockSpec):
        pass

    with pytest.raises(ValueError, match=r"blocks of the class Grebe\..*MODULES = {Grebe: "):
        DecoderModel(Decoder(8, 8, (Grebe(),), None, True), dtype=torch.float32, max_positions=8)


def test_a_family_travels_to_other_processes_by_name(package: Path) -> None:
    from vllm.model_executor.models.registry import Registry

    copy = Registry()
    copy.restore(ModelRegistry.registered())
    assert copy.registered() == ModelRegistry.registered()
    assert copy.resolve("HeronForCausalLM") == ModelRegistry.resolve("HeronForCausalLM")
    with pytest.raises(ValueError, match="<module>:<FAMILY>"):
        copy.register_family("Heron", "heron.HERON")
    copy.register_family("Broken", "heron:heron")
    with pytest.raises(ValueError, match="is not a Family"):
        copy.resolve("Broken")
