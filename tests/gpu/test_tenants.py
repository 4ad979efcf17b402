"""On a GPU, in captured steps: models with recurrent states, one of them of the tests alone, against a loop and against
Hugging Face on the CPU, whose ways on a GPU depend on what is installed; drafts, masks that come late, pooled requests
and cross attention; and a lower tier in pinned memory.
"""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from tests.executor.configs import Masked
from tests.tenants import checkpoint, test_cross
from tests.tenants.drafter import DeviceDrafter
from tests.tenants.drive import greedy, run
from tests.tenants.test_drafts import requests as of_every_kind
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.core import EngineCore
from vllm.executor import create_executor
from vllm.model_executor.models import ModelRegistry
from vllm.pooling_params import PoolingParams
from vllm.step.messages import CoreRequest

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


def settings(folder, **args):
    options = {
        "dtype": "float32", "max_model_len": 512, "gpu_memory_utilization": 0.3, "num_gpu_blocks_override": 400,
        "max_num_seqs": 16,
    }  # fmt: skip
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, **{**options, **args}).create_engine_config()


def core(folder, **args):
    return EngineCore(settings(folder, **args))


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
    assert len(tokens) == COUNT and (best - chosen).max() < 1e-3 * logits[logits.isfinite()].std()


def captured(engine):
    """How the captured steps end, and how many tokens a row has in them."""
    graphs = engine.executor.worker._graphs._graphs
    return {(key.ending, key.query) for key, entry in graphs.items() if entry.graph is not None}


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


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """Every second layer has a window."""
    torch.manual_seed(2)
    config = Gemma2Config(
        **SMALL, **ATTENTION, num_hidden_layers=4, head_dim=64, query_pre_attn_scalar=64, sliding_window=24,
        max_position_embeddings=1024,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("gemma2")
    Gemma2ForCausalLM(config).eval().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("states", [False, True], ids=["windows", "states"])
def test_drafts_of_the_device_change_no_token(windows, weir, states, depth):
    """In a batch with seeds, penalties, logprobs and tokens that end a request."""
    folder, vocab, args = (weir[0], checkpoint.VOCAB, {"max_model_len": 128}) if states else (windows, 1000, {})
    plain = core(folder, **args)
    truth = run(plain, of_every_kind())
    end(plain)
    if depth == 2:
        args = {**args, "max_model_len": 64, "num_gpu_blocks_override": 14}
    config = settings(folder, **args)
    config = replace(config, scheduler_config=replace(config.scheduler_config, num_drafts=3))
    drafter = DeviceDrafter(create_executor(config), truth.tokens, vocab, 3, depth)
    engine = EngineCore(config, drafter)
    for _ in range(4):  # until steps are captured
        found = run(engine, of_every_kind())
        assert found.tokens == truth.tokens
        assert {name: len(entries) for name, entries in found.logprobs.items()} == {
            name: len(entries) for name, entries in truth.logprobs.items()
        }
    assert drafter.drafted > 200 and (drafter.inexact > 40) == (depth > 1)
    for _ in range(3):  # greedy ones alone: nothing else ends their steps
        texts = [request for request in of_every_kind() if request.request_id == "greedy"]
        assert run(engine, texts).tokens["greedy"] == truth.tokens["greedy"]
    # pages of state for each draft are read and written by steps that are launched one by one
    assert states or any(query > 1 for _, query in captured(engine))
    end(engine)


def test_masks_that_come_late_on_half_of_the_rows(weir):
    """Rows in even slots may say multiples of three only; which requests those are changes from run to run."""
    folder, oracle = weir
    texts = [greedy(str(i), p, COUNT) for i, p in enumerate(prompts(30, 13, 22, 9, vocab=checkpoint.VOCAB))]

    def allowed(ids):
        logits = oracle.logits(ids)
        return logits.masked_fill(torch.arange(logits.shape[-1]) % 3 != 0, -torch.inf)

    said = {}
    for late in (False, True):
        config = settings(folder, max_model_len=128)
        engine = EngineCore(config, Masked(create_executor(config), checkpoint.VOCAB, late))
        for _ in range(4):  # until steps are captured
            found = run(engine, texts).tokens
            masked = {name for name, tokens in found.items() if all(token % 3 == 0 for token in tokens)}
            assert len(masked) == 2
            for request in texts:
                name = request.request_id
                assert said.setdefault((name, name in masked), found[name]) == found[name]
        assert ("masked", 1) in captured(engine)
        end(engine)
    for request in texts:
        for is_masked, logits_of in ((False, oracle.logits), (True, allowed)):
            if (tokens := said.get((request.request_id, is_masked))) is not None:
                check(logits_of, request.prompt_token_ids, tokens)


@pytest.mark.parametrize("chunk", [64, 512])
def test_pooled_requests_beside_generating_ones(weir, chunk):
    folder, oracle = weir
    engine = core(
        folder, max_model_len=128, max_num_batched_tokens=chunk, worker_cls="tests.tenants.workers.MeanWorker"
    )
    texts = prompts(30, 13, 22, 70, 41, 1, vocab=checkpoint.VOCAB)
    requests = [
        greedy(str(i), text, COUNT) if i % 2 else CoreRequest(str(i), text, PoolingParams(), seed=0)
        for i, text in enumerate(texts)
    ]
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for _ in range(3):
        found = run(engine, requests)
        pooled = {out.request_id: out.pooled for out in found.outputs if out.pooled is not None}
        assert sorted(pooled) == ["0", "2", "4"]
        for i, text in enumerate(texts):
            if i % 2:
                check(oracle.logits, text, found.tokens[str(i)])
                continue
            vector = torch.from_numpy(np.frombuffer(pooled[str(i)].data, np.float32).copy())
            torch.testing.assert_close(embedding @ vector, oracle.logits(text).mean(0), rtol=1e-3, atol=1e-3)
    assert captured(engine)
    end(engine)


quay = test_cross.folder  # a fixture


@pytest.mark.parametrize("way", ["batched", "chunked", "preempted"])
def test_cross_attention_reads_what_the_encoder_said(quay, way):
    args = {"chunked": {"max_num_batched_tokens": 16}, "preempted": {"num_gpu_blocks_override": 20}}.get(way, {})
    engine = core(quay, **{"max_model_len": 64, "max_num_seqs": 6, **args})
    texts = prompts(20, 5, 31, 1, vocab=test_cross.VOCAB)
    wanted = {
        f"{i}/{n}": greedy(f"{i}/{n}", text, test_cross.COUNT, encoder_tokens=n, encoder_key=bytes([n]))
        for i, text in enumerate(texts)
        for n in (0, 3, test_cross.LONGEST)
    }
    for _ in range(2):
        found = run(engine, list(wanted.values()))
        for name, request in wanted.items():
            assert found.tokens[name] == test_cross.said(quay, request.prompt_token_ids, request.encoder_tokens), name
    end(engine)
