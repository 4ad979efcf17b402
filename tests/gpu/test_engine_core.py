"""The engine core on a GPU: greedy tokens are the same however a request is computed, and the same as Hugging
Face's.
"""

import copy
import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.core import EngineCore
from vllm.ops import shared_prefix
from vllm.step.messages import CoreRequest
from vllm.worker import slot_table
from vllm.worker.prefix_sharing import PrefixSharing

SMALL = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request, tmp_path_factory):
    """A folder with random weights, and Hugging Face's model on the device in fp32."""
    config, kind = MODELS[request.param]
    torch.manual_seed(1)
    hf = kind(config(**SMALL)).eval()
    folder = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(folder)
    return str(folder), hf.cuda().float()


def core(folder, **args):
    options = {"dtype": "float32", "max_model_len": 512, "gpu_memory_utilization": 0.3, "num_gpu_blocks_override": 400}
    return EngineCore(EngineArgs(model=folder, skip_tokenizer_init=True, **{**options, **args}).create_engine_config())


def finish(engine):
    tokens, logprobs = {}, {}
    while engine.has_unfinished():
        for out in engine.step():
            assert out.error is None
            tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
            logprobs.setdefault(out.request_id, []).extend(out.logprobs or [])
    return tokens, logprobs


def prompts(count=6):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(2, 1000, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 120, (count,), generator=generator)
    ]


def request(name, prompt, tokens=24, **sampling):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling})
    return CoreRequest(str(name), prompt, params, seed=7)


def together(engine, **sampling):
    engine.add_requests([request(i, p, **sampling) for i, p in enumerate(prompts())])
    return finish(engine)


@torch.inference_mode()
def hugging_face(hf, prompt, tokens=24):
    ids = torch.tensor([prompt], device="cuda")
    out = hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def test_six_ways_give_the_tokens_of_hugging_face(model):
    folder, hf = model
    hf.generation_config.eos_token_id = None
    want = {str(i): hugging_face(hf, p) for i, p in enumerate(prompts())}
    engine = core(folder)
    assert together(engine)[0] == want, "all together, in CUDA graphs"
    assert together(engine)[0] == want, "with cached prefixes"
    for i, p in enumerate(prompts()):
        engine.add_requests([request(i, p)])
        assert finish(engine)[0] == {str(i): want[str(i)]}, "alone"
    assert together(core(folder, enforce_eager=True))[0] == want, "without graphs"
    assert together(core(folder, max_num_batched_tokens=32, enable_chunked_prefill=True))[0] == want, "in chunks"
    engine = core(folder, num_gpu_blocks_override=14, max_model_len=192, enable_prefix_caching=False)
    assert together(engine)[0] == want, "preempted"
    assert engine.stats().num_preemptions > 0


def test_tokens_survive_a_slot_table_that_grows(model, monkeypatch):
    folder, _ = model
    want = together(core(folder))[0]
    monkeypatch.setattr(slot_table, "_FIRST_WIDTH", 64)  # graphs are captured, thrown away and captured again
    engine = core(folder)
    assert together(engine)[0] == want
    assert together(engine)[0] == want


def test_reading_a_common_prefix_once_does_not_change_the_tokens(model, monkeypatch):
    folder, _ = model
    common = torch.randint(2, 1000, (330,), generator=torch.Generator().manual_seed(4)).tolist()
    sent = []
    send = PrefixSharing._send
    monkeypatch.setattr(PrefixSharing, "_send", lambda self, *args: (sent.append(args), send(self, *args)))
    found = []
    for worth in (1 << 60, 0):
        monkeypatch.setattr(shared_prefix, "_WORTH", worth)
        engine = core(folder)
        for _ in range(2):  # computed together, and cached
            engine.add_requests([request(i, common + p) for i, p in enumerate(prompts())])
            found.append(finish(engine)[0])
        assert bool(sent) == (worth == 0)
    assert all(tokens == found[0] for tokens in found)


@pytest.fixture(scope="module")
def calm_model(tmp_path_factory):
    """A folder with small random weights, whose logits do not jump at a rounding."""
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("calm")
    LlamaForCausalLM(LlamaConfig(**{**SMALL, "initializer_range": 0.06})).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_a_float8_cache_gives_logprobs_close_to_an_exact_one(calm_model, cache_dtype):
    found = []
    for dtype in ("auto", cache_dtype):
        engine = core(calm_model, dtype="bfloat16", kv_cache_dtype=dtype, enable_prefix_caching=False)
        engine.add_requests([request(i, p, 8, prompt_logprobs=0) for i, p in enumerate(prompts())])
        logprobs = {}
        while engine.has_unfinished():
            for out in engine.step():
                logprobs.setdefault(out.request_id, []).extend(e.logprobs[0] for e in out.prompt_logprobs or [])
        found.append(torch.tensor([x for i in range(6) for x in logprobs[str(i)]]))
    error = (found[0] - found[1]).abs()
    assert 1e-4 < error.mean() < 0.15


