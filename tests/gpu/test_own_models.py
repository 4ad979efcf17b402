"""Modules of a user's own, and classes that derive from built-in ones, in captured steps: also where a step ends with
penalties, biases and log probabilities, for which the sampler goes on behind the graph.
"""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM as BuiltIn

from tests.gpu.test_tenants import ATTENTION, COUNT, SMALL, captured, check, core, end, prompts
from tests.models.own_models import NewLlamaForCausalLM, OldLlamaForCausalLM
from tests.tenants.drive import greedy, run
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreRequest


class Derived(BuiltIn):
    def compute_logits(self, hidden_states, sampling_metadata=None):
        return super().compute_logits(hidden_states, sampling_metadata) * 2.0


class Asking(BuiltIn):
    def forward(self, *args, **kwargs):
        hidden = super().forward(*args, **kwargs)
        return hidden if float(hidden.float().sum()) != 0.5 else hidden + 1  # a number from the device


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(1)
    config = LlamaConfig(**SMALL, **ATTENTION, num_hidden_layers=3, head_dim=64, max_position_embeddings=1024)
    hf = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    hf.save_pretrained(folder)
    return folder, hf


@pytest.mark.parametrize("kind", [OldLlamaForCausalLM, NewLlamaForCausalLM, Derived])
def test_captured_steps_give_the_tokens_of_hugging_face(llama, kind, monkeypatch):
    folder, hf = llama
    monkeypatch.setattr(ModelRegistry, "_registered", dict(ModelRegistry._registered))
    ModelRegistry.register_model("OwnForCausalLM", kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"]}))
    texts = prompts(1, 3, 40, 130, 17, 66, vocab=1000)
    more = {
        "penalties": {"frequency_penalty": 0.7},
        "logprobs": {"logprobs": 2},
        "biased": {"logit_bias": {3: 2.0}, "temperature": 0.8},
    }
    said = []
    for way in ({}, {"enforce_eager": True}):
        engine = core(folder, **way)
        for _ in range(3):
            found = run(engine, [greedy(str(i), p, COUNT) for i, p in enumerate(texts)])
            for i, prompt in enumerate(texts):
                with torch.inference_mode():
                    check(lambda ids: hf(torch.tensor([ids])).logits[0], prompt, found.tokens[str(i)])
            params = {
                name: SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True, **fields})
                for name, fields in more.items()
            }
            mixed = run(engine, [CoreRequest(n, texts[2], p, seed=3) for n, p in params.items()])
        said.append(mixed.tokens)
        assert way or {("plain", 1), ("hidden", 1)} <= captured(engine)
        end(engine)
    assert said[0] == said[1]


def test_a_model_that_asks_the_device_is_told_so(llama, monkeypatch):
    folder, _ = llama
    monkeypatch.setattr(ModelRegistry, "_registered", dict(ModelRegistry._registered))
    ModelRegistry.register_model("OwnForCausalLM", Asking)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"]}))
    with pytest.raises(RuntimeError, match="asks the device for a number.*enforce_eager=True"):
        run(core(folder), [greedy("0", [5] * 9, COUNT)])
    assert torch.randn(3, device="cuda").isfinite().all()  # which the capture has not taken with it
    engine = core(folder, enforce_eager=True)
    assert len(run(engine, [greedy("0", [5] * 9, COUNT)]).tokens["0"]) == COUNT
    end(engine)
