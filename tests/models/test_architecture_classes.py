"""Classes that plug-ins derive from: importable by the names of modules, and what a derived class changes shows."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.test_against_hugging_face import CASES
from vllm import ModelRegistry
from vllm.model_executor.models import architecture_modules
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.ops import cpu

from vllm.model_executor.models.llama import LlamaForCausalLM, MistralForCausalLM  # isort: skip

PROMPT = torch.tensor([5, 90, 17, 3, 44, 8, 101, 60])
PACKAGE = "vllm.model_executor.models"


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, nn.Module]:
    return tmp_path, save_random_hf_model(CASES["llama"](), tmp_path)


@pytest.fixture(autouse=True)
def registry() -> Any:
    before = dict(ModelRegistry._registered)
    yield
    ModelRegistry._registered.clear()
    ModelRegistry._registered.update(before)


def logits(folder: Path, model_cls: type[nn.Module], **options: Any) -> Tensor:
    ModelRegistry.register_model("LlamaForCausalLM", model_cls)
    return PagedDriver(load(folder, **options)).run([PROMPT], [3, 1])[0]


def test_every_architecture_has_a_class_in_a_module() -> None:
    for architecture in ModelRegistry.built_in():
        module = importlib.import_module(f"{PACKAGE}.{architecture_modules.module_of(architecture)}")
        found = getattr(module, architecture)
        assert isinstance(found, type) and issubclass(found, nn.Module)
        assert (found.__module__, found.__name__) == (module.__name__, architecture)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("llama", "LlamaForCausalLM"), ("mixtral", "MixtralForCausalLM"), ("qwen2", "Qwen2ForCausalLM"),
        ("qwen2_moe", "Qwen2MoeForCausalLM"), ("qwen3_moe", "Qwen3MoeForCausalLM"), ("gemma2", "Gemma2ForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"), ("gpt_neox", "GPTNeoXForCausalLM"), ("gpt_bigcode", "GPTBigCodeForCausalLM"),
        ("gpt_j", "GPTJForCausalLM"), ("opt", "OPTForCausalLM"), ("phi3", "Phi3ForCausalLM"),
        ("commandr", "CohereForCausalLM"), ("olmo2", "Olmo2ForCausalLM"), ("chatglm", "ChatGLMModel"),
        ("baichuan", "BaichuanForCausalLM"), ("starcoder2", "Starcoder2ForCausalLM"), ("bloom", "BloomForCausalLM"),
    ],
)  # fmt: skip
def test_modules_have_the_names_that_programs_import(module: str, name: str) -> None:
    assert getattr(importlib.import_module(f"{PACKAGE}.{module}"), name).__name__ == name


def test_what_is_not_there_says_what_is() -> None:
    with pytest.raises(ImportError):
        importlib.import_module(f"{PACKAGE}.nobody")
    with pytest.raises(ImportError, match="cannot import name 'LlamaDecoderLayer'"):
        from vllm.model_executor.models.llama import LlamaDecoderLayer  # noqa: F401
    with pytest.raises(AttributeError, match="models are made of families here, and each has one class"):
        importlib.import_module(f"{PACKAGE}.llama").LlamaMLP  # noqa: B018


class Layers(LlamaForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        assert len(self.model.blocks) == self.config.num_hidden_layers
        self.model.layers  # noqa: B018


def test_layers_of_other_names_are_told_of(llama: tuple[Path, nn.Module]) -> None:
    with pytest.raises(AttributeError, match="'DecoderModel' object has no attribute 'layers'"):
        logits(llama[0], Layers)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_class_itself_is_the_family(load_format: str, llama: tuple[Path, nn.Module]) -> None:
    folder, _ = llama
    expected = PagedDriver(load(folder, load_format=load_format)).run([PROMPT], [3, 1])[0]
    assert relative_error(logits(folder, LlamaForCausalLM, load_format=load_format), expected) < 1e-5


class OldStyle(LlamaForCausalLM):
    """The constructor and signatures of 0.6."""

    def __init__(self, config: Any, cache_config: Any = None, quant_config: Any = None) -> None:
        super().__init__(config, cache_config, quant_config)
        self.seen: list[int] = []

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], attn_metadata: Any) -> Tensor:
        self.seen.append(len(input_ids))
        return super().forward(input_ids, positions, kv_caches, attn_metadata)

    def compute_logits(self, hidden_states: Tensor, sampling_metadata: Any) -> Tensor:
        return super().compute_logits(hidden_states, sampling_metadata) * 2.0


class NewStyle(LlamaForCausalLM):
    """Today's, with a layer of its own, other names in the checkpoint and embeddings made here."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shift = nn.Parameter(torch.zeros(self.config.hidden_size), requires_grad=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        embeds = self.get_input_embeddings(input_ids)
        assert torch.equal(embeds, self.embed_input_ids(input_ids))
        return super().forward(input_ids, positions, intermediate_tensors, embeds * 3.0) + self.shift

    def load_weights(self, weights: Any) -> set[str]:
        renamed = [(name, tensor / 3.0 if "embed_tokens" in name else tensor) for name, tensor in weights]
        return super().load_weights([*renamed, ("shift", torch.ones(self.config.hidden_size))])


