"""Small mixed steps as graphs: the same tokens as without, whatever the order in which requests come."""

import random

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.core import EngineCore
from vllm.step.messages import CoreRequest

SMALL = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
KINDS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=48)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)),
}


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request, tmp_path_factory):
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp(request.param)
    KINDS[request.param]().eval().save_pretrained(path)
    return str(path)


def staggered(folder, **args):
    """Tokens of 60 requests that come one or two a step, and the engine's graphs of mixed steps."""
    options = {"dtype": "float32", "max_model_len": 4096, "num_gpu_blocks_override": 2000, "skip_tokenizer_init": True}
    engine = EngineCore(EngineArgs(model=folder, **{**options, **args}).create_engine_config())
    rng = random.Random(5)
    lengths = [rng.choice((1, 3, 12, 40, 200, 1500)) for _ in range(60)]
    waiting = [
        CoreRequest(
            str(i),
            rng.choices(range(2, 1000), k=n),
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
            seed=1,
        )
        for i, n in enumerate(lengths)
    ]
    tokens = {}
    while waiting or engine.has_unfinished():
        for _ in range(min(len(waiting), rng.choice((0, 1, 1, 2)))):
            engine.add_requests([waiting.pop()])
        for out in engine.step():
            assert out.error is None
            tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
    runner = engine._executor.worker.runner
    captured = [] if runner.mixed_steps is None else list(runner.mixed_steps._entries.values())
    count = sum(entry.graph is not None for entry in captured)
    engine.shutdown()
    return tokens, count


def test_requests_that_come_one_by_one_get_the_same_tokens(folder):
    plain, none = staggered(folder, enforce_eager=True)
    assert none == 0
    with_graphs, captured = staggered(folder)
    assert captured >= 2
    assert with_graphs == plain
