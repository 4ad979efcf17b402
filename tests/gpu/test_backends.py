"""The torch reference as attention backend of a whole engine on the GPU, and mixtures of experts inside one."""

import pytest
import torch
import transformers

from tests.gpu.test_engine_core import SMALL, core, together
from vllm.ops import attention_backends

MODELS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "gemma2": transformers.Gemma2Config(
        **{**SMALL, "initializer_range": 0.1}, sliding_window=32, query_pre_attn_scalar=64
    ),
    "mixtral": transformers.MixtralConfig(
        **{**SMALL, "initializer_range": 0.1}, num_local_experts=4, num_experts_per_tok=2
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_torchs_own_attention_gives_the_tokens_of_the_kernels(family, tmp_path, monkeypatch):
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(MODELS[family]).save_pretrained(tmp_path)
    want = together(core(str(tmp_path)))[0]
    assert together(core(str(tmp_path), enforce_eager=True))[0] == want
    monkeypatch.setattr(attention_backends, "_users", {})  # no engine of before is used any more
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_SDPA")
    engine = core(str(tmp_path))
    assert engine._executor.worker.runner.decode_steps is None
    assert together(engine)[0] == want