class AsVllm(LlamaForCausalLM):
    """Its methods have the bodies that those of vLLM's class have."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Tensor:
        embeds = self.get_input_embeddings(input_ids)
        plain: Tensor = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        given = self.model(input_ids=None, positions=positions, inputs_embeds=embeds)
        assert relative_error(given, plain) < 1e-5
        assert relative_error(self.model(None, positions, None, 2.0 * embeds), plain) > 1e-3
        assert torch.equal(self.get_input_embeddings(input_ids), embeds)
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor, sampling_metadata: Any = None) -> Tensor:
        return self.logits_processor(self.lm_head, hidden_states, sampling_metadata)

    def load_weights(self, weights: Any) -> set[str]:
        loader = AutoWeightsLoader(self, skip_prefixes=["other."])
        return loader.load_weights([*weights, ("other.weight", torch.ones(1))])


class OtherConfig(LlamaForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        vllm_config.model_config.hf_config.rms_norm_eps = 0.5
        super().__init__(vllm_config=vllm_config, prefix=prefix)


class Forgetful(LlamaForCausalLM):
    def load_weights(self, weights: Any) -> set[str]:
        return set()


def test_what_a_derived_class_overrides_shows(llama: tuple[Path, nn.Module]) -> None:
    folder, reference = llama
    cpu.register()  # the engine's kernels, some of which overwrite what they take
    with torch.inference_mode():
        expected = reference(PROMPT[None]).logits[0]
        hidden = reference.model(PROMPT[None]).last_hidden_state[0] + 1.0
        shifted = reference.lm_head(hidden)
    assert relative_error(logits(folder, OldStyle), 2.0 * expected) < 1e-5
    assert relative_error(logits(folder, NewStyle), shifted) < 1e-5
    assert relative_error(logits(folder, AsVllm), expected) < 1e-5
    reference.config.rms_norm_eps = 0.5
    for module in reference.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
    with torch.inference_mode():
        other = reference(PROMPT[None]).logits[0]
    assert relative_error(other, expected) > 1e-2
    assert relative_error(logits(folder, OtherConfig), other) < 1e-5


class OneRow(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)[:1]


class TwoColumns(LlamaForCausalLM):
    def compute_logits(self, hidden_states: Tensor, sampling_metadata: Any = None) -> Tensor | None:
        found = super().compute_logits(hidden_states)
        return None if found is None else found[:, :2]


@pytest.mark.parametrize(
    ("model_cls", "message"),
    [
        (OneRow, r"^OneRow\.forward returned a tensor of shape \(1, 48\), expected .* all 3 tokens"),
        (TwoColumns, r"^TwoColumns\.compute_logits .* of shape \(3, 2\), expected a tensor of shape \(3, 131\)"),
    ],
)
def test_results_of_other_sizes_are_refused(
    model_cls: type[nn.Module], message: str, llama: tuple[Path, nn.Module]
) -> None:
    with pytest.raises(ValueError, match=message):
        logits(llama[0], model_cls)


def test_forgotten_weights_are_an_error(llama: tuple[Path, nn.Module]) -> None:
    with pytest.raises(ValueError, match="were not initialized from checkpoint: embed.weight"):
        logits(llama[0], Forgetful)


def test_the_engine_constructs_models() -> None:
    with pytest.raises(RuntimeError, match="is constructed by the engine"):
        MistralForCausalLM(None)


PLUGIN = """
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM

class Backwards(LlamaForCausalLM):
    def compute_logits(self, hidden_states, sampling_metadata=None):
        return -super().compute_logits(hidden_states)

def register():
    ModelRegistry.register_model("BackwardsForCausalLM", Backwards)
"""
PROGRAM = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
    llm = LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, hf_overrides={"architectures": [sys.argv[2]]},
              tensor_parallel_size=int(sys.argv[3]))
    print(list(llm.generate({"prompt_token_ids": [5, 90, 17]}, params, use_tqdm=False)[0].outputs[0].token_ids))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_installed_plugin_that_derives_from_llama_runs(ranks: int, tmp_path: Path) -> None:
    config = CASES["llama-tied-biased"]()
    config.intermediate_size = 78
    reference = save_random_hf_model(config, tmp_path / "model")
    (tmp_path / "backwards.py").write_text(PLUGIN)
    info = tmp_path / "backwards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: backwards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nbackwards = backwards:register\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    command = [
        sys.executable,
        str(tmp_path / "program.py"),
        str(tmp_path / "model"),
        "BackwardsForCausalLM",
        str(ranks),
    ]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    tokens = [5, 90, 17]
    for _ in range(5):
        with torch.inference_mode():
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmin()))
    assert ran.stdout.strip().splitlines()[-1] == str(tokens[3:])
