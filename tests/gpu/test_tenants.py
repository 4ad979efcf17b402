"""On a GPU, in captured steps: models with recurrent states, one of them of the tests alone, against a loop and against
Hugging Face on the CPU, whose ways on a GPU depend on what is installed; and a lower tier in pinned memory.
"""

import gc

import pytest
import torch
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from tests.tenants import checkpoint
from tests.tenants.drive import greedy, run
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.core import EngineCore
from vllm.model_executor.models import ModelRegistry

COUNT = 24
SMALL = {"vocab_size": 1000, "hidden_size": 256, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
MODELS = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SMALL, num_hidden_layers=3)),
    "mamba2": lambda: Mamba2ForCausalLM(
        # of several groups, transformers before 5.20 normalise all as one
        Mamba2Config(**SMALL, num_hidden_layers=2, num_heads=8, head_dim=64, n_groups=1, state_size=64)
    ),
    "jamba": lambda: JambaForCausalLM(
        JambaConfig(
            **SMALL, **ATTENTION, num_hidden_layers=4, num_experts=4, attn_layer_period=3, attn_layer_offset=1,
            max_position_embeddings=1024,
        )
    ),
}  # fmt: skip
WAYS = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    "preempted": {"num_gpu_blocks_override": 40},
}


def core(folder, **args):
    options = {
        "dtype": "float32", "max_model_len": 512, "gpu_memory_utilization": 0.3, "num_gpu_blocks_override": 400,
        "max_num_seqs": 16,
    }  # fmt: skip
    return EngineCore(
        EngineArgs(model=str(folder), skip_tokenizer_init=True, **{**options, **args}).create_engine_config()
    )


def end(engine):
    engine.shutdown()
    del engine
    gc.collect()
    torch.cuda.empty_cache()


def prompts(*lengths, vocab, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in lengths]


def check(logits_of, prompt, tokens):
    """Each token is the likeliest behind those before it, up to rounding."""
    logits = logits_of(prompt + tokens[:-1])[len(prompt) - 1 :].float().cpu()
    best = logits.max(-1).values
    chosen = logits[torch.arange(len(tokens)), tokens]
    assert len(tokens) == COUNT and (best - chosen).max() < 1e-3 * logits.std()


def captured(engine):
    return any(entry.graph is not None for entry in engine.executor.worker._graphs._graphs.values())


@pytest.fixture(scope="module")
def weir(tmp_path_factory):
    """The tenant's model, as large as kernels like it."""
    with pytest.MonkeyPatch.context() as patch:
        # blocks of one length, which is what graphs know; the heads of each group stay unlike
        heads = {1: 2, 3: 4, 4: 2, 5: 4}
        for name, value in {"HIDDEN": 128, "DIM": 32, "MLP": 256, "KV_HEADS": heads}.items():
            patch.setattr(checkpoint, name, value)
        patch.setattr(ModelRegistry, "_families", {checkpoint.ARCHITECTURE: checkpoint.FAMILY})
        folder = checkpoint.save(tmp_path_factory.mktemp("weir"))
        yield folder, checkpoint.Oracle(folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_the_tests_own(weir, way):
    folder, oracle = weir
    args = {**WAYS[way], "max_model_len": 128} | ({"num_gpu_blocks_override": 30} if way == "preempted" else {})
    engine = core(folder, **args)
    texts = prompts(1, 5, 37, 70, 20, 51, vocab=checkpoint.VOCAB)
    for _ in range(2):  # the second time from snapshots
        found = run(engine, [greedy(str(i), p, COUNT) for i, p in enumerate(texts)])
        for i, prompt in enumerate(texts):
            check(oracle.logits, prompt, found.tokens[str(i)])
    assert found.cached["3"] in ((0, 64) if way == "preempted" else (64,))
    assert way == "eager" or captured(engine)
    end(engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_hugging_face(name, way, tmp_path):
    torch.manual_seed(1)
    hf = MODELS[name]().eval()
    hf.save_pretrained(tmp_path)
    engine = core(tmp_path, **WAYS[way])
    texts = prompts(1, 3, 40, 130, 17, 66, vocab=1000)
    for _ in range(2):
        found = run(engine, [greedy(str(i), p, COUNT) for i, p in enumerate(texts)])
        for i, prompt in enumerate(texts):
            with torch.inference_mode():
                check(lambda ids: hf(torch.tensor([ids])).logits[0], prompt, found.tokens[str(i)])
    assert found.cached["3"] in ((0, 128) if way == "preempted" else (128,))
    assert way == "eager" or captured(engine)
    end(engine)


@pytest.mark.parametrize("chunk", [64, 512])
def test_a_prefix_comes_back_from_pinned_memory(chunk, tmp_path):
    torch.manual_seed(1)
    config = LlamaConfig(**SMALL, **ATTENTION, num_hidden_layers=3, max_position_embeddings=1024)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    engine = core(
        tmp_path, num_gpu_blocks_override=40, max_num_batched_tokens=chunk, kv_offloading_size=0.05, max_num_seqs=4
    )
    wanted, others = prompts(150, 201, vocab=1000), prompts(*[300] * 6, vocab=1000, seed=9)
    first = run(engine, [greedy(str(i), p, COUNT) for i, p in enumerate(wanted)])
    run(engine, [greedy(f"other {i}", p, COUNT) for i, p in enumerate(others)])
    assert engine.scheduler.kv.tier.places.num_blocks > 100
    again = run(engine, [*(greedy(str(i), p, COUNT) for i, p in enumerate(wanted)), greedy("new", [7] * 20, 30)])
    assert again.cached == {"0": 144, "1": 192, "new": 0}
    assert all(again.tokens[str(i)] == first.tokens[str(i)] for i in range(2))
    end(engine)
