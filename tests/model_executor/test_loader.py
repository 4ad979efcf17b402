"""Loading weights: every format, every kind of damage by name, and no more memory than the weights need."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file, save_model

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from vllm.model_executor.model_loader.checkpoint import find_checkpoint
from vllm.model_executor.model_loader.safetensors_file import iterate_tensors, read_entries

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
}
PROMPT = torch.arange(3, 40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama on disk."""
    save_random_hf_model(hf.LlamaConfig(**SIZES), tmp_path)
    return tmp_path


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return PagedDriver(load(folder, **options)).run([PROMPT], [11])[0]


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of the checkpoint in `folder`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def to_bin(folder: Path, state: Any = None, **options: Any) -> Path:
    """Replace the safetensors file by a torch.save file."""
    file = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors") if state is None else state, file, **options)
    (folder / "model.safetensors").unlink()
    return file


# ---- formats ---------------------------------------------------------------------------------------------------------


def test_sharded_safetensors_and_both_pt_formats_load_the_same(folder: Path, tmp_path: Path) -> None:
    single = logits(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="40KB")
    assert (sharded / "model.safetensors.index.json").exists()
    assert torch.equal(logits(sharded), single)
    state = load_file(folder / "model.safetensors")
    to_bin(folder)
    assert torch.equal(logits(folder), single)
    assert torch.equal(logits(folder, load_format="pt"), single)
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(logits(folder), single)


def test_names_without_the_base_prefix_and_harmless_extras_are_understood(folder: Path) -> None:
    before = logits(folder)

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    edit(folder, strip)
    assert torch.equal(logits(folder), before)


def test_old_and_new_names_of_gpt2_and_mixtral_load_the_same(tmp_path: Path) -> None:
    gpt2, mixtral = tmp_path / "gpt2", tmp_path / "mixtral"
    save_random_hf_model(hf.GPT2Config(vocab_size=131, n_embd=48, n_layer=2, n_head=6, n_positions=64), gpt2)
    before = logits(gpt2)

    def as_on_the_hub(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    edit(gpt2, as_on_the_hub)
    assert torch.equal(logits(gpt2), before)
    save_random_hf_model(hf.MixtralConfig(**SIZES, num_local_experts=3), mixtral)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in load_file(mixtral / "model.safetensors")
    before = logits(mixtral)

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
            w1, w2, w3 = (
                torch.stack([tensors.pop(f"{old}.experts.{e}.{w}.weight") for e in range(3)])
                for w in ("w1", "w2", "w3")
            )
            tensors[f"{new}.experts.gate_up_proj"] = torch.cat([w1, w3], 1)
            tensors[f"{new}.experts.down_proj"] = w2
            tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")

    edit(mixtral, stack)
    assert torch.equal(logits(mixtral), before)


def test_dtype_is_cast_while_loading(folder: Path) -> None:
    model = load(folder, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert relative_error(PagedDriver(model).run([PROMPT], [11])[0], logits(folder)) < 0.05


def test_dummy_weights_are_random_and_the_same_every_time(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, second = logits(folder, load_format="dummy"), logits(folder, load_format="dummy")
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert first.std() > 0.01


# ---- checkpoints that do not fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight", "model.embed_tokens.weight"],
)
def test_missing_tensor_is_named_as_the_checkpoint_names_it(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"missing '{name}'"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["extra.weight", "model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias"]
)
def test_unexpected_tensor_is_named(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(77, 48)}))
    with pytest.raises(ValueError, match=f"unexpected '{name}'"):
        load(folder)


def test_a_name_that_the_family_knows_and_the_model_lacks_is_said_in_both_languages(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(77)}))
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.up_proj.bias' is 'blocks.0.ffn.up.bias' by the"):
        load(folder)


def test_wrong_shape_names_tensor_got_and_expected(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(48, 78)}))
    with pytest.raises(ValueError, match=rf"{name}.*\[48, 78\].*\[48, 77\]"):
        load(folder)


def test_integers_are_no_weights(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ValueError, match=rf"{name}.*torch.int8, expected floating-point numbers"):
        load(folder)


