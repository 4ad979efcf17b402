"""The formats beside safetensors: sharded_state, tensorizer, npcache and PyTorch files give the same model."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.models.harness import PagedDriver, load, save_random_hf_model
from tests.models.own_models import NewLlamaForCausalLM
from tests.models.test_against_hugging_face import CASES, GQA
from vllm import LLM, EngineArgs, ModelRegistry, SamplingParams
from vllm.config.model_source import copy_small_files
from vllm.distributed import TensorParallel
from vllm.model_executor.model_loader import checkpoint, weights
from vllm.model_executor.model_loader.safetensors_file import write_tensors
from vllm.model_executor.model_loader.tensorizer import TensorizerConfig, tensorize_vllm_model

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 8, "max_model_len": 64}
PROMPTS = [{"prompt_token_ids": [5, 90, 17, 3, 44]}, {"prompt_token_ids": [8, 8, 100]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_random_hf_model(hf.LlamaConfig(**{**GQA, "intermediate_size": 78}), tmp_path / "model")
    return tmp_path / "model"


def tokens(model: Path, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def saved(model: Path, target: Path, max_size: int | None = None, **options: Any) -> list[list[int]]:
    """Save the model from a running engine, which goes on afterwards; its tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        llm.save_sharded_state(str(target), max_size=max_size)
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