def test_engines_share_a_device_by_their_own_limits(model):
    """Two of 0.4 in a process, and a third that finds less than it may have."""
    folder, hf = model
    engines = [core(folder, num_gpu_blocks_override=None, gpu_memory_utilization=share) for share in (0.4, 0.4, 0.9)]
    total = torch.cuda.mem_get_info()[1]
    sizes = [engine.num_blocks * engine._executor.kv_layout.bytes_per_block / total for engine in engines]
    assert sizes[0] > 0.3 and sizes[1] > 0.9 * sizes[0] and 0.0 < sizes[2] < 0.2
    tokens = [together(engine)[0] for engine in engines]
    assert tokens[0] == tokens[1] == tokens[2]
    for engine in engines:
        engine.shutdown()


def test_memory_comes_back_when_engines_end(model):
    folder, _ = model
    left = []
    for _ in range(6):
        engine = core(folder, num_gpu_blocks_override=40_000)  # 250 MB
        together(engine)
        engine.shutdown()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.mem_get_info()[0])
    assert left[-1] >= left[1] - (16 << 20), left


def test_logprobs_in_bf16_are_as_close_to_fp32_as_those_of_hugging_face(model):
    folder, hf = model
    tokens, logprobs = together(core(folder, dtype="bfloat16"), logprobs=0)
    rounded = copy.deepcopy(hf).bfloat16()
    ours, theirs = [], []
    with torch.inference_mode():
        for i, prompt in enumerate(prompts()):
            ids = torch.tensor([prompt + tokens[str(i)]], device="cuda")
            chosen = ids[0, len(prompt) :, None]
            want, bf16 = (
                m(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).gather(1, chosen)[:, 0]
                for m in (hf, rounded)
            )
            got = torch.tensor([entry.logprobs[0] for entry in logprobs[str(i)]], device="cuda")
            ours.append((want - got).abs())
            theirs.append((want - bf16).abs())
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    assert ours.mean() < 1.3 * theirs.mean()
    assert ours.max() < 3 * theirs.max()


def test_greedy_tokens_of_the_fused_step_are_the_best_that_bf16_can_tell(model):
    folder, hf = model
    engine = core(folder, dtype="bfloat16")
    steps = engine._executor.worker.runner.decode_steps
    assert steps._weights is not None, "the fused step takes this model"
    tokens, _ = together(engine)
    rounded = copy.deepcopy(hf).bfloat16()
    with torch.inference_mode():
        for i, prompt in enumerate(prompts()):
            ids = torch.tensor([prompt + tokens[str(i)]], device="cuda")
            logits, bf16 = (m(ids).logits[0, len(prompt) - 1 : -1].float() for m in (hf, rounded))
            chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            # a token may stand behind the best by as much as bf16 moves two logits
            assert (logits.amax(-1) - chosen <= 3 * (logits - bf16).abs().max()).all()


def test_seeded_samples_do_not_depend_on_the_batch(model):
    folder, _ = model
    engine = core(folder)
    sampling = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
    tokens, _ = together(engine, **sampling)
    for i, p in enumerate(prompts()):
        engine.add_requests([request(i, p, **sampling)])
        assert finish(engine)[0] == {str(i): tokens[str(i)]}


def test_replayed_steps_give_the_tokens_of_eager_ones(model):
    """Greedy rows, drawn ones and such that want logprobs; batches that shrink while requests end, and grow again."""
    folder, _ = model
    drawn, wanting = {"temperature": 0.9, "top_p": 0.9, "seed": 3}, {"temperature": 1.1, "logprobs": 2}
    kinds = ([{}], [drawn], [{}, drawn], [{}, drawn, wanting], [{}])
    found = []
    for eager in (False, True):
        engine = core(folder, enforce_eager=eager)
        found.append([])
        for kind in kinds:
            batch = [request(i, p, 10 + 7 * i, **kind[i % len(kind)]) for i, p in enumerate(prompts())]
            engine.add_requests(batch[:4])
            tokens: dict = {}
            for step in range(1000):
                if step == 12:
                    engine.add_requests(batch[4:])
                if not engine.has_unfinished():
                    break
                for out in engine.step():
                    assert out.error is None
                    tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
            found[-1].append(tokens)
            assert [len(tokens[str(i)]) for i in range(len(batch))] == [10 + 7 * i for i in range(len(batch))]
        if not eager:
            graphs = engine._executor.worker.runner.decode_steps._graphs
            captured = {(key.ending, key.drawn) for key, entry in graphs.items() if entry.graph}
            assert captured == {("plain", False), ("plain", True), ("hidden", False)}
    assert found[0] == found[1]


def test_what_is_prepared_in_idle_moments_is_what_requests_then_get(model):
    """Every graph of the first batches is there, and gives the tokens that steps without one give."""
    folder, _ = model
    want = together(core(folder, enforce_eager=True))[0]
    engine = core(folder)
    worker = engine.executor.worker
    worker._compiling = None
    pieces = 0
    while engine.prepare():
        pieces += 1
    assert pieces > 10
    before = {key: entry.graph for key, entry in worker._graphs._graphs.items()}
    mixed = {key: entry.graph for key, entry in worker._mixed_graphs._entries.items()}
    assert None not in before.values()
    assert None not in mixed.values()
    assert together(engine)[0] == want
    drawn = together(engine, temperature=0.9, top_p=0.8)[0]
    assert {len(tokens) for tokens in drawn.values()} == {24}
    assert {key: entry.graph for key, entry in worker._graphs._graphs.items()} == before, "nothing was captured again"
    assert not engine.prepare()