def test_wrong_shape_of_a_transposed_weight_is_given_as_the_checkpoint_has_it(tmp_path: Path) -> None:
    save_random_hf_model(hf.GPT2Config(vocab_size=131, n_embd=48, n_layer=1, n_head=6, n_positions=64), tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"transformer.h.0.mlp.c_fc.weight": torch.zeros(48, 191)}))
    with pytest.raises(ValueError, match=r"c_fc.*\[48, 191\].*\[48, 192\]"):
        load(tmp_path)


def test_tensor_that_occurs_twice_is_refused(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"].clone()}))
    with pytest.raises(ValueError, match="twice"):
        load(folder)


def test_tied_head_in_the_checkpoint_is_left_out(tmp_path: Path) -> None:
    save_random_hf_model(hf.LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    before = logits(tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(tmp_path), before)


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
@pytest.mark.parametrize("config", [hf.LlamaConfig, hf.GPT2Config])
def test_of_tied_weights_the_head_alone_may_be_stored(config: Any, model_impl: str, tmp_path: Path) -> None:
    sizes = SIZES if config is hf.LlamaConfig else {"vocab_size": 131, "n_embd": 48, "n_layer": 2, "n_head": 6}
    reference = save_random_hf_model(config(**sizes, tie_word_embeddings=True), tmp_path)
    save_model(reference, str(tmp_path / "model.safetensors"))  # keeps the first of equal names' tensors
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" in names and not any("embed_tokens" in name or "wte" in name for name in names)
    with torch.inference_mode():
        assert relative_error(logits(tmp_path, model_impl=model_impl), reference(PROMPT[None]).logits[0]) < 1e-5


def test_folder_without_weights_says_what_was_expected(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"No weights found.*\*\.bin"):
        load(folder, load_format="pt")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"No weights found.*\*\.safetensors"):
        load(folder)
    with pytest.raises(ValueError, match=r"No weights found.*'npcache'.*\*\.bin"):
        load(folder, load_format="npcache")
    with pytest.raises(ValueError, match="load_format='somehow' is not supported"):
        load(folder, load_format="somehow")


# ---- damaged and hostile files ---------------------------------------------------------------------------------------


def with_header(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": b"",
    "short": b"\x01\x02",
    "header longer than the file": with_header({}, length=1000),
    "huge header": with_header({}, length=2**63),
    "not json": with_header(b"{nonsense"),
    "not utf-8": with_header(b"\xff\xfe{}"),
    "deep json": with_header(b"[" * 100_000),
    "a list": with_header([1]),
    "entry is no object": with_header({"a": 3}),
    "unknown dtype": with_header({"a": {**F32, "dtype": "F31"}}, bytes(8)),
    "dtype is a list": with_header({"a": {**F32, "dtype": ["F32"]}}, bytes(8)),
    "negative shape": with_header({"a": {**F32, "shape": [-2]}}, bytes(8)),
    "shape of words": with_header({"a": {**F32, "shape": ["2"]}}, bytes(8)),
    "shape of booleans": with_header({"a": {**F32, "shape": [True]}}, bytes(8)),
    "too many dimensions": with_header({"a": {**F32, "shape": [1] * 40}}, bytes(8)),
    "huge shape": with_header({"a": {**F32, "shape": [2**62, 2**62]}}, bytes(8)),
    "bytes do not match the shape": with_header({"a": {**F32, "shape": [3]}}, bytes(8)),
    "reversed offsets": with_header({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8)),
    "three offsets": with_header({"a": {**F32, "data_offsets": [0, 8, 8]}}, bytes(8)),
    "truncated data": with_header({"a": F32}, bytes(7)),
    "trailing data": with_header({"a": F32}, bytes(9)),
    "overlap": with_header({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
    "hole": with_header({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, bytes(20)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_safetensors_name_the_file(damage: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(DAMAGED[damage])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        load(folder)


def test_a_pointer_of_git_lfs_says_how_to_fetch_the_file(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(ValueError, match="is a pointer of Git LFS, whose content `git lfs pull` fetches"):
        load(folder)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999])
def test_truncated_safetensors_name_the_file(kept: float, folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete"):
        load(folder)


def test_safetensors_reader_returns_what_was_written(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randint(0, 200, (7,), dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(9).half(),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = dict(iterate_tensors(tmp_path / "x.safetensors"))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert len(read_entries(tmp_path / "x.safetensors")) == len(tensors)
    odd = with_header({"f": F32}, struct.pack("<2f", 1.5, -2.0))  # data at an odd address
    (tmp_path / "odd.safetensors").write_bytes(odd if len(odd) % 4 else odd[:8] + b" " + odd[8:])
    if len(odd) % 4 == 0:
        (tmp_path / "odd.safetensors").write_bytes(with_header(json.dumps({"f": F32}).encode() + b" ", odd[-8:]))
    assert dict(iterate_tensors(tmp_path / "odd.safetensors"))["f"].tolist() == [1.5, -2.0]


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_with_code_is_refused_and_its_code_never_runs(zipped: bool, folder: Path) -> None:
    marker = folder / "was_here"
    state: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    to_bin(folder, {**state, "evil": _Evil(marker)}, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*refused.*safetensors") as refused:
        load(folder)
    assert "weights_only" not in str(refused.value)  # no advice to load it unsafely
    assert not marker.exists()


def test_plain_pickle_and_garbage_are_refused(folder: Path) -> None:
    marker = folder / "was_here"
    file = to_bin(folder)
    file.write_bytes(pickle.dumps(_Evil(marker)))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        load(folder)
    assert not marker.exists()
    for content in (b"", b"garbage", b"PK\x03\x04broken zip"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
            load(folder)


def test_pt_file_of_something_else_is_refused(folder: Path) -> None:
    file = to_bin(folder, {"a": 3})
    with pytest.raises(ValueError, match="entry 'a' is a int"):
        load(folder)
    torch.save([torch.zeros(1)], file)
    with pytest.raises(ValueError, match="list"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../outside.safetensors"}}, "plain name"),
        ({"weight_map": {"a": "gone.safetensors"}}, "does not exist"),
        ({"weight_map": ["a"]}, "not a checkpoint index"),
        ({}, "not a checkpoint index"),
        ([], "not a checkpoint index"),
    ],
)
def test_bad_index_is_refused(index: Any, message: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        load(folder)


# ---- memory ----------------------------------------------------------------------------------------------------------

_MEASURE = """
import re, sys, torch
from pathlib import Path
from tests.models.harness import load

def memory(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
load(Path(sys.argv[2]))  # everything that loading imports is in memory now
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = memory("VmRSS")
load(Path(sys.argv[1]))
print(memory("VmHWM") - before)
"""


def test_loading_takes_the_weights_and_one_tensor(folder: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    config = hf.LlamaConfig(
        **{**SIZES, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 4096}
    )
    with torch.device("meta"):
        names = {name: tensor.shape for name, tensor in hf.LlamaForCausalLM(config).state_dict().items()}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(big)
    save_file({name: torch.zeros(shape) for name, shape in names.items()}, big / "model.safetensors")
    size = (big / "model.safetensors").stat().st_size
    largest = 3072 * 768 * 2 * 4
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(big), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert int(run.stdout.split()[-1]) < size + 2 * largest


def test_a_terminal_sees_how_far_loading_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Bar(contextlib.AbstractContextManager):
        def __init__(self, **settings: Any) -> None:
            self.total, self.seen = settings["total"], 0
            bars.append(self)

        def __exit__(self, *error: object) -> None:
            return

        def update(self, size: int) -> None:
            self.seen += size

    monkeypatch.setattr("tqdm.tqdm", Bar)
    checkpoint = find_checkpoint(folder, "auto")
    plain = [name for name, _, _ in checkpoint.tensors(progress=True)]
    assert not bars, "no terminal, no bar"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert [name for name, _, _ in checkpoint.tensors(progress=False)] == plain and not bars
    assert [name for name, _, _ in checkpoint.tensors(progress=True)] == plain
    assert 0.9 * bars[0].total < bars[0].seen <= bars[0].total
