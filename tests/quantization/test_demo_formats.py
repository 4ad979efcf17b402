"""The packaged model in every format that can hold it: it still knows the capital of France."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torchao.quantization as ao
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from transformers import TorchAoConfig

from tests.quantization import writers
from tests.quantization.harness import Write
from tests.quantization.test_formats import CASES, every
from tests.quantization.test_gguf import DEMO, write_demo
from tests.quantization.test_libraries import AO
from vllm import LLM, SamplingParams
from vllm.config.quantization import method_of

_RANDOM = ("aqlm", "compressed-tensors sparse")  # writers of weights that are not the model's
_TOO_FEW_BITS = ("gptq 2 bits",)  # for so small a model


def bitsandbytes(kind: str) -> Write:
    def write(module: str, weight: Tensor) -> Any:
        if "_proj" not in module:
            return None
        if kind == "int8":
            codes, largest, _ = bnb.functional.int8_vectorwise_quant(weight)
            return {"weight": codes, "SCB": largest.float()}, weight
        codes, state = bnb.functional.quantize_4bit(weight, quant_type=kind)
        return {"weight": codes, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}, weight

    return write


def torchao(config: Any) -> Write:
    def write(module: str, weight: Tensor) -> Any:
        if "_proj" not in module:
            return None
        model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        model[0].weight.data = weight
        ao.quantize_(model, config)
        tensors, _ = flatten_tensor_state_dict(model.state_dict())
        return {name.removeprefix("0."): tensor for name, tensor in tensors.items()}, weight

    return write


MARLIN = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}
FORMATS: dict[str, tuple[Write, dict[str, Any]]] = {
    **{name: case for name, case in CASES.items() if name not in (*_RANDOM, *_TOO_FEW_BITS)},
    "marlin": (every(writers.marlin, group=128), MARLIN),
    "bitsandbytes nf4": (bitsandbytes("nf4"), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes fp4": (bitsandbytes("fp4"), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes int8": (bitsandbytes("int8"), {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    **{f"torchao {name}": (torchao(config), TorchAoConfig(config).to_dict()) for name, config in AO.items()},
}


def answer(folder: Path) -> str:
    llm = LLM(str(folder), max_model_len=64)
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    return output.outputs[0].text


@pytest.mark.parametrize("name", FORMATS)
def test_the_packaged_model_in_every_format(name: str, tmp_path: Path) -> None:
    write, settings = FORMATS[name]
    shutil.copytree(DEMO, tmp_path / "model")
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(DEMO / "model.safetensors").items():
        module = key.removesuffix(".weight")
        written = write(module, tensor.float()) if tensor.dim() == 2 else None
        if written is None:
            tensors[key] = tensor
        else:
            tensors.update({f"{module}.{leaf}": value.contiguous() for leaf, value in written[0].items()})
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    assert "Paris" in answer(tmp_path / "model")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_packaged_model_as_a_gguf_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    assert "Paris" in answer(write_demo(tmp_path, kind)[0])


def test_no_format_of_files_is_left_out() -> None:
    from vllm.config.quantization import _NAMES, IN_FLIGHT

    tested = {method_of(settings, DEMO) for _, settings in [*CASES.values(), *FORMATS.values()]}
    elsewhere = {"gguf", "mxfp4"}  # above, `test_formats`
    assert set(_NAMES) - tested - elsewhere <= set(IN_FLIGHT)