# -- sharded_state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama", {}),
        ("gemma2", {"dtype": "bfloat16"}),
        ("mixtral", {}),
        ("opt-350m", {}),
        ("jamba", {}),
        ("llama", {"quantization": "fp8"}),
        ("mixtral", {"quantization": "experts_int8"}),
        ("llama", {"model_impl": "transformers"}),
    ],
)
def test_a_saved_state_gives_the_same_tokens(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    save_random_hf_model(CASES[case](), tmp_path / "model")
    expected = saved(tmp_path / "model", tmp_path / "saved", 20_000, **options)
    files = sorted(file.name for file in (tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == "model-rank-0-part-0.safetensors"
    assert expected == tokens(tmp_path / "model", **options)
    assert tokens(tmp_path / "saved", load_format="sharded_state", **options) == expected


def test_four_bit_weights_are_saved_in_four_bits(tmp_path: Path) -> None:
    config = hf.LlamaConfig(**{**GQA, "hidden_size": 96, "intermediate_size": 128})
    save_random_hf_model(config, tmp_path / "model")
    options = {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    expected = saved(tmp_path / "model", tmp_path / "saved", **options)
    kept = {"quantization": "bitsandbytes", "load_format": "sharded_state"}
    assert tokens(tmp_path / "saved", **kept) == expected
    size = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.safetensors"))
    assert size < 0.5 * (tmp_path / "model" / "model.safetensors").stat().st_size


def test_own_models_are_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    before = dict(ModelRegistry._registered)
    ModelRegistry.register_model("LlamaForCausalLM", NewLlamaForCausalLM)
    try:
        expected = saved(folder, tmp_path / "saved")
        assert tokens(tmp_path / "saved", load_format="sharded_state") == expected
    finally:
        ModelRegistry._registered.clear()
        ModelRegistry._registered.update(before)


def test_the_example_saves_two_ranks(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    command = [sys.executable, "examples/save_sharded_state.py", "--model", str(folder), "-o", str(target)]
    flags = ["--tensor-parallel-size", "2", "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "64"]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, timeout=120)
    assert {file.name for file in target.glob("*.safetensors")} == {
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
    }
    assert (target / "config.json").exists()
    assert tokens(target, load_format="sharded_state", tensor_parallel_size=2) == tokens(folder)
    with pytest.raises(ValueError, match=r"was saved with tensor_parallel_size=2, but is loaded with 1"):
        tokens(target, load_format="sharded_state")


def test_a_state_is_loaded_as_it_was_saved_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    saved(folder, target, 20_000)
    with pytest.raises(ValueError, match="was saved with dtype='float32', but is loaded with 'bfloat16'"):
        tokens(target, load_format="sharded_state", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"has no files 'other-0-\*.safetensors'"):
        extra = {"pattern": "other-{rank}-{part}.safetensors"}
        tokens(target, load_format="sharded_state", model_loader_extra_config=extra)
    sorted(target.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(ValueError, match="are not complete"):
        tokens(target, load_format="sharded_state")


def _one_row(numbers: dict[str, Any], tensors: dict[str, Any], codes: str) -> None:
    for name in (codes, codes.replace("codes", "scales")):
        tensors[name] = tensors[name][:1].contiguous()


def _twice_the_inputs(numbers: dict[str, Any], tensors: dict[str, Any], codes: str) -> None:
    for name in (codes, codes.replace("codes", "scales")):
        tensors[name] = torch.cat([tensors[name]] * 2, 1)


@pytest.mark.parametrize(
    "damage",
    [
        _one_row,
        _twice_the_inputs,
        lambda numbers, tensors, codes: numbers.update(group=0),
        lambda numbers, tensors, codes: numbers.update(bits=64),
        lambda numbers, tensors, codes: numbers.update(tensors=["../codes"]),
        lambda numbers, tensors, codes: numbers.update(inputs={"kind": "x"}),
        lambda numbers, tensors, codes: numbers.clear(),
    ],
)
def test_a_damaged_state_is_refused_before_a_kernel_reads_it(damage: Any, damaged_state: Path) -> None:
    file = damaged_state / "model-rank-0-part-0.safetensors"
    tensors = load_file(file)
    document = json.loads(bytes(tensors["vllm_rank_state"].numpy()))
    path, layer = next(iter(document["quantized"].items()))
    damage(layer[0][0], tensors, f"{path}#0.0.codes")
    tensors["vllm_rank_state"] = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="the saved weights of .* are damaged"):
        tokens(damaged_state, load_format="sharded_state", quantization="fp8")


@pytest.fixture
def damaged_state(folder: Path, tmp_path: Path) -> Path:
    saved(folder, tmp_path / "saved", quantization="fp8")
    return tmp_path / "saved"


@pytest.mark.parametrize("pattern", [7, "weights.safetensors", "../{rank}-{part}", "{rank}", "{rank.x}-{part}"])
def test_a_pattern_must_tell_files_apart(pattern: Any, folder: Path, tmp_path: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm, pytest.raises(ValueError, match="must be a file's name"):
        llm.save_sharded_state(str(tmp_path / "saved"), pattern=pattern)


def test_a_model_is_not_saved_into_its_own_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    before = sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())
    with LLM(str(folder), **OPTIONS) as llm:
        for path in (folder, tmp_path / "link"):
            with pytest.raises(ValueError, match=f"{path} is the model's own folder"):
                llm.save_sharded_state(str(path))
    assert sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir()) == before


def test_a_model_takes_the_place_of_another_that_was_saved(folder: Path, tmp_path: Path) -> None:
    """Whose files were more."""
    saved(folder, tmp_path / "saved", max_size=20_000)
    assert len(list((tmp_path / "saved").glob("model-rank-0-part-*"))) > 2
    torch.manual_seed(5)
    save_random_hf_model(hf.LlamaConfig(**GQA), tmp_path / "other")
    expected = saved(tmp_path / "other", tmp_path / "saved")
    assert tokens(tmp_path / "saved", load_format="sharded_state") == expected


def test_saved_weights_say_how_they_are_loaded(folder: Path, tmp_path: Path) -> None:
    saved(folder, tmp_path / "saved")
    with pytest.raises(ValueError, match='Load them with load_format="sharded_state"'):
        tokens(tmp_path / "saved")


def test_saved_weights_are_for_whom_other_files_are_for(folder: Path, tmp_path: Path) -> None:
    saved(folder, tmp_path / "saved")
    (tmp_path / "any").touch()
    assert {file.stat().st_mode for file in (tmp_path / "saved").iterdir()} == {(tmp_path / "any").stat().st_mode}


def test_a_full_disk_is_an_os_error_and_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"x\.safetensors cannot be written: .*File too large"):
            write_tensors({"x": torch.zeros(1000)}, tmp_path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


# -- tensorizer --------------------------------------------------------------------------------------------------------


def engine_args(folder: Path, **options: Any) -> EngineArgs:
    return EngineArgs(model=str(folder), **{**OPTIONS, **options})


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_tensorized_weights_give_the_same_tokens(quantization: str | None, folder: Path, tmp_path: Path) -> None:
    config = TensorizerConfig(tensorizer_uri=str(tmp_path / "out" / "model.tensors"), verify_hash=True)
    tensorize_vllm_model(engine_args(folder, quantization=quantization), config)
    only_config = tmp_path / "only-config"
    only_config.mkdir()
    copy_small_files(folder, only_config)
    options = {"load_format": "tensorizer", "model_loader_extra_config": config}
    expected = tokens(folder, quantization=quantization)
    assert tokens(only_config, quantization=quantization, **options) == expected
    options["model_loader_extra_config"] = {"tensorizer_uri": config.tensorizer_uri, "num_readers": 2}
    assert tokens(only_config, quantization=quantization, **options) == expected


def test_encrypted_weights_need_their_key(folder: Path, tmp_path: Path) -> None:
    uri, key = str(tmp_path / "%02d.tensors"), tmp_path / "key"
    config = TensorizerConfig(tensorizer_uri=uri, encryption_keyfile=str(key))
    tensorize_vllm_model(engine_args(folder), config)
    assert key.stat().st_mode & 0o777 == 0o600 and (tmp_path / "00.tensors").exists()
    assert tokens(folder, load_format="tensorizer", model_loader_extra_config=config) == tokens(folder)
    with pytest.raises(ValueError, match="exists, and models may be encrypted with it"):
        tensorize_vllm_model(engine_args(folder), config)
    (tmp_path / "wrong").write_bytes(bytes(32))
    for wrong in (str(tmp_path / "wrong"), None):
        settings = {"tensorizer_uri": uri, "encryption_keyfile": wrong}
        with pytest.raises(ValueError, match="tensorizer cannot read"):
            tokens(folder, load_format="tensorizer", model_loader_extra_config=settings)


def test_a_tensorized_checkpoint_of_hugging_face_loads_by_its_names(folder: Path, tmp_path: Path) -> None:
    import tensorizer as library

    serializer = library.TensorSerializer(str(tmp_path / "hf.tensors"))
    serializer.write_state_dict(hf.AutoModelForCausalLM.from_pretrained(folder).state_dict())
    serializer.close()
    settings = {"tensorizer_uri": str(tmp_path / "hf.tensors")}
    assert tokens(folder, load_format="tensorizer", model_loader_extra_config=settings) == tokens(folder)


def test_the_tensorizer_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "tensorize_vllm_model.py"), "--model", "demo"]
    out = ["serialize", "--serialized-directory", str(tmp_path), "--suffix", "v1"]
    subprocess.run([*command, *out], check=True, timeout=120)
    path = tmp_path / "vllm" / "demo" / "v1" / "model.tensors"
    read = [*command, "deserialize", "--path-to-tensors", str(path)]
    printed = subprocess.run(read, check=True, timeout=120, capture_output=True, text=True).stdout
    assert "Paris" in json.loads(printed.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs tensorizer_uri"),
        ({"tensorizer_uri": "x", "speed": 1}, "has no setting speed"),
        ({"tensorizer_uri": "x", "num_readers": 0}, "num_readers must be at least 1"),
    ],
)
def test_settings_of_tensorizer_are_checked(settings: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        engine_args(folder, load_format="tensorizer", model_loader_extra_config=settings).create_engine_config()


def test_ranks_need_files_of_their_own(folder: Path) -> None:
    settings = {"tensorizer_uri": "model.tensors"}
    args = engine_args(folder, load_format="tensorizer", model_loader_extra_config=settings, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="is one file for 2 ranks"):
        args.create_engine_config()


def test_other_formats_have_no_settings(folder: Path) -> None:
    with pytest.raises(ValueError, match="has no setting a for load_format='auto'"):
        engine_args(folder, model_loader_extra_config={"a": 1}).create_engine_config()


def test_without_the_package_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorizer", None)
    with pytest.raises(ValueError, match=r"pip install vllm\[tensorizer\]"):
        tokens(folder, load_format="tensorizer", model_loader_extra_config={"tensorizer_uri": "x"})


# -- PyTorch files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def torch_folder(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "torch"
    target.mkdir()
    copy_small_files(folder, target)
    state = hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    names = sorted(state)
    files = {f"pytorch_model-{i}.bin": names[i::2] for i in range(2)}
    for file, part in files.items():
        torch.save({name: state[name].bfloat16() for name in part}, target / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (target / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def test_npcache_is_written_once_and_read_afterwards(torch_folder: Path) -> None:
    prompt = torch.tensor([5, 90, 17, 3, 44])
    expected = PagedDriver(load(torch_folder, load_format="pt")).run([prompt], [5])[0]
    for _ in range(2):
        assert torch.equal(PagedDriver(load(torch_folder, load_format="npcache")).run([prompt], [5])[0], expected)
        for file in torch_folder.glob("*.bin"):
            file.unlink()  # the second time there is the cache alone
    names = json.loads((torch_folder / "np" / "weight_names.json").read_text())
    assert "model.embed_tokens.weight" in names
    assert np.load(torch_folder / "np" / "model.embed_tokens.weight.npy").dtype == np.float32
    assert not list(torch_folder.glob(".np*"))
    for damage in (b"\x93NUMPY nothing", b""):
        (torch_folder / "np" / "model.norm.weight.npy").write_bytes(damage)
        with pytest.raises(ValueError, match=r"cannot be read.*Remove .*/np"):
            load(torch_folder, load_format="npcache")


def test_npcache_is_written_anew_for_weights_that_are_newer(torch_folder: Path) -> None:
    load(torch_folder, load_format="npcache")
    for file in torch_folder.glob("*.bin"):
        torch.save({name: 2 * value for name, value in torch.load(file).items()}, file)
    name = "model.embed_tokens.weight"
    before = np.array(np.load(torch_folder / "np" / f"{name}.npy"))
    load(torch_folder, load_format="npcache")
    assert np.array_equal(np.load(torch_folder / "np" / f"{name}.npy"), 2 * before)


@pytest.mark.parametrize(("content", "reason"), [(b"", "it ends too early"), (b"abc" * 100, ".+")])
def test_damaged_pytorch_files_are_named(content: bytes, reason: str, torch_folder: Path) -> None:
    for file in torch_folder.glob("*.bin"):
        file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"\.bin is not a complete PyTorch checkpoint: {reason}\. Download it again"):
        load(torch_folder, load_format="pt")


def test_names_of_a_numpy_cache_cannot_leave_it(torch_folder: Path) -> None:
    (torch_folder / "np").mkdir()
    (torch_folder / "np" / "weight_names.json").write_text('["../model"]')
    with pytest.raises(ValueError, match="is not a list of tensors' names"):
        load(torch_folder, load_format="npcache")


def test_a_device_for_pytorch_files_is_said_to_be_idle_where_there_are_none(
    folder: Path, torch_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(weights.logger, "warning", lambda text, *values: said.append(text % values))

    def read(model: Path, **options: Any) -> None:
        config = engine_args(model, **options).create_engine_config()
        with weights.open_weights(config, torch.device("cpu"), TensorParallel(), 0):
            pass

    read(torch_folder, pt_load_map_location={"cuda:0": "cpu"})
    read(folder)
    assert said == []
    read(folder, pt_load_map_location={"cuda:0": "cpu"})
    assert said == ["pt_load_map_location has no effect: the weights are safetensors files."]


def test_the_progress_of_loading_is_shown_unless_it_is_switched_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(checkpoint.Checkpoint, "tensors", lambda self, progress: asked.append(progress) or iter(()))
    for shown in (True, False):
        config = engine_args(folder, use_tqdm_on_load=shown).create_engine_config()
        with weights.open_weights(config, torch.device("cpu"), TensorParallel(), 0):
            pass
    assert asked == [True, False]


def test_devices_of_pytorch_files_are_mapped(torch_folder: Path) -> None:
    assert tokens(torch_folder, pt_load_map_location={"cuda:0": "cpu"}) == tokens(torch_folder, load_format="pt")
    with pytest.raises(ValueError, match="pt_load_map_location must be"):
        engine_args(torch_folder, pt_load_map_location="disk").create_engine_config()


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_little_more_memory_than_the_weights() -> None:
    command = [sys.executable, "-m", "benchmarks.load_weights", "--random", "0.25", "--dtype", "bfloat16"]
    printed = subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True, text=True).stdout
    figures = json.loads(printed.strip().splitlines()[-1])
    assert figures["kept_gib"] > 0.9 * figures["files_gib"]
    assert figures["peak_share"] < 1.15
