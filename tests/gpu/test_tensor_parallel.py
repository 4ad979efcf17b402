"""Ranks on several GPUs, joined by NCCL: the same greedy tokens as one, with and without graphs, and a clean end."""

import copy
import os
import signal
import subprocess
import sys

import pytest
import torch
import transformers

from tests.gpu.test_engine_core import SMALL, core, finish, prompts, request, together
from vllm.exceptions import EngineDeadError

pytestmark = pytest.mark.timeout(120)  # ranks that wait for each other would wait for ever

FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 32, "query_pre_attn_scalar": 64, "pad_token_id": 0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "neox": ("GPTNeoX", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with random weights for each family."""
    made = {}
    for name, (kind, settings) in FAMILIES.items():
        torch.manual_seed(4)
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, "initializer_range": 0.1, **settings})
        made[name] = str(tmp_path_factory.mktemp(name))
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(made[name])
    return made


def answers(folder, **args):
    engine = core(folder, **args)
    try:
        first = together(engine)[0]
        assert together(engine)[0] == first, "once more, from graphs if there are any"
    finally:
        engine.shutdown()
    return first


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "neox"])
def test_two_ranks_give_the_tokens_of_one(folders, family):
    want = answers(folders[family])
    assert answers(folders[family], tensor_parallel_size=2) == want
    if family == "llama":
        assert answers(folders[family], tensor_parallel_size=2, enforce_eager=True) == want


if torch.cuda.device_count() >= 4:

    @pytest.mark.parametrize("family", ["llama", "mixtral"])
    def test_four_ranks_give_the_tokens_of_one(folders, family):
        """Fewer KV heads than ranks: each is on two of them."""
        assert answers(folders[family], tensor_parallel_size=4) == answers(folders[family])


def test_small_mixed_steps_of_two_ranks_replay_graphs(folders):
    want = answers(folders["llama"])
    engine = core(folders["llama"], tensor_parallel_size=2)
    try:
        for _ in range(6):  # prompts are cached from the second round on; the third small step of a kind is captured
            assert together(engine)[0] == want
        entries = engine._executor.worker.runner.mixed_steps._entries.values()
        assert any(entry.graph is not None and entry.uses > 3 for entry in entries)
    finally:
        engine.shutdown()


def test_two_ranks_draw_what_one_draws(folders):
    found = []
    for world in (1, 2):
        engine = core(folders["llama"], tensor_parallel_size=world)
        try:
            found.append(together(engine, temperature=0.8, top_k=50, top_p=0.95)[0])
        finally:
            engine.shutdown()
    assert found[0] == found[1]


def test_seeded_samples_and_logprobs_are_those_of_one_rank(folders):
    found = []
    for world in (1, 2):
        engine = core(folders["llama"], tensor_parallel_size=world)
        found.append(together(engine, temperature=0.9, top_p=0.9, logprobs=1))
        engine.shutdown()
    (tokens, entries), (tokens_of_two, entries_of_two) = found
    assert tokens == tokens_of_two
    for name, ours in entries.items():
        a, b = (torch.tensor([entry.logprobs[0] for entry in e]) for e in (ours, entries_of_two[name]))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("count", "sampling"), [(6, {}), (80, {}), (6, {"temperature": 0.7, "top_k": 1})])
def test_fused_steps_of_two_ranks_choose_the_best_that_bf16_can_tell(folders, count, sampling):
    engine = core(folders["qwen3"], tensor_parallel_size=2, dtype="bfloat16", num_gpu_blocks_override=2000)
    asked = prompts(count)
    try:
        assert engine._executor.worker.runner.decode_steps._weights is not None, "the fused step takes this model"
        engine.add_requests([request(i, p, **sampling) for i, p in enumerate(asked)])
        tokens, _ = finish(engine)
    finally:
        engine.shutdown()
    exact = transformers.AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32).cuda().eval()
    rounded = copy.deepcopy(exact).bfloat16()
    with torch.inference_mode():
        for i in range(0, count, 5):
            ids = torch.tensor([asked[i] + tokens[str(i)]], device="cuda")
            logits, bf16 = (m(ids).logits[0, len(asked[i]) - 1 : -1].float() for m in (exact, rounded))
            chosen = logits.gather(1, ids[0, len(asked[i]) :, None])[:, 0]
            assert (logits.amax(-1) - chosen <= 3 * (logits - bf16).abs().max()).all()


def blocks(folder):
    """How many blocks an engine on two ranks finds room for, and the bytes of one on each rank."""
    engine = core(folder, tensor_parallel_size=2, num_gpu_blocks_override=None)
    try:
        together(engine)
        return engine._executor.num_blocks, engine._executor.kv_layout.bytes_per_block
    finally:
        engine.shutdown()


def test_ranks_share_the_smallest_memory(folders):
    """Others may hold what is beyond the engines' share; more than that is missing from the cache, on all ranks."""
    alone, size = blocks(folders["llama"])
    total, missing = torch.cuda.mem_get_info("cuda:1")[1], 20 << 30
    held = torch.empty(int(total * 0.7) + missing, dtype=torch.uint8, device="cuda:1")  # 0.3: what `core` may use
    try:
        beside, _ = blocks(folders["llama"])
    finally:
        del held
        torch.cuda.empty_cache()
    spare = int(total * 0.02)  # is left, where others hold so much
    assert (alone - beside) * size == pytest.approx(missing + spare, abs=4 << 30)  # contexts and libraries


def test_a_killed_rank_ends_the_engine_and_another_can_follow(folders):
    engine = core(folders["llama"], tensor_parallel_size=2)
    want = together(engine)[0]
    engine.add_requests([request(i, p, 200) for i, p in enumerate(prompts())])
    for _ in range(10):
        engine.step()
    os.kill(engine._executor._ranks[0].process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="was killed by signal 9"):
        while True:
            engine.step()
    engine.shutdown()
    assert not torch.distributed.is_initialized()
    assert answers(folders["llama"], tensor_parallel_size=2) == want


PROGRAM = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", tensor_parallel_size=2, num_gpu_blocks_override=200)
params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
rank = llm.llm_engine._client.core._executor._ranks[0].process
out = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
print("tokens", len(out[0].outputs[0].token_ids), "rank", rank.pid)
"""


def test_a_program_that_just_ends_leaves_nothing(folders):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folders["llama"]], stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert done.returncode == 0
    words = next(line for line in done.stdout.splitlines() if line.startswith("tokens")).split()
    assert words[1] == "40"
    assert not os.path.exists(f"/proc/{words[3]}")
